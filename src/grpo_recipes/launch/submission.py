"""Submit a run to Slurm: check and plan it on the login node, freeze it in its run directory, and call sbatch.

The job runs the frozen copy of code and recipe, so later edits do not change a run that waits in the queue.

    submission, estimates = prepare_submission(profile, "recipe.yaml", None, [], os.environ)
    run, job = submit_run(submission, profile)

``prepare_submissions`` prepares several runs. Each starts from the model of the run before. Submit them in order,
each with ``after``, the job id of the run before: otherwise its job does not wait for that model.
"""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem, config_error, translate_errors
from grpo_recipes.fetch.assets import Assets, find_assets, record_assets
from grpo_recipes.launch.attempt import SUBMITTED, freeze_inputs
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.launch.resolve import (
    choose_names,
    create_log_folders,
    record_job,
    require_tracker_access,
)
from grpo_recipes.launch.stages import find_shared_models, start_from
from grpo_recipes.paths import CODE_VARIABLE, cache_root, display_path, find_code_root, module_command
from grpo_recipes.plan.devices import Resources, environment_device
from grpo_recipes.plan.disk_space import require_disk_space
from grpo_recipes.plan.estimates import Estimates, estimate
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.preflight import GOOD_CORES, GOOD_GIB, find_shortages, parse_slurm_bytes
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.document import Value, as_words
from grpo_recipes.recipe.rules import reports_to
from grpo_recipes.recipe.trackers import remote_trackers
from grpo_recipes.runs.code_version import FROZEN_CODE, hash_frozen_code
from grpo_recipes.runs.rundir import Run, new_run, write_json
from grpo_recipes.slurm.client import MaybeSubmitted, parse_walltime, read_cluster_name, submit
from grpo_recipes.slurm.profile import Profile, read_profile, render_script

PROFILES = Path("slurm/profiles")
_COPIED = ("src", "requirements", "training.sh")
_ACCELERATE_FILE = "accelerate.yaml"
_DEEP_SECONDS = 600


@dataclass(frozen=True)
class Submission:
    """A checked and planned run that starts later in a job."""

    recipe: Recipe
    names: Names
    resources: Resources  # resources that its job will have
    sources: Assets  # models and data of the run that are on this machine
    plan: Plan
    environment: Mapping[str, str]  # the user's environment variables

    def script(self, profile: Profile) -> str:
        """Return the batch script of the run for a site profile."""
        name, command = profile.job_name or self.names.run, ["grpo", "launch", "--resume", str(self.names.run_dir)]
        return render_script(
            profile, name, command, frozen_environment(self.names.run_dir, self.environment), Path.cwd()
        )


def read_site_profile(name: str, environment: Mapping[str, str]) -> Profile:
    """Read a Slurm profile by its path or by its name.

    A path is relative to the working folder or the repository. The name is a file in ``slurm/profiles``. The variable
    SLURM_GPU_FLAG_STYLE replaces ``gpu_flag_style``. Raise ConfigError if there is no such profile.
    """
    shipped = find_code_root() / PROFILES
    paths = [Path(name), find_code_root() / name, shipped / f"{name}.yaml"]
    path = next((path for path in paths if os.path.isfile(path)), None)  # isfile accepts names that are too long
    if path is None:
        names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
        raise config_error("--profile", f"profile '{name}' not found", f"use the path of a file, or one of {names}")
    profile, variable = read_profile(path), "SLURM_GPU_FLAG_STYLE"
    style = environment.get(variable)
    return profile.with_values({"gpu_flag_style": style}, variable) if style else profile


def site_environment(profile: Profile, environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with CACHE_ROOT set to the profile's ``cache_root``, unless it is set already."""
    return {**({"CACHE_ROOT": profile.cache_root} if profile.cache_root else {}), **environment}


def site_resources(profile: Profile) -> Resources:
    """Return the GPUs, cores and nodes that a job with this profile gets, with placeholders as node addresses."""
    device = "cuda" if profile.gpus else "cpu"
    gpus = tuple(str(index) for index in range(profile.gpus))
    return Resources(device, gpus, profile.cpus or 1, gpu_gib=profile.gpu_memory_gib).on_nodes(profile.nodes)


def prepare_submissions(
    profile: Profile, recipe_names: Sequence[str | None], task: str | None, flags: Sequence[str],
    environment: Mapping[str, str],
) -> list[tuple[Submission, Estimates]]:  # fmt: skip
    """Check and plan runs as ``prepare_submission`` does, in this order. Each starts from the model of the run before.

    The checks of all runs use the model of the first recipe, because the models of earlier runs do not exist yet. A
    name None is CONFIG or the default recipe. Raise ConfigError also if two runs would have the same directory, or if a
    flag or variable sets the model of every run.
    """
    first, *later = recipe_names
    if later and (problems := find_shared_models(str(first), flags, environment)):
        raise ConfigError(*problems)
    device, variables = site_resources(profile).device, site_environment(profile, environment)
    model = resolve_recipe(first, task, flags, variables, device).model
    keys = start_from(model.name, model.revision)
    for name in later:  # a mistake in the last recipe is found before the minute-long checks of the first
        resolve_recipe(name, task, flags, variables, device, keys)
    prepared = [prepare_submission(profile, first, task, flags, environment)]
    for name in later:
        run_dir = prepared[-1][0].names.run_dir
        submission, estimates = prepare_submission(profile, name, task, flags, environment, keys)
        if submission.names.run_dir in [earlier.names.run_dir for earlier, _ in prepared]:
            problem = f"{display_path(submission.names.run_dir)} would be the directory of two runs"
            raise config_error("run_name", problem, f"set another run_name in {name}")
        # The run starts from the model of the run before it, which does not exist yet.
        recipe, sources = submission.recipe, submission.sources
        for key, value in start_from(str(run_dir.absolute() / "model"), "main").items():
            recipe = recipe.with_value(key, value)
        others = [asset for asset in sources.present if asset is not sources.model]
        submission = replace(submission, recipe=recipe, sources=Assets(others, sources.missing))
        prepared.append((submission, estimates))
    return prepared


def prepare_submission(
    profile: Profile, recipe_name: str | None, task: str | None, flags: Sequence[str], environment: Mapping[str, str],
    keys: Mapping[str, Value] | None = None,
) -> tuple[Submission, Estimates]:  # fmt: skip
    """Check and plan a run for submission; raise ConfigError if its job would fail. No run directory is created.

    Without ``recipe_name``, CONFIG or the default recipe is used. ``keys`` and ``flags`` set recipe keys. The checks
    include memory, free space, W&B and hooks, and `grpo check --deep` in a separate process.
    """
    environment = site_environment(profile, environment)
    resources, profile_notes = site_resources(profile), check_profile(profile)
    recipe = resolve_recipe(recipe_name, task, flags, environment, resources.device, keys)
    recipe = with_site_run_root(recipe, profile)
    names, sources = choose_names(recipe), find_assets(recipe, environment)
    plan = make_plan(recipe, resources, environment, names, sources)
    plan.notes.extend(profile_notes)
    estimates = estimate(plan, recipe, names, profile.gpu_memory_gib, parse_walltime(profile.time))
    ignore = f"or remove gpu_memory_gib from {profile.name}.yaml to submit it anyway"
    if too_large := [
        Problem(
            display_path(plan.recipe), f"the run does not fit: the {role} needs {need.size}", f"{need.fix}; {ignore}"
        )
        for role, need in estimates.memory.items()
        if not need.fits
    ]:
        raise ConfigError(*too_large)
    require_disk_space(recipe, plan, names.run_dir)
    if profile.internet:
        require_tracker_access(recipe, environment)
        AllHooks().check(recipe, environment, names.run)
    else:
        problems, reason = [], f"but the nodes of {profile.name} have no internet"
        for tracker, _ in remote_trackers(reports_to(recipe), environment):
            problem = f"the run reports to {tracker.title}, {reason}"
            problems.append(Problem(recipe.source("report_to"), problem, tracker.without_network))
        if recipe.run.push_to_hub:
            fix = "remove it, and upload the finished model from this machine: hf upload"
            problems.append(Problem(recipe.source("push_to_hub"), f"the run uploads its model, {reason}", fix))
        if problems:
            raise ConfigError(*problems)
    _check_deep(recipe.path, task, [*as_words(keys or {}), *flags], environment)
    return Submission(recipe, names, resources, sources, plan, environment), estimates


def check_profile(profile: Profile) -> list[str]:
    """Check that a profile has enough cores and memory for its GPUs; return a note if it does not set them, else [].

    Raise ConfigError if it has too few, if its time is not longer than its ``signal_lead``, or if Slurm cannot use the
    working folder: Slurm replaces %j and similar in the paths of its logs.
    """
    file, problems = f"{profile.name}.yaml", []
    for problem, option in find_shortages(profile.gpus, profile.cpus or math.inf, parse_slurm_bytes(profile.mem)):
        fix = option.replace("--cpus-per-task=", "set cpus: ").replace("--mem=", "set mem: ")
        problems.append(Problem(file, problem, fix))
    seconds = parse_walltime(profile.time) or 0
    if seconds <= profile.signal_lead:
        problem = f"time {profile.time} is not longer than signal_lead ({profile.signal_lead} s): the run stops at once"
        problems.append(Problem(file, problem, f"set a longer time, or signal_lead: {max(30, seconds // 10)}"))
    if re.search(r"[%\\\n]", folder := os.getcwd()):
        problem = f"'{folder}' contains a character that Slurm replaces in the paths of its logs"
        problems.append(Problem("working folder", problem, "submit from a folder without % and \\"))
    if problems:
        raise ConfigError(*problems)
    missing = [
        key for key in ("cpus", "mem") if profile.gpus and not profile.exclusive and getattr(profile, key) is None
    ]
    if not missing:
        return []
    values = f"cpus: {GOOD_CORES * profile.gpus} and mem: {GOOD_GIB * profile.gpus}G"
    return [
        f"{file} does not set {' and '.join(missing)}. If the site's default is one core and a few GB, the job fails "
        f"at its start; set e.g. {values}"
    ]


def require_environment(profile: Profile) -> None:
    """Raise ConfigError if this Python environment is for another device (cpu, cuda) than the job's nodes have.

    Nothing is checked if the profile specifies an environment.
    """
    if profile.env_dir or profile.env_activate or profile.conda_env:
        return
    device, job_device = environment_device(), "cuda" if profile.gpus else "cpu"
    if device != job_device:
        problem = f"the nodes {'have' if profile.gpus else 'do not have'} GPUs, but this environment is for {device}"
        fix = f"run DEVICE={job_device} make setup, or set env_dir in {profile.name}.yaml to another environment"
        raise config_error("--profile", problem, fix)


def submit_run(submission: Submission, profile: Profile, after: int | None = None) -> tuple[Run, int]:
    """Create the run directory, submit its batch script to Slurm, and return the run and the job id.

    The job waits for the success of the job ``after``. If sbatch fails, remove the run directory again and raise
    ConfigError. After an error that may have queued the job (``MaybeSubmitted``), the run directory stays.
    """
    run = freeze_run(submission)
    try:
        job = submit_script(run.folder, submission.script(profile), after)
    except ConfigError as error:
        if not isinstance(error, MaybeSubmitted):  # otherwise the job may be in the queue
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    record_job(run.folder, submission.recipe, f"{read_cluster_name()}-{job}")
    return run, job


def submit_script(folder: Path, text: str, after: int | None = None) -> int:
    """Create the log folders, write ``job.sh`` to ``folder``, submit it from the working folder; return its job id.

    The job waits for the success of the job ``after``. Raise ConfigError if the file cannot be written or sbatch fails.
    """
    create_log_folders()  # Slurm opens its logs before the script runs
    script = folder / "job.sh"
    fix = "set run_root to a folder with free space that you can write to"
    with translate_errors(
        OSError, lambda error: config_error(display_path(script), f"cannot write this file ({error.strerror})", fix)
    ):
        script.write_text(text)
    return submit(script, after)


def freeze_run(submission: Submission) -> Run:
    """Create a new run directory with recipe, plan and a copy of the code, for a run that starts later.

    ``grpo launch --resume DIR`` with the variables of ``frozen_environment`` starts the run with that copy. Raise
    ConfigError if the directory exists or cannot be written; an incomplete directory is removed.
    """
    names, plan, environment = submission.names, submission.plan, submission.environment
    run = new_run(names.run_dir.absolute(), names.run, names.timestamp, submission.resources.facts())
    if run is None:
        problem = f"{display_path(names.run_dir)} exists: another run has just used this name"
        raise config_error("run_name", problem, "submit again, or set another run_name")
    problem = f"cannot copy code and recipe to {display_path(run.folder)}"
    fix = "set run_root to a folder with free space that you can write to"
    with (
        contextlib.ExitStack() as undo,
        translate_errors(
            OSError, lambda error: config_error("run_root", f"{problem} ({error.strerror or error})", fix)
        ),
    ):
        undo.callback(shutil.rmtree, run.folder, ignore_errors=True)
        is_ours = (find_code_root() / plan.entry).is_relative_to(find_code_root() / "src")
        for name in _COPIED if is_ours else (*_COPIED, plan.entry):
            # Both are equal if the entry script is absolute.
            source, copy = find_code_root() / name, run.folder / FROZEN_CODE / name
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            elif source != copy:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
        if environment.get("CONFIG_FILE"):
            shutil.copyfile(environment["CONFIG_FILE"], run.folder / _ACCELERATE_FILE)
        run.identity["code"]["frozen_sha256"] = hash_frozen_code(run.folder)
        write_json(run.folder / "run.json", run.identity)
        freeze_inputs(run, submission.recipe, plan)
        if not submission.sources.missing:
            record_assets(run, submission.sources)
        write_json(run.folder / "summary.json", {"status": SUBMITTED, "smoke": plan.smoke, "restarts": 0})
        undo.pop_all()
    return run


def frozen_environment(run_dir: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make ``grpo launch --resume run_dir`` run the code that ``freeze_run`` copied there."""
    code, accelerate = run_dir.absolute() / FROZEN_CODE, run_dir.absolute() / _ACCELERATE_FILE
    has_accelerate_file = accelerate.is_file() or environment.get("CONFIG_FILE")
    return {
        CODE_VARIABLE: str(code),
        "GRPO_HOME": str(find_code_root()),
        "PYTHONPATH": str(code / "src"),
        "CACHE_ROOT": str(cache_root(environment)),  # the user's cache folder
        **({"CONFIG_FILE": str(accelerate)} if has_accelerate_file else {}),
    }


def with_site_run_root(recipe: Recipe, profile: Profile) -> Recipe:
    """Return the recipe with the profile's ``run_root``, unless the user has set this key."""
    if not profile.run_root or recipe.is_set("run_root"):
        return recipe
    return recipe.with_value("run_root", Value(profile.run_root, f"{profile.name}.yaml"))


def _check_deep(path: Path, task: str | None, flags: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `grpo check --deep` in a separate process, because it imports torch; raise ConfigError with its problems.

    Raise ConfigError too if it takes more than 10 minutes or prints no result.
    """
    options = ["--deep", "--json", *(["--task", task] if task else [])]
    argv = module_command("grpo_recipes", "check", str(path), *options, *flags)

    def failure(reason: str) -> ConfigError:
        """Return a ConfigError for a check that gave no result, for this reason."""
        fix = f"run grpo check --deep {display_path(path)}, and read its output"
        return config_error(display_path(path), f"grpo check --deep {reason}", fix)

    with translate_errors(subprocess.TimeoutExpired, lambda _: failure(f"took more than {_DEEP_SECONDS} seconds")):
        done = subprocess.run(argv, env=dict(environment), stdout=subprocess.PIPE, timeout=_DEEP_SECONDS, check=False)
    with translate_errors(ValueError, lambda _: failure(f"ended with code {done.returncode} and without a result")):
        result = json.loads(done.stdout)
    if result["problems"]:
        raise ConfigError(*[Problem(**problem) for problem in result["problems"]])
