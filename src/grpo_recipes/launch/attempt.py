"""One attempt at a run: what is made before any process starts, and the summary, report and requeue after the last."""

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import EXIT_STOPPED, config_error, translate
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.launch.nodes import NodeWorkers
from grpo_recipes.launch.processes import Ending, tail
from grpo_recipes.launch.resolve import note_job
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.plan.commands import base_environment, run_environment, wandb_environment
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.roles import admit, dismiss
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.process.reports import plural, print_line, say
from grpo_recipes.process.scratch import Scratch, make_scratch, remove_dead_scratch
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.sources import user_code
from grpo_recipes.recipe.user_code import copy_source
from grpo_recipes.rewards.load import keep_rewards
from grpo_recipes.runs import rundir
from grpo_recipes.runs.benchmark import write_benchmark
from grpo_recipes.runs.checkpoints import newest_complete, recording_changes, step_of
from grpo_recipes.runs.endings import advice
from grpo_recipes.runs.health import describe_means, find_notices
from grpo_recipes.runs.progress import unusual_totals
from grpo_recipes.runs.rundir import NO_REQUEUE, Run, json_mapping, read_json, write_json
from grpo_recipes.slurm.client import SlurmJob, requeue
from grpo_recipes.stats import result_line

SUBMITTED = "submitted"  # status of a run that no launch has started yet
# So many attempts in a row without a newer checkpoint, and a requeue would only burn the queue's time. One that was
# stopped while server and ranks still started says little: on a busy cluster jobs are preempted within minutes.
_IDLE_ATTEMPTS, _IDLE_STARTS = 2, 10
_KEPT = (
    "idle_attempts",
    "idle_trained",
    "server_restarts",
    "process_restarts",
    "launch_seconds",
)  # in summary.json from attempt to attempt


@dataclass
class Attempt:
    """One attempt at a run: what is read, planned and made before any process starts."""

    run: Run
    recipe: Recipe
    plan: Plan
    names: Names
    scratch: Scratch
    environment: dict[str, str]  # of every process; the plan has what each adds
    resumed: str  # where it goes on; empty for a new run
    workers: NodeWorkers
    first_step: int = 0  # step of the checkpoint it begins with
    hooks: AllHooks = field(default_factory=AllHooks)
    hook_lines: Sequence[str] = ()  # of the hooks, for the start of the run
    serve_command: str | None = (
        None  # starts a process of the user's that joins the run, e.g. an environment; None if none may join
    )
    began: float = field(default_factory=time.monotonic)

    def server_address(self) -> tuple[str, int, str]:
        """Return host, port and token of the server."""
        return self.plan.server_host, self.plan.ports.server, self.scratch.token.read_text()

    def move_server(self, port: int) -> None:
        """Plan the next server on another port; environments in other terminals must be started again."""
        self.plan = replace(self.plan, ports=replace(self.plan.ports, server=port))
        self.serve_command = admit(self.recipe, self.plan, self.names)
        if self.serve_command:
            say(f"the server's URL changes; start your environments again with: {self.serve_command}")

    def renew_token(self) -> None:
        """Give the next server a token of its own, on every node."""
        self.scratch.write_token(token := secrets.token_hex(16))
        self.workers.send("token", token=token)


def prepare(
    run: Run, recipe: Recipe, plan: Plan, names: Names, resources: Resources, workers: NodeWorkers,
    update_rewards: bool = False,
) -> Attempt:  # fmt: skip
    """Freeze recipe and plan in the run directory; make each node's scratch folders and the token."""
    before = read_json(run.folder / "summary.json")
    if before.get("status") == SUBMITTED:
        before.clear()  # nothing has run yet
    resumed = go_back(run) if before else ""  # it may refuse the resume: before anything is made
    plan = replace(plan, processes=[replace(process, log=new_log(process.log)) for process in plan.processes])
    freeze_inputs(run, recipe, plan, update_rewards)
    rundir.remove_files(*(run.folder / "processes").glob("*.json"))
    if resources.job is not None:
        note_job(run.folder, recipe, resources.job.name)
    if removed := remove_dead_scratch(os.environ):
        say(removed)
    tracking = {**wandb_environment(recipe), "WANDB_RUN_ID": run.identity["wandb_id"], "WANDB_RESUME": "allow"}
    kept = {key: before[key] for key in _KEPT if key in before}
    restarts = before.get("restarts", 0) + 1 if before else 0
    first_step = newest_step(run)
    with contextlib.ExitStack() as undo:
        scratch = make_scratch(os.environ)
        undo.callback(scratch.remove)
        workers.begin(run.folder, names.served, scratch.token.read_text(), tracking)
        own = run_environment(os.environ, scratch, run.folder, names.served)
        environment = {**base_environment(os.environ), **own, **tracking}
        serve_command = admit(recipe, plan, names)
        undo.callback(dismiss, run.folder)
        # Last: what fails before leaves the status as it was.
        path, began = run.folder / "summary.json", {"status": "running", "smoke": plan.smoke, "restarts": restarts}
        resumed_at = {"resumed_at": [*before.get("resumed_at", []), first_step]} if before else {}
        write_json(path, {**began, **resumed_at, **kept})
        undo.pop_all()
    return Attempt(
        run, recipe, plan, names, scratch, environment, resumed, workers, first_step, serve_command=serve_command
    )


def freeze_inputs(run: Run, recipe: Recipe, plan: Plan, update_rewards: bool = False) -> None:
    """Leave recipe, plan and the user's own code in the run directory; notes on that code go into the plan.

    Where rewards are updated, ``run.json`` gets the step from which on they are others.
    """
    with recording_changes(run.folder):
        rundir.write_atomically(run.folder / "recipe.yaml", recipe.as_yaml())
        for spec in recipe["callbacks"]:
            copy_source(spec, run.folder / "callbacks")
        plan.notes.extend(notes := keep_rewards(user_code(recipe.__getitem__), run.folder, update_rewards))
        if update_rewards:
            run.identity.setdefault("updated_rewards", []).append({"after_step": newest_step(run), "notes": notes})
            write_json(run.folder / "run.json", run.identity)
        write_json(run.folder / "plan.json", {**plan.as_json(), rundir.RECIPE_HASH: rundir.recipe_hash(run.folder)})


def new_log(name: str) -> str:
    """Make an empty log of that name, or with a number behind it: two attempts can begin in one second."""
    path = Path(name)
    with translate(
        OSError, lambda error: config_error(name, f"cannot be a log ({error.strerror})", "name another file")
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            path.touch(mode=0o600, exist_ok=False)  # completions and prompts are in it
            break
        path = Path(name).with_stem(f"{Path(name).stem}-{number}")
    return str(path)


def newest_step(run: Run) -> int:
    """Return the step of the newest complete checkpoint, 0 without one."""
    checkpoint = newest_complete(run.folder / "checkpoints")
    return step_of(checkpoint) if checkpoint else 0


def go_back(run: Run) -> str:
    """Forget the ranks that were, and move aside the rows after the newest checkpoint; return where the run goes on."""
    checkpoint = newest_complete(run.folder / "checkpoints")
    moved = rundir.move_rows_after(run.folder, newest_step(run))
    for name in ("rank_*.json", "phase_*.json"):
        rundir.remove_files(*(run.folder / "processes").glob(name))
    where = f"resuming from {checkpoint.name}" if checkpoint else "no complete checkpoint: starting again from step 0"
    return f"{where}; {moved} later rows of metrics.jsonl moved to metrics.redone.jsonl"


def say_start(attempt: Attempt) -> None:
    """Print what begins: the recipe and its run directory, the batch, notes, where it goes on, and the logs."""
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
        attempt.resumed,
        *(f"{process.role} log {process.log}" for process in plan.processes),
    ]
    for line in filter(None, lines):
        say(line)


def finish(attempt: Attempt, ending: Ending, wants_requeue: bool, job: SlurmJob | None, benchmark: bool = False) -> int:
    """Write the summary, print how the run ended, requeue its job where that is wanted, and return the exit code."""
    folder, cause = attempt.run.folder, ending.cause
    # Attempts in a row that left no newer checkpoint, this one included.
    idle = int(read_json(folder / "summary.json").get("idle_attempts", 0)) + 1
    idle = idle if newest_step(attempt.run) <= attempt.first_step else 0
    phases = [(json_mapping(path) or {}).get("phase") for path in (folder / "processes").glob("phase_*.json")]
    trained = not {None, "start", "connect"}.issuperset(phases)
    idle_trained = (read_json(folder / "summary.json").get("idle_trained", 0) + trained) if idle else 0
    seconds = read_json(folder / "summary.json").get("launch_seconds", 0.0) + time.monotonic() - attempt.began
    job = job if wants_requeue and ending.code == EXIT_STOPPED else None
    most, why_not = attempt.recipe["max_requeues"], None
    if job and (folder / NO_REQUEUE).exists():
        why_not = "grpo stop was called"
    elif job and job.restarts >= most:
        why_not = f"the job was requeued {job.restarts} times (max_requeues {most})"
    elif job and (idle_trained >= _IDLE_ATTEMPTS or idle >= _IDLE_STARTS):
        why_not = f"{idle} attempts in a row made no new step"
    goes_on = job is not None and why_not is None
    stopped = ending.code == EXIT_STOPPED or cause.startswith("stopped by")
    over = "stopped" if stopped else "failed" if ending.code else "completed"
    status = "requeued" if goes_on else over
    summary = rundir.finish_summary(
        folder, status=status, exit_code=ending.code, failed_rank=ending.failed_rank, cause=cause or None,
        idle_attempts=idle, idle_trained=idle_trained, launch_seconds=round(seconds, 3),
    )  # fmt: skip
    if not goes_on:  # else after the requeue: no report may cost the job its place in the queue
        _say_end(attempt)
    if ending.log is not None and ending.code != EXIT_STOPPED:
        print_line(f"--- last lines of {display_path(ending.log)}\n{tail(ending.log)}\n---", error=True)
    _say_results(attempt, summary["benchmarks"], over=not goes_on)
    if benchmark and not goes_on:
        print_line("\n".join(write_benchmark(Run(folder))))
    rewards = outcome(summary)
    smoke, fix = "smoke test on CPU, " if attempt.plan.smoke else "", ""
    if ending.code == 0:
        say(f"{smoke}done: {rewards}; model in {display_path(folder / 'model')}{attempt.hooks.on_model(folder)}")
        return 0
    say(f"{smoke}{status} with exit code {ending.code}: {cause} ({rewards})")
    if status == "failed":
        fix = advice(Run(folder), cause)
        say(f"fix: {fix}")
    if job and goes_on and (why_not := requeue(job)):
        rundir.finish_summary(folder, status=over)
    if goes_on:
        _say_end(attempt)
    if why_not:
        say(f"not requeued: {why_not}")
    if (
        "NotFinite" not in cause
        and "--resume" not in fix
        and (not goes_on or why_not)
        and newest_complete(folder / "checkpoints")
    ):
        say(f"continue with: grpo launch --resume {shell_path(folder)}{rundir.damaged_rows(folder)}")
    return ending.code


def _say_end(attempt: Attempt) -> None:
    """Call the hooks of the end, and print their lines."""
    for line in attempt.hooks.on_end(attempt.run.folder):
        say(line)


def _say_results(attempt: Attempt, benchmarks: Mapping[str, Any], over: bool) -> None:
    """Print what is serious in the rows of a run, which may be over, its benchmarks, and shares of all steps."""
    rows = rundir.read_metrics(attempt.run.folder, lenient=True)
    for notice in find_notices(rows, attempt.recipe.__getitem__, over=over):
        if notice.serious:
            say(f"note: {notice}")
    for name, result in benchmarks.items():
        say(f"benchmark {name}: {result_line(result)}")
    if shares := unusual_totals(rows):
        say(f"over all steps: {shares}")


def outcome(summary: Mapping[str, Any]) -> str:
    """Return what a run came to, in a few words: its rewards with the steps that each is the mean of."""
    steps, first, last = summary["steps"], summary["initial_reward"], summary["final_reward"]
    text = f"{plural(steps, 'step')}, none with a reward" if steps else "no step was completed"
    if first is not None:
        text = f"reward {first} -> {last} over {plural(steps, 'step')}, {describe_means(steps)}"
    if "initial_eval_reward" in summary:
        text += f"; evaluated {summary['initial_eval_reward']} -> {summary['final_eval_reward']}"
    return text


def end_without_run(ending: Ending, wants_requeue: bool, job: SlurmJob | None) -> int:
    """End a launch that was stopped before it had a run directory; requeue its job where that was asked for."""
    say(f"{ending.cause}; there is no run directory yet")
    if wants_requeue and job is not None and (error := requeue(job)):
        say(f"not requeued: {error}")
    return ending.code
