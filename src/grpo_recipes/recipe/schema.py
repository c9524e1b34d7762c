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
    properties = {name: _property(name, entry) for name, entry in catalogue().items()}
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


def _property(path: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a key, or of ``path`` inside one, with the keys of a mapping where they are known."""
    is_list = entry["type"].startswith("list[")
    kind = entry["type"].removeprefix("list[").removesuffix("]")
    part: dict[str, Any] = {"type": _TYPES[kind]}
    if kind == "dict" and path in nested_catalogue():
        properties = {name: _property(f"{path}.{name}", inner) for name, inner in nested_catalogue()[path].items()}
        part |= {"properties": properties, "additionalProperties": False}
    types = ["array"] if is_list else []
    types += [] if is_list and kind == "dict" else [part["type"]]  # one item may stand alone, as on the command line
    types += ["null"] if entry["optional"] else []
    types_of = {"type": types if len(types) > 1 else types[0]}
    found: dict[str, Any] = {**types_of, "items": part} if is_list else {**part, **types_of}
    if entry.get("choices"):
        found["enum"] = [*entry["choices"], *([None] if entry["optional"] else [])]
    found |= {name: entry[limit] for name, limit in (("minimum", "min"), ("maximum", "max")) if limit in entry}
    return {**found, "description": entry["help"], "default": entry["default"]}


if __name__ == "__main__":
    schema_file().write_text(json.dumps(schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
