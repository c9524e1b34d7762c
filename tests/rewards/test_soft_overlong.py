"""The penalty near the longest completion."""

from __future__ import annotations

import pytest

from grpo_recipes.rewards.functions import soft_overlong


def rewards(lengths: list[int], **keys) -> list[float | None]:
    ids = [[5] * length for length in lengths]
    return soft_overlong([""] * len(ids), ids, max_completion_length=100, answer=["7"] * len(ids), **keys)


def test_the_penalty_grows_over_the_last_tokens():
    assert rewards([0, 80, 85, 90, 100, 120], soft_punish_cache=20) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_by_default_the_last_quarter_is_punished():
    assert rewards([75, 80, 100]) == pytest.approx([0.0, -0.2, -1.0])


def test_it_is_the_reference_formula():
    from trl.rewards import get_soft_overlong_punishment

    for cache in (1, 7, 50, 100):
        reference = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=cache)
        lengths = list(range(0, 130))
        assert rewards(lengths, soft_punish_cache=cache) == pytest.approx(reference([[1] * n for n in lengths]))
