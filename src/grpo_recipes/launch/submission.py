"""A run on its way to Slurm: checked and planned on the login node, frozen in its run directory, and handed over."""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.fetch.assets import Assets, find_assets, record_assets
from grpo_recipes.launch.attempt import SUBMITTED, freeze_inputs
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.launch.resolve import OFFLINE_WANDB, make_logs, names_of, need_wandb_route, needs_wandb, note_job
from grpo_recipes.paths import CODE_VARIABLE, cache_root, display_path, home, python_module
from grpo_recipes.plan.devices import Resources, environment_device
from grpo_recipes.plan.estimates import Estimates, estimate
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.preflight import GOOD_CORES, GOOD_GIB, find_shortages, slurm_bytes
from grpo_recipes.plan.room import need_room
from grpo_recipes.plan.types import Names, Plan
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
    """A checked and planned run that starts later."""

    recipe: Recipe
    names: Names
    resources: Resources  # what its job will offer
    sources: Assets  # what was found here of the models and data it reads
    plan: Plan
    environment: Mapping[str, str]  # the user's

    def script(self, profile: Profile) -> str:
        """Return the batch script of the run for a site."""
        name, command = profile.job_name or self.names.run, ["grpo", "launch", "--resume", str(self.names.run_dir)]
        return render(profile, name, command, frozen_environment(self.names.run_dir, self.environment), Path.cwd())


def site_profile(given: str, environment: Mapping[str, str]) -> Profile:
    """Read the profile of that path, here or in the repository, or of that name among the repository's."""
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
    return Resources(device, gpus, profile.cpus or 1, gpu_gib=profile.gpu_memory_gib).on_nodes(profile.nodes)


def prepare(
    profile: Profile, recipe_name: str | None, task: str | None, flags: Sequence[str], environment: Mapping[str, str]
) -> tuple[Submission, Estimates]:
    """Check a recipe (None: CONFIG or the default one), refuse it with all that would end its job, and plan it."""
    environment = site_environment(profile, environment)
    resources, asked = site_resources(profile), judge_profile(profile)
    recipe = on_scratch(resolve_recipe(recipe_name, task, flags, environment, resources.device), profile)
    names, sources = names_of(recipe), find_assets(recipe, environment)
    plan = make_plan(recipe, resources, environment, names, sources)
    plan.notes.extend(asked)
    estimates = estimate(plan, recipe, names, profile.gpu_memory_gib, walltime_seconds(profile.time))
    anyway = f"or leave gpu_memory_gib out of {profile.name}.yaml to submit it all the same"
    if larger := [
        Problem(
            display_path(plan.recipe), f"the run does not fit: the {role} needs {need.size}", f"{need.fix}; {anyway}"
        )
        for role, need in estimates.memory.items()
        if not need.fits
    ]:
        raise ConfigError(*larger)
    need_room(recipe, plan, names.run_dir)
    if profile.internet:
        need_wandb_route(recipe, environment)
        AllHooks().check(recipe, environment, names.run)
    else:
        problems, why = [], f"and the nodes of {profile.name} have no internet"
        if needs_wandb(recipe, environment):
            problems.append(Problem(recipe.source("report_to"), f"reports to W&B, {why}", OFFLINE_WANDB))
        if recipe["push_to_hub"]:
            fix = "remove it, and push the finished model from here: hf upload"
            problems.append(Problem(recipe.source("push_to_hub"), f"publishes, {why}", fix))
        if problems:
            raise ConfigError(*problems)
    _check_deep(recipe.path, task, flags, environment)
    return Submission(recipe, names, resources, sources, plan, environment), estimates


def judge_profile(profile: Profile) -> list[str]:
    """Refuse a profile that asks for too few cores or too little memory for its GPUs; return notes of what it leaves.

    The working folder is where Slurm opens the job's logs: it replaces %j and the like in the whole path.
    """
    file, problems = f"{profile.name}.yaml", []
    for what, option in find_shortages(profile.gpus, profile.cpus or math.inf, slurm_bytes(profile.mem)):
        fix = option.replace("--cpus-per-task=", "write cpus: ").replace("--mem=", "write mem: ")
        problems.append(Problem(file, what, fix))
    if re.search(r"[%\\\n]", here := os.getcwd()):
        what = f"'{here}' holds a character that Slurm replaces in the names of its logs, which then cannot be opened"
        problems.append(Problem("working folder", what, "submit from a folder without % and \\"))
    if problems:
        raise ConfigError(*problems)
    left = [key for key in ("cpus", "mem") if profile.gpus and not profile.exclusive and getattr(profile, key) is None]
    if not left:
        return []
    what = f"{file} asks for no {' and no '.join(left)}: where a site gives one core and a few GB by default"
    enough = f"cpus: {GOOD_CORES * profile.gpus} and mem: {GOOD_GIB * profile.gpus}G"
    return [f"{what}, the job ends at its start; write e.g. {enough}"]


def need_environment(profile: Profile) -> None:
    """Refuse this environment for a job whose nodes are for the other device, unless the profile names another one."""
    if profile.env_dir or profile.env_activate or profile.conda_env:
        return
    here, there = environment_device(), "cuda" if profile.gpus else "cpu"
    if here != there:
        what = f"nodes {'with' if profile.gpus else 'without'} GPUs, and this environment is for {here}"
        fix = f"run DEVICE={there} make setup, or name another environment in {profile.name}.yaml (env_dir)"
        raise config_error("--profile", what, fix)


def send(submission: Submission, profile: Profile) -> tuple[Run, int]:
    """Freeze the run, submit its script, and return the run and its job's id; where sbatch refuses, leave nothing."""
    run = freeze(submission)
    try:
        job = submit_script(run.folder, submission.script(profile))
    except ConfigError as error:
        if not isinstance(error, MaybeSubmitted):  # else the job may be in the queue
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    note_job(run.folder, submission.recipe, f"{cluster_name()}-{job}")
    return run, job


def submit_script(folder: Path, text: str) -> int:
    """Keep a batch script in a folder, submit it from the working folder, and return the id of its job."""
    make_logs()  # Slurm opens its logs before the script runs
    script = folder / "job.sh"
    fix = "name a folder with room that you may write to"
    with translate(
        OSError, lambda error: config_error(display_path(script), f"cannot be written ({error.strerror})", fix)
    ):
        script.write_text(text)
    return submit(script)


def freeze(submission: Submission) -> Run:
    """Make the run directory of a run that starts later, which must not exist yet: recipe, plan and code as checked.

    ``grpo launch --resume DIR`` with the variables of ``frozen_environment`` starts it, with its copy of the code.
    """
    names, plan, environment = submission.names, submission.plan, submission.environment
    run = new_run(names.run_dir.absolute(), names.run, names.timestamp, submission.resources.facts())
    if run is None:
        what = f"{display_path(names.run_dir)} exists: another run has just taken that name"
        raise config_error("run_name", what, "submit again, or set another run_name")
    what, fix = (
        f"cannot copy code and recipe into {display_path(run.folder)}",
        "name a folder with room that you may write to",
    )
    with (
        contextlib.ExitStack() as undo,
        translate(OSError, lambda error: config_error("run_root", f"{what} ({error.strerror or error})", fix)),
    ):
        undo.callback(shutil.rmtree, run.folder, ignore_errors=True)
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
        freeze_inputs(run, submission.recipe, plan)
        if not submission.sources.missing:
            record_assets(run, submission.sources)
        write_json(run.folder / "summary.json", {"status": SUBMITTED, "smoke": plan.smoke, "restarts": 0})
        undo.pop_all()
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
    if not profile.run_root or recipe.is_set("run_root"):
        return recipe
    return recipe.with_value("run_root", Value(profile.run_root, f"{profile.name}.yaml"))


def _check_deep(path: Path, task: str | None, flags: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse what `grpo check --deep` finds, in a process of its own: it imports torch, and stays off the network."""
    options = ["--deep", "--json", *(["--task", task] if task else [])]
    argv = python_module("grpo_recipes", "check", str(path), *options, *flags)

    def refused(how: str) -> ConfigError:
        fix = "run it by itself, and see where it stays or what it prints"
        return config_error(display_path(path), f"grpo check --deep {how}", fix)

    with translate(subprocess.TimeoutExpired, lambda _: refused(f"took more than {_DEEP_SECONDS} seconds")):
        done = subprocess.run(argv, env=dict(environment), stdout=subprocess.PIPE, timeout=_DEEP_SECONDS, check=False)
    with translate(ValueError, lambda _: refused(f"ended with code {done.returncode} and no answer")):
        found = json.loads(done.stdout)
    if found["problems"]:
        raise ConfigError(*[Problem(**problem) for problem in found["problems"]])
