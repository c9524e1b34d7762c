"""A run reads the recipe that it froze, and has nothing to say about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe import read_frozen, read_recipe

RECIPES = [path for path in sorted((find_code_root() / "recipes").rglob("*.yaml")) if "base" not in path.parts]


@pytest.mark.parametrize("flags", [(), ("--logging_steps", "1")])
def test_a_frozen_recipe_is_read_without_notes(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """M20: a resume printed that a key in a file of the run's own changes nothing."""
    frozen, notes_of = tmp_path / "recipe.yaml", {}
    for path in RECIPES:
        frozen.write_text(read_recipe(path, flags).as_yaml())
        if notes := read_frozen(frozen).notes:
            notes_of[path.name] = notes
    assert notes_of == {}
