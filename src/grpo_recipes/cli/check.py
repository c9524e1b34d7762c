"""`grpo check`: say everything that is wrong in a recipe."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict

from grpo_recipes.cli.recipes import add_recipe_arguments, chosen_recipe
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError
from grpo_recipes.fetch.gated import gated_note
from grpo_recipes.paths import shown
from grpo_recipes.plan.environment import hub_environment
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.rules import notes
from grpo_recipes.recipe.schema import schema_note

HELP = "say everything that is wrong in a recipe"
TAKES_RECIPE = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--deep and --json, beside the recipe's."""
    add_recipe_arguments(parser)
    parser.add_argument("--deep", action="store_true", help="also load tokenizer, data and rewards (seconds)")
    parser.add_argument("--json", action="store_true", help="print problems and notes as JSON")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Say that the recipe is right, with notes; with ``--json`` everything found, right or wrong.

    Returns:
        0, or with ``--json`` 2 where something is wrong.

    Raises:
        ConfigError: every problem of the recipe, without ``--json``.
    """
    if options.json:
        return _run_json(options, flags)
    recipe = chosen_recipe(options, flags)
    for note in _notes(recipe):
        print(f"grpo: note: {note}")
    for line in _deep(recipe) if options.deep else []:
        print(line)
    print(f"grpo: {shown(recipe.path)} is right")
    return 0


def _notes(recipe: Recipe) -> list[str]:
    told = [gated_note(recipe["model_name_or_path"]), schema_note(recipe.path)]
    return [*notes(recipe), *(note for note in told if note)]


def _run_json(options: argparse.Namespace, flags: list[str]) -> int:
    recipe: Recipe | None = None
    problems = []
    seen: list[str] = []
    try:
        recipe = chosen_recipe(options, flags)
        seen = _deep(recipe) if options.deep else []
    except ConfigError as refused:
        problems = refused.problems
    answer = {
        "ok": not problems,
        "recipe": str(recipe.path) if recipe else options.recipe or options.config,
        "problems": [asdict(problem) for problem in problems],
        "notes": _notes(recipe) if recipe else [],
        "deep": seen,
    }
    print(json.dumps(answer, indent=1))
    return EXIT_CONFIG_ERROR if problems else 0


def _deep(recipe: Recipe) -> list[str]:
    # Before the import: the hub's clients read these once.
    os.environ.update(hub_environment(os.environ))
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    from grpo_recipes.doctor.deep_check import look_deep

    return look_deep(recipe, os.environ)
