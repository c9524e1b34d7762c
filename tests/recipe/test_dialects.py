"""Names of other recipes: translated to recipe keys, or refused with what to write instead."""

from __future__ import annotations

import pytest

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.dialects import (
    ALIASES,
    HARMLESS,
    OBSOLETE_KEYS,
    OLDER_TRL,
    SLURM_GUIDE,
    UNREAD_VARIABLES,
    nearest,
    recipe_keys,
)
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, OWNED_KEYS, READ_VARIABLES, SHELL_VARIABLES, catalogue


def translated(**keys: object) -> tuple[dict[str, object], list[Problem], list[str]]:
    """Translate one layer, and return what it gives for keys of the catalogue, its problems and its notes."""
    problems: list[Problem] = []
    notes: list[str] = []
    layer = [(key, Value(value, f"recipe.yaml:{line}")) for line, (key, value) in enumerate(keys.items(), 1)]
    return {key: raw.value for key, raw in recipe_keys(layer, problems, notes).items()}, problems, notes


def test_keys_of_the_catalogue_pass_as_they_are() -> None:
    assert translated(seed=1, beta=0.1) == ({"seed": 1, "beta": 0.1}, [], [])


@pytest.mark.parametrize(("name", "key"), ALIASES.items())
def test_another_name_is_read_as_its_key_and_noted(name: str, key: str) -> None:
    assert translated(**{name: 0.5}) == ({key: 0.5}, [], [f"recipe.yaml:1: '{name}' is read as {key}"])


@pytest.mark.parametrize("name", [*OBSOLETE_KEYS, *OWNED_KEYS, "seeed", "env"])
def test_every_other_name_is_refused_at_its_place_and_gives_nothing(name: str) -> None:
    keys, (problem,), notes = translated(seed=1, **{name: "x"})
    assert (keys, problem.where, notes) == ({"seed": 1}, "recipe.yaml:2", [])
    assert f"'{name}'" in problem.what and problem.fix


@pytest.mark.parametrize(("name", "value"), HARMLESS.items())
def test_what_asks_for_what_happens_anyway_is_noted_and_its_opposite_refused(name: str, value: bool) -> None:
    keys, problems, (note,) = translated(**{name: value})
    assert (keys, problems) == ({}, []) and "has no effect" in note
    assert translated(**{name: not value})[1]


def test_a_name_has_one_meaning() -> None:
    refused = [*OLDER_TRL, *SLURM_GUIDE, *OWNED_KEYS, *ALIASES]
    assert len(refused) == len(set(refused)) and not set(refused) & set(catalogue())
    assert set(ALIASES.values()) <= set(catalogue())
    variables = [*ENVIRONMENT_KEYS, *READ_VARIABLES, *SHELL_VARIABLES]
    assert len({*variables, *UNREAD_VARIABLES}) == len(variables) + len(UNREAD_VARIABLES)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("learning_rte", "learning_rate"),
        ("num_generation", "num_generations"),
        ("evaluation_strateg", "evaluation_strategy"),
        ("xyzzyx", None),
    ],
)
def test_the_nearest_key_of_a_typo(typo, meant):
    assert nearest(typo) == meant
