"""Find the run that a launch starts or resumes, with its recipe and names, and check that it can resume.

A run resumes from its newest checkpoint only with the same code, data order and number of training processes. Each
check raises a ConfigError before anything starts.
"""

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.launch.rendezvous import Meeting
from grpo_recipes.paths import CODE_VARIABLE, display_path
from grpo_recipes.plan.commands import LOGS, log_folder
from grpo_recipes.plan.devices import Resources, count_generation_completions
from grpo_recipes.plan.replicas import with_replicas
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.process.reports import can_reach, say
from grpo_recipes.recipe import Recipe, merge_recipe, read_frozen
from grpo_recipes.recipe.check import check, choose_recipe, resolve_recipe
from grpo_recipes.recipe.document import Value, as_words, read_flags
from grpo_recipes.recipe.generated import keys_of_data
from grpo_recipes.recipe.keys import DEFAULT_RECIPE, run_root
from grpo_recipes.recipe.rules import reports_to
from grpo_recipes.recipe.sources import user_code
from grpo_recipes.recipe.tasks import GRPO, requested_task, require_same_task
from grpo_recipes.recipe.trackers import remote_trackers
from grpo_recipes.recipe.user_code import REWARD_COPIES, changed_copies, spec_problem, split_spec
from grpo_recipes.runs import rundir
from grpo_recipes.runs.checkpoints import find_newest_complete, parse_step, read_world_size, verify_run_files
from grpo_recipes.runs.code_version import FROZEN_CODE, format_own_command
from grpo_recipes.runs.rundir import JOB_FILE, Run, describe_code_change, find_run, load_json_mapping

POINTERS = ".jobs"  # folder in run_root; its file ``<cluster>-<job>[_<task>]`` contains the run directory of the job


@dataclass(frozen=True)
class Options:
    """The command line of `grpo launch`."""

    recipe: str | None = None
    task: str | None = None
    resume: str | None = None
    allow_changed_code: bool = False
    update_rewards: bool = False
    dry_run: bool = False
    benchmark: bool = False
    keys: Mapping[str, Value] = field(default_factory=dict)  # recipe keys that an entry point sets
    flags: tuple[str, ...] = ()  # flags for recipe keys
    then: tuple[str, ...] = ()  # recipes to run afterwards, each from the model of the run before it
    previous: str | None = None  # run directory of the recipe before, for a run that starts from its model
    meeting: Meeting | None = None  # the meeting of nodes that the user starts by hand

    def as_json(self) -> dict[str, Any]:
        """Return the options that must be equal on all nodes, as plain data."""
        nodes = self.meeting.nodes if self.meeting else 1
        words = " ".join(self.words())
        return {**asdict(replace(self, keys={}, meeting=None)), "flags": words, "meeting": None, "--nodes": nodes}

    def words(self) -> list[str]:
        """Return the recipe keys and flags as words for the command line of `grpo launch`."""
        return [*as_words(self.keys), *self.flags]


def resolve_run(options: Options, resources: Resources) -> tuple[Run | None, Recipe]:
    """Return the run to resume and its recipe, after all checks of a resume; None and the recipe for a new run.

    A requeued Slurm job resumes its run without ``--resume``. Notes on the resumed run are printed. If the run is
    just ending, wait for its end. A run that still runs is returned without the checks of its files, because
    ``lock_run`` rejects it later. Raise ConfigError if the run can't resume, if options contradict each other, or
    if the recipe is wrong.
    """
    # The frozen recipe of a submitted run contains the environment of the submission.
    environment = {} if os.environ.get(CODE_VARIABLE) else os.environ
    if options.resume is not None and options.recipe:
        raise config_error("--resume", "a resumed run uses its own recipe", "remove the recipe from the command")
    if options.resume is None and options.update_rewards:
        problem = "a new run always uses the current files"
        raise config_error("--update-rewards", problem, "remove --update-rewards, or add --resume")
    run = _find_run_of_job(options, environment, resources)
    if run is None:
        if options.resume is None:
            return None, resolve_recipe(
                options.recipe, options.task, options.flags, environment, resources.device, options.keys
            )
        # The flags change the run's own recipe and are checked with it. Only run_root is read from this recipe.
        is_last = options.resume == "last"
        root = _find_run_root(None, options, environment, resources.device) if is_last else Path()
        run = find_run(root, options.resume)
    rundir.wait_for_end(run)
    notes = []
    if not run.is_running():  # otherwise its files may change now, and ``lock_run`` rejects this launch
        notes += verify_run_files(run.folder, options.allow_changed_code)
        notes += require_rows(run, options.allow_changed_code)
    changed = describe_code_change(run)
    if changed and not options.allow_changed_code:
        raise config_error("--resume", changed, "go back to that code, or add --allow-changed-code")
    recipe = read_frozen(run.folder / "recipe.yaml", options.flags, environment, options.keys)
    recipe = with_replicas(recipe, run.plan.get("replicas", 1))  # a requeued job may have the flag ``auto``
    if recipe.source("model_revision") == "--model_revision":
        problem = "a resumed run uses the commit that it started with"
        raise config_error("--model_revision", problem, "remove --model_revision")
    if contradictions := check(recipe, os.environ):
        raise ConfigError(*contradictions)
    if options.update_rewards:
        _require_changed_rewards(run, recipe)
    current_hash = rundir.hash_recipe(run.folder)
    if run.plan.get(rundir.RECIPE_HASH, current_hash) != current_hash:
        edited = display_path(run.folder / "recipe.yaml")
        notes.append(f"{edited} was edited since the last attempt; the run uses the edited keys")
    for note in notes:
        say(f"note: {note}")
    request = requested_task(environment, options.task)
    if run.plan:
        require_same_task(recipe, request, run.plan["task"])
    return run, replace(recipe, entry=run.plan.get("entry", request.entry))


def _find_run_of_job(options: Options, environment: Mapping[str, str], resources: Resources) -> Run | None:
    """Return the run that a requeued Slurm job continues, or None.

    The user may have changed or removed the recipe since the job started, so only ``run_root`` is read from it. A
    batch script may launch several runs: each command continues the run that it started. A command that started none,
    for example because its flags contain the time, continues the job's only run if that run is not completed.
    ``--resume last`` means the same run as when the job started.
    """
    job, is_named = resources.job, options.resume not in (None, "last")
    if job is None or job.restarts == 0 or is_named or options.previous is not None:
        return None  # with ``previous``, the job's newest run is the run of the recipe before
    root = run_root(environment)
    with contextlib.suppress(ConfigError):
        root = _find_run_root(options.recipe, options, environment, resources.device)
    if not (pointer := root / POINTERS / job.name).is_file():
        return None
    newest = find_run(root, pointer.read_text().strip())
    if options.resume == "last":
        return newest
    runs = [
        run for run in rundir.list_runs(root) if (load_json_mapping(run.folder / JOB_FILE) or {}).get("job") == job.name
    ]
    command = format_own_command()
    started = next((run for run in (newest, *runs) if run.identity.get("command") == command), None)
    if started is None and len(runs) == 1 and newest.summary.get("status") != "completed":
        return newest
    return started


def _find_run_root(name: str | None, options: Options, environment: Mapping[str, str], device: str) -> Path:
    """Return ``run_root`` of the recipe ``name``, by default of the default recipe, with the launch's flags.

    Raise ConfigError if the recipe can't be read, or if its ``run_root`` is not valid.
    """
    task = requested_task(environment, options.task).task or GRPO
    path = choose_recipe(name, {DEFAULT_RECIPE: "1", **environment}, task, device)
    recipe, problems = merge_recipe(path, options.flags, environment, keys=options.keys)
    if "run_root" in recipe.broken:
        raise ConfigError(*problems)
    return _run_root(recipe)


def require_rows(run: Run, allow_missing: bool) -> list[str]:
    """Check that ``metrics.jsonl`` has a row for each trained step; return a note in a list if rows are missing.

    Return [] without missing rows, or without a checkpoint.

    Rewards, charts and the summary are computed from these rows, so they would describe another run. Raise ConfigError
    if the file does not exist, unless ``allow_missing`` is true.
    """
    path, checkpoint = run.folder / "metrics.jsonl", find_newest_complete(run.folder / "checkpoints")
    if checkpoint is None or parse_step(checkpoint) == 0:
        return []
    if not path.exists() and not allow_missing:
        problem = f"not found, but {checkpoint.name} was saved after {parse_step(checkpoint)} steps"
        fix = "restore the file, or add --allow-changed-code to continue without its rows"
        raise config_error(display_path(path), problem, fix)
    steps = {row["step"] for row in rundir.read_metrics(run.folder, lenient=True)}
    missing = parse_step(checkpoint) - sum(step <= parse_step(checkpoint) for step in steps)
    if missing <= 0:
        return []
    return [
        f"{display_path(path)} has no rows for {missing} of {parse_step(checkpoint)} steps; "
        "report and summary lack them"
    ]


def is_finished(run: Run, recipe: Recipe, options: Options) -> bool:
    """Return whether a run is completed and no further step or change is requested; if so, print it.

    A restart could only lose results. In a chain of jobs that resume a run, the jobs after its end exit without error.
    """
    summary, newest = run.summary, find_newest_complete(run.folder / "checkpoints")
    flags = {*options.keys, *(key for key, _ in read_flags(options.flags, []))}
    limit = "max_steps" if recipe.batch.max_steps > 0 else "num_train_epochs"
    rows = rundir.read_metrics(run.folder, lenient=True)
    epochs = max((row["epoch"] for row in rows if isinstance(row.get("epoch"), int | float)), default=0.0)
    trained = {"max_steps": summary.get("steps", 0), "num_train_epochs": epochs}
    if recipe[limit] <= trained[limit]:
        flags -= {"max_steps", "num_train_epochs"}  # these steps are done, and max_steps takes precedence over epochs
    requests_change = flags or options.update_rewards or "error" in (summary.get("published") or {})
    # The user may have removed newer checkpoints.
    is_rewound = newest is not None and parse_step(newest) < summary.get("steps", 0)
    is_completed = summary.get("status") == "completed" and (run.folder / "model").is_dir()
    if requests_change or is_rewound or not is_completed or run.is_running():
        return False
    if summary.get("stopped_early"):
        limit = "early_stopping_patience"
    say(f"{display_path(run.folder)} has completed its {summary.get('steps')} steps; raise --{limit} to train further")
    return True


def _require_changed_rewards(run: Run, recipe: Recipe) -> None:
    """Raise ConfigError for ``--update-rewards`` if no reward or environment of the run has changed since its copy.

    A changed file that is not valid Python is also an error.
    """
    flag, specs = "--update-rewards", [spec for spec in user_code(recipe.__getitem__) if ".py:" in spec]
    changed = changed_copies(specs, run.folder / REWARD_COPIES)
    if not changed:
        files = ", ".join(split_spec(spec)[0] for spec in specs) or "the recipe names no file"
        unchanged = f"no reward or environment of the run has changed since its copy ({files})"
        raise config_error(
            flag, unchanged, "edit the file in the folder of the first launch, or remove --update-rewards"
        )
    # An environment may run with another Python, which has other packages.
    results = (spec_problem(spec, flag, spec in recipe.rewards.funcs) for spec in changed)
    if problems := [problem for problem in results if problem]:
        raise ConfigError(*problems)


def _run_root(recipe: Recipe) -> Path:
    """Return the folder of the runs, the recipe's ``run_root`` with ~ expanded."""
    return Path(os.path.expanduser(recipe.run.root))


def create_log_folders() -> None:
    """Create ``logs`` in the working folder for Slurm's logs, and LOGDIR for the processes' logs.

    Raise ConfigError if a folder can't be created.
    """
    problem, fix = f"cannot create the folder {LOGS} here", "launch or submit from a folder that you can write to"
    with translate_errors(OSError, lambda error: config_error("working folder", f"{problem} ({error.strerror})", fix)):
        Path(LOGS).mkdir(exist_ok=True)
    folder, fix = log_folder(os.environ), "set LOGDIR to a folder that you can write to"
    with translate_errors(
        OSError, lambda error: config_error("LOGDIR", f"cannot create '{folder}' ({error.strerror})", fix)
    ):
        folder.mkdir(parents=True, exist_ok=True)


def record_job(folder: Path, recipe: Recipe, job: str) -> None:
    """Write two files that connect a Slurm job with its run directory ``folder``, in both directions.

    ``job`` is ``<cluster>-<job>[_<task>]``. The run directory gets ``JOB_FILE``, and run_root gets a pointer file. Its
    folder has the permissions of run_root, which several users may share. Raise ConfigError if it can't be written.
    """
    root, pointers = _run_root(recipe), _run_root(recipe) / POINTERS
    problem, fix = f"cannot write {display_path(pointers / job)}", "set run_root to a folder that you can write to"
    with translate_errors(OSError, lambda error: config_error("run_root", f"{problem} ({error.strerror})", fix)):
        if not pointers.is_dir():
            pointers.mkdir(parents=True, exist_ok=True)
            pointers.chmod(stat.S_IMODE(root.stat().st_mode))
        (pointers / job).write_text(str(folder))
    rundir.write_json(folder / rundir.JOB_FILE, {"job": job, "working_folder": os.getcwd()})


def choose_names(recipe: Recipe, run: Run | None = None) -> Names:
    """Choose run directory, run name, served model name and timestamp of an attempt at ``run``, or at a new run.

    Nothing is created. The served name is random.
    """
    stamp = rundir.timestamp()
    name = run.name if run else recipe.run_name
    folder = run.folder if run else (_run_root(recipe) / f"{name}-{stamp}").absolute()
    return Names(folder, name, f"{name}-{secrets.token_hex(4)}", stamp)


def create_run(recipe: Recipe, facts: Mapping[str, Any], names: Names) -> tuple[Run, Names]:
    """Create the run directory; return the run and its names, which differ from ``names`` if the folder exists.

    ``facts`` are stored in ``run.json``.

    If another launch has just used the name, wait for a name with another second. Raise ConfigError after a minute.
    """
    for _ in range(60):
        if run := rundir.new_run(names.run_dir, names.run, names.timestamp, facts):
            return run, names
        time.sleep(1)
        names = choose_names(recipe)
    raise config_error("run_root", f"no free name for a run directory of '{names.run}'", "set another run_name")


def require_same_world_size(run: Run, plan: Plan) -> None:
    """Raise ConfigError if the plan of a resumed run has another number of training processes than before.

    The number is compared with the newest checkpoint, or with the submitted plan if there is no checkpoint. Without
    both, nothing is checked.
    """
    checkpoint, planned = find_newest_complete(run.folder / "checkpoints"), plan.batch.world_size
    if checkpoint is not None:
        saved, subject = read_world_size(checkpoint), checkpoint.name  # each process has saved its own part
        fix = f"use as many devices as before, or add --num_processes {saved}"
    elif (run.folder / FROZEN_CODE).is_dir():
        saved, subject = int(run.plan["batch"]["world_size"]), "the submitted run"
        fix = "check the resources of the job, and submit again"
    else:
        return
    if saved != planned:
        raise config_error("--resume", f"{subject} has {saved} training processes, the plan has {planned}", fix)


# Keys that determine the prompts of a run and their order. They are compared before anything starts; the trainer
# compares the actual data.
_ORDER_KEYS = (
    "seed", "shuffle_dataset", "num_iterations", "max_train_prompts", "max_prompt_length", "dataset_name",
    "dataset_config", "dataset_train_split", "dataset_mixture", "dataset_prompt_column",
)  # fmt: skip


def require_same_data_order(run: Run, recipe: Recipe, plan: Plan) -> str:
    """Reject a resume that would continue at another position in the data; return a note, or "" without a note.

    The keys that determine the order of prompts, and the sizes of the batch, must be the same as before. Without a
    checkpoint, nothing is compared. With ``ignore_data_skip``, nothing is compared either, and the note explains
    that the epoch starts again. Raise ConfigError if a value differs.
    """
    checkpoint = find_newest_complete(run.folder / "checkpoints")
    if checkpoint is None or not run.plan:
        return ""
    if recipe.run.ignore_data_skip:
        return "ignore_data_skip: the epoch starts again, now and whenever this run is resumed"
    restart_epoch = "add --ignore_data_skip true, which starts the epoch again"
    effect = f"{checkpoint.name} would continue at another position in the data"
    saved = read_frozen(run.folder / "recipe.yaml")
    for key in (*_ORDER_KEYS, *keys_of_data("order_keys")):
        if recipe[key] != saved[key]:
            problem = f"{key} was {saved[key]}: {effect}"
            raise config_error(recipe.location(key), problem, f"restore its value, or {restart_epoch}")
    saved_sizes, sizes = _describe_sizes(saved, run.plan["batch"]), _describe_sizes(recipe, asdict(plan.batch))
    if saved_sizes != sizes:
        problem = f"the run had {saved_sizes}, now it has {sizes}: {effect}"
        raise config_error("--resume", problem, f"restore the keys of the batch, or {restart_epoch}")
    return ""


def _describe_sizes(recipe: Recipe, batch: Mapping[str, int]) -> str:
    """Return the sizes of an optimizer step and of a generation over all processes, for a message."""
    group_size = batch["num_generations"]
    step_prompts = batch["completions"] // group_size
    generation_prompts = count_generation_completions(recipe, batch) // group_size
    return f"{step_prompts} prompts per step, {generation_prompts} per generation, {group_size} completions of each"


def require_tracker_access(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a tracker of the run can't be reached from this machine.

    Its client would otherwise end the trainer after minutes.
    """
    for tracker, address in remote_trackers(reports_to(recipe), environment):
        if not can_reach(address, environment):
            problem = f"{tracker.title} does not answer at {address} from this machine"
            raise config_error(recipe.source("report_to"), problem, tracker.without_network)
