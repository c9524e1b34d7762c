"""The keys and variables of ``*_rows.yaml``: each is known, refused with the row's note, or read, as its row states."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledgers import SHOWN, Row, read_rows

from grpo_recipes.recipe import merge_recipe
from grpo_recipes.recipe.converters import ALIASES
from grpo_recipes.recipe.keys import (
    READ_VARIABLES,
    SHELL_VARIABLES,
    catalogue,
    environment_keys,
    nested_catalogue,
)

READ = {*environment_keys(), *READ_VARIABLES, *SHELL_VARIABLES}


def rows_with(field: str) -> list:
    """Return a case per name that a row lists in ``keys`` or ``variables``."""
    return [pytest.param(row, name, id=f"{row.id}-{name}") for row in read_rows() for name in getattr(row, field)]


def is_known(key: str) -> bool:
    """Return whether a recipe may contain ``key``. A dotted key is in the mapping before its last dot."""
    path, _, name = key.rpartition(".")
    if path:
        return name in nested_catalogue()[path]
    return key in catalogue() or key in ALIASES


@pytest.mark.parametrize(("row", "key"), rows_with("keys"))
def test_a_key_is_what_its_row_says(row: Row, key: str, tmp_path: Path) -> None:
    if row.status != "refused":
        assert is_known(key) == (row.status in SHOWN)
        return
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{key}: x\n")
    merged, problems = merge_recipe(recipe)
    if not problems:  # a note: it asks for the behavior of every run
        (note,) = merged.notes
        assert f"{key}: x changes nothing: {row.note.removeprefix('remove it; ')}" in note
        return
    (problem,) = problems
    assert problem.where == f"{recipe}:1" and key in problem.what
    assert problem.fix in (row.note, f"{row.note}: x")


@pytest.mark.parametrize("name", sorted({key for row in read_rows() for key in row.keys} & ALIASES.keys()))
def test_another_name_of_a_key_is_read_as_it_and_not_beside_it(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{name}: 0.5\n")
    merged, problems = merge_recipe(recipe)
    assert (merged[ALIASES[name]], problems) == (0.5, [])
    recipe.write_text(f"{name}: 0.5\n{ALIASES[name]}: 0.6\n")
    (problem,) = merge_recipe(recipe)[1]
    assert name in problem.what and problem.fix == f"remove {name}"


@pytest.mark.parametrize(("row", "name"), rows_with("variables"))
def test_a_variable_is_what_its_row_says(row: Row, name: str) -> None:
    assert (name in READ) == (row.status in SHOWN)


@pytest.mark.parametrize("key", ["span_kl_beta", "span_kl_target"])
def test_keys_without_effect_are_unknown(key: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{key}: 0.1\n")
    (problem,) = merge_recipe(recipe)[1]
    assert problem.what == f"unknown key '{key}'"


@pytest.mark.parametrize("name", ["path", "name", "data_dir", "data_files", "fraction"])
def test_trls_names_in_a_mixture_are_told(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"dataset_mixture:\n  datasets:\n    - id: a/b\n      {name}: x\n")
    (problem,) = merge_recipe(recipe)[1]
    assert problem.where == f"{recipe}:4" and f"'{name}'" in problem.what
