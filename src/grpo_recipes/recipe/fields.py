"""Recipe keys as fields of a dataclass, and the catalogue entries that describe them. No torch.

@dataclass
class DiceArguments:
    dice_sides: int = key(6, "Sides of a die.", min=2)

entries_of(DiceArguments)  # {"dice_sides": {"type": "int", "default": 6, "help": "Sides of a die.", "min": 2, ...}}
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

# Larger values are typing errors: no run has them.
MOST_TOKENS, MOST_ROWS, MOST_OF_A_GROUP, MOST_STEPS, MOST_GPUS = 10_000_000, 1_000_000, 65_536, 10**9, 1024
# Limits of our fields: min, max, infinite, auto. TRL's parser passes a field's metadata on to argparse, which rejects
# them there.
FIELD_LIMITS: dict[dataclasses.Field[Any], dict[str, Any]] = {}


def key(default: Any, help: str, choices: list[str] | None = None, **limits: float) -> Any:
    """Return a dataclass field with a recipe key's help line and choices, and store its limits in ``FIELD_LIMITS``."""
    metadata: dict[str, Any] = {"help": help, "choices": choices} if choices else {"help": help}
    value: dict[str, Any] = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    field = dataclasses.field(**value, metadata=metadata)
    FIELD_LIMITS[field] = limits
    return field


def entries_of(
    config: Any,
    left_out: Collection[str] = (),
    choices: Mapping[str, list[str]] | None = None,
    ranges: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the keys of a config class: name -> type, default, help, limits and the class.

    ``choices`` and ``ranges`` add limits that the class does not declare. The keys in ``left_out`` and private fields
    are omitted.
    """
    hints, entries = typing.get_type_hints(config), {}
    for spec in dataclasses.fields(config):
        name, hint = spec.name, hints[spec.name]
        if not spec.init or name in left_out or name.startswith("_"):
            continue
        kind, optional = kind_of(hint)
        default = spec.default_factory() if spec.default_factory is not dataclasses.MISSING else spec.default
        classes = [member for member in (hint, *typing.get_args(hint)) if isinstance(member, type)]
        values = {str(value.value) for member in classes if issubclass(member, enum.Enum) for value in member}
        allowed = spec.metadata.get("choices") or (choices or {}).get(name) or values
        entries[name] = {
            "config": config.__name__,
            "type": kind,
            "optional": optional or default is None,
            "default": default.value if isinstance(default, enum.Enum) else default,
            "help": " ".join(str(spec.metadata.get("help", "")).split()),
            **FIELD_LIMITS.get(spec, {}),
            **(ranges or {}).get(name, {}),
            **({"choices": allowed if isinstance(allowed, list) else sorted(allowed)} if allowed else {}),
        }
    return entries


def kind_of(hint: Any) -> tuple[str, bool]:
    """Return the catalogue's name of a type annotation, and whether None is allowed.

    A union of several types is named after its dict or list, or else is a "str". Other unknown types are "any".
    """
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = {kind_of(member)[0] for member in members if member is not type(None)}
        wide = [kind for kind in ("dict", "list[str]", "list[any]") if kind in kinds]
        return [*wide, kinds.pop() if len(kinds) == 1 else "str"][0], type(None) in members
    if origin is list:
        return f"list[{kind_of(members[0])[0]}]", False
    if origin is dict or hint is dict or dataclasses.is_dataclass(hint):
        return "dict", False
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return "str", False
    return {bool: "bool", int: "int", float: "float", str: "str"}.get(hint, "any"), False
