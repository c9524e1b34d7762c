"""`grpo sweep` from the command line to the comparison: tasks of one array job, or one child after the other."""

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from grpo_recipes.console.sweep import folder as sweeps
from grpo_recipes.console.sweep.search import Proposals, need_optuna
from grpo_recipes.console.sweep.spec import SweepSpec, Trial, for_each, is_number, make_trials
from grpo_recipes.errors import EXIT_STOPPED, ConfigError, config_error
from grpo_recipes.launch import submission
from grpo_recipes.launch.attempt import SUBMITTED
from grpo_recipes.launch.resolve import note_job
from grpo_recipes.paths import display_path, python_module, shell_path
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.ports import need_named_ports
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.process.terminal import LOG
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe import read_frozen
from grpo_recipes.recipe.rules import removal, uses_external_server
from grpo_recipes.runs.groups import COMPLETED, GONE
from grpo_recipes.runs.rundir import Run, code_state, lock_run, read_json, stop_file, write_json
from grpo_recipes.slurm.client import MaybeSubmitted, cluster_name, tasks_in_queue
from grpo_recipes.slurm.profile import Profile, render

INDEX = "SLURM_ARRAY_TASK_ID"
_LOOK_SECONDS = 0.5  # between two looks at a launch, and for a request to stop


@dataclass(frozen=True)
class Backend:
    """Where the runs of a sweep run."""

    profile: Profile | None = None  # of the site, for one array job; None: sequentially on this machine
    most: int | None = None  # tasks of the array that run at the same time, None for all

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Return the user's variables, with what the site adds."""
        return submission.site_environment(self.profile, environment) if self.profile else environment

    def resources(self, environment: Mapping[str, str]) -> Resources:
        """Return what a run will have; it is not part of the job in which the sweep itself may run."""
        profile = self.profile
        return submission.site_resources(profile) if profile else replace(find_resources(environment), job=None)


def start(
    spec: SweepSpec,
    backend: Backend,
    environment: Mapping[str, str],
    new: bool,
    dry_run: bool = False,
    elsewhere: Sequence[Path] = (),
) -> int:
    """Check and plan every run, make the sweep or find the one that is not completed, and run what is left.

    Return the exit code of the command. A ConfigError says what is wrong with any of the runs, before anything is
    written or started. With ``new`` another sweep begins though the same one is not completed, which is looked for in
    the folders ``elsewhere`` too; with ``dry_run`` nothing is written or started.
    """
    if spec.search:
        need_optuna()
    environment = backend.environment(environment)
    resources = backend.resources(environment)
    trials = make_trials(spec, environment, resources.device)
    recipes = {trial.name: trial.recipe for trial in trials}
    for_each(recipes, lambda recipe: make_plan(recipe, resources, environment))
    if profile := backend.profile:
        if asked := next((trial.recipe for trial in trials if uses_external_server(trial.recipe)), None):
            key, fix = "vllm_server_base_url", "remove it: each run starts its own server; or leave out --slurm"
            raise config_error(asked.location(key), "the runs of an array would give one server different weights", fix)
        if grouped := next((trial.recipe for trial in trials if trial.recipe["atropos_api_url"] is not None), None):
            fix = f"{removal(grouped, 'atropos_api_url')}: each run starts its own run-api; or leave out --slurm"
            raise config_error(grouped.location("atropos_api_url"), "the runs of an array can't share a run-api", fix)
        submission.require_environment(profile)
        # As `grpo submit` does: models, data and rewards are loaded once for all trials that differ in numbers alone.
        unlike: dict[tuple[str, ...], Trial] = {}
        for trial in trials:
            unlike.setdefault(tuple(text for key, text in trial.values.items() if not is_number(key)), trial)
        flags = {trial.name: spec.flags_of(trial.values) for trial in unlike.values()}
        for_each(
            flags, lambda given: submission.prepare_submission(profile, spec.recipe, spec.task, given, environment)
        )
        trials = [replace(trial, recipe=submission.with_site_run_root(trial.recipe, profile)) for trial in trials]
    elif not dry_run:
        for_each(recipes, need_named_ports)
    if spec.search:
        sweeps.need_metric(trials[0].recipe, spec.search.metric)

    def run(sweep: sweeps.Sweep) -> int:
        proposals = Proposals(sweep, spec, spec.search, resources, environment) if spec.search else None
        return _run_gaps(sweep, backend, environment, proposals)

    sweep = None if new else sweeps.unfinished(spec, trials, elsewhere)
    if dry_run:
        return _list_runs(spec, trials, sweep)
    if sweep is not None:
        say(f"going on with {display_path(sweep.folder)}, the same sweep (--new begins another)")
        gone = [] if spec.search else [trial for trial in trials if sweep.status(trial.index) == GONE]
        code = {key: value for key, value in code_state().items() if key != "patch"}
        if (gone or spec.search) and code != sweep.record["code"]:
            why = f"the run directory of {gone[0].name} is gone" if gone else "new trials are to begin"
            what = f"{why}, and the code is no longer the sweep's"
            raise config_error(
                display_path(sweep.folder), what, "go back to that code, or begin another sweep with --new"
            )
        for trial in gone:
            sweeps.freeze_trial(sweep, trial, resources, environment)
        return run(sweep)
    sweep = sweeps.new_sweep(spec, trials, resources, environment)
    say(f"{spec.search.trials if spec.search else len(trials)} runs in {display_path(sweep.folder)}")
    try:
        return run(sweep)
    except ConfigError as error:
        started = sweep.record.get("jobs") or any(sweep.folder.glob("cells/*/metrics.jsonl"))
        if not started and not isinstance(error, MaybeSubmitted):
            shutil.rmtree(sweep.folder, ignore_errors=True)
        raise


def _list_runs(spec: SweepSpec, trials: Sequence[Trial], sweep: sweeps.Sweep | None) -> int:
    """Print the runs of a sweep, or what a search draws its runs from."""
    lines, count = [trial.name for trial in trials], len(trials)
    if search := spec.search:
        join = {key: " to " if key in search.spans else ", " for key in spec.axes}
        lines, count = [f"{key}={join[key].join(texts)}" for key, texts in spec.axes.items()], search.trials
    where = display_path(sweep.folder if sweep else sweeps.sweep_root(trials[0].recipe))
    say(f"{count} runs would {'go on' if sweep else 'begin'} in {where}{', chosen from' if search else ''}:")
    for line in lines:
        print_line(f"  {line}")
    return 0


def start_again(sweep: sweeps.Sweep, backend: Backend, environment: Mapping[str, str]) -> int:
    """Run what is not completed in a sweep; a run directory that is gone is a ``ConfigError``, and so is a search."""
    if "search" in sweep.record:
        what = f"{display_path(sweep.folder)} is a search, which needs its keys to go on"
        raise config_error("--resume", what, f"run its command again: {sweep.resume_command()}")
    gone = [sweep.names[index] for index in sweep.gaps() if sweep.status(index) == GONE]
    if gone:
        what = f"the run directory of {', '.join(gone)} is gone"
        raise config_error("--resume", what, f"make it again: {sweep.record['command']}")
    return _run_gaps(sweep, backend, backend.environment(environment))


def run_task(folder: Path, environment: Mapping[str, str]) -> int:
    """Run the trial of the array task that this process is; every task that ends writes the comparison anew."""
    sweep = sweeps.Sweep.read(folder)
    task = environment.get(INDEX, "")  # set by Slurm
    if not task.isdecimal() or int(task) >= len(sweep.names):
        raise config_error(INDEX, f"'{task}' is not a trial of {folder.name}", "submit with grpo sweep --slurm")
    index = int(task)
    say(f"trial {index + 1} of {len(sweep.names)}: {sweep.names[index]}")
    code = run_trial(sweep, index, SignalForwarder(), environment, None)
    print_line(_comparison(sweep)[-1])
    return code


def _run_gaps(
    sweep: sweeps.Sweep, backend: Backend, environment: Mapping[str, str], proposals: Proposals | None = None
) -> int:
    """Run or submit what has not completed and does not run already, and what is proposed then."""
    with os.fdopen(lock_run(Run(sweep.folder))):
        stop_file(sweep.folder).unlink(missing_ok=True)
        gaps, waiting = sweep.gaps(), tasks_in_queue(sweep.record["jobs"])
        left = [index for index in gaps if index not in waiting and not Run(sweep.trial_dir(index)).is_running()]
        left = gaps if proposals else left  # which wait for a run that still saves
        count = sweep.trial_count - len(sweep.names) + len(left)
        if count < sweep.trial_count:
            busy = f", {len(gaps) - len(left)} queued or running" if len(left) < len(gaps) else ""
            say(f"{len(sweep.names) - len(gaps)} of {sweep.trial_count} completed{busy}, {count} to run")
        if backend.profile and left:
            job = submit_array(sweep, left, backend.profile, backend.most, environment)
            say(f"job {job} is submitted, a task for each of {len(left)} runs: logs/slurm_{job}_TASK.out")
            say(f"the comparison, at any time: grpo report {shell_path(sweep.folder)}")
            return 0
        ended = {"ended": proposals.ended} if proposals else {}
        code = run_sequentially(sweep, proposals or left, environment, count, **ended)
    for line in _comparison(sweep):
        print_line(line)
    return code


def _comparison(sweep: sweeps.Sweep) -> list[str]:
    """Write the page and return what to print; a page that cannot be written fails no sweep, since the runs count."""
    folder = shell_path(sweep.folder)
    try:
        page, results = sweeps.write_sweep(sweep)
    except Exception as error:
        return [f"comparison not written ({type(error).__name__}: {error}); try again: grpo report {folder}"]
    lines = [sweeps.text_table(sweep, results)]
    left = [f"{result.name} ({result.status})" for result in results if result.status != COMPLETED]
    if left:
        lines.append(f"grpo: not completed: {', '.join(left)}")
    if not sweep.is_over():
        lines.append(f"grpo: {'go on' if 'search' in sweep.record else 'run them'} with: {sweep.resume_command()}")
    return [*lines, f"grpo: comparison in {display_path(page)}"]


def submit_array(
    sweep: sweeps.Sweep, indices: Sequence[int], profile: Profile, most: int | None, environment: Mapping[str, str]
) -> int:
    """Submit trials as one array job, of which at most ``most`` tasks run at a time; record and return its id."""
    name, array = profile.job_name or str(sweep.record["name"]), array_text(indices, most)
    command = ["grpo", "sweep", "--cell", str(sweep.folder)]
    variables = submission.frozen_environment(sweep.trial_dir(indices[0]), environment)
    script = render(profile, name, command, variables, Path.cwd(), array, log="%A_%a")
    job = submission.submit_script(sweep.folder, script)
    sweep.record["jobs"].append(job)
    write_json(sweep.folder / sweeps.RECORD, sweep.record)
    cluster = cluster_name()
    for index in indices:
        recipe = read_frozen(sweep.trial_dir(index) / "recipe.yaml")
        note_job(sweep.trial_dir(index), recipe, f"{cluster}-{job}_{index}")
    return job


def array_text(indices: Sequence[int], most: int | None = None) -> str:
    """Return indices as sbatch's ``--array`` takes them, e.g. ``0-2,5%2``."""
    ranges = []
    for _, members in groupby(enumerate(sorted(indices)), lambda item: item[1] - item[0]):
        run = [index for _, index in members]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ",".join(ranges) + (f"%{most}" if most else "")


class SignalForwarder:
    """Pass the signals of a sweep on to the launches that run, which save and end.

    A launch has a session of its own, so that a Ctrl-C reaches it once, through us. All but USR1 are passed on as
    SIGINT: ``scancel`` sends SIGTERM to the launch as well, for which a second one would mean to end without saving.
    """

    def __init__(self, request: Path | None = None) -> None:
        self.seen: int | None = None  # the first signal that came
        self._request = request  # the file by which `grpo stop` asks, as a SIGINT does
        self._child: subprocess.Popen[bytes] | None = None  # the launch that runs
        self._told: set[int] = set()  # pids of the launches that a signal was passed on to
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            # nohup, or a shell's background job, has a signal ignored on purpose; a batch script has USR1 for us.
            if signum == signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, _: object) -> None:
        self.seen = self.seen or signum
        if self._child is not None:
            self._tell(self._child, signum)

    def _tell(self, child: subprocess.Popen[bytes], signum: int) -> None:
        if child.poll() is None:
            self._told.add(child.pid)
            child.send_signal(signum if signum == signal.SIGUSR1 else signal.SIGINT)

    def asked(self) -> bool:
        """Return whether the sweep is to end, by a signal or by ``grpo stop``."""
        if self.seen is None and self._request is not None and self._request.exists():
            self._handle(signal.SIGINT, None)
        return self.seen is not None

    def run(self, argv: Sequence[str], environment: Mapping[str, str], log: Path | None) -> int:
        """Run a launch to its end and return its exit code, 128+n for a signal.

        The launch gets the signals. Its output is added to ``log``, or goes to our own output.
        """
        end_with_us = functools.partial(die_with_parent, os.getpid())
        with log.open("ab") if log else nullcontext() as file:
            child = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, preexec_fn=end_with_us,
            )  # fmt: skip
        self._child = child
        if self.seen is not None and child.pid not in self._told:  # it came while the child was made
            self._tell(child, self.seen)
        code = None
        while code is None:
            self.asked()
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(_LOOK_SECONDS)
        return code if code >= 0 else 128 - code


def note_refusal(folder: Path, code: int) -> None:
    """Record a launch that ended before its attempt began, and recorded nothing itself."""
    summary = read_json(folder / "summary.json")
    if code and summary.get("status") == SUBMITTED:
        cause = _last_line(folder / LOG) or "refused before it began; the job's output says why"
        write_json(folder / "summary.json", {**summary, "status": "failed", "exit_code": code, "cause": cause})


def run_trial(
    sweep: sweeps.Sweep, index: int, forwarder: SignalForwarder, environment: Mapping[str, str], log: Path | None
) -> int:
    """Run or continue a trial by the code that was frozen with it; return the exit code of its launch."""
    folder = sweep.trial_dir(index)
    argv = python_module("grpo_recipes", "launch", "--resume", str(folder))
    code = forwarder.run(argv, {**environment, **submission.frozen_environment(folder, environment)}, log)
    note_refusal(folder, code)
    return code


def run_sequentially(
    sweep: sweeps.Sweep,
    indices: Iterable[int],
    environment: Mapping[str, str],
    count: int,
    ended: Callable[[int, int], None] = lambda index, code: None,
) -> int:
    """Run trials one after the other; one that fails is named and the others go on.

    ``ended`` gets the index and the exit code of each, but of one that a signal ended; ``count`` is for the reader.
    Return 0, or the code of the first trial that did not complete; 75 where a signal left trials over.
    """
    forwarder, first = SignalForwarder(stop_file(sweep.folder)), 0
    place, rest = 0, iter(indices)
    while not forwarder.asked() and (index := next(rest, None)) is not None:
        place += 1
        folder, trial = sweep.trial_dir(index), f"trial {place} of {count}: {sweep.names[index]}"
        say(f"{trial}; output in {display_path(folder / LOG)}")
        code = run_trial(sweep, index, forwarder, environment, folder / LOG)
        first = first or code
        summary = read_json(folder / "summary.json")
        if code == 0 or forwarder.seen is None:
            ended(index, code)
        if code == 0:
            say(f"{trial} completed: reward {summary.get('initial_reward')} -> {summary.get('final_reward')}")
            continue
        cause = summary.get("cause") if summary.get("exit_code") == code else _last_line(folder / LOG)
        end = (
            f"stopped after step {summary.get('steps', 0)}" if code == EXIT_STOPPED else f"failed with exit code {code}"
        )
        say(f"{trial} {end}: {cause or 'its log says why'}")
    if forwarder.seen is not None:
        why = "grpo stop" if stop_file(sweep.folder).exists() else signal.Signals(forwarder.seen).name
        say(f"{why}: the sweep ends here")
        return first or EXIT_STOPPED
    return first


def _last_line(log: Path) -> str:
    """Return the last line that a launch itself wrote, without its prefix."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return next((line.removeprefix("grpo: ") for line in reversed(lines) if line.startswith("grpo: ")), "")
