"""`grpo launch`: preflight, server, trainers, and the end of both. Reads top to bottom in ``launch``."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.check import SMOKE_SCHEME, checked_recipe
from grpo_recipes.errors import EXIT_STOPPED, Refused, refuse
from grpo_recipes.evaluate.pass_at_k import result_line
from grpo_recipes.fetch.pieces import smoke_command
from grpo_recipes.fetch.preflight import need_sources
from grpo_recipes.fetch.sources import Sources, find_sources, record_sources
from grpo_recipes.launch.checkpoints import newest_complete, step_of, world_size_of
from grpo_recipes.launch.descendants import end_descendants, reap
from grpo_recipes.launch.environment import (
    Scratch,
    base_environment,
    make_scratch,
    run_environment,
    wandb_environment,
)  # fmt: skip
from grpo_recipes.launch.network import need_wandb_route
from grpo_recipes.launch.plan import (
    Names,
    Plan,
    choose_recipe,
    describe,
    make_plan,
)  # fmt: skip
from grpo_recipes.launch.ports import free_ports, plan_ports
from grpo_recipes.launch.prctl import become_subreaper
from grpo_recipes.launch.progress import Progress
from grpo_recipes.launch.resources import Resources, find_resources
from grpo_recipes.launch.rundir import (
    Run,
    changed_code,
    claim,
    find_run,
    finish_summary,
    move_rows_after,
    new_run,
    read_json,
    stop_file,
    timestamp,
    write_json,
)  # fmt: skip
from grpo_recipes.launch.server import NotReady, wait_until_ready
from grpo_recipes.launch.supervisor import Child, Ending, shell_code, tail, wait_for_trainer
from grpo_recipes.paths import shown
from grpo_recipes.publish.preflight import need_target
from grpo_recipes.publish.publisher import Publisher, hand_over, make_publisher
from grpo_recipes.recipe import Recipe, merge_recipe, read_frozen
from grpo_recipes.report.single import report_line
from grpo_recipes.rewards.load import keep_rewards
from grpo_recipes.secrets import masked, masked_environment
from grpo_recipes.tasks import GRPO, asked_task, entry_of, same_task
from grpo_recipes.user_code import copy_source


@dataclass(frozen=True)
class Options:
    """The command line of `grpo launch` beside the recipe's own flags."""

    recipe: str | None = None
    task: str | None = None
    resume: str | None = None
    allow_changed_code: bool = False
    dry_run: bool = False
    flags: tuple[str, ...] = ()


@dataclass
class Attempt:
    """One attempt at a run: what is read, planned and made before any process starts."""

    run: Run
    recipe: Recipe
    plan: Plan
    names: Names
    scratch: Scratch
    environment: dict[str, str]
    resumed: str
    publisher: Publisher | None = None


def launch(options: Options) -> int:
    """Run a recipe to its end.

    Returns:
        The exit code: 0, the first failed rank's, or 128+n for a signal.

    Raises:
        Refused: recipe, flag or environment is wrong; nothing was started.
    """
    resources = find_resources(os.environ)
    run, recipe, entry = _settle(options, resources)
    names = _names(run, recipe)
    recorded = run.identity.get("sources") if run else None
    if options.dry_run:
        return _dry_run(recipe, resources, names, entry, find_sources(recipe, os.environ, recorded))
    ports, port_notes = free_ports(recipe, plan_ports(recipe, resources.job), recipe["vllm_server_host"])
    plan = make_plan(recipe, resources, os.environ, names, entry, ports)
    need_wandb_route(recipe, os.environ)
    sources = _need_sources(options, run, recipe)
    target = need_target(recipe, os.environ, names.run)
    _make_log_folder()
    if run is None:
        run, names = _make_run(recipe, resources, names)
    else:
        _need_same_world(run, plan)
    plan = make_plan(recipe, resources, os.environ, names, entry, ports, sources)
    plan.notes.extend(port_notes)
    claim(run)
    record_sources(run, sources)
    attempt = _prepare(run, recipe, plan, names, resources)
    attempt.publisher = make_publisher(target, run.folder, os.environ, _say)
    return _finish(attempt, _supervise(attempt))


def _supervise(attempt: Attempt) -> Ending:
    """Run the processes; however that ends, nothing of the run is left afterwards."""
    stop = _StopSignals(stop_file(attempt.run.folder))
    try:
        _say_start(attempt)
        ending = _make_smoke_task(attempt) or _run_processes(attempt, stop)
    except _StoppedBySignal as stopped:
        ending = Ending(128 + stopped.signum, f"stopped by {signal.Signals(stopped.signum).name}")
    except Exception as error:
        traceback.print_exc()
        ending = Ending(1, f"the launcher failed: {type(error).__name__}: {masked(str(error))}")
    finally:
        stop.ignore()
        end_descendants()
        attempt.scratch.remove()
    if stop.seen == signal.SIGTERM and ending.code not in (0, EXIT_STOPPED):
        return Ending(128 + signal.SIGTERM, "stopped by SIGTERM")  # Slurm sends it to every process of the job
    return ending


def _need_sources(options: Options, run: Run | None, recipe: Recipe) -> Sources:
    """What the recipe reads, brought now if it must be; of a resumed run the commits it began with."""
    named = ["--resume", str(run.folder)] if run else [shown(recipe.path)]
    recorded = run.identity.get("sources") if run else None
    return need_sources(recipe, os.environ, recorded, [*named, *options.flags], options.allow_changed_code)


def _make_run(recipe: Recipe, resources: Resources, names: Names) -> tuple[Run, Names]:
    """Make the run directory; the next second's name where another launch has just taken this one's."""
    for _ in range(60):
        run = new_run(_run_root(recipe), names.run, names.timestamp, resources)
        if run is not None:
            return run, names
        time.sleep(1)
        names = _names(None, recipe)
    raise refuse("run_root", f"no free name for a run directory of '{names.run}'", "set another run_name")


def _need_same_world(run: Run, plan: Plan) -> None:
    """A checkpoint holds a part of the generation window per process: it fits the same number of them alone."""
    checkpoint = newest_complete(run.folder / "checkpoints")
    made_by = world_size_of(checkpoint) if checkpoint else plan.batch.world_size
    if made_by != plan.batch.world_size:
        what = (
            f"{checkpoint.name if checkpoint else ''} is of {made_by} processes, the plan has {plan.batch.world_size}"
        )
        raise refuse("--resume", what, f"give it as many devices as before, or --num_processes {made_by}")


def _settle(options: Options, resources: Resources) -> tuple[Run | None, Recipe, str]:
    """Which run this is (None: a new one), its recipe and entry script."""
    asked = asked_task(os.environ, options.task)
    if options.resume is not None and options.recipe:
        raise refuse("--resume", "a resumed run goes on with its own recipe", "leave the recipe out")
    if options.resume in (None, "last"):
        path = choose_recipe(options.recipe, os.environ, asked.task or GRPO, resources.flavour)
    if options.resume is None:
        recipe = checked_recipe(path, options.flags, os.environ, asked)
        pointer = _job_pointer(resources, recipe)
        requeued = resources.job is not None and resources.job.restarts > 0 and pointer.is_file()
        if not requeued:
            return None, recipe, entry_of(recipe, asked)
        run = find_run(_run_root(recipe), pointer.read_text().strip())
    elif options.resume == "last":
        # Flags are for the run's own recipe, with which they are checked: run_root alone is asked of this one.
        recipe, problems = merge_recipe(path, options.flags, os.environ)
        if "run_root" in recipe.broken:
            raise Refused(*problems)
        run = find_run(_run_root(recipe), "last")
    else:
        run = find_run(Path(), options.resume)
    changed = changed_code(run)
    if changed and not options.allow_changed_code:
        raise refuse("--resume", changed, "go back to that code, or add --allow-changed-code")
    recipe = read_frozen(run.folder / "recipe.yaml", options.flags, os.environ)
    if recipe.origin("model_revision") == "--model_revision":
        raise refuse("--model_revision", "a resumed run goes on with the commit it began with", "leave it out")
    saved = read_json(run.folder / "plan.json")
    if saved is None:
        return run, recipe, entry_of(recipe, asked)
    same_task(recipe, asked, saved["task"])
    return run, recipe, saved["entry"]


def _run_root(recipe: Recipe) -> Path:
    return Path(os.path.expanduser(recipe["run_root"]))


def _job_pointer(resources: Resources, recipe: Recipe) -> Path:
    """The file by which a requeued job finds its run directory; outside Slurm none exists."""
    name = f"{resources.job.cluster}-{resources.job.id}" if resources.job else "no-job"
    return _run_root(recipe) / ".jobs" / name


def planned_names(recipe: Recipe) -> Names:
    """The names a launch of this recipe would choose now."""
    return _names(None, recipe)


def _names(run: Run | None, recipe: Recipe) -> Names:
    stamp = timestamp()
    name = run.name if run else (recipe["run_name"] or recipe.path.stem.removeprefix("config_"))
    folder = run.folder if run else (_run_root(recipe) / f"{name}-{stamp}").absolute()
    return Names(folder, name, f"{name}-{secrets.token_hex(4)}", stamp)


def _dry_run(recipe: Recipe, resources: Resources, names: Names, entry: str, sources: Sources) -> int:
    plan = make_plan(recipe, resources, os.environ, names, entry, sources=sources)
    nowhere = Path(tempfile.gettempdir()) / "grpo-dry-run"
    shared = run_environment(os.environ, Scratch(nowhere, nowhere), names.run_dir, names.served)
    differences = {}
    for process in plan.processes:
        wanted = {**base_environment(os.environ), **shared, **wandb_environment(recipe), **process.environment}
        changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
        removed = {name: "(removed)" for name in os.environ if name not in wanted}
        differences[process.role] = masked_environment({**changed, **removed})
    print(describe(plan, differences))
    return 0


def _make_log_folder() -> None:
    try:
        Path("logs").mkdir(exist_ok=True)
    except OSError as error:
        what = f"cannot make the folder logs here ({error.strerror})"
        raise refuse("working folder", what, "launch from a folder you may write to") from None


def _prepare(run: Run, recipe: Recipe, plan: Plan, names: Names, resources: Resources) -> Attempt:
    """Freeze recipe and plan in the run directory; make the scratch folder and the token."""
    (run.folder / "recipe.yaml").write_text(recipe.as_yaml())
    for spec in recipe["callbacks"]:
        copy_source(spec, run.folder / "callbacks")
    plan.notes.extend(keep_rewards(recipe["reward_funcs"], run.folder))
    write_json(run.folder / "plan.json", plan.as_json())
    for record in (run.folder / "processes").glob("*.json"):
        record.unlink()
    stop_file(run.folder).unlink(missing_ok=True)
    if resources.job is not None:
        pointer = _job_pointer(resources, recipe)
        pointer.parent.mkdir(exist_ok=True)
        pointer.write_text(str(run.folder))
    before = read_json(run.folder / "summary.json")
    write_json(
        run.folder / "summary.json",
        {"status": "running", "smoke": plan.smoke, "restarts": before["restarts"] + 1 if before else 0},
    )
    scratch = make_scratch(os.environ)
    environment = {
        **base_environment(os.environ),
        **run_environment(os.environ, scratch, run.folder, names.served),
        **wandb_environment(recipe),
        "WANDB_RUN_ID": run.identity["wandb_id"],
        "WANDB_RESUME": "allow",
    }
    return Attempt(run, recipe, plan, names, scratch, environment, _rewind(run) if before else "")


def _rewind(run: Run) -> str:
    """Move aside the rows of metrics that will be redone, and say where the run goes on."""
    checkpoint = newest_complete(run.folder / "checkpoints")
    moved = move_rows_after(run.folder, step_of(checkpoint) if checkpoint else 0)
    where = f"resuming from {checkpoint.name}" if checkpoint else "no complete checkpoint: starting again from step 0"
    return f"{where}; {moved} later rows of metrics.jsonl moved to metrics.redone.jsonl"


def _say_start(attempt: Attempt) -> None:
    plan = attempt.plan
    smoke = "smoke test on CPU, not an experiment: " if plan.smoke else ""
    _say(f"{smoke}{shown(plan.recipe)} -> {shown(attempt.run.folder)}")
    if plan.maxent:
        _say(f"objective {plan.maxent}")
    _say(f"batch {plan.batch}")
    _say(f"vllm {plan.mode}, weights by {plan.bridge or 'none'} ({plan.why_bridge})")
    for note in plan.notes:
        _say(f"note: {note}")
    if attempt.publisher:
        _say(f"publishing in {attempt.publisher}")
    if attempt.resumed:
        _say(attempt.resumed)
    for process in plan.processes:
        _say(f"{process.role} log {process.log}")


def _make_smoke_task(attempt: Attempt) -> Ending | None:
    """Make the built-in model and data of a smoke recipe, once."""
    name = attempt.recipe["model_name_or_path"]
    if not name.startswith(SMOKE_SCHEME):
        return None
    folder, command = smoke_command(name, os.environ)
    if (folder / "COMPLETE").exists():
        return None
    _say(f"making the smoke model and data in {shown(folder)} (once, about a minute)")
    code = subprocess.Popen(command, env=attempt.environment).wait()
    return Ending(code, f"python -m grpo_recipes.smoke exited with code {code}") if code else None


def _run_processes(attempt: Attempt, stop: _StopSignals) -> Ending:
    become_subreaper()
    plan = attempt.plan
    server = _start(attempt, "server") if plan.process("server") else None
    trainer = _start(attempt, "trainer") if server is None else None
    if server is not None:
        try:
            _wait_for_server(attempt, server)
        except NotReady as error:
            return Ending(shell_code(server.exit_code()) or 1, str(error), log=server.log)
        trainer = _start(attempt, "trainer")
    assert trainer is not None
    progress = Progress(attempt.run.folder)

    def tick() -> None:
        lines = progress.new_lines()
        stop.trainers_run = stop.trainers_run or bool(lines)
        stop.check_deadline()
        for line in lines:
            _print(line)
        if attempt.publisher:
            attempt.publisher.tick()

    ending = wait_for_trainer(trainer, server, attempt.run.folder, tick)
    for line in progress.new_lines():
        _print(line)
    return ending


def _start(attempt: Attempt, role: str) -> Child:
    process = attempt.plan.process(role)
    assert process is not None
    return Child(process, {**attempt.environment, **process.environment}, attempt.run.folder, attempt.scratch)


def _wait_for_server(attempt: Attempt, server: Child) -> None:
    plan, recipe = attempt.plan, attempt.recipe
    token = attempt.scratch.token.read_text()

    def alive() -> bool:
        reap()
        return server.alive()

    waited = wait_until_ready(
        alive, server.warden_pid, recipe["vllm_server_host"], plan.ports.server, attempt.names.served, token,
        recipe["vllm_server_timeout"],
    )  # fmt: skip
    _say(f"server ready after {waited:.0f} s on {recipe['vllm_server_host']}:{plan.ports.server}")


def _finish(attempt: Attempt, ending: Ending) -> int:
    """Write the summary, say how it ended, and return the code."""
    if ending.code == 0:
        status = "completed"
    else:
        stopped = ending.code == EXIT_STOPPED or ending.cause.startswith("stopped by")
        status = "stopped" if stopped else "failed"
    summary = finish_summary(
        attempt.run.folder,
        status=status,
        exit_code=ending.code,
        failed_rank=ending.failed_rank,
        cause=ending.cause or None,
    )
    _say(report_line(attempt.run.folder))
    if ending.log is not None and ending.code != EXIT_STOPPED:
        print(f"--- last lines of {shown(ending.log)}\n{tail(ending.log)}\n---", file=sys.stderr)
    rewards = f"reward {summary['initial_reward']} -> {summary['final_reward']} over {summary['steps']} steps"
    if "initial_eval_reward" in summary:
        rewards += f", evaluated {summary['initial_eval_reward']} -> {summary['final_eval_reward']}"
    smoke = "smoke test on CPU, " if attempt.plan.smoke else ""
    for name, result in summary["benchmarks"].items():
        _say(f"benchmark {name}: {result_line(result)}")
    if ending.code == 0:
        published = hand_over(attempt.publisher, attempt.run.folder)
        _say(f"{smoke}done: {rewards}; model in {shown(attempt.run.folder / 'model')}{published}")
    else:
        if attempt.publisher:
            attempt.publisher.abandon()
        _say(f"{smoke}{status} with exit code {ending.code}: {ending.cause} ({rewards})")
        if newest_complete(attempt.run.folder / "checkpoints"):
            _say(f"continue with: grpo launch --resume {shlex.quote(shown(attempt.run.folder))}")
    return ending.code


def _say(text: str) -> None:
    _print(f"grpo: {text}")


def _print(text: str) -> None:
    """Print a line; a terminal or pipe that is gone must not end the run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _StoppedBySignal(BaseException):
    def __init__(self, signum: int):
        self.signum = signum


class _StopSignals:
    """While trainers run the first signal asks them to save and end; before, or the second time, it ends the run.

    SIGTERM leaves them only as long as Slurm usually leaves us before SIGKILL.
    """

    _signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    _term_grace_seconds = 20.0

    def __init__(self, request: Path) -> None:
        self._request = request
        self._deadline = float("inf")
        self.trainers_run = False
        self.seen: int | None = None
        for signum in self._signals:
            # nohup, or a shell's background job, has a signal ignored on purpose; training.sh has USR1 for us.
            if signum == signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, _: object) -> None:
        self.seen = signum
        if not self.trainers_run or self._request.exists():
            raise _StoppedBySignal(signum)
        self._request.touch()
        if signum != signal.SIGUSR1 and signum != signal.SIGINT:
            self._deadline = time.monotonic() + self._term_grace_seconds
        _say(f"{signal.Signals(signum).name}: saving after the step in flight, then ending (again: end at once)")

    def check_deadline(self) -> None:
        """End the run when the trainers took too long to save after SIGTERM."""
        if time.monotonic() > self._deadline:
            raise _StoppedBySignal(signal.SIGTERM)

    def ignore(self) -> None:
        """From now on only the clean-up counts."""
        for signum in self._signals:
            signal.signal(signum, signal.SIG_IGN)
