"""The baselines of bench/environments.py: games of SecretMafia that no model plays."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from bench.scripts import HOME, script


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    pytest.importorskip("textarena")
    with script("environments", alias="bench_environments") as module:
        yield module


def test_who_does_not_look_at_the_game_plays_worse_than_who_draws_a_valid_move(bench: ModuleType) -> None:
    recipe = HOME / "recipes/environments/secret_mafia_smoke.yaml"
    rows = {mode: bench.baseline(recipe, mode, times=2) for mode in ("blind", "drawn", "scripted")}
    assert [row["mode"] for row in rows.values()] == list(rows) == list(bench.BASELINES)
    names = ("legal", "won", "reward_detective")  # as a run's eval.jsonl has them
    legal, won, reward = ([row["evaluated"][0][f"eval_episodes/{name}"] for row in rows.values()] for name in names)
    assert 0.2 < legal[0] < 0.5 and legal[1:] == [1, 1]
    assert sorted(won) == won and sorted(reward) == reward
    assert all(row["episodes_played"] == 128 for row in rows.values())
