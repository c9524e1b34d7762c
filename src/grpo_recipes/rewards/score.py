"""The score of a reward for one completion, or why there is none, and the one way in which a reward is called."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GIVEN_UP = "not called: too many unscored before it, or the run was stopped"
_LARGEST = 3.4e38  # rewards are float32 in the trainer; beyond this they are infinite there
_LONGEST_REASON = 300  # characters; a reply of a child must fit a pipe's atomic write


class RewardFailed(Exception):
    """A reward cannot be called at all: its code, not a completion, is at fault."""


class WrongShape(Exception):
    """A reward returned something other than a list with one entry per completion."""


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of one reward for one completion."""

    value: float | None
    # Why it is unscored: a limit, a death, an exception, no number. None where there is a value, and where the reward
    # returned None by itself, which says that the completion is not its task.
    reason: str | None = None
    seconds: float = 0.0  # wall time of the call; 0 where it is unknown or no call was made
    by_limit: bool = False  # a limit or a death decided: another call might end otherwise
    replayed: bool = False  # an earlier outcome was given again without a call

    @property
    def unscored(self) -> bool:
        """Return whether a value is missing that should be there."""
        return self.reason is not None


@dataclass(frozen=True)
class PoolReward:
    """A reward as a child process finds it."""

    spec: str  # name of ours, or the user's ``module:function`` or ``file.py:function``
    keys: Mapping[str, Any] = field(default_factory=dict)  # recipe keys that one of ours takes
    place: str | None = None  # loaded instead of ``spec``: the same function in a copy of the file


def parameters(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of the columns a reward takes, None for all."""
    kinds = inspect.signature(function).parameters.values()
    everything = any(parameter.kind == parameter.VAR_KEYWORD for parameter in kinds)
    return None if everything else [parameter.name for parameter in kinds]


def taken(columns: Mapping[str, Sequence[Any]], takes: Sequence[str] | None) -> dict[str, Sequence[Any]]:
    """Return the columns that a reward with these ``parameters`` takes."""
    return {name: values for name, values in columns.items() if takes is None or name in takes}


def call_reward(function: Callable[..., Any], columns: Mapping[str, Sequence[Any]], rows: int) -> list[Score]:
    """Call a reward, plain or async, on ``rows`` completions; WrongShape where it returns no list of that length."""
    result = function(**columns)
    if inspect.isawaitable(result):
        import asyncio

        async def awaited(waiting: Any = result) -> Any:
            return await waiting

        result = asyncio.run(awaited())
    if hasattr(result, "tolist") and getattr(result, "ndim", 0) == 1:
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise WrongShape(f"wrong type: returned {type(result).__name__} instead of a list")
    if len(result) != rows:
        raise WrongShape(f"wrong length: returned {len(result)} entries for {rows} completion{'s' if rows > 1 else ''}")
    return [_score(entry) for entry in result]


def _score(entry: Any) -> Score:
    if entry is None:
        return Score(None)
    if isinstance(entry, str | bytes) or not hasattr(type(entry), "__float__"):
        return Score(None, f"wrong type: {type(entry).__name__} instead of a number")
    try:
        value = float(entry)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Score(None, described(error))
    if not math.isfinite(value):
        return Score(None, f"not a number: {value}")
    if abs(value) > _LARGEST:
        return Score(None, f"not a number: {value:.0e} is infinite in float32")
    return Score(value)


def described(error: BaseException) -> str:
    """Return an exception in one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:_LONGEST_REASON] if lines else type(error).__name__
