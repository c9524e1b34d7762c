"""The catalogue that `check` and `plan` read, without torch."""

from __future__ import annotations

import importlib.metadata

from grpo_recipes.recipe.keys import (
    catalogue,
    catalogue_trl,
    environment_keys,
)


def test_the_catalogue_is_of_the_installed_trl():
    assert catalogue_trl() == importlib.metadata.version("trl")


def test_every_key_has_help_and_a_type_the_reader_knows():
    known = {"str", "int", "float", "bool", "dict", "list[str]", "list[int]", "list[float]"}
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


def test_environment_variables_stand_for_existing_keys():
    assert set(environment_keys().values()) <= set(catalogue())
    assert len(set(environment_keys().values())) == len(environment_keys())
