"""Test environments in real child processes: a hang, death or lost state costs one episode, and the others continue."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.extensions.environments.stage import PLAY, hash_turn, parse_turn, play
from grpo_recipes.process.tree import descendants, is_alive
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score

pytestmark = pytest.mark.alone

FILE = Path(__file__).with_name("wild_environment.py")


def is_text(value: Any) -> bool:
    return isinstance(value, str)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(PLAY, workers=2, timeout=2.0, network=False, valid=is_text) as pool:
        moved(pool, ["warm", "warm"], [[], []])
        yield pool


def moved(
    pool: RewardPool, observations: list[str], actions: list[list[str]], kind: str = "Wild", name: str = "g",
    stopped: Callable[[], bool] = lambda: False, **arguments: Any,
) -> list[Score]:  # fmt: skip
    """Take episodes one turn further after turns that ended with ``observations``."""
    rows = range(len(actions))
    columns = {
        "environment": [f"{FILE}:{kind}" for _ in rows],
        "arguments": [json.dumps(arguments) for _ in rows],
        "seed": list(rows),
        "episode": [f"{name}/{row}" for row in rows],
        "last_digest": [hash_turn(text) for text in observations],
    }
    return pool.score(PLAY, actions, columns, stopped=stopped, names=columns["episode"])


def played(pool: RewardPool, actions: list[list[str]], **arguments: Any) -> list[list[Score]]:
    """Play these actions turn by turn; return the scores of each turn."""
    observations, turns = [""] * len(actions), []
    for turn in range(len(actions[0]) + 1):
        scores = moved(pool, observations, [episode_actions[:turn] for episode_actions in actions], **arguments)
        observations = [score.value or "" for score in scores]
        turns.append(scores)
    return turns


def test_an_episode_stays_in_its_child_between_turns(pool: RewardPool, tmp_path: Path) -> None:
    turns = played(pool, [["a", "b"]] * 8, folder=str(tmp_path), exactly=9, name="stays")
    assert len((tmp_path / "resets").read_text().splitlines()) == 8
    assert {parse_turn(score.value).info["said"] for score in turns[-1]} == {"b"}


def test_a_death_fails_one_episode_and_the_others_are_played_again(pool: RewardPool, tmp_path: Path) -> None:
    actions = [["a", "k" if row == 3 else "b", "c"] for row in range(8)]
    calm = [["a", "b", "c"] for _ in range(8)]
    without = played(pool, calm, exactly=9, name="calm")
    turns = played(pool, actions, folder=str(tmp_path), exactly=9, name="death")
    assert turns[2][3].reason == "its process died (SIGKILL, perhaps out of memory)"
    for row in set(range(8)) - {3}:
        assert [scores[row].value for scores in turns] == [scores[row].value for scores in without]
    assert len((tmp_path / "resets").read_text().splitlines()) > 8


def test_an_episode_that_grows_fails_and_the_others_are_played_again() -> None:
    with RewardPool(PLAY, workers=1, timeout=20.0, memory_gib=0.75, valid=is_text) as pool:
        turns = played(pool, [["a", "g" if row == 0 else "b"] for row in range(4)], exactly=9, name="grows")
    assert [score.reason for score in turns[-1]] == ["memory limit", None, None, None]


@pytest.mark.slow
def test_a_slow_episode_is_played_again_within_its_turns_limits() -> None:
    actions = [["s", "s", "s", "k" if row == 0 else "s"] for row in range(3)]
    with RewardPool(PLAY, workers=1, timeout=1.0, valid=is_text) as pool:
        moved(pool, ["warm"], [[]])
        turns = played(pool, actions, exactly=9, name="slow")
    assert [score.reason for score in turns[-1]] == ["its process died (SIGKILL, perhaps out of memory)", None, None]


@pytest.mark.slow
def test_an_episode_that_hangs_when_it_is_played_again_fails() -> None:
    with RewardPool(PLAY, workers=1, timeout=1.0, valid=is_text) as pool:
        moved(pool, ["warm"], [[]])
        first, _ = moved(pool, ["", ""], [[], []], name="again")
        observations = [first.value or ""] * 2
        first, _ = moved(pool, observations, [["s"], ["k"]], name="again", exactly=9)
        (replayed,) = moved(pool, [first.value or ""], [["h", "s"]], name="again", exactly=9)
    assert replayed.reason == "time limit" and 2.0 <= replayed.seconds < 20.0


def test_an_episode_is_played_on_whichever_child_has_it() -> None:
    with RewardPool(PLAY, workers=1, timeout=2.0, valid=is_text) as pool:
        assert played(pool, [["k"]], name="dies")[-1][0].by_limit
        deadline = time.monotonic() + 60
        while len(pool._children) < 2 or not all(child.ready for child in pool._children):
            pool._handle_replies(0.1)
            assert time.monotonic() < deadline
        (first,) = moved(pool, [""], [[]], name="home")
        pool._children.reverse()  # the order if the spare child was ready first
        (second,) = moved(pool, [first.value or ""], [["a"]], name="home", stopped=lambda: time.monotonic() > deadline)
    assert second.reason is None


@pytest.mark.parametrize(
    ("action", "reason"),
    [("h", "time limit"), ("r", "ValueError: a rule was broken"), ("u", "UnicodeEncodeError: 'utf-8' codec can't")],
    ids=["hangs", "raises", "shows half a character"],
)
def test_an_episode_that_goes_wrong_has_a_reason(pool: RewardPool, action: str, reason: str) -> None:
    (_, (score, other)) = played(pool, [[action], ["a"]], name=f"wrong{action}")
    assert score.value is None and str(score.reason).startswith(reason)
    assert other.reason is None


def test_an_episode_is_closed_when_it_ends_fails_or_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    known, file = json.dumps({"folder": str(tmp_path), "exactly": 2}), tmp_path / "closed"

    def here(episode: str, seed: int, actions: list[str]) -> None:
        play([actions], [f"{FILE}:Closing"], [known], [seed], [episode], [""])

    for turn in range(3):
        here("first/0", 5, ["a"] * turn)
    assert file.read_text().split() == ["5"]
    here("first/1", 6, [])
    with pytest.raises(ValueError, match="a rule was broken"):
        here("first/1", 6, ["r"])
    here("first/2", 7, [])
    assert file.read_text().split() == ["5", "6"]
    here("second/0", 8, [])
    assert file.read_text().split() == ["5", "6", "7"]
    assert capfd.readouterr().err.splitlines() == [f"{FILE}:Closing: close raised OSError"] * 3


def test_an_environment_that_does_not_repeat_itself_is_an_error(pool: RewardPool) -> None:
    (first,) = moved(pool, [""], [[]], kind="Forgetful", name="forget", exactly=9)
    pool.close()
    pool.start()  # none of its children has the episode
    (replayed,) = moved(pool, [first.value], [["a"]], kind="Forgetful", name="forget", exactly=9)
    assert "does not repeat itself from its seed" in str(replayed.reason)


def test_environments_have_no_network_unless_it_is_asked_for(pool: RewardPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        action = f"n{server.getsockname()[1]}"
        (_, (refused,)) = played(pool, [[action]], name="refused")
        assert "environment_network: true" in str(refused.reason)
        with RewardPool(PLAY, workers=1, timeout=10.0, valid=is_text) as connected:
            (_, (allowed,)) = played(connected, [[action]], name="allowed")
        assert allowed.reason is None


def test_a_child_that_sends_a_number_is_not_believed() -> None:
    with RewardPool("format_tags", workers=1, valid=is_text) as pool:
        (score,) = pool.score("format_tags", ["<answer>1</answer>"])
    assert score.value is None
    assert score.reason == "its process sent garbled replies"


def test_nothing_of_a_pool_is_left() -> None:
    # Check only the processes of this pool: a child of the module's pool may be starting its worker.
    with RewardPool(PLAY, workers=1, valid=is_text) as pool:
        played(pool, [["a"]], name="left")
        keepers = [child.pid for child in pool._children]
        processes = [*keepers, *(process.pid for keeper in keepers for process in descendants(keeper))]
        assert len(processes) == 2 and all(map(is_alive, processes))
    assert not any(map(is_alive, processes))
