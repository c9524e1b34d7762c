"""The registry of extensions: named objects exist, and two extensions can't declare the same key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import extensions as registry
from grpo_recipes.recipe import keys
from grpo_recipes.recipe.extensions import Extension, extensions, load
from grpo_recipes.recipe.fields import key

# The values of these mappings are names of objects.
REFERENCES = ("nested", "ports", "commands")


@pytest.mark.parametrize("extension", extensions(), ids=lambda extension: extension.name)
def test_every_object_that_an_extension_names_exists(extension: Extension) -> None:
    for part in fields(Extension):
        value = getattr(extension, part.name)
        if isinstance(value, str) and part.name != "name":
            assert not value or extension.load(part.name) is not None, part.name
        elif isinstance(value, Mapping) and part.name in REFERENCES:
            assert all(load(reference) is not None for reference in value.values()), part.name


def test_an_extension_is_named_after_its_folder() -> None:
    names = [extension.name for extension in extensions()]
    assert names == sorted(names[:-1]) + names[-1:] and len(set(names)) == len(names)


@dataclass
class Twice:
    """Declare a key of the core again."""

    run_name: str = key("x", "A name.")


def test_a_key_that_is_declared_twice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "twice", SimpleNamespace(Twice=Twice))
    monkeypatch.setattr(keys, "extensions", lambda: (Extension("twice", keys="twice:Twice"),))
    with pytest.raises(ConfigError, match="declares 'run_name', but the key exists already"):
        keys.extension_entries.__wrapped__()


def test_an_entry_point_that_is_not_an_extension_is_rejected() -> None:
    entry_point = SimpleNamespace(load=lambda: 3, value="dice:EXTENSION", dist=SimpleNamespace(name="dice"))
    with pytest.raises(ConfigError, match=r"must be an Extension, got int.*pip uninstall dice"):
        registry._load_installed(entry_point)
