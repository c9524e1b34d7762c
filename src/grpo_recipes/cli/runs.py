"""The commands for runs and their jobs: launch, submit, sweep, status, logs, stop, report."""

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from grpo_recipes.cli import Option, command, option, recipe_name, switch
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.launch.attempt import SUBMITTED
from grpo_recipes.launch.resolve import POINTERS, Options
from grpo_recipes.launch.run import launch as launch_run
from grpo_recipes.launch.submission import need_environment, prepare, send, site_profile
from grpo_recipes.paths import newest_first, shown
from grpo_recipes.process.reports import aligned
from grpo_recipes.recipe.keys import catalogue, run_root
from grpo_recipes.report.pages import write_comparison, write_report
from grpo_recipes.runs.health import notices_of
from grpo_recipes.runs.rundir import NO_REQUEUE, Run, clock, find_run, finish_summary, launcher_of, runs_in, stop_file
from grpo_recipes.secrets import masked
from grpo_recipes.slurm.client import NO_ANSWER, Job, cancel, find_job, my_jobs
from grpo_recipes.slurm.profile import KEYS, Profile
from grpo_recipes.sweep.folder import FOLDER, RECORD, find_sweep, read_sweep, text_table, write_sweep
from grpo_recipes.sweep.run import Backend, run_task, start, start_again
from grpo_recipes.sweep.spec import SweepSpec, is_axis, read_axes

# Keys of a profile that the command line may give instead.
OVERRIDES = ("account", "partition", "time", "nodes", "gpus", "mem", "cpus", "qos", "constraint", "exclude")
_RUN_HELP = "run directory, its name in RUN_ROOT, last for the newest there, or the id of a Slurm job"
_OVER = ("completed", "failed", "stopped")
_PACE_ROWS = 20  # of metrics.jsonl, over which a step's time is averaged
_LOGS = {"slurm": ("slurm.out", "slurm.err"), "server": ("server",), "trainer": ("trainer",)}
_SECONDS = 1.0  # between two looks at the files
_SLURM_SECONDS = 15.0  # between two questions to Slurm, which others ask, too
_MOST_BYTES = 1 << 20  # of one file at a time


@command(
    "run a recipe",
    option("--resume", metavar="DIR|last", help="continue a run"),
    switch("--allow-changed-code", help="resume though the code changed"),
    switch("--dry-run", help="print argv and environment of every process"),
    takes_recipe=True,
)
def launch(options: argparse.Namespace) -> int:
    """Run a recipe, or continue a run; return the run's exit code."""
    named, flags = recipe_name(options), tuple(options.flags)
    return launch_run(Options(named, options.task, options.resume, options.allow_changed_code, options.dry_run, flags))


def _site_options(required: bool) -> list[Option]:
    """Return --profile and the options that replace values of the profile."""
    about = "the site, e.g. slurm/profiles/cpu.yaml"
    texts = {key: str(KEYS[key]["help"]).replace("`", "") for key in OVERRIDES}
    instead = [(key, f"instead of the profile's: {text}") for key, text in texts.items()]
    return [
        option("--profile", required=required, metavar="FILE|NAME", help=about),
        *(option(f"--{key}", metavar=key.upper(), help=text) for key, text in instead),
    ]


def _overrides(options: argparse.Namespace) -> dict[str, str]:
    """Return what the command line gives in place of the profile's values."""
    return {key: text for key in OVERRIDES if (text := getattr(options, key)) is not None}


def _chosen_profile(options: argparse.Namespace) -> Profile:
    """Return the site's profile with what the command line gives in place of its values."""
    return site_profile(options.profile, os.environ).with_values(_overrides(options))


@command(
    "check a recipe, freeze it and give it to Slurm",
    *_site_options(required=True),
    switch("--dry-run", help="print the batch script; write and submit nothing"),
    takes_recipe=True,
)
def submit(options: argparse.Namespace) -> int:
    """Submit a run, or with ``--dry-run`` print its batch script alone to stdout, so that a file can keep it."""
    profile = _chosen_profile(options)
    if not options.dry_run:
        need_environment(profile)
    submission, estimates = prepare(profile, recipe_name(options), options.task, options.flags, os.environ)
    plan, kind = submission.plan, f" {profile.gpu_kind}" if profile.gpu_kind else ""
    devices = f"{profile.gpus}{kind} GPUs" if profile.gpus else f"{profile.cpus or 1} CPU cores"
    nodes = f"{profile.nodes} nodes" if profile.nodes > 1 else "1 node"
    lines = [
        f"{shown(plan.recipe)} for {profile.name}: {nodes} with {devices} each, at most {profile.time}",
        f"batch {plan.batch}",
        f"vllm {plan.mode}, weights by {plan.bridge or 'none'} ({plan.why_bridge})",
        *estimates.lines(),
        *(f"note: {note}" for note in plan.notes),
    ]
    print(*(f"grpo: {line}" for line in lines), sep="\n", file=sys.stderr if options.dry_run else sys.stdout)
    if options.dry_run:
        try:
            need_environment(profile)
        except ConfigError as error:
            print(f"grpo: note: submitting would end here: {error}", file=sys.stderr)
        print(submission.script(profile), end="")
        return 0
    made, job = send(submission, profile)
    print(f"grpo: job {job} is submitted, run directory {shown(made.folder)}")
    print(f"grpo: follow it with grpo status {job}, or grpo logs -f {job}; end it with grpo stop {job}")
    return 0


@command(
    "run a recipe at several values of some keys, and compare",
    option("--max-parallel", type=int, metavar="N", help="with --slurm: tasks that run at the same time"),
    *_site_options(required=False),
    option("--name", help="name of the sweep; the run name or the recipe's by default"),
    option("--resume", metavar="DIR|last", help="run what is not completed in a sweep"),
    switch("--new", help="begin anew though the same sweep is not completed"),
    option("--cell", type=Path, help=argparse.SUPPRESS),  # a task of the array job
    exclusive=(
        switch("--local", help="run one after the other on this machine (the default)"),
        switch("--slurm", help="submit one array job, a task for each run"),
    ),
    takes_recipe=True,
    usage="[RECIPE] KEY=V1,V2 [KEY=1..3 ...] [options] [--KEY VALUE ...]",
    epilog="KEY=V1,V2 varies a recipe key, KEY=1..3 over whole numbers; --KEY VALUE sets one for all runs.",
)
def sweep(options: argparse.Namespace) -> int:
    """Run a sweep, or submit it, or continue one.

    Return 0, or the exit code of the first run that did not complete; 75 where a signal left runs over.
    """
    if options.cell:
        return run_task(options.cell, os.environ)
    _check_sweep(options)
    backend = Backend(_chosen_profile(options) if options.slurm else None, options.max_parallel)
    words, flags = _split(options)
    if options.resume is not None:
        if words or flags or options.recipe or options.config or options.name or options.new:
            raise config_error("--resume", "a sweep goes on as it began", "leave out recipe, keys, --name and --new")
        return start_again(find_sweep(run_root(os.environ) / FOLDER, options.resume), backend, os.environ)
    if options.name is not None:
        flags = ["--run_name", options.name, *flags]
    spec = SweepSpec(recipe_name(options), read_axes(words, flags), flags, options.task)
    return start(spec, backend, os.environ, options.new)


def _check_sweep(options: argparse.Namespace) -> None:
    """Refuse options that need others which are missing."""
    given = [name for name in ("profile", *OVERRIDES, "max_parallel") if getattr(options, name) is not None]
    problems = []
    if options.slurm and options.profile is None:
        problems.append(Problem("--slurm", "no site is named", "add --profile slurm/profiles/SITE.yaml"))
    if not options.slurm:
        what, fix = "changes nothing without --slurm", "add --slurm, or remove it"
        problems += [Problem(f"--{name.replace('_', '-')}", what, fix) for name in given]
    if options.max_parallel is not None and options.max_parallel < 1:
        problems.append(Problem("--max-parallel", f"is {options.max_parallel}", "write 1 or more"))
    if problems:
        raise ConfigError(*problems)


def _split(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the words before the first flag, and the flags; the first word may be in the recipe's place."""
    first = next((place for place, word in enumerate(options.flags) if word.startswith("-")), len(options.flags))
    words, flags = options.flags[:first], options.flags[first:]
    if options.recipe and is_axis(options.recipe) and not os.path.isfile(options.recipe):
        words.insert(0, options.recipe)
        options.recipe = None
    late = next((word for word in flags if is_axis(word) and word.partition("=")[0] in catalogue()), None)
    if late:
        raise config_error(late, "follows a flag", f"write {late} before the flags")
    return words, flags


def _named_run(which: str) -> Run:
    """Return the run a person means by a folder, a name, a job id or ``last``."""
    is_job = re.fullmatch(r"\d+(_\d+)?", which)
    fix = "name a run directory, a run in RUN_ROOT, the id of its job, or last"
    return find_run(run_root(os.environ), str(_folder_of_job(which)) if is_job else which, which, fix)


def _folder_of_job(job_id: str) -> Path:
    """Find a run by the pointer its launcher or its submission left, else by where its batch script is."""
    pointers = [path for path in (run_root(os.environ) / POINTERS).glob(f"*-{job_id}") if path.is_file()]
    for pointer in newest_first(pointers):
        folder = Path(pointer.read_text().strip())
        if os.path.isfile(folder / "run.json"):
            return folder
    tasks = sorted(path.name.rpartition("-")[2] for path in (run_root(os.environ) / POINTERS).glob(f"*-{job_id}_*"))
    if tasks:
        fix = f"name one of them, e.g. {tasks[0]}; scancel {job_id} ends them all"
        raise config_error(job_id, f"is an array job of {len(tasks)} runs", fix)
    job = find_job(job_id)
    if job and job.script and os.path.isfile(job.script.parent / "run.json"):
        return job.script.parent
    raise config_error(job_id, "is not the job of a run known here", "name the run directory, or set RUN_ROOT")


def _job_of(run: Run) -> Job | None:
    """Return the run's last job as Slurm sees it now; None where it had none, or Slurm does not know it."""
    return find_job(run.job_id) if run.job_id else None


def _state(run: Run, job: Job | None) -> tuple[str, bool]:
    """Return the run's state in a few words, and whether it has ended and nothing will start it again."""
    status = str(run.summary.get("status", "unknown"))
    over = not (job is not None and job.active) and (status in _OVER or not run.is_running())
    if job is not None and job.waits:
        return f"waiting in the queue{f' ({job.reason})' if job.reason else ''}", over
    if status in _OVER:
        return status, over
    if job is not None and job.state == NO_ANSWER:
        return f"{status}, but Slurm does not answer", over
    if over:
        end = f", its job is {job.state}" if job is not None else ""
        return f"never started{end}" if status == SUBMITTED else f"lost: its launcher is gone{end}", over
    return "starting" if status == SUBMITTED else status, over


@command(
    "show the state of a run, or list all of them",
    option("which", nargs="?", metavar="RUN", help=f"{_RUN_HELP}; without it a table of all in RUN_ROOT"),
)
def status(options: argparse.Namespace) -> int:
    """Print the state of a run, or a table of the runs in RUN_ROOT, first the one whose summary was written last."""
    if options.which is None:
        _print_runs()
        return 0
    run = _named_run(options.which)
    job = _job_of(run)
    state, over = _state(run, job)
    step, reward, left = _progress(run, over)
    ends = f", at most until {job.ends}" if job and job.ends and not job.waits and job.active else ""
    facts = [
        ("run", shown(run.folder)),
        ("state", state),
        ("cause", run.cause),
        ("job", run.job_id and f"{run.job_id} {job or 'is no longer known to Slurm'}{ends}"),
        ("step", step),
        ("reward", reward and f"{reward} (mean of the last steps)"),
        ("left", left and f"about {left} of training"),
        ("restarts", str(run.summary.get("restarts") or "")),
        *(("note", str(notice)) for notice in notices_of(run.rows, run.value, over=over)),
        *(("log", shown(path)) for path in run.logs.values()),
    ]
    print(*(f"{name:<8} {text}" for name, text in facts if text), sep="\n")
    return 0


def _print_runs() -> None:
    """Print a table of the runs in RUN_ROOT, first the one whose summary was written last: a resume moves it up."""
    runs = sorted(runs_in(run_root(os.environ)), key=_written, reverse=True)
    if not runs:
        print(f"grpo: there is no run in {shown(run_root(os.environ))}")
        return
    jobs = my_jobs()  # None where Slurm does not answer
    rows: list[tuple[str, ...]] = [("run", "state", "job", "step", "reward", "left")]
    for run in runs:
        try:
            unknown = Job(run.job_id, NO_ANSWER) if run.job_id else None
            job = unknown if jobs is None else jobs.get(run.job_id)
            state, over = _state(run, job)
            rows.append((run.folder.name, state, run.job_id, *_progress(run, over)))
        except ConfigError as error:
            rows.append((run.folder.name, f"damaged: {Path(error.problems[0].where).name}", "", "", "", ""))
    print(*aligned(rows), sep="\n")


def _written(run: Run) -> float:
    """Return when a run's summary was written last; where it has none yet, when the run was made."""
    for name in ("summary.json", "run.json"):
        with contextlib.suppress(OSError):
            return (run.folder / name).stat().st_mtime
    return 0.0  # removed meanwhile


def _progress(run: Run, over: bool) -> tuple[str, str, str]:
    """Return step, reward, and the time the remaining steps take at the pace of the last, each empty if unknown."""
    if not run.rows:
        return "", "", ""
    last, reward, seconds = run.rows[-1], run.recent("reward"), run.numbers("seconds/step", _PACE_ROWS)
    left = ""
    if seconds and "max_steps" in last and not over:
        left = clock(sum(seconds) / len(seconds) * (last["max_steps"] - last["step"]))
    return f"{last['step']}/{last.get('max_steps', '?')}", "" if reward is None else f"{reward:.3f}", left


@command(
    "print the logs of a run; -f follows them until it ends",
    option("which", metavar="RUN", help=_RUN_HELP),
    switch("-f", "--follow", help="go on until the run ends"),
    option("-n", "--lines", type=int, default=50, help="lines of each log to begin with (50)"),
    switch("--slurm", help="the job's output: the launcher's own lines (default)"),
    switch("--server", help="the log of the vLLM server"),
    switch("--trainer", help="the log of the trainers (default without Slurm)"),
)
def logs(options: argparse.Namespace) -> int:
    """Print logs, and follow them with ``-f``; return 130 after Ctrl-C."""
    if options.lines < 0:
        raise config_error("--lines", f"is {options.lines}", "write 0 or more")
    found = _named_run(options.which)
    kinds = [kind for kind in _LOGS if getattr(options, kind)] or ["slurm" if found.job_id else "trainer"]
    follower = Follower(kinds, options.lines)
    try:
        if options.follow:
            _follow(found.folder, follower)
        elif not follower.look(found):
            what = f"{shown(found.folder)} has no log of {' or '.join(kinds)} yet"
            raise config_error(options.which, what, "grpo status shows its state; -f waits for it")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


class Follower:
    """Print what is new in the logs of a run, beginning with the last lines; a new attempt's logs join in."""

    def __init__(self, kinds: Iterable[str], lines: int):
        self._roles = [role for kind in kinds for role in _LOGS[kind]]
        self._lines = lines
        self._offsets: dict[Path, int] = {}
        self._shown: Path | None = None

    def look(self, run: Run) -> bool:
        """Print what is new; return whether there is any log at all."""
        paths = [path for role, path in run.logs.items() if role in self._roles]
        for path in paths:
            size, known = path.stat().st_size, self._offsets.get(path)
            start = max(0, size - _MOST_BYTES) if known is None else min(known, size)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(_MOST_BYTES)
            # Whole lines alone: masking would miss a secret cut in two. One that is too long is shown all the same.
            whole = content.rfind(b"\n") + 1
            content = content[:whole] if whole or len(content) < _MOST_BYTES else content
            self._offsets[path] = start + len(content)
            lines = content.decode(errors="replace").splitlines(keepends=True)
            if known is None:
                lines = lines[max(0, len(lines) - self._lines) :]
            if lines and path != self._shown:
                print(f"==> {shown(path)} <==")
                self._shown = path
            print(masked("".join(lines)), end="", flush=True)
        return bool(paths)


def _follow(folder: Path, follower: Follower) -> None:
    """Print what is new until the run is over, the last lines included."""
    said, asked_at = "", -_SLURM_SECONDS
    while True:
        run = Run(folder)
        if time.monotonic() - asked_at >= _SLURM_SECONDS:
            asked_at = time.monotonic()
            state, over = _state(run, _job_of(run))
            if state != said and "waiting" in state:
                print(f"grpo: {state}", flush=True)
            said = state
            if over:
                follower.look(Run(folder))
                print(f"grpo: {shown(folder)} is over: {state}")
                return
        follower.look(run)
        time.sleep(_SECONDS)


@command(
    "have a run save and end; --now ends it at once",
    option("which", metavar="RUN", help=_RUN_HELP),
    switch("--now", help="end it without waiting for the step in flight"),
)
def stop(options: argparse.Namespace) -> int:
    """Ask a run to save and end; take a job that waits out of the queue."""
    found = _named_run(options.which)
    job = _job_of(found)
    state, over = _state(found, job)
    if over:
        raise config_error(options.which, f"{shown(found.folder)} is over: {state}", "there is nothing to stop")
    (found.folder / NO_REQUEUE).touch()
    if job is not None and (job.waits or found.summary.get("status") != "running"):
        cancel(job.id)  # nothing of it runs: there is nothing to save, and nobody who would see a request
        finish_summary(found.folder, status="stopped", cause="taken out of the queue by grpo stop")
        print(f"grpo: job {job.id} is out of the queue; the run directory stays: {shown(found.folder)}")
    elif options.now and job is not None:
        cancel(job.id)
        print(f"grpo: job {job.id} is cancelled; it saves if Slurm leaves it the time")
    elif options.now:
        host, pid = launcher_of(found.folder)
        if host != socket.gethostname():
            raise config_error("--now", f"the launcher runs on {host}, this is {socket.gethostname()}", "do it there")
        for _ in range(2):  # the second signal is final
            os.kill(pid, signal.SIGTERM)
        print(f"grpo: its launcher (pid {pid}) was asked to end at once")
    else:
        stop_file(found.folder).touch()
        print("grpo: asked: it saves after the step in flight and ends (at once: --now)")
    return 0


@command(
    "write report.html of a run, or a page that compares several or a sweep",
    option("runs", nargs="+", metavar="RUN", help="run or sweep directory, or last for RUN_ROOT's newest run"),
    option("--out", type=Path, metavar="FILE", help="the page; by default report.html in the run, or here"),
)
def report(options: argparse.Namespace) -> int:
    """Write the page of a run, of several compared, or of a sweep."""
    folders = [_named_run(which).folder if which == "last" else Path(which) for which in options.runs]
    fix = "name a file you may write"
    with translate(OSError, lambda error: config_error("--out", f"cannot write the page ({error.strerror})", fix)):
        if len(folders) == 1 and os.path.isfile(folders[0] / RECORD):
            found = read_sweep(folders[0])
            page, results = write_sweep(found, options.out)
            print(text_table(found, results))
        elif len(folders) == 1:
            page = write_report(folders[0], options.out)
        else:
            page = write_comparison(folders, options.out or Path("report.html"))
    print(f"grpo: {shown(page)}")
    return 0
