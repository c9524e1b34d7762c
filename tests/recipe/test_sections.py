"""Sections give the keys of the catalog as attributes with the catalog's types."""

from __future__ import annotations

import ast
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.recipe import BrokenKey, merge_recipe, read_recipe
from grpo_recipes.recipe.fields import kind_of
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.sections import Key, Section, Sections

SOURCE = Path(__file__).parents[2] / "src"
ATTRIBUTES = {type(vars(Sections)[name].__get__({}, dict)).__name__: name for name in vars(Sections) if name[0] != "_"}


def keys_of_sections() -> list[tuple[type[Section], str, Key[Any]]]:
    catalogue()  # imports the modules with the sections of extensions
    return [
        (section, attribute, key)
        for section in Section.__subclasses__()
        for attribute, key in vars(section).items()
        if isinstance(key, Key)
    ]


def test_each_key_has_the_type_of_the_catalog() -> None:
    for section, attribute, key in keys_of_sections():
        (hint,) = typing.get_args(key.__orig_class__)  # type: ignore[attr-defined]
        entry = catalogue()[key.name]
        assert kind_of(hint) == (entry["type"], entry["optional"]), f"{section.__name__}.{attribute}"


def test_an_attribute_is_the_key_or_its_last_words() -> None:
    keys = keys_of_sections()
    assert len(keys) > 100
    assert [key.name for _, attribute, key in keys if not f"_{key.name}".endswith(f"_{attribute}")] == []
    names = [key.name for _, _, key in keys]
    assert len(names) == len(set(names))


def test_each_key_of_a_section_is_read() -> None:
    code = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    for section, attribute, key in keys_of_sections():
        owner = ATTRIBUTES.get(section.__name__, r"keys|\w+Keys\([\w.]+\)")  # the second is a section of an extension
        assert re.search(rf"\b(?:self|{owner})\.{attribute}\b", code), f"no code reads {key.name}"


def test_each_section_is_an_attribute_of_a_recipe(tmp_path: Path) -> None:
    core = {section for section, _, _ in keys_of_sections() if section.__module__ == Sections.__module__}
    assert set(ATTRIBUTES) == {section.__name__ for section in core}
    path = tmp_path / "recipe.yaml"
    path.write_text("maxent_tau: 0.5\nvllm_server_port: 9000\n")
    recipe = read_recipe(path)
    assert (recipe.maxent.tau, recipe.server.port, recipe.model.name) == (0.5, 9000, "")
    for section, attribute, key in keys_of_sections():
        assert getattr(section(recipe), attribute) == recipe[key.name]


def test_a_broken_value_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("maxent_tau: warm\n")
    recipe, _ = merge_recipe(path)
    with pytest.raises(BrokenKey, match="maxent_tau"):
        _ = recipe.maxent.tau


def test_no_code_reads_a_key_by_its_name() -> None:
    """``recipe["beta"]`` has no type, and mypy does not see that the key does not exist."""
    by_name = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
        and re.search(r"(^|[._])recipe$|^r$", owner := ast.unparse(node.value)) and owner != "run.recipe"
    ]  # fmt: skip
    assert by_name == []
