"""A run directory made before its job runs: recipe, plan and code as they were checked.

The job starts it with ``grpo launch --resume DIR`` and the variables of ``frozen_environment``: it then runs the copy
of the code in the run directory, whatever happens to the repository while it waits.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.sources import Sources, record_sources
from grpo_recipes.paths import CODE_VARIABLE, cache_root, home, shown
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.user_code import copy_source
from grpo_recipes.rewards.load import keep_rewards
from grpo_recipes.runs.digests import rewriting
from grpo_recipes.runs.rundir import FROZEN_CODE, Run, frozen_hash, new_run_in, write_json, write_whole

SUBMITTED = "submitted"  # status of a run that no launch has started yet
_COPIED = ("src", "requirements", "training.sh")
_ACCELERATE_FILE = "accelerate.yaml"


def freeze(
    recipe: Recipe, plan: Plan, sources: Sources, names: Names, resources: Resources, environment: Mapping[str, str]
) -> Run:
    """Make the run directory ``names.run_dir`` of a run that starts later.

    Args:
        recipe: the checked recipe.
        plan: its plan, with these names and sources.
        sources: what was found of the models and data it reads.
        names: what the run is called.
        resources: what the job will offer; its ``job`` is None, since there is none yet.
        environment: variables of the user; what they change is in the frozen recipe.

    Returns:
        The run, with ``status`` "submitted" in its ``summary.json``.

    Raises:
        ConfigError: the folder exists or cannot be made.
    """
    run = new_run_in(names.run_dir.absolute(), names.run, names.timestamp, resources.facts())
    if run is None:
        what = f"{shown(names.run_dir)} exists: another run has just taken that name"
        raise config_error("run_name", what, "submit again, or set another run_name")
    try:
        _copy_code(run.folder / FROZEN_CODE, plan.entry)
        if environment.get("CONFIG_FILE"):
            shutil.copyfile(environment["CONFIG_FILE"], run.folder / _ACCELERATE_FILE)
        run.identity["code"]["frozen_sha256"] = frozen_hash(run.folder)
        write_json(run.folder / "run.json", run.identity)
        keep(run, recipe, plan)
        if not sources.missing:
            record_sources(run, sources)
        write_json(run.folder / "summary.json", {"status": SUBMITTED, "smoke": plan.smoke, "restarts": 0})
    except OSError as error:
        shutil.rmtree(run.folder, ignore_errors=True)
        what = f"cannot copy code and recipe into {shown(run.folder)} ({error.strerror or error})"
        raise config_error("run_root", what, "name a folder with room that you may write to") from None
    except BaseException:
        shutil.rmtree(run.folder, ignore_errors=True)
        raise
    return run


def keep(run: Run, recipe: Recipe, plan: Plan) -> None:
    """Leave recipe, plan and the user's own code in the run directory; notes on that code go into the plan."""
    with rewriting(run.folder):
        write_whole(run.folder / "recipe.yaml", recipe.as_yaml())
        for spec in recipe["callbacks"]:
            copy_source(spec, run.folder / "callbacks")
        plan.notes.extend(keep_rewards(recipe["reward_funcs"], run.folder))
        write_json(run.folder / "plan.json", plan.as_json())


def frozen_environment(run_dir: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which ``grpo launch --resume run_dir`` runs the code that was frozen there.

    Args:
        run_dir: a run directory that ``freeze`` made.
        environment: variables of the user: the caches stay where they are.
    """
    code = run_dir.absolute() / FROZEN_CODE
    accelerate = run_dir.absolute() / _ACCELERATE_FILE
    return {
        CODE_VARIABLE: str(code),
        "GRPO_HOME": str(home()),
        "PYTHONPATH": str(code / "src"),
        "CACHE_ROOT": str(cache_root(environment)),
        **({"CONFIG_FILE": str(accelerate)} if accelerate.is_file() or environment.get("CONFIG_FILE") else {}),
    }


def _copy_code(target: Path, entry: str) -> None:
    target.mkdir()
    names = [*_COPIED] if (home() / entry).is_relative_to(home() / "src") else [*_COPIED, entry]
    for name in names:
        source, copy = home() / name, target / name  # of an absolute entry both are the entry itself
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif source != copy:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
