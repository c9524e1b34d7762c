"""A run on its way to Slurm: checked and planned on the login node, frozen in its run directory, and handed over."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.fetch.assets import Assets, find_assets, record_assets
from grpo_recipes.launch.attempt import SUBMITTED, freeze_inputs
from grpo_recipes.launch.resolve import OFFLINE_WANDB, names_of, need_wandb_route, needs_wandb, note_job
from grpo_recipes.paths import CODE_VARIABLE, cache_root, home, shown
from grpo_recipes.plan.devices import Resources, environment_device
from grpo_recipes.plan.estimates import Estimates, estimate, need_room
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.publish.push import need_target
from grpo_recipes.recipe import Recipe, Value
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.runs.rundir import FROZEN_CODE, Run, frozen_hash, new_run, write_json
from grpo_recipes.slurm.client import MaybeSubmitted, cluster_name, submit, walltime_seconds
from grpo_recipes.slurm.profile import Profile, read_profile, render

PROFILES = Path("slurm/profiles")
_COPIED = ("src", "requirements", "training.sh")
_ACCELERATE_FILE = "accelerate.yaml"
_DEEP_SECONDS = 600


@dataclass(frozen=True)
class Submission:
    """A checked and planned run for a site."""

    profile: Profile  # with what the command line gives in place of its values
    recipe: Recipe
    names: Names
    resources: Resources  # what its job will offer
    sources: Assets  # what was found here of the models and data it reads
    plan: Plan
    estimates: Estimates
    environment: Mapping[str, str]  # the user's

    def script(self) -> str:
        """Return the batch script of the run."""
        name, command = self.profile.job_name or self.names.run, ["grpo", "launch", "--resume", str(self.names.run_dir)]
        return render(self.profile, name, command, frozen_environment(self.names.run_dir, self.environment), Path.cwd())


def site_profile(given: str, environment: Mapping[str, str]) -> Profile:
    """Read the profile of that path, here or in the repository, or of that name among the repository's.

    SLURM_GPU_FLAG_STYLE replaces its ``gpu_flag_style``.
    """
    shipped = home() / PROFILES
    places = [Path(given), home() / given, shipped / f"{given}.yaml"]
    found = next((place for place in places if os.path.isfile(place)), None)  # False too for a name that is too long
    if found is None:
        names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
        raise config_error("--profile", f"there is no profile '{given}'", f"name a file, or one of {names}")
    profile, variable = read_profile(found), "SLURM_GPU_FLAG_STYLE"
    style = environment.get(variable)
    return profile.with_values({"gpu_flag_style": style}, variable) if style else profile


def site_environment(profile: Profile, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables, with the site's cache where the user names none."""
    return {**({"CACHE_ROOT": profile.cache_root} if profile.cache_root else {}), **environment}


def site_resources(profile: Profile) -> Resources:
    """Return what a job of this profile offers."""
    device = "cuda" if profile.gpus else "cpu"
    gpus = tuple(str(index) for index in range(profile.gpus))
    return Resources(device, gpus, profile.cpus or 1).on_nodes(profile.nodes)


def prepare(
    profile: Profile, recipe_name: str | None, task: str | None, flags: Sequence[str], environment: Mapping[str, str]
) -> Submission:
    """Check a recipe, refuse it with everything that would end a job of this site, and plan it there.

    ``recipe_name`` is the recipe as the user names it; None takes CONFIG or the default one.
    """
    environment = site_environment(profile, environment)
    resources = site_resources(profile)
    recipe = on_scratch(resolve_recipe(recipe_name, task, flags, environment, resources.device), profile)
    names, sources = names_of(recipe), find_assets(recipe, environment)
    plan = make_plan(recipe, resources, environment, names, sources)
    estimates = estimate(plan, recipe, names, profile.gpu_memory_gib, walltime_seconds(profile.time))
    for role, need in estimates.memory.items():
        if not need.fits:
            fix = f"{need.fix}; or leave gpu_memory_gib out of {profile.name}.yaml to submit it all the same"
            raise config_error(shown(plan.recipe), f"the run does not fit: the {role} needs {need.size}", fix)
    need_room(recipe, plan, names.run_dir)
    _need_routes(recipe, profile, names, environment)
    _check_deep(recipe.path, task, flags, environment)
    return Submission(profile, recipe, names, resources, sources, plan, estimates, environment)


def need_environment(profile: Profile) -> None:
    """Refuse this environment for a job whose nodes are for the other device, unless the profile names another one."""
    if profile.env_dir or profile.env_activate or profile.conda_env:
        return
    here, there = environment_device(), "cuda" if profile.gpus else "cpu"
    if here != there:
        what = f"nodes {'with' if profile.gpus else 'without'} GPUs, and this environment is for {here}"
        fix = f"run DEVICE={there} make setup, or name another environment in {profile.name}.yaml (env_dir)"
        raise config_error("--profile", what, fix)


def send(submission: Submission) -> tuple[Run, int]:
    """Freeze the run, submit its script, and return the run and the id of its job.

    Where sbatch refuses, no run directory is left; where it prints no job id, the job may be in the queue, so the run
    directory stays.
    """
    recipe, names = submission.recipe, submission.names
    run = freeze(recipe, submission.plan, submission.sources, names, submission.resources, submission.environment)
    try:
        job = submit_script(run.folder, submission.script())
    except ConfigError as error:
        if not isinstance(error, MaybeSubmitted):
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    note_job(run.folder, recipe, f"{cluster_name()}-{job}")
    return run, job


def submit_script(folder: Path, text: str) -> int:
    """Keep a batch script in a folder, submit it from the working folder, and return the id of its job."""
    script = folder / "job.sh"
    try:
        script.write_text(text)
        Path("logs").mkdir(exist_ok=True)  # Slurm opens its logs before the script runs
    except OSError as error:
        what = f"cannot write {error.filename} ({error.strerror})"
        raise config_error("working folder", what, "submit from a folder you may write to") from None
    return submit(script)


def freeze(
    recipe: Recipe, plan: Plan, sources: Assets, names: Names, resources: Resources, environment: Mapping[str, str]
) -> Run:
    """Make the run directory of a run that starts later, with recipe, plan and code as checked.

    The folder must not exist yet. Its job starts it with ``grpo launch --resume DIR`` and the variables of
    ``frozen_environment``: it then runs the copy of the code, whatever happens to the repository while it waits.
    ``resources`` are what the job will offer.
    """
    run = new_run(names.run_dir.absolute(), names.run, names.timestamp, resources.facts())
    if run is None:
        what = f"{shown(names.run_dir)} exists: another run has just taken that name"
        raise config_error("run_name", what, "submit again, or set another run_name")
    try:
        own = (home() / plan.entry).is_relative_to(home() / "src")
        for name in _COPIED if own else (*_COPIED, plan.entry):
            source, copy = home() / name, run.folder / FROZEN_CODE / name  # both the entry itself, if it is absolute
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            elif source != copy:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
        if environment.get("CONFIG_FILE"):
            shutil.copyfile(environment["CONFIG_FILE"], run.folder / _ACCELERATE_FILE)
        run.identity["code"]["frozen_sha256"] = frozen_hash(run.folder)
        write_json(run.folder / "run.json", run.identity)
        freeze_inputs(run, recipe, plan)
        if not sources.missing:
            record_assets(run, sources)
        write_json(run.folder / "summary.json", {"status": SUBMITTED, "smoke": plan.smoke, "restarts": 0})
    except BaseException as error:
        shutil.rmtree(run.folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        what = f"cannot copy code and recipe into {shown(run.folder)} ({error.strerror or error})"
        raise config_error("run_root", what, "name a folder with room that you may write to") from None
    return run


def frozen_environment(run_dir: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which ``grpo launch --resume run_dir`` runs the code that ``freeze`` copied there."""
    code, accelerate = run_dir.absolute() / FROZEN_CODE, run_dir.absolute() / _ACCELERATE_FILE
    own_file = accelerate.is_file() or environment.get("CONFIG_FILE")
    return {
        CODE_VARIABLE: str(code),
        "GRPO_HOME": str(home()),
        "PYTHONPATH": str(code / "src"),
        "CACHE_ROOT": str(cache_root(environment)),  # where the user has it
        **({"CONFIG_FILE": str(accelerate)} if own_file else {}),
    }


def on_scratch(recipe: Recipe, profile: Profile) -> Recipe:
    """Return the recipe with the site's folder of runs, where the user named no other."""
    if not profile.run_root or recipe.given("run_root"):
        return recipe
    value = Value(profile.run_root, f"{profile.name}.yaml")
    return replace(recipe, values={**recipe.values, "run_root": value})


def _need_routes(recipe: Recipe, profile: Profile, names: Names, environment: Mapping[str, str]) -> None:
    """Refuse a run that uses the internet while it runs where the nodes, or this machine, have none."""
    if profile.internet:
        need_wandb_route(recipe, environment)
        need_target(recipe, environment, names.run)
        return
    rows = (
        (needs_wandb(recipe, environment), "report_to", "reports to W&B", OFFLINE_WANDB),
        (
            recipe["push_to_hub"],
            "push_to_hub",
            "publishes",
            "remove it, and push the finished model from here: hf upload",
        ),
    )
    nodes = f"the nodes of {profile.name} have no internet"
    if problems := [Problem(recipe.source(key), f"{what}, and {nodes}", fix) for uses, key, what, fix in rows if uses]:
        raise ConfigError(*problems)


def _check_deep(path: Path, task: str | None, flags: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse what `grpo check --deep` finds, in a process of its own: it imports torch, and stays off the network."""
    options = ["--deep", "--json", *(["--task", task] if task else [])]
    argv = [sys.executable, "-m", "grpo_recipes", "check", str(path), *options, *flags]
    code: int | None = None
    try:
        done = subprocess.run(
            argv, env=dict(environment), stdout=subprocess.PIPE, text=True, timeout=_DEEP_SECONDS, check=False
        )
        code = done.returncode
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        how = f"took more than {_DEEP_SECONDS} seconds" if code is None else f"ended with code {code} and no answer"
        fix = "run it by itself, and see where it stays or what it prints"
        raise config_error(shown(path), f"grpo check --deep {how}", fix) from None
    if found["problems"]:
        raise ConfigError(*[Problem(**problem) for problem in found["problems"]])
