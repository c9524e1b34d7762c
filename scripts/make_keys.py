"""Write ``keys.json``, by which all commands know the recipe keys, and the editors' ``recipes/schema.json``.

Both come from the config classes of ``grpo_recipes.recipe.configs``: ``make keys``.
"""

import json
from collections.abc import Mapping
from typing import Any

import trl
from passed_names import passed_names

from grpo_recipes.recipe.configs import CONFIGS, NESTED, RANGES, TRL_CHOICES
from grpo_recipes.recipe.converters import ALIASES, SAME_VALUES
from grpo_recipes.recipe.document import BASE_KEY
from grpo_recipes.recipe.fields import entries_of, kind_of
from grpo_recipes.recipe.keys import (
    CATALOGUE_FILE,
    OWNED_KEYS,
    catalogue,
    extension_entries,
    nested_catalogue,
    schema_file,
)


def _entries(config: Any) -> dict[str, dict[str, Any]]:
    """Return the keys of a config class that belong to the core."""
    return entries_of(config, {*OWNED_KEYS, *extension_entries()}, TRL_CHOICES, RANGES)


def catalogue_content() -> dict[str, Any]:
    """Return what ``keys.json`` holds: keys as plain data, and those of the mappings inside a key by its path."""
    keys = dict(sorted((name, entry) for config in CONFIGS for name, entry in _entries(config).items()))
    nested = {path: _entries(config) for path, config in NESTED.items()}
    return {"trl": trl.__version__, "keys": keys, "nested": nested, "passed": passed_names(kind_of)}


_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}


def schema() -> dict[str, Any]:
    """Return the JSON schema with which editors complete and check keys."""
    properties = {name: _property(name, entry) for name, entry in catalogue().items()}
    properties[BASE_KEY] = {
        "type": "string",
        "description": "A recipe that this one builds on: a file next to it or in the repository.",
    }
    for alias, key in ALIASES.items():
        properties[alias] = {**properties[key], "description": f"Another name of {key}."}
    for key, values in SAME_VALUES.items():
        if any(isinstance(value, bool) for value in values):
            properties[key]["type"] = [properties[key]["type"], "boolean"]
        properties[key]["enum"] = [*properties[key]["enum"], *values]
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
    types += ["string"] if entry.get("auto") else []
    types_of = {"type": types if len(types) > 1 else types[0]}
    schema: dict[str, Any] = {**types_of, "items": part} if is_list else {**part, **types_of}
    if entry.get("choices"):
        schema["enum"] = [*entry["choices"], *([None] if entry["optional"] else [])]
    schema |= {"pattern": "^auto$"} if entry.get("auto") else {}
    schema |= {name: entry[limit] for name, limit in (("minimum", "min"), ("maximum", "max")) if limit in entry}
    return {**schema, "description": entry["help"], "default": entry["default"]}


if __name__ == "__main__":
    for file, content in ((CATALOGUE_FILE, catalogue_content), (schema_file(), schema)):
        file.write_text(json.dumps(content(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
