"""A run on its way to Slurm: checked and planned on the login node, frozen, and handed over."""

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
from grpo_recipes.fetch.sources import Sources, find_sources
from grpo_recipes.launch.freeze import freeze, frozen_environment
from grpo_recipes.launch.preflight_network import need_wandb_route, needs_wandb
from grpo_recipes.launch.resolve_run import note_job, planned_names
from grpo_recipes.paths import home, shown
from grpo_recipes.plan.devices import Resources, environment_flavour
from grpo_recipes.plan.disk import need_room
from grpo_recipes.plan.estimates import Estimates, estimate
from grpo_recipes.plan.fit import Memory
from grpo_recipes.plan.plan import choose_recipe, make_plan
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.publish.preflight import need_target
from grpo_recipes.recipe import Recipe, Value
from grpo_recipes.recipe.check import checked_recipe
from grpo_recipes.recipe.tasks import GRPO, entry_of, requested_task
from grpo_recipes.runs.rundir import Run
from grpo_recipes.slurm.profile import Profile, read_profile, walltime_seconds
from grpo_recipes.slurm.queue import cluster_name
from grpo_recipes.slurm.sbatch import MaybeSubmitted, submit
from grpo_recipes.slurm.script import Request, render

PROFILES = Path("slurm/profiles")
_SCRIPT = "job.sh"
_DEEP_SECONDS = 600


@dataclass(frozen=True)
class Submission:
    """A checked and planned run for a site.

    Attributes:
        profile: the site's profile, with what the command line gives in place of its values.
        recipe: the checked recipe.
        names: what the run is called.
        resources: what its job will offer.
        sources: what was found here of the models and data it reads.
        plan: what the job will start.
        estimates: memory, disk and time it will take.
        environment: variables of the user.
    """

    profile: Profile
    recipe: Recipe
    names: Names
    resources: Resources
    sources: Sources
    plan: Plan
    estimates: Estimates
    environment: Mapping[str, str]

    def script(self) -> str:
        """The batch script of the run."""
        request = Request(self.profile.job_name or self.names.run, chdir=Path.cwd())
        command = ["grpo", "launch", "--resume", str(self.names.run_dir)]
        return render(self.profile, request, command, frozen_environment(self.names.run_dir, self.environment))


def find_profile(given: str) -> Path:
    """The profile of that path, here or in the repository, or of that name among the repository's.

    Raises:
        ConfigError: there is none.
    """
    shipped = home() / PROFILES
    places = [Path(given), home() / given, shipped / f"{given}.yaml"]
    found = next((place for place in places if os.path.isfile(place)), None)  # False too for a name that is too long
    if found is None:
        names = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
        raise config_error("--profile", f"there is no profile '{given}'", f"name a file, or one of {names}")
    return found


def site_profile(given: str, environment: Mapping[str, str]) -> Profile:
    """The profile the user names; SLURM_GPU_FLAG_STYLE stands over its ``gpu_flag_style``.

    Raises:
        ConfigError: there is none, or something is wrong in it.
    """
    profile = read_profile(find_profile(given))
    style = environment.get("SLURM_GPU_FLAG_STYLE")
    return profile.with_values({"gpu_flag_style": style}, "SLURM_GPU_FLAG_STYLE") if style else profile


def site_environment(profile: Profile, environment: Mapping[str, str]) -> dict[str, str]:
    """The user's variables, with the site's cache where the user names none."""
    return {**({"CACHE_ROOT": profile.cache_root} if profile.cache_root else {}), **environment}


def site_resources(profile: Profile) -> Resources:
    """What a job of this profile offers."""
    flavour = "cuda" if profile.gpus else "cpu"
    gpus = tuple(str(index) for index in range(profile.gpus))
    return Resources(flavour, gpus, profile.cpus or 1).on_nodes(profile.nodes)


def prepare(
    profile: Profile, recipe_name: str | None, task: str | None, flags: Sequence[str], environment: Mapping[str, str]
) -> Submission:
    """Check a recipe, look that a job of this site could run it, and plan it there.

    Args:
        profile: the site's profile, with what the command line gives.
        recipe_name: the recipe as the user names it; None takes CONFIG or the default one.
        task: value of ``--task``.
        flags: recipe flags.
        environment: variables of the user.

    Raises:
        ConfigError: everything that would end the job.
    """
    environment = site_environment(profile, environment)
    resources = site_resources(profile)
    asked = requested_task(environment, task)
    path = choose_recipe(recipe_name, environment, asked.task or GRPO, resources.flavour)
    recipe = on_scratch(checked_recipe(path, flags, environment, asked), profile)
    names, sources = planned_names(recipe), find_sources(recipe, environment)
    plan = make_plan(recipe, resources, environment, names, entry_of(recipe, asked), sources)
    estimates = estimate(plan, recipe, names, profile.gpu_memory_gib, walltime_seconds(profile.time))
    _need_memory(plan, estimates.memory, profile)
    need_room(recipe, plan, names.run_dir)
    _need_routes(recipe, profile, names, environment)
    _look_deep(path, task, flags, environment)
    return Submission(profile, recipe, names, resources, sources, plan, estimates, environment)


def need_environment(profile: Profile) -> None:
    """The environment of the job must be of the flavour of its nodes, as far as it is known here.

    Raises:
        ConfigError: it is this one, and of the other flavour.
    """
    if profile.env_dir or profile.env_activate or profile.conda_env:
        return
    here, there = environment_flavour(), "cuda" if profile.gpus else "cpu"
    if here != there:
        what = f"nodes {'with' if profile.gpus else 'without'} GPUs, and this environment is for {here}"
        fix = f"run DEVICE={there} make setup, or name another environment in {profile.name}.yaml (env_dir)"
        raise config_error("--profile", what, fix)


def send(submission: Submission) -> tuple[Run, int]:
    """Freeze the run and submit its script.

    Returns:
        The run and the id of its job.

    Raises:
        ConfigError: the run directory cannot be made, or sbatch refuses; then no directory is left.
        MaybeSubmitted: sbatch tells no job id; the directory stays.
    """
    recipe, names = submission.recipe, submission.names
    plan, sources = submission.plan, submission.sources
    run = freeze(recipe, plan, sources, names, submission.resources, submission.environment)
    script = run.folder / _SCRIPT
    try:
        script.write_text(submission.script())
        Path("logs").mkdir(exist_ok=True)  # Slurm opens its logs before the script runs
        job = submit(script, Path.cwd())
    except MaybeSubmitted:
        raise
    except (ConfigError, OSError) as error:
        shutil.rmtree(run.folder, ignore_errors=True)
        if isinstance(error, ConfigError):
            raise
        what = f"cannot write {error.filename} ({error.strerror})"
        raise config_error("working folder", what, "submit from a folder you may write to") from None
    note_job(run.folder, recipe, f"{cluster_name()}-{job}")
    return run, job


def on_scratch(recipe: Recipe, profile: Profile) -> Recipe:
    """The recipe with the site's folder of runs, where nobody named another one."""
    if not profile.run_root or recipe.given("run_root"):
        return recipe
    value = Value(profile.run_root, f"{profile.name}.yaml")
    return replace(recipe, values={**recipe.values, "run_root": value})


def _need_memory(plan: Plan, memory: Memory, profile: Profile) -> None:
    if memory.fits:
        return
    what = f"the run does not fit: {memory.excess}"
    fix = f"{memory.knob}; or leave gpu_memory_gib out of {profile.name}.yaml to submit it all the same"
    raise config_error(shown(plan.recipe), what, fix)


def _need_routes(recipe: Recipe, profile: Profile, names: Names, environment: Mapping[str, str]) -> None:
    """What the run asks of the internet while it runs must be there: on the nodes, and here as far as that tells."""
    if profile.internet:
        need_wandb_route(recipe, environment)
        need_target(recipe, environment, names.run)
        return
    problems = []
    nodes = f"the nodes of {profile.name} have no internet"
    if needs_wandb(recipe, environment):
        fix = "export WANDB_MODE=offline and run wandb sync later, or report_to: none"
        problems.append(Problem(recipe.origin("report_to"), f"reports to W&B, and {nodes}", fix))
    if recipe["push_to_hub"]:
        fix = "remove it, and push the model of the finished run from here: hf upload"
        problems.append(Problem(recipe.origin("push_to_hub"), f"publishes, and {nodes}", fix))
    if problems:
        raise ConfigError(*problems)


def _look_deep(path: Path, task: str | None, flags: Sequence[str], environment: Mapping[str, str]) -> None:
    """`grpo check --deep` in a process of its own: it imports torch, and keeps the hub's clients off the network.

    Raises:
        ConfigError: everything it finds, models and data that are not here included.
    """
    options = ["--deep", "--json", *(["--task", task] if task else [])]
    argv = [sys.executable, "-m", "grpo_recipes", "check", str(path), *options, *flags]
    try:
        done = subprocess.run(
            argv, env=dict(environment), stdout=subprocess.PIPE, text=True, timeout=_DEEP_SECONDS, check=False
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        what = f"grpo check --deep took more than {_DEEP_SECONDS} seconds"
        raise config_error(shown(path), what, "run it by itself and see where it stays") from None
    except json.JSONDecodeError:
        what = f"grpo check --deep ended with code {done.returncode} and no answer"
        raise config_error(shown(path), what, "run it by itself and look at its messages") from None
    if found["problems"]:
        raise ConfigError(*[Problem(**problem) for problem in found["problems"]])
