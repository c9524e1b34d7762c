"""Begin and finish an attempt at a run.

``prepare_attempt`` creates everything that the processes need. ``finish`` writes the summary, prints how the run ended
and requeues its Slurm job. Each launch or requeue of a run is one attempt; all attempts share a run directory.
"""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from grpo_recipes.errors import EXIT_STOPPED, config_error, translate_errors
from grpo_recipes.launch.closing import describe_model, describe_next_step, describe_rewards, format_resume_command
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.launch.nodes import NodeWorkers
from grpo_recipes.launch.processes import Ending, read_last_lines
from grpo_recipes.launch.resolve import record_job
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import base_environment, run_environment, tracker_environment
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.replicas import with_replicas
from grpo_recipes.plan.roles import remove_access_files, write_access_files
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.process.reports import plural, print_line, say
from grpo_recipes.process.scratch import Scratch, make_scratch, remove_dead_scratch
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.sources import user_code
from grpo_recipes.recipe.user_code import copy_source
from grpo_recipes.rewards.load import copy_reward_files
from grpo_recipes.runs import rundir
from grpo_recipes.runs.benchmark import write_benchmark
from grpo_recipes.runs.checkpoints import find_newest_complete, parse_step, recording_changes
from grpo_recipes.runs.commands import fill_commands
from grpo_recipes.runs.health import find_notices
from grpo_recipes.runs.progress import format_unusual_totals
from grpo_recipes.runs.rundir import NO_REQUEUE, Run, load_json_mapping, read_json, write_json
from grpo_recipes.runs.trace import LAUNCHER, Trace
from grpo_recipes.slurm.client import SlurmJob, requeue_job
from grpo_recipes.stats import format_result

SUBMITTED = "submitted"  # status of a run that no launch has started yet
# A job is not requeued after this many attempts in a row without a newer checkpoint. The first limit only counts
# attempts that started to train: on a busy cluster, jobs may be preempted while server and ranks start.
_MAX_IDLE_TRAINED, _MAX_IDLE_ATTEMPTS = 2, 10
# Keys of summary.json that the next attempt takes over.
_CARRIED_KEYS = ("idle_attempts", "idle_trained", "server_restarts", "process_restarts", "launch_seconds")


@dataclass
class Attempt:
    """One attempt at a run: everything that is read, planned and created before any process starts."""

    run: Run
    recipe: Recipe
    plan: Plan
    names: Names
    scratch: Scratch
    environment: dict[str, str]  # shared by all processes; the plan contains the additions of each process
    resume_note: str  # the checkpoint that the attempt resumes from, as a sentence; empty for a new run
    workers: NodeWorkers
    lock: int = -1  # descriptor of the run's lock; -1 if there is none
    first_step: int = 0  # step of the checkpoint that the attempt resumes from
    hooks: AllHooks = field(default_factory=AllHooks)
    hook_lines: Sequence[str] = ()  # lines that the hooks add to the start of the run
    # Command for the user to start a process that joins the run, e.g. an environment; None if no process may join.
    serve_command: str | None = None
    started_at: float = field(default_factory=time.monotonic)
    trace: Trace = field(default_factory=lambda: Trace(LAUNCHER))
    previous_summary: Mapping[str, Any] = field(default_factory=dict)  # ``summary.json`` before this attempt

    def server_address(self) -> tuple[str, int, str]:
        """Return host, port and token of the vLLM server."""
        return self.plan.server_host, self.plan.ports.server, self.scratch.token_file.read_text()

    def move_server(self, port: int) -> None:
        """Set the port of the next server in the plan, and write the access files of user processes again.

        Print the new command for environments in other terminals. No running process is changed.
        """
        self.plan = replace(self.plan, ports=replace(self.plan.ports, server=port))
        self.serve_command = write_access_files(self.recipe, self.plan, self.names)
        if self.serve_command:
            say(f"the server's URL changes; start your environments again with: {self.serve_command}")

    def restore_summary(self) -> None:
        """Write the summary that the run had before this attempt, which ends without having started a trainer."""
        if self.previous_summary:
            write_json(self.run.folder / "summary.json", self.previous_summary)

    def rewind(self) -> None:
        """Rewind the run again, because its newest checkpoint was damaged, and correct the recorded steps."""
        say(rewind_to_checkpoint(self.run))
        self.first_step = newest_step(self.run)
        path = self.run.folder / "summary.json"
        summary = read_json(path)
        write_json(path, {**summary, "resumed_at": [*summary.get("resumed_at", ())[:-1], self.first_step]})
        updates = self.run.identity.get("updated_rewards", [])
        if any(update["after_step"] > self.first_step for update in updates):
            with recording_changes(self.run.folder):
                for update in updates:
                    update["after_step"] = min(update["after_step"], self.first_step)
                write_json(self.run.folder / "run.json", self.run.identity)


def prepare_attempt(
    run: Run, recipe: Recipe, plan: Plan, names: Names, resources: Resources, workers: NodeWorkers,
    update_rewards: bool = False,
) -> Attempt:  # fmt: skip
    """Prepare an attempt at a run: freeze its inputs, and create scratch folders and a server token on each node.

    If the run was started before, first rewind it to its newest complete checkpoint: later rows of its metrics move to
    another file. With ``update_rewards``, changed reward files replace their copies. At the end, ``summary.json`` gets
    the status ``running`` and the number of restarts. After a failure, its status is unchanged, and this node's scratch
    folders are removed.
    """
    previous = read_json(run.folder / "summary.json")
    previous_summary = dict(previous)
    if previous.get("status") == SUBMITTED:
        previous.clear()  # no attempt has started yet
    resume_note = rewind_to_checkpoint(run) if previous else ""  # first, because it may reject the resume
    plan = replace(plan, processes=[replace(process, log=create_log(process.log)) for process in plan.processes])
    freeze_inputs(run, recipe, plan, update_rewards)
    rundir.remove_files(*(run.folder / "processes").glob("*.json"))
    if resources.job is not None:
        record_job(run.folder, recipe, resources.job.name)
    if removed := remove_dead_scratch(os.environ):
        say(removed)
    tracking = {
        **tracker_environment(recipe, os.environ),
        "WANDB_RUN_ID": run.identity["wandb_id"],
        "WANDB_RESUME": "allow",
    }
    first_step = newest_step(run)
    with contextlib.ExitStack() as undo:
        scratch = make_scratch(os.environ)
        undo.callback(scratch.remove)
        workers.begin(run.folder, names.served, scratch.token_file.read_text(), tracking)
        variables = run_environment(os.environ, scratch, run.folder, names.served)
        environment = {**base_environment(os.environ), **variables, **tracking}
        serve_command = write_access_files(recipe, plan, names)
        undo.callback(remove_access_files, run.folder)
        # The summary is written last, so that a failure before this line leaves the status unchanged.
        restarts = previous.get("restarts", 0) + 1 if previous else 0
        summary = {"status": "running", "smoke": plan.smoke, "restarts": restarts}
        if previous:
            summary["resumed_at"] = [*previous.get("resumed_at", []), first_step]
        summary |= {key: previous[key] for key in _CARRIED_KEYS if key in previous}
        write_json(run.folder / "summary.json", summary)
        undo.pop_all()
    return Attempt(
        run, recipe, plan, names, scratch, environment, resume_note, workers, first_step, serve_command=serve_command,
        previous_summary=previous_summary,
    )  # fmt: skip


def freeze_inputs(run: Run, recipe: Recipe, plan: Plan, update_rewards: bool = False) -> None:
    """Write recipe, plan and copies of the user's code to the run directory, and add notes on that code to the plan.

    With ``update_rewards``, ``run.json`` records the last step with the old rewards.
    """
    with recording_changes(run.folder):
        rundir.write_atomically(run.folder / "recipe.yaml", with_replicas(recipe, plan.replicas).as_yaml())
        for spec in recipe.run.callbacks:
            copy_source(spec, run.folder / "callbacks")
        plan.notes.extend(notes := copy_reward_files(user_code(recipe.__getitem__), run.folder, update_rewards))
        if update_rewards:
            run.identity.setdefault("updated_rewards", []).append({"after_step": newest_step(run), "notes": notes})
            write_json(run.folder / "run.json", run.identity)
        write_json(run.folder / "plan.json", {**plan.as_json(), rundir.RECIPE_HASH: rundir.hash_recipe(run.folder)})


def create_log(name: str) -> str:
    """Create an empty log that only the user can read, and return its path.

    The path is ``name``, or ``name`` with a number in its stem if another attempt started in this second. Raise
    ConfigError if the folder of the log cannot be created.
    """
    path = Path(name)
    fix = "set LOGDIR to a folder that you can write to"
    with translate_errors(OSError, lambda error: config_error(name, f"cannot create this log ({error.strerror})", fix)):
        path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            path.touch(mode=0o600, exist_ok=False)  # it contains prompts and completions
            break
        path = Path(name).with_stem(f"{Path(name).stem}-{number}")
    return str(path)


def newest_step(run: Run) -> int:
    """Return the optimizer step of the run's newest complete checkpoint, or 0 if there is none."""
    checkpoint = find_newest_complete(run.folder / "checkpoints")
    return parse_step(checkpoint) if checkpoint else 0


def rewind_to_checkpoint(run: Run) -> str:
    """Prepare the run directory for a restart from the newest complete checkpoint; return a sentence for the user.

    Rows of ``metrics.jsonl`` after the checkpoint move to ``metrics.redone.jsonl``. The records and phases of the
    earlier ranks are removed. Without a complete checkpoint, the run starts again from step 0, so all rows move.
    """
    checkpoint = find_newest_complete(run.folder / "checkpoints")
    moved = rundir.move_rows_after(run.folder, newest_step(run))
    for name in ("rank_*.json", "phase_*.json"):
        rundir.remove_files(*(run.folder / "processes").glob(name))
    start = f"resuming from {checkpoint.name}" if checkpoint else "no complete checkpoint: starting again from step 0"
    return f"{start}; {moved} later rows of metrics.jsonl moved to metrics.redone.jsonl" if moved else start


def print_start(attempt: Attempt) -> None:
    """Print the recipe, the run directory, the batch, notes, the checkpoint that is resumed, and the logs."""
    plan = attempt.plan
    smoke = "smoke test on CPU, not an experiment: " if plan.smoke else ""
    lines = [
        f"{smoke}{display_path(plan.recipe)} -> {display_path(attempt.run.folder)}",
        f"objective {plan.maxent}" if plan.maxent else "",
        f"{plan.data.kind} of {plan.data.text}" if plan.data else "",
        f"start your environments with: {attempt.serve_command}" if attempt.serve_command else "",
        f"batch {plan.batch}",
        f"vllm {plan.vllm}",
        *(f"note: {note}" for note in plan.notes),
        *attempt.hook_lines,
        attempt.resume_note,
        *(f"{process.role} log {process.log}" for process in plan.processes),
    ]
    for line in filter(None, lines):
        say(line)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, and whether its job is requeued."""

    code: int  # exit code of the launcher
    status: Literal["completed", "stopped", "failed"]  # status of the run, unless its job is requeued
    job: SlurmJob | None = None  # the job that is requeued
    refusal: str = ""  # why a requested requeue does not happen
    idle_attempts: int = 0  # attempts in a row without a newer checkpoint, including this attempt
    idle_trained: int = 0  # idle attempts that started to train

    @property
    def final_status(self) -> str:
        """The status in ``summary.json``."""
        return "requeued" if self.job else self.status


def decide_outcome(attempt: Attempt, ending: Ending, wants_requeue: bool, job: SlurmJob | None) -> Outcome:
    """Decide how an attempt ended, and whether Slurm is asked to start its job again.

    A requeue needs a ``job``, ``wants_requeue`` and the exit code 75. There is no requeue after `grpo stop`, after
    ``max_requeues`` requeues, or after several attempts in a row without a new step. The field ``refusal`` then has the
    reason. Without a requeue, the field ``job`` is None. This function changes nothing.
    """
    folder, summary = attempt.run.folder, read_json(attempt.run.folder / "summary.json")
    idle_attempts = idle_trained = 0
    if newest_step(attempt.run) <= attempt.first_step:
        phases = [(load_json_mapping(path) or {}).get("phase") for path in (folder / "processes").glob("phase_*.json")]
        has_trained = not {None, "start", "connect"}.issuperset(phases)
        idle_attempts = int(summary.get("idle_attempts", 0)) + 1
        idle_trained = summary.get("idle_trained", 0) + has_trained
    refusal = ""
    if job and wants_requeue and ending.code == EXIT_STOPPED:
        if (folder / NO_REQUEUE).exists():
            refusal = "grpo stop was called"
        elif limit := _describe_limit(job, attempt.recipe.run.max_requeues):
            refusal = limit
        elif idle_trained >= _MAX_IDLE_TRAINED or idle_attempts >= _MAX_IDLE_ATTEMPTS:
            refusal = f"{idle_attempts} attempts in a row made no new step"
    else:
        job = None
    status: Literal["completed", "stopped", "failed"] = "failed" if ending.code else "completed"
    if ending.code == EXIT_STOPPED or ending.cause.startswith("stopped by"):
        status = "stopped"
    return Outcome(ending.code, status, None if refusal else job, refusal, idle_attempts, idle_trained)


def finish_attempt(
    attempt: Attempt, ending: Ending, wants_requeue: bool, job: SlurmJob | None, benchmark: bool = False
) -> Outcome:
    """Write ``summary.json``, print how the run ended, and requeue its job if that was requested and is allowed.

    ``wants_requeue`` requests the requeue of ``job``, and ``decide_outcome`` decides on it. With ``benchmark``, the
    benchmark result is written and printed too, unless the job is requeued. Hooks get ``on_end``, for example to write
    a report. If Slurm rejects the requeue, ``refusal`` of the result contains Slurm's answer.
    """
    folder, cause = attempt.run.folder, ending.cause
    outcome = decide_outcome(attempt, ending, wants_requeue, job)
    seconds = read_json(folder / "summary.json").get("launch_seconds", 0.0) + time.monotonic() - attempt.started_at
    summary = rundir.finish_summary(
        folder, status=outcome.final_status, exit_code=outcome.code, failed_rank=ending.failed_rank,
        cause=cause or None, idle_attempts=outcome.idle_attempts, idle_trained=outcome.idle_trained,
        launch_seconds=round(seconds, 3),
    )  # fmt: skip
    if outcome.final_status == "completed":  # no attempt follows, and the prompts can be as large as the dataset
        shutil.rmtree(folder / rundir.PROMPTS, ignore_errors=True)
    if not outcome.job:  # a job is requeued first: a slow report could cost it its place in the queue
        for line in attempt.hooks.on_end(folder):
            say(line)
    if ending.log is not None and outcome.code != EXIT_STOPPED:
        print_line(f"--- last lines of {display_path(ending.log)}\n{read_last_lines(ending.log)}\n---", error=True)
    _print_results(attempt, summary["benchmarks"], is_over=not outcome.job)
    if benchmark and not outcome.job:
        print_line("\n".join(write_benchmark(Run(folder))))
    if outcome.refusal:
        say(f"not requeued: {outcome.refusal}")
    _print_ending(attempt, outcome)
    if outcome.job:
        if refusal := requeue_job(outcome.job):
            outcome = replace(outcome, job=None, refusal=refusal)
            rundir.finish_summary(folder, status=outcome.final_status)
            command = format_resume_command(folder, cause)
            say(f"not requeued: {refusal}{f'; continue with: {command}' if command else ''}")
        for line in attempt.hooks.on_end(folder):
            say(line)
    return outcome


def _print_ending(attempt: Attempt, outcome: Outcome) -> None:
    """Print at most four lines: status and cause, rewards or loss, model, and the next command.

    For a completed run, first call ``on_model`` of the hooks, which may publish the model.
    """
    run = Run(attempt.run.folder)
    summary, status = run.summary, outcome.final_status
    model = describe_model(run)
    if outcome.code:
        status += f" with exit code {outcome.code}: {run.cause}"
    else:
        model += attempt.hooks.on_model(run.folder)
        if summary.get("stopped_early"):
            status += f"; stopped early, {plural(summary['evaluations_since_best'], 'evaluation')} without improvement"
    if attempt.plan.smoke:
        status += "; smoke test on CPU, not an experiment"
    next_step = "nothing, Slurm starts the job again"
    if not outcome.job:
        next_step = "; then ".join(filter(None, describe_next_step(run, attempt.hooks)))
    result = "loss" if summary.get("final_loss") is not None else "reward"
    lines = {"status": status, result: describe_rewards(summary), "model": model, "next": next_step}
    for label, text in lines.items():
        if text:
            say(f"{label:<7} {text}")


def _print_results(attempt: Attempt, benchmarks: Mapping[str, Any], is_over: bool) -> None:
    """Print serious notices, the results of the benchmarks, and unusual fractions over all steps.

    ``is_over`` is false if the run continues later in a requeued job.
    """
    rows = rundir.read_metrics(attempt.run.folder, lenient=True)
    for notice in find_notices(rows, attempt.recipe.__getitem__, over=is_over):
        if notice.serious:
            say(fill_commands(f"note: {notice}", attempt.run))
    for name, result in benchmarks.items():
        say(f"benchmark {name}: {format_result(result)}")
    if shares := format_unusual_totals(rows):
        say(f"over all steps: {shares}")


def end_without_attempt(
    ending: Ending, wants_requeue: bool, job: SlurmJob | None, run: Run | None = None, recipe: Recipe | None = None
) -> int:
    """Print why a launch ended before its attempt began, and return the exit code of ``ending``.

    With ``wants_requeue``, also requeue ``job``, or print why not: ``max_requeues`` of ``recipe`` is reached, or Slurm
    rejects it. Outside Slurm, ``job`` is None. Run and recipe are None while they are not known yet.
    """
    state = f"the attempt at {display_path(run.folder)} had not begun" if run else "there is no run directory yet"
    say(f"{ending.cause}; {state}")
    if wants_requeue and job is not None:
        max_requeues = recipe.run.max_requeues if recipe else catalogue()["max_requeues"]["default"]
        if refusal := _describe_limit(job, max_requeues) or requeue_job(job):
            say(f"not requeued: {refusal}")
    return ending.code


def _describe_limit(job: SlurmJob, max_requeues: int) -> str:
    """Return why a job that was requeued ``max_requeues`` times is not requeued again; "" if it may be."""
    limit = f"the job was requeued {job.restarts} times (max_requeues {max_requeues})"
    return limit if job.restarts >= max_requeues else ""
