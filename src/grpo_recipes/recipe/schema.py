"""The JSON schema of a recipe, by which editors complete and check keys; `make keys` writes ``recipes/schema.json``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.paths import home
from grpo_recipes.recipe.dialects import ALIASES
from grpo_recipes.recipe.document import BASE_KEY
from grpo_recipes.recipe.keys import catalogue, nested_catalogue

_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
_LINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)", re.MULTILINE)


def schema_file() -> Path:
    """Return where the schema of this installation is."""
    return home() / "recipes" / "schema.json"


def schema_line(recipe: Path) -> str:
    """Return the comment by which an editor finds the schema: relative inside the repository, absolute elsewhere."""
    inside = recipe.resolve().is_relative_to(home().resolve())
    path = os.path.relpath(schema_file(), recipe.resolve().parent) if inside else str(schema_file())
    return f"# yaml-language-server: $schema={path}"


def schema_note(recipe: Path) -> str | None:
    """Return what to write when a recipe names a schema that is not there, as a copied one does."""
    match = _LINE.search(recipe.read_text(encoding="utf-8"))
    if match is None or match[1].startswith(("http:", "https:")) or (recipe.parent / match[1]).is_file():
        return None
    line = schema_line(recipe)
    return f"{recipe.name} names a schema that is not there; editors know the keys with this first line: {line}"


def schema() -> dict[str, Any]:
    """Return the schema: every key of the catalogue, and nothing else."""
    properties = {name: _property((name,), entry) for name, entry in catalogue().items()}
    properties[BASE_KEY] = {
        "type": "string",
        "description": "A recipe whose keys this one takes over: a file beside this one or in the repository.",
    }
    for alias, key in ALIASES.items():
        properties[alias] = {**properties[key], "description": f"Another name of {key}."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "grpo-recipes recipe",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
    }


def _property(path: tuple[str, ...], entry: Mapping[str, Any]) -> dict[str, Any]:
    kind = _kind(path, entry)
    if entry.get("choices"):
        kind["enum"] = [*entry["choices"], *([None] if entry["optional"] else [])]
    kind |= {name: entry[limit] for name, limit in (("minimum", "min"), ("maximum", "max")) if limit in entry}
    return {**kind, "description": entry["help"], "default": entry["default"]}


def _kind(path: tuple[str, ...], entry: Mapping[str, Any]) -> dict[str, Any]:
    name = entry["type"]
    if name.startswith("list["):
        items = _object(path) if name == "list[dict]" else {"type": _TYPES[name[5:-1]]}
        # One item may stand alone, as on the command line.
        types: dict[str, Any] = {"type": ["array", items["type"]] if name != "list[dict]" else "array", "items": items}
    elif name == "dict":
        types = _object(path)
    else:
        types = {"type": _TYPES[name]}
    if entry["optional"]:
        kinds = types["type"] if isinstance(types["type"], list) else [types["type"]]
        types["type"] = [*kinds, "null"]
    return types


def _object(path: tuple[str, ...]) -> dict[str, Any]:
    known = nested_catalogue().get(".".join(path))
    if known is None:
        return {"type": "object"}
    properties = {name: _property((*path, name), entry) for name, entry in known.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


if __name__ == "__main__":
    schema_file().write_text(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
