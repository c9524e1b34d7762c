"""Run several recipes in order: `grpo launch sft.yaml grpo.yaml`. Each run starts from the model of the run before it.

``run.json`` of a run lists the recipes that follow it, and ``next_run.json`` names the run of the next recipe. So a
resume of any of these runs, also by a requeued Slurm job, continues with the recipes after it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.fetch.assets import ensure_assets
from grpo_recipes.launch.resolve import Options
from grpo_recipes.paths import display_path
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.check import choose_recipe, resolve_recipe
from grpo_recipes.recipe.document import Value, read_flags
from grpo_recipes.recipe.tasks import GRPO
from grpo_recipes.runs.rundir import Run, read_json

NEXT_RUN = "next_run.json"  # in a run directory: the run of the next recipe
MODEL = "model_name_or_path"


def list_later_stages(options: Options, resources: Resources) -> list[Options]:
    """Return the options of the recipes after the first, which start from the first recipe's model for now.

    Check and plan each, and download its missing models and datasets. Raise ConfigError if one of these recipes is
    wrong, before the first run takes hours. Without later recipes, return an empty list.
    """
    if not options.then or options.recipe is None:
        return []
    problems = find_shared_models(options.recipe, options.flags, os.environ)
    if options.meeting is not None:
        problem = "several recipes can't be combined with nodes that you start by hand"
        problems.append(Problem("--node_rank", problem, "launch one recipe, or use a Slurm job"))
    if problems:
        raise ConfigError(*problems)
    first = resolve_recipe(options.recipe, options.task, options.flags, os.environ, resources.device)
    stages = []
    for path in options.then:
        stage = replace(options, recipe=path, then=(), keys=start_from(first.model.name, first.model.revision))
        recipe = resolve_recipe(path, stage.task, stage.flags, os.environ, resources.device, stage.keys)
        make_plan(recipe, resources, os.environ)
        ensure_assets(recipe, os.environ, None, [path, *stage.words()], options.allow_changed_code)
        stages.append(stage)
    return stages


def describe_later_recipes(options: Options, device: str) -> dict[str, Any]:
    """Return the entries of ``run.json`` for a run that other recipes follow; an empty mapping for any other run.

    ``then`` has the absolute paths of these recipes, and ``then_flags`` the flags of all recipes. Raise ConfigError if
    a recipe is not found.
    """
    if not options.then:
        return {}
    paths = [choose_recipe(name, os.environ, GRPO, device).absolute() for name in options.then]
    return {"then": [str(path) for path in paths], "then_flags": list(options.flags)}


def next_stage(run: Run, options: Options) -> Options | None:
    """Return the options that start or resume the recipe after a completed run; None if no recipe follows.

    ``options`` are the options of ``run``. Raise ConfigError if the run has no model.
    """
    if not run.identity.get("then"):
        return None
    recipe, *later = run.identity["then"]
    stage = replace(options, recipe=None, resume=None, then=(), keys={}, previous=None, update_rewards=False)
    if next_run := read_json(run.folder / NEXT_RUN).get("run"):
        say(f"{display_path(recipe)} resumes in {display_path(next_run)}")
        return replace(stage, resume=next_run, flags=())
    model = run.folder / "model"
    if not model.is_dir():
        fix = f"launch the recipes again: {run.identity['command']}"
        raise config_error(display_path(run.folder), "the run has no model to start from", fix)
    say(f"{display_path(recipe)} starts from {display_path(model)}")
    flags = tuple(run.identity["then_flags"])
    keys = start_from(str(model), "main")
    return replace(stage, recipe=recipe, then=tuple(later), keys=keys, flags=flags, previous=str(run.folder))


def find_shared_models(first: str, flags: Sequence[str], environment: Mapping[str, str]) -> list[Problem]:
    """Return problems if a flag or variable sets the model of every recipe, and not only of the ``first``.

    Flags and variables apply to all recipes. ``first`` is the name of the first recipe, for the fix.
    """
    problems = []
    if MODEL in {key for key, _ in read_flags(flags, [])}:
        problems.append(Problem(f"--{MODEL}", "would apply to every recipe", f"set {MODEL} in {first}"))
    if environment.get("VLLM_MODEL"):
        problems.append(Problem("VLLM_MODEL", "would apply to every recipe", "unset VLLM_MODEL"))
    return problems


def start_from(model: str, revision: str) -> Mapping[str, Value]:
    """Return the keys that let a recipe start from ``model``, a folder or a hub id, at this revision."""
    source = "model of the recipe before"
    return {MODEL: Value(model, source), "model_revision": Value(revision, source)}
