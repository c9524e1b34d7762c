"""Run a sweep: start or continue it, run its trials, and print the comparison.

Trials run one after the other, each as a child process (``run_sequentially``), or as the tasks of one Slurm array job
(``submit_array``; each task calls ``run_array_task``).
"""

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
from grpo_recipes.console.sweep.search import Proposals, require_optuna
from grpo_recipes.console.sweep.spec import SweepSpec, Trial, is_number, make_trials, map_trials
from grpo_recipes.errors import EXIT_STOPPED, ConfigError, config_error
from grpo_recipes.launch import submission
from grpo_recipes.launch.attempt import SUBMITTED
from grpo_recipes.launch.resolve import record_job
from grpo_recipes.paths import display_path, module_command, shell_path
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.ports import require_named_ports
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.process.terminal import LOG
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe import read_frozen
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.rules import removal, uses_external_server
from grpo_recipes.runs.code_version import read_code_state
from grpo_recipes.runs.groups import COMPLETED, GONE
from grpo_recipes.runs.rundir import Run, lock_run, read_json, stop_file, write_json
from grpo_recipes.slurm.client import MaybeSubmitted, find_queued_tasks, read_cluster_name
from grpo_recipes.slurm.profile import Profile, render_script

INDEX = "SLURM_ARRAY_TASK_ID"
_POLL_SECONDS = 0.5  # between two checks of a launch and of a stop request


@dataclass(frozen=True)
class Backend:
    """The place for the runs of a sweep: this machine, one after the other, or the tasks of a Slurm array job."""

    profile: Profile | None = None  # the site of the array job; None to run sequentially on this machine
    max_parallel: int | None = None  # limit of array tasks that run at the same time; None for no limit

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Return the environment of the runs: the user's, and for Slurm also the variables of the site's profile."""
        return submission.site_environment(self.profile, environment) if self.profile else environment

    def resources(self, environment: Mapping[str, str]) -> Resources:
        """Return the devices of a run: the site's for Slurm, otherwise this machine's, as outside of a Slurm job."""
        profile = self.profile
        return submission.site_resources(profile) if profile else replace(find_resources(environment), job=None)


def start_sweep(
    spec: SweepSpec,
    backend: Backend,
    environment: Mapping[str, str],
    new: bool,
    dry_run: bool = False,
    elsewhere: Sequence[Path] = (),
) -> int:
    """Check and plan every run, then start a new sweep or continue the same unfinished sweep; return the exit code.

    Raise ConfigError with the problems of all runs before anything is written or started. With ``new``, start a new
    sweep even if the same sweep is unfinished in its folder or in the folders ``elsewhere``. With ``dry_run``, only
    print the runs. If a ConfigError prevents the first run of a new sweep, remove the sweep's directory, unless a job
    may have been submitted.
    """
    if spec.search:
        require_optuna()
    environment = backend.environment(environment)
    resources = backend.resources(environment)
    trials = make_trials(spec, environment, resources.device)
    recipes = {trial.name: trial.recipe for trial in trials}
    map_trials(recipes, lambda recipe: make_plan(recipe, resources, environment))
    if backend.profile:
        trials = _prepare_array(spec, trials, backend.profile, environment)
    elif not dry_run:
        map_trials(recipes, require_named_ports)
    if spec.search:
        sweeps.check_metric(trials[0].recipe, spec.search.metric)
    sweep = None if new else sweeps.find_unfinished_sweep(spec, trials, elsewhere)
    if dry_run:
        return _print_runs(spec, trials, sweep)
    if sweep is not None:
        return _continue_sweep(sweep, spec, backend, trials, resources, environment)
    sweep = sweeps.create_sweep(spec, trials, resources, environment)
    say(f"{spec.search.trials if spec.search else len(trials)} runs in {display_path(sweep.folder)}")
    try:
        return _run_unfinished_trials(sweep, backend, environment, _make_proposals(sweep, spec, resources, environment))
    except ConfigError as error:
        started = sweep.record.get("jobs") or any(sweep.folder.glob("cells/*/metrics.jsonl"))
        if not started and not isinstance(error, MaybeSubmitted):
            shutil.rmtree(sweep.folder, ignore_errors=True)
        raise


def _prepare_array(
    spec: SweepSpec, trials: Sequence[Trial], profile: Profile, environment: Mapping[str, str]
) -> list[Trial]:
    """Check that a Slurm array job can run the trials; return them with the run_root of the site's profile.

    Load models, data and rewards of the trials like `grpo submit`, once for trials that differ only in numbers. Raise
    ConfigError if the trials share an external server or an Atropos run-api, or if a check fails.
    """
    if trial := next((trial for trial in trials if uses_external_server(trial.recipe)), None):
        key, fix = "vllm_server_base_url", "remove it: each run starts its own server; or leave out --slurm"
        message = "the runs of an array would send different weights to one server"
        raise config_error(trial.recipe.location(key), message, fix)
    key = "atropos_api_url"
    has_key = key in catalogue()  # the extension may be missing
    if trial := next((trial for trial in trials if has_key and trial.recipe[key] is not None), None):
        fix = f"{removal(trial.recipe, key)}: each run starts its own run-api; or leave out --slurm"
        raise config_error(trial.recipe.location(key), "the runs of an array can't share a run-api", fix)
    submission.require_environment(profile)
    # Like `grpo submit`, load models, data and rewards. Trials that differ only in numbers load the same ones.
    by_texts: dict[tuple[str, ...], Trial] = {}
    for trial in trials:
        by_texts.setdefault(tuple(text for key, text in trial.values.items() if not is_number(key)), trial)
    flags = {trial.name: spec.make_flags(trial.values) for trial in by_texts.values()}
    map_trials(flags, lambda words: submission.prepare_submission(profile, spec.recipe, spec.task, words, environment))
    return [replace(trial, recipe=submission.with_site_run_root(trial.recipe, profile)) for trial in trials]


def _continue_sweep(
    sweep: sweeps.Sweep,
    spec: SweepSpec,
    backend: Backend,
    trials: Sequence[Trial],
    resources: Resources,
    environment: Mapping[str, str],
) -> int:
    """Run the trials of an existing sweep that are not completed, and return the exit code.

    Create missing run directories first. Raise ConfigError if new run directories are needed, which is always so for a
    search, but the code has changed since the sweep started.
    """
    say(f"continuing {display_path(sweep.folder)}, the same sweep (--new starts another)")
    missing = [] if spec.search else [trial for trial in trials if sweep.status(trial.index) == GONE]
    code = {key: value for key, value in read_code_state().items() if key != "patch"}
    if (missing or spec.search) and code != sweep.record["code"]:
        reason = f"the run directory of {missing[0].name} is gone" if missing else "the search needs new trials"
        message = f"{reason}, and the code has changed since the sweep started"
        raise config_error(
            display_path(sweep.folder), message, "check out that code again, or start another sweep with --new"
        )
    for trial in missing:
        sweeps.create_trial_directory(sweep, trial, resources, environment)
    return _run_unfinished_trials(sweep, backend, environment, _make_proposals(sweep, spec, resources, environment))


def _make_proposals(
    sweep: sweeps.Sweep, spec: SweepSpec, resources: Resources, environment: Mapping[str, str]
) -> Proposals | None:
    """Return the iterator over the trials that Optuna proposes, or None for a sweep without a search."""
    return Proposals(sweep, spec, spec.search, resources, environment) if spec.search else None


def _print_runs(spec: SweepSpec, trials: Sequence[Trial], sweep: sweeps.Sweep | None) -> int:
    """Print the runs of a sweep, or the possible values of a search, and return 0; nothing is started.

    ``sweep`` is the unfinished sweep that would continue, or None if a new one would start.
    """
    lines, count = [trial.name for trial in trials], len(trials)
    if search := spec.search:
        separators = {key: " to " if key in search.spans else ", " for key in spec.axes}
        lines = [f"{key}={separators[key].join(texts)}" for key, texts in spec.axes.items()]
        count = search.trials
    folder = display_path(sweep.folder if sweep else sweeps.get_sweep_root(trials[0].recipe))
    say(f"{count} runs would {'continue' if sweep else 'start'} in {folder}{', chosen from' if search else ''}:")
    for line in lines:
        print_line(f"  {line}")
    return 0


def resume_sweep(sweep: sweeps.Sweep, backend: Backend, environment: Mapping[str, str]) -> int:
    """Run or submit the trials of a sweep that are not completed, for ``grpo sweep --resume``; return the exit code.

    Raise ConfigError for a search, which can't continue without its keys, and if a run directory is missing.
    """
    if "search" in sweep.record:
        message = f"{display_path(sweep.folder)} is a search, which needs its keys to continue"
        raise config_error("--resume", message, f"run its command again: {sweep.resume_command()}")
    missing = [sweep.names[index] for index in sweep.find_unfinished_trials() if sweep.status(index) == GONE]
    if missing:
        message = f"the run directory of {', '.join(missing)} is gone"
        raise config_error("--resume", message, f"create it again: {sweep.record['command']}")
    return _run_unfinished_trials(sweep, backend, backend.environment(environment))


def run_array_task(folder: Path, environment: Mapping[str, str]) -> int:
    """Run the trial of this Slurm array task, write the sweep's page with its result, and return its exit code.

    SLURM_ARRAY_TASK_ID in ``environment`` selects the trial; raise ConfigError if it is not the index of a trial.
    """
    sweep = sweeps.Sweep.read(folder)
    task = environment.get(INDEX, "")  # set by Slurm
    if not task.isdecimal() or int(task) >= len(sweep.names):
        raise config_error(INDEX, f"'{task}' is not a trial of {folder.name}", "submit with grpo sweep --slurm")
    index = int(task)
    say(f"trial {index + 1} of {len(sweep.names)}: {sweep.names[index]}")
    code = run_trial(sweep, index, SignalForwarder(), environment, None)
    print_line(_write_comparison(sweep)[-1])
    return code


def _run_unfinished_trials(
    sweep: sweeps.Sweep, backend: Backend, environment: Mapping[str, str], proposals: Proposals | None = None
) -> int:
    """Run the unfinished trials of a sweep one after the other, or submit them as one Slurm array job.

    Trials that are queued or running elsewhere are skipped. ``proposals`` are the remaining trials of a search. The
    sweep's directory is locked during the runs. Return the exit code of the runs and print the comparison, or 0 after a
    submission.
    """
    with os.fdopen(lock_run(Run(sweep.folder))):
        stop_file(sweep.folder).unlink(missing_ok=True)
        gaps, queued = sweep.find_unfinished_trials(), find_queued_tasks(sweep.record["jobs"])
        if proposals:  # they wait for runs that are still saving
            pending = gaps
        else:
            pending = [index for index in gaps if index not in queued and not Run(sweep.trial_dir(index)).is_running()]
        count = sweep.trial_count - len(sweep.names) + len(pending)
        if count < sweep.trial_count:
            busy = f", {len(gaps) - len(pending)} queued or running" if len(pending) < len(gaps) else ""
            say(f"{len(sweep.names) - len(gaps)} of {sweep.trial_count} completed{busy}, {count} to run")
        if backend.profile and pending:
            job = submit_array(sweep, pending, backend.profile, backend.max_parallel, environment)
            say(f"submitted job {job} with {len(pending)} tasks, one per run: logs/slurm_{job}_TASK.out")
            say(f"show the comparison at any time with: grpo report {shell_path(sweep.folder)}")
            return 0
        if proposals:
            code = run_sequentially(sweep, proposals, environment, count, proposals.report)
        else:
            code = run_sequentially(sweep, pending, environment, count)
    for line in _write_comparison(sweep):
        print_line(line)
    return code


def _write_comparison(sweep: sweeps.Sweep) -> list[str]:
    """Write the page of a sweep, and return lines to print: its table, unfinished trials and the page's path.

    If trials remain to run, a line has the command for them. If writing fails, return a line with the error instead of
    raising it, since the runs are done.
    """
    folder = shell_path(sweep.folder)
    try:
        page, results = sweeps.write_sweep_page(sweep)
    except Exception as error:
        return [f"comparison not written ({type(error).__name__}: {error}). Try again with: grpo report {folder}"]
    lines = [sweeps.format_table(sweep, results)]
    unfinished = [f"{result.name} ({result.status})" for result in results if result.status != COMPLETED]
    if unfinished:
        lines.append(f"grpo: not completed: {', '.join(unfinished)}")
    if not sweep.is_over():
        lines.append(f"grpo: {'continue' if 'search' in sweep.record else 'run them'} with: {sweep.resume_command()}")
    return [*lines, f"grpo: comparison in {display_path(page)}"]


def submit_array(
    sweep: sweeps.Sweep,
    indices: Sequence[int],
    profile: Profile,
    max_parallel: int | None,
    environment: Mapping[str, str],
) -> int:
    """Write a batch script for the trials ``indices``, submit it as one Slurm array job, and return the job's id.

    The id is also written to ``sweep.json`` and to the run directories. At most ``max_parallel`` tasks run at the same
    time; None sets no limit.
    """
    name, array = profile.job_name or str(sweep.record["name"]), format_array_indices(indices, max_parallel)
    command = ["grpo", "sweep", "--cell", str(sweep.folder)]
    variables = submission.frozen_environment(sweep.trial_dir(indices[0]), environment)
    script = render_script(profile, name, command, variables, Path.cwd(), array, log="%A_%a")
    job = submission.submit_script(sweep.folder, script)
    sweep.record["jobs"].append(job)
    write_json(sweep.folder / sweeps.RECORD, sweep.record)
    cluster = read_cluster_name()
    for index in indices:
        recipe = read_frozen(sweep.trial_dir(index) / "recipe.yaml")
        record_job(sweep.trial_dir(index), recipe, f"{cluster}-{job}_{index}")
    return job


def format_array_indices(indices: Sequence[int], max_parallel: int | None = None) -> str:
    """Return indices in the format of sbatch's ``--array``: ``0-2,5%2`` for 0, 1, 2 and 5, two at the same time."""
    ranges = []
    for _, pairs in groupby(enumerate(sorted(indices)), lambda pair: pair[1] - pair[0]):
        consecutive = [index for _, index in pairs]
        first, last = consecutive[0], consecutive[-1]
        ranges.append(f"{first}-{last}" if len(consecutive) > 1 else str(first))
    return ",".join(ranges) + (f"%{max_parallel}" if max_parallel else "")


class SignalForwarder:
    """Run launches as child processes, and forward the signals of the sweep to the running launch, which then stops.

    A launch runs in a separate session, so that a Ctrl-C reaches it once, through this class. All signals except USR1
    are forwarded as SIGINT: ``scancel`` also sends SIGTERM to the launch itself, and a second SIGTERM would end the
    launch without saving.
    """

    def __init__(self, request: Path | None = None) -> None:
        """Install a handler for SIGINT, SIGTERM, SIGHUP and SIGUSR1; ``request`` is the file that `grpo stop` writes.

        Signals that this process ignores, e.g. after nohup, stay ignored, except SIGUSR1.
        """
        self.first_signal: int | None = None
        self._request = request  # file that `grpo stop` writes; it acts like a SIGINT
        self._child: subprocess.Popen[bytes] | None = None  # the running launch
        self._signaled: set[int] = set()  # pids of the launches that received a signal
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            # nohup and background jobs of a shell ignore signals on purpose, but a batch script sends USR1 to us.
            if signum == signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._handle_signal)

    def _handle_signal(self, signum: int, _: object) -> None:
        """Store the first signal in ``first_signal``, and forward every signal to a running launch."""
        self.first_signal = self.first_signal or signum
        if self._child is not None:
            self._forward_signal(self._child, signum)

    def _forward_signal(self, child: subprocess.Popen[bytes], signum: int) -> None:
        """Send SIGUSR1 if ``signum`` is SIGUSR1, otherwise SIGINT, to a launch; do nothing if it has ended."""
        if child.poll() is None:
            self._signaled.add(child.pid)
            child.send_signal(signum if signum == signal.SIGUSR1 else signal.SIGINT)

    def is_stop_requested(self) -> bool:
        """Return whether the sweep must end: a signal has arrived, or `grpo stop` has written the sweep's stop file.

        If the stop file exists before any signal, also send SIGINT to the running launch, once.
        """
        if self.first_signal is None and self._request is not None and self._request.exists():
            self._handle_signal(signal.SIGINT, None)
        return self.first_signal is not None

    def run(self, argv: Sequence[str], environment: Mapping[str, str], log: Path | None) -> int:
        """Start a launch as a child process, wait for its end, and return its exit code, 128+n after signal n.

        Signals that arrive are forwarded to it. Its output is appended to ``log``, or goes to the output of this
        process if ``log`` is None.
        """
        end_with_us = functools.partial(die_with_parent, os.getpid())
        with log.open("ab") if log else nullcontext() as file:
            child = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, preexec_fn=end_with_us,
            )  # fmt: skip
        self._child = child
        if self.first_signal is not None and child.pid not in self._signaled:  # it came while the child was started
            self._forward_signal(child, self.first_signal)
        code = None
        while code is None:
            self.is_stop_requested()
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(_POLL_SECONDS)
        return code if code >= 0 else 128 - code


def run_trial(
    sweep: sweeps.Sweep, index: int, forwarder: SignalForwarder, environment: Mapping[str, str], log: Path | None
) -> int:
    """Run ``grpo launch --resume`` in a trial's run directory with the code copied there; return its exit code.

    If the launch fails before it writes a status itself, write the status "failed" to the run's ``summary.json``. The
    output is appended to ``log``, or goes to the output of this process if ``log`` is None.
    """
    folder = sweep.trial_dir(index)
    argv = module_command("grpo_recipes", "launch", "--resume", str(folder))
    code = forwarder.run(argv, {**environment, **submission.frozen_environment(folder, environment)}, log)
    summary = read_json(folder / "summary.json")
    if code and summary.get("status") == SUBMITTED:  # the launch recorded nothing itself
        cause = _read_last_message(folder / LOG) or "rejected before it started; see the output of the job"
        write_json(folder / "summary.json", {**summary, "status": "failed", "exit_code": code, "cause": cause})
    return code


def run_sequentially(
    sweep: sweeps.Sweep,
    indices: Iterable[int],
    environment: Mapping[str, str],
    count: int,
    report: Callable[[int, int], None] = lambda index, code: None,
) -> int:
    """Run trials one after the other and print how each ended; a failed trial does not stop the others.

    ``report`` is called with the index and the exit code of each trial that was not ended by a signal. ``count`` is the
    number of trials, for messages. After a signal or ``grpo stop``, no further trial starts. Return 0, the exit code of
    the first trial that did not complete, or 75 after a signal that ended no trial.
    """
    forwarder, first_failure = SignalForwarder(stop_file(sweep.folder)), 0
    remaining, number = iter(indices), 0
    while not forwarder.is_stop_requested() and (index := next(remaining, None)) is not None:
        number += 1
        folder, trial = sweep.trial_dir(index), f"trial {number} of {count}: {sweep.names[index]}"
        say(f"{trial}, output in {display_path(folder / LOG)}")
        code = run_trial(sweep, index, forwarder, environment, folder / LOG)
        first_failure = first_failure or code
        summary = read_json(folder / "summary.json")
        if code == 0 or forwarder.first_signal is None:
            report(index, code)
        if code == 0:
            say(f"{trial} completed: reward {summary.get('initial_reward')} -> {summary.get('final_reward')}")
            continue
        cause = summary.get("cause") if summary.get("exit_code") == code else _read_last_message(folder / LOG)
        stopped = f"stopped after step {summary.get('steps', 0)}"
        ending = stopped if code == EXIT_STOPPED else f"failed with exit code {code}"
        say(f"{trial} {ending}: {cause or 'see its log'}")
    if forwarder.first_signal is not None:
        reason = "grpo stop" if stop_file(sweep.folder).exists() else signal.Signals(forwarder.first_signal).name
        say(f"sweep stopped by {reason}")
        return first_failure or EXIT_STOPPED
    return first_failure


def _read_last_message(log: Path) -> str:
    """Return the last line of a log that starts with ``grpo:``, without this prefix; "" without such a line or log."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return next((line.removeprefix("grpo: ") for line in reversed(lines) if line.startswith("grpo: ")), "")
