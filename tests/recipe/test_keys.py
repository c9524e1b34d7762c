"""The catalogue that `check` and `plan` read, without torch."""

from __future__ import annotations

import importlib.metadata

import pytest

from grpo_recipes.recipe.keys import (
    ENVIRONMENT_KEYS,
    OBSOLETE_KEYS,
    OWNED_KEYS,
    RANGES,
    TRL_CHOICES,
    catalogue,
    catalogue_trl,
    nearest,
    nested_catalogue,
)


def test_the_catalogue_is_of_the_installed_trl():
    assert catalogue_trl() == importlib.metadata.version("trl")


def test_every_key_has_help_and_a_type_the_reader_knows():
    known = {"str", "int", "float", "bool", "dict", "list[str]", "list[float]"}
    assert len(catalogue()) > 150
    for name, entry in catalogue().items():
        assert entry["help"].strip(), name
        assert entry["type"] in known, name


def test_defaults_are_within_their_own_limits():
    for name, entry in catalogue().items():
        default = entry["default"]
        if default is None:
            assert entry["optional"], name
        elif isinstance(default, int | float) and not isinstance(default, bool):
            assert entry.get("min", default) <= default <= entry.get("max", default), name
        elif isinstance(default, str) and entry.get("choices"):
            assert default in entry["choices"], name


@pytest.mark.parametrize("table", [RANGES, TRL_CHOICES], ids=["ranges", "choices"])
def test_hand_kept_limits_are_of_existing_keys_and_in_the_catalogue(table):
    for key, limits in table.items():
        owner, _, name = key.rpartition(".")
        nested = {name: entry for part in nested_catalogue().values() for name, entry in part.items()}
        entry = nested[name] if owner else catalogue()[name]
        assert owner in ("", entry["config"])
        if isinstance(limits, dict):
            assert {name: entry[name] for name in limits} == limits
        else:
            assert entry["choices"] == limits


def test_environment_variables_stand_for_existing_keys():
    assert set(ENVIRONMENT_KEYS.values()) <= set(catalogue())
    assert len(set(ENVIRONMENT_KEYS.values())) == len(ENVIRONMENT_KEYS)


def test_no_key_is_both_refused_and_accepted():
    assert not set(catalogue()) & (set(OWNED_KEYS) | set(OBSOLETE_KEYS))
    assert not set(OWNED_KEYS) & set(OBSOLETE_KEYS)


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
