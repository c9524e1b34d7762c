"""A penalty that grows over the last tokens before the limit: DAPO, arXiv 2503.14476, equation 13."""

from __future__ import annotations

from typing import Any


def soft_overlong(
    completions: list[Any],
    completion_ids: list[list[int]],
    *,
    max_completion_length: int,
    soft_punish_cache: int | None = None,
    **_: Any,
) -> list[float | None]:
    """0 up to L - C tokens, falling to -1 at L: ``R = clip((L - C - n) / C, -1, 0)``.

    n is the tokens of the completion, its end token included; L = ``max_completion_length``. So a completion cut off at
    L gets -1.

    Args:
        completions: one completion a row.
        completion_ids: the sampled tokens of each completion, without padding.
        max_completion_length: L, in tokens.
        soft_punish_cache: C, in tokens; None is a quarter of L.
    """
    cache = soft_punish_cache or max(max_completion_length // 4, 1)
    free = max_completion_length - cache
    return [
        min(0.0, max(-1.0, (free - len(ids)) / cache))
        for _completion, ids in zip(completions, completion_ids, strict=True)
    ]
