"""R7: the limits of a reward process cover its total use, not a single resource or call."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_recipes.rewards import pool as pools
from grpo_recipes.rewards.child import GARBLED, read_reply
from grpo_recipes.rewards.memory import _try_mount
from grpo_recipes.rewards.pool import RewardPool

WILD = f"{Path(__file__).parent / 'wild_reward.py'}:score"


def scores(pool: RewardPool, *completions: str) -> list:
    """Return the scores of completions, each with the reference solution "yes"."""
    columns = {"answer": ["yes"] * len(completions), "prompts": ["p"] * len(completions)}
    return pool.score(WILD, completions, columns)


def may_mount() -> bool:
    """Return whether a process may have its own /dev/shm here."""
    child = os.fork()
    if child == 0:
        os._exit(0 if _try_mount(1 << 20) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("completion", "count"), [("memfd 60", 40), ("memfd 600", 2)])
def test_files_in_memory_count(completion, count):
    """R7: memfd files are bounded, even if many quick calls each keep a small file."""
    with RewardPool(WILD, workers=1, timeout=20, memory_gib=0.4) as pool:
        assert "memory limit" in [score.reason for score in scores(pool, *[completion] * count)]


def test_files_in_shared_memory_are_limited_and_end_with_the_child():
    """R7: closed files in /dev/shm have no owning process and used to stay after the run."""
    if not may_mount():
        pytest.skip("no mount namespaces here")
    with RewardPool(WILD, workers=1, timeout=20, memory_gib=0.4) as pool:
        reasons = [score.reason for score in scores(pool, *["shared-file 60"] * 20)]
    assert any(reason and ("memory limit" in reason or "No space left" in reason) for reason in reasons)
    assert list(Path("/dev/shm").glob("wild-*")) == []


def test_what_rewards_print_is_limited_in_all_calls_together(capfd, monkeypatch):
    """R7: 50 MB per call filled the disk with the log."""
    monkeypatch.setattr(pools, "_MOST_PRINTED", 3 << 20)
    with RewardPool(WILD, workers=2, timeout=20) as pool:
        assert [score.value for score in scores(pool, *["print 2"] * 6)] == [1.0] * 6
    printed = capfd.readouterr().err
    assert 3 << 20 <= len(printed) < (3 << 20) + 500
    assert printed.count("later output is dropped") == 1


def test_a_child_cannot_send_a_long_reason():
    """R7: replies are short, because reasons are kept in files of the run."""
    line = b'{"score": [null, "%s", 0.1, false], "row": 0}'
    assert read_reply(line % (b"x" * 100), [WILD]) != GARBLED
    assert read_reply(line % (b"x" * 5000), [WILD]) == GARBLED
