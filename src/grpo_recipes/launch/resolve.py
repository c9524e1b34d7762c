"""Which run a launch means, its recipe and its names, and whether it can go on from its newest checkpoint."""

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error, translate
from grpo_recipes.launch.rendezvous import Meeting
from grpo_recipes.paths import CODE_VARIABLE, display_path
from grpo_recipes.plan.commands import LOGS, log_folder
from grpo_recipes.plan.devices import Resources, rows_of_generation
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.process.reports import address_reachable, say
from grpo_recipes.recipe import Recipe, merge_recipe, read_frozen
from grpo_recipes.recipe.check import check, choose_recipe, resolve_recipe
from grpo_recipes.recipe.document import Value, as_words, read_flags
from grpo_recipes.recipe.generated import keys_of_data
from grpo_recipes.recipe.keys import DEFAULT_RECIPE
from grpo_recipes.recipe.sources import user_code
from grpo_recipes.recipe.tasks import GRPO, requested_task, same_task
from grpo_recipes.recipe.user_code import REWARD_COPIES, changed_copies, spec_problem, split_spec
from grpo_recipes.runs import rundir
from grpo_recipes.runs.checkpoints import newest_complete, step_of, verify_run_files, world_size_of
from grpo_recipes.runs.rundir import FROZEN_CODE, Run, changed_code, find_run

POINTERS = ".jobs"  # under run_root: a file for each job, ``<cluster>-<job>[_<task>]``, that names its run directory


@dataclass(frozen=True)
class Options:
    """The command line of `grpo launch` beside the recipe's own flags."""

    recipe: str | None = None
    task: str | None = None
    resume: str | None = None
    allow_changed_code: bool = False
    update_rewards: bool = False
    dry_run: bool = False
    benchmark: bool = False
    keys: Mapping[str, Value] = field(default_factory=dict)  # recipe keys that an entry point sets
    flags: tuple[str, ...] = ()
    meeting: Meeting | None = None  # of nodes that the user starts by hand

    def as_json(self) -> dict[str, Any]:
        """Return what must be equal on all nodes as plain data."""
        nodes = self.meeting.nodes if self.meeting else 1
        words = " ".join(self.words())
        return {**asdict(replace(self, keys={}, meeting=None)), "flags": words, "meeting": None, "--nodes": nodes}

    def words(self) -> list[str]:
        """Return the recipe keys and flags as the command line of `grpo launch` has them."""
        return [*as_words(self.keys), *self.flags]


def resolve_run(options: Options, resources: Resources) -> tuple[Run | None, Recipe]:
    """Return the run that is meant (None: a new one), and its recipe."""
    # What the environment said when a run was submitted is in its frozen recipe.
    environment = {} if os.environ.get(CODE_VARIABLE) else os.environ
    if options.resume is not None and options.recipe:
        raise config_error("--resume", "a resumed run goes on with its own recipe", "leave the recipe out")
    if options.resume is None and options.update_rewards:
        raise config_error("--update-rewards", "a new run takes the files as they are", "leave it out, or add --resume")
    if options.resume is None:
        recipe = resolve_recipe(
            options.recipe, options.task, options.flags, environment, resources.device, options.keys
        )
        job = resources.job
        if job is None or job.restarts == 0 or not (pointer := _run_root(recipe) / POINTERS / job.name).is_file():
            return None, recipe
        run = find_run(_run_root(recipe), pointer.read_text().strip())
    elif options.resume == "last":
        # Flags are for the run's own recipe, with which they are checked: only run_root is read from this one.
        task = requested_task(environment, options.task).task or GRPO
        path = choose_recipe(None, {DEFAULT_RECIPE: "1", **environment}, task, resources.device)
        recipe, problems = merge_recipe(path, options.flags, environment, keys=options.keys)
        if "run_root" in recipe.broken:
            raise ConfigError(*problems)
        run = find_run(_run_root(recipe), "last")
    else:
        run = find_run(Path(), options.resume)
    rundir.wait_for_end(run)
    # Where another launch holds the run nothing is compared: it may be writing the files, and ``claim`` refuses us.
    notes = [] if run.is_running() else verify_run_files(run.folder, options.allow_changed_code)
    notes += [] if run.is_running() else need_rows(run, options.allow_changed_code)
    changed = changed_code(run)
    if changed and not options.allow_changed_code:
        raise config_error("--resume", changed, "go back to that code, or add --allow-changed-code")
    recipe = read_frozen(run.folder / "recipe.yaml", options.flags, environment, options.keys)
    if recipe.source("model_revision") == "--model_revision":
        raise config_error("--model_revision", "a resumed run goes on with the commit it began with", "leave it out")
    if contradictions := check(recipe, os.environ):
        raise ConfigError(*contradictions)
    if options.update_rewards:
        _need_better_rewards(run, recipe)
    if run.plan.get(rundir.RECIPE_HASH, current_hash := rundir.recipe_hash(run.folder)) != current_hash:
        notes.append(
            f"{display_path(run.folder / 'recipe.yaml')} was edited since the last attempt:"
            " its keys are used as they are now"
        )
    for note in notes:
        say(f"note: {note}")
    asked = requested_task(environment, options.task)
    if run.plan:
        same_task(recipe, asked, run.plan["task"])
    return run, replace(recipe, entry=run.plan.get("entry", asked.entry))


def need_rows(run: Run, allow_missing: bool) -> list[str]:
    """Reject a resume if ``metrics.jsonl`` was removed; return a note if it lacks rows of steps that were trained.

    Rewards, charts and the summary are computed from its rows, so they would describe another run.
    """
    path, checkpoint = run.folder / "metrics.jsonl", newest_complete(run.folder / "checkpoints")
    if checkpoint is None or step_of(checkpoint) == 0:
        return []
    if not path.exists() and not allow_missing:
        what = f"not found, but {checkpoint.name} was saved after {step_of(checkpoint)} steps"
        fix = "restore the file, or add --allow-changed-code to continue without its rows"
        raise config_error(display_path(path), what, fix)
    steps = {row["step"] for row in rundir.read_metrics(run.folder, lenient=True)}
    missing = step_of(checkpoint) - sum(step <= step_of(checkpoint) for step in steps)
    if missing <= 0:
        return []
    return [
        f"{display_path(path)} has no rows for {missing} of {step_of(checkpoint)} steps; report and summary lack them"
    ]


def nothing_is_left(run: Run, recipe: Recipe, options: Options) -> bool:
    """Say so if a run is completed and no further step or change is requested: a start could only lose results.

    In a chain of jobs that each resume, those after the end then end at once, without an error.
    """
    summary, newest = run.summary, newest_complete(run.folder / "checkpoints")
    flags = {*options.keys, *(key for key, _ in read_flags(options.flags, []))}
    limit = "max_steps" if recipe["max_steps"] > 0 else "num_train_epochs"
    if recipe[limit] <= _done(run)[limit]:
        flags -= {"max_steps", "num_train_epochs"}  # these steps are done; with max_steps, epochs do not count
    asks = flags or options.update_rewards or "error" in (summary.get("published") or {})
    cut = newest is not None and step_of(newest) < summary.get("steps", 0)  # later ones were removed, to go back
    if asks or cut or summary.get("status") != "completed" or not (run.folder / "model").is_dir() or run.is_running():
        return False
    say(f"{display_path(run.folder)} has completed its {summary.get('steps')} steps; raise --{limit} to train further")
    return True


def _done(run: Run) -> dict[str, float]:
    """Return how many steps and epochs a run has trained, by the keys that limit them."""
    rows = rundir.read_metrics(run.folder, lenient=True)
    epochs = max((row["epoch"] for row in rows if isinstance(row.get("epoch"), int | float)), default=0.0)
    return {"max_steps": run.summary.get("steps", 0), "num_train_epochs": epochs}


def _need_better_rewards(run: Run, recipe: Recipe) -> None:
    """Refuse ``--update-rewards`` where no reward or environment has changed, or one has become no valid Python."""
    where, files = "--update-rewards", [spec for spec in user_code(recipe.__getitem__) if ".py:" in spec]
    changed = changed_copies(files, run.folder / REWARD_COPIES)
    if not changed:
        named = ", ".join(split_spec(spec)[0] for spec in files) or "a file of yours"
        what = f"no reward or environment of the run has changed since its copy ({named})"
        raise config_error(where, what, "edit the file first, in the folder of the first launch, or leave it out")
    if problems := [problem for spec in changed if (problem := spec_problem(spec, where))]:
        raise ConfigError(*problems)


def _run_root(recipe: Recipe) -> Path:
    return Path(os.path.expanduser(recipe["run_root"]))


def make_logs() -> None:
    """Make the folder of Slurm's logs where the command is run, and that of the processes' logs, which LOGDIR names."""
    what, fix = "cannot make the folder logs here", "launch or submit from a folder you may write to"
    with translate(OSError, lambda error: config_error("working folder", f"{what} ({error.strerror})", fix)):
        Path(LOGS).mkdir(exist_ok=True)
    folder, fix = log_folder(os.environ), "name a folder you may write to"
    with translate(OSError, lambda error: config_error("LOGDIR", f"cannot make '{folder}' ({error.strerror})", fix)):
        folder.mkdir(parents=True, exist_ok=True)


def note_job(folder: Path, recipe: Recipe, job: str) -> None:
    """Let the job ``<cluster>-<job>[_<task>]`` and its run directory be found from one another."""
    pointers = _run_root(recipe) / POINTERS
    pointers.mkdir(parents=True, exist_ok=True)
    (pointers / job).write_text(str(folder))
    rundir.write_json(folder / rundir.JOB_FILE, {"job": job, "working_folder": os.getcwd()})


def names_of(recipe: Recipe, run: Run | None = None) -> Names:
    """Return the names of an attempt at ``run``, or at a new run that would begin now."""
    stamp = rundir.timestamp()
    name = run.name if run else (recipe["run_name"] or recipe.path.stem.removeprefix("config_"))
    folder = run.folder if run else (_run_root(recipe) / f"{name}-{stamp}").absolute()
    return Names(folder, name, f"{name}-{secrets.token_hex(4)}", stamp)


def make_run(recipe: Recipe, resources: Resources, names: Names) -> tuple[Run, Names]:
    """Make the run directory; take the next second's name where another launch has just taken this one's."""
    for _ in range(60):
        if run := rundir.new_run(names.run_dir, names.run, names.timestamp, resources.facts()):
            return run, names
        time.sleep(1)
        names = names_of(recipe)
    raise config_error("run_root", f"no free name for a run directory of '{names.run}'", "set another run_name")


def need_same_world(run: Run, plan: Plan) -> None:
    """Refuse another number of training processes than that of the checkpoint, or with which the run was submitted."""
    checkpoint, now = newest_complete(run.folder / "checkpoints"), plan.batch.world_size
    if checkpoint is not None:
        before, what = world_size_of(checkpoint), checkpoint.name  # a part of the generation window for each
        fix = f"give it as many devices as before, or --num_processes {before}"
    elif (run.folder / FROZEN_CODE).is_dir():
        before, what = int(run.plan["batch"]["world_size"]), "the submitted run"
        fix = "look at what the job was given, and submit again"
    else:
        return
    if before != now:
        raise config_error("--resume", f"{what} is of {before} processes, the plan has {now}", fix)


# Keys by which a run takes its prompts in another order, or others. The trainer compares what comes of all keys; these
# are known before anything starts.
_ORDER = (
    "seed", "shuffle_dataset", "num_iterations", "max_train_prompts", "max_prompt_length", "dataset_name",
    "dataset_config", "dataset_train_split", "dataset_mixture", "dataset_prompt_column",
)  # fmt: skip


def need_same_data(run: Run, recipe: Recipe, plan: Plan) -> str:
    """Refuse what would move a run's place in its data, a number of steps; return a note of ``ignore_data_skip``."""
    checkpoint = newest_complete(run.folder / "checkpoints")
    if checkpoint is None or not run.plan:
        return ""
    if recipe["ignore_data_skip"]:
        return "ignore_data_skip: the epoch begins again, now and whenever this run is resumed"
    begin_again = "add --ignore_data_skip true: the epoch then begins again"
    elsewhere = f"{checkpoint.name} would continue at another place in the data"
    before = read_frozen(run.folder / "recipe.yaml")
    for key in (*_ORDER, *keys_of_data("order_keys")):
        if recipe[key] != before[key]:
            what = f"{key} was {before[key]}: {elsewhere}"
            raise config_error(recipe.location(key), what, f"leave it as it was, or {begin_again}")
    was, now = _sizes(before, run.plan["batch"]), _sizes(recipe, asdict(plan.batch))
    if was != now:
        what = f"the run had {was}, now it has {now}: {elsewhere}"
        raise config_error("--resume", what, f"leave the keys of the batch as they were, or {begin_again}")
    return ""


def _sizes(recipe: Recipe, batch: Mapping[str, int]) -> str:
    """Return in words what a step and a generation take, of all processes."""
    group, step = batch["num_generations"], batch["completions"] // batch["num_generations"]
    return (
        f"{step} prompts a step, {rows_of_generation(recipe, batch) // group} a generation, {group} completions of each"
    )


OFFLINE_WANDB = "export WANDB_MODE=offline and run wandb sync later, or report_to: none"


def needs_wandb(recipe: Recipe, environment: Mapping[str, str]) -> bool:
    """Return whether a run would talk to W&B while it runs."""
    offline = environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    disabled = environment.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes")
    return "wandb" in (recipe["report_to"] or []) and not disabled and not offline


def need_wandb_route(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Refuse a run that reports to W&B where that is out of reach: W&B waits for minutes, and then ends the trainer."""
    address = environment.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if needs_wandb(recipe, environment) and not address_reachable(address, environment):
        what = f"W&B does not answer at {address} from this machine"
        raise config_error(recipe.source("report_to"), what, OFFLINE_WANDB)
