"""What a reward said of a completion, or why it said nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# Rewards are float32 in the trainer; beyond this they are infinite there.
_LARGEST = 3.4e38
_LONGEST_REASON = 300  # characters; a reply of a child must fit a pipe's atomic write


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one reward for one completion.

    Attributes:
        value: the reward, or None.
        reason: why there is no verdict: a limit, a death, an exception, no number. None where there is a value, and
            where the reward returned None by itself, which says that the completion is not its task.
        seconds: wall time of the call; 0 where it is not known or no call was made.
        by_limit: whether a limit or a death decided: another call might end otherwise.
        replayed: whether an earlier verdict was given again without a call.
    """

    value: float | None
    reason: str | None = None
    seconds: float = 0.0
    by_limit: bool = False
    replayed: bool = False

    @property
    def missing(self) -> bool:
        """Whether there should be a verdict and is none."""
        return self.reason is not None


class WrongShape(Exception):
    """A reward returned something else than a list with one entry per completion."""


def entries(result: Any, rows: int) -> list[Any]:
    """What a reward returned, as a list.

    Args:
        result: a list, a tuple, or an array or tensor of one dimension.
        rows: completions it was called with.

    Raises:
        WrongShape: it is something else, or has another length.
    """
    if hasattr(result, "tolist") and getattr(result, "ndim", 0) == 1:
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise WrongShape(f"wrong type: returned {type(result).__name__} instead of a list")
    if len(result) != rows:
        raise WrongShape(f"wrong length: returned {len(result)} entries for {rows} completion{'s' if rows > 1 else ''}")
    return list(result)


def number(entry: Any) -> tuple[float | None, str | None]:
    """An entry of the list as value and reason; at most one of them is not None."""
    if entry is None:
        return None, None
    if isinstance(entry, str | bytes) or not hasattr(type(entry), "__float__"):
        return None, f"wrong type: {type(entry).__name__} instead of a number"
    try:
        value = float(entry)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return None, described(error)
    if not math.isfinite(value):
        return None, f"not a number: {value}"
    if abs(value) > _LARGEST:
        return None, f"not a number: {value:.0e} is infinite in float32"
    return value, None


def described(error: BaseException) -> str:
    """An exception in one short line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:_LONGEST_REASON] if lines else type(error).__name__
