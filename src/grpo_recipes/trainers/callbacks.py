"""The user's own trainer callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_recipes.errors import config_error
from grpo_recipes.recipe.user_code import load_object


def load_callbacks(specs: Iterable[str], copies: Path | None = None) -> list[TrainerCallback]:
    """Make the callbacks a recipe names.

    Args:
        specs: ``module:Class`` or ``file.py:Class``.
        copies: the run's folder of copied files, which are run in place of the originals.

    Raises:
        ConfigError: a name is no class of callbacks, or its constructor wants arguments.
    """
    return [_make(spec, load_object(spec, copies)) for spec in specs]


def _make(spec: str, found: Any) -> TrainerCallback:
    if not (isinstance(found, type) and issubclass(found, TrainerCallback)):
        what = f"'{spec}' is no subclass of transformers.TrainerCallback"
        raise config_error("callbacks", what, "derive the class from TrainerCallback")
    try:
        return found()
    except TypeError as error:
        raise config_error(
            "callbacks", f"'{spec}' cannot be made ({error})", "let its __init__ take no argument"
        ) from error
