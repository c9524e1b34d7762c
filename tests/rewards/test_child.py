"""Replies of a child process: what one of ours writes is read, all else counts as its death."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_recipes.numbers import LARGEST_REWARD
from grpo_recipes.rewards import child
from grpo_recipes.rewards.child import GARBLED, read_reply

SPECS = ("math_verify", "own.py:score")
READY = {"ready": {"math_verify": None, "own.py:score": ["completions"]}, "together": ["own.py:score"]}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
)
NAMES = st.sampled_from(["score", "row", "ready", "together", "failed", "died", *SPECS])
LIKE_REPLIES = st.dictionaries(
    NAMES, ANYTHING | st.lists(ANYTHING, min_size=4, max_size=4) | st.just(READY["ready"]), max_size=3
)


@pytest.mark.parametrize(
    "reply",
    [
        READY,
        {"failed": "no such file"},
        {"died": "its process exited (code 1)"},
        {"score": [0.5, None, 0.1, False], "row": 3},
        {"score": [None, None, 0.1, False], "row": 0},
        {"score": [None, "time limit", 5, True], "row": 0},
    ],
)
def test_a_reply_of_ours_is_read_as_it_is(reply: dict[str, Any]) -> None:
    assert read_reply(json.dumps(reply).encode(), SPECS) == reply


@given(ANYTHING | LIKE_REPLIES)
def test_anything_else_is_a_death_and_no_score_is_out_of_range(reply: Any) -> None:
    read = read_reply(json.dumps(reply).encode(), SPECS)
    assert read in (reply, GARBLED)
    if "score" in read:
        value, reason, seconds, by_limit = read["score"]
        assert value is None or (math.isfinite(value) and abs(value) <= LARGEST_REWARD and reason is None)
        assert type(read["row"]) is int and 0 <= seconds < math.inf and type(by_limit) is bool
    if "ready" in read:
        assert set(read["ready"]) == set(SPECS) and set(read["together"]) <= set(SPECS)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_json_are_a_death(line: bytes) -> None:
    assert read_reply(line, SPECS) == GARBLED or json.loads(line)


@pytest.mark.parametrize(
    "reply",
    [
        {"score": [math.nan, None, 0.1, False], "row": 0},
        {"score": [math.inf, None, 0.1, False], "row": 0},
        {"score": [1e39, None, 0.1, False], "row": 0},
        {"score": [10**400, None, 0.1, False], "row": 0},
        {"score": [True, None, 0.1, False], "row": 0},
        {"score": ["1", None, 0.1, False], "row": 0},
        {"score": [1.0, "but why", 0.1, False], "row": 0},
        {"score": [1.0, None, -1, False], "row": 0},
        {"score": [1.0, None, 0.1, 0], "row": 0},
        {"score": [1.0, None, 0.1], "row": 0},
        {"score": [1.0, None, 0.1, False], "row": True},
        {"score": [1.0, None, 0.1, False], "row": 0, "more": 1},
        {"ready": {"math_verify": None}, "together": []},
        {"ready": {"math_verify": None, "own.py:score": ["answer"]}, "together": []},
        {"ready": {"math_verify": None, "own.py:score": None}, "together": ["other"]},
        {"failed": 3},
        {"died": None},
        {"out_of_memory": True},
        [],
        None,
    ],
)
def test_a_reply_of_another_shape_is_a_death(reply: Any) -> None:
    assert read_reply(json.dumps(reply).encode(), SPECS) == GARBLED


def test_a_secret_at_the_end_of_a_long_reason_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_secrets", ["plantedsecret"])
    for length in range(250, 300):
        reason = child._make_unscored(ValueError("x" * length + "plantedsecret")).reason
        assert reason is not None and "xp" not in reason and len(reason) <= 300
