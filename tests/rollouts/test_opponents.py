"""Test models as a game's other players: the turns that they get and the text that they read."""

from __future__ import annotations

import importlib.util
import itertools
import re
from types import SimpleNamespace

import pytest

from grpo_recipes.extensions.environments.load import load_environment
from grpo_recipes.rollouts.backends import ServerRollouts
from grpo_recipes.rollouts.turns import Turn
from grpo_recipes.weights.lora import LoraClient

from .played import named_last, play, written

QUOTED = re.compile(r"'(\[\w+\])'")
GAMES = ["TicTacToe-v0", "KuhnPoker-v0", "SecretMafia-v0"]
needs_textarena = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="EXTRAS=environments bash scripts/setup.sh"
)


def named(turn: Turn) -> str:
    """Answer with the last move in quotes, which most games list, else with the last number in brackets."""
    return (QUOTED.findall(turn.messages[-1]["content"]) or [named_last(turn)])[-1]


@needs_textarena
@pytest.mark.parametrize("game", GAMES)
def test_a_model_is_asked_for_each_turn_of_the_other_seats(game: str) -> None:
    env = load_environment(f"textarena:{game}", {"opponents": "policy", "player": 1})
    turns = play(env, 5, named)
    seats = {turn.seat for turn in turns if turn.opponent}
    assert seats and 1 not in seats
    assert all(turn.opponent in ("", "policy") and turn.messages for turn in turns[:-1])
    assert written(play(env, 5, named)) == written(turns)


@needs_textarena
@pytest.mark.parametrize("game", GAMES)
def test_rewards_of_actions_are_the_policys_alone(game: str) -> None:
    args = {"opponents": "policy", "legal_reward": 0.5, "illegal_reward": -0.5}
    turns = play(load_environment(f"textarena:{game}", args), 5, named)
    assert any(turn.opponent for turn in turns)
    for before, after in itertools.pairwise(turns):
        assert ("opponent_legal" if before.opponent else "legal") in after.info
        assert ("legal" if before.opponent else "opponent_legal") not in after.info
        assert after.done or abs(after.reward) == (0.0 if before.opponent else 0.5)


@needs_textarena
def test_a_move_of_a_model_that_the_game_does_not_take_is_drawn_in_its_place() -> None:
    def first_free(turn: Turn) -> str:
        return "no move" if turn.opponent else re.findall(r"'(\[\d\])'", turn.messages[-1]["content"])[0]

    turns = play(load_environment("textarena:TicTacToe-v0", {"opponents": "policy"}), 5, first_free)
    legal = [turn.info["opponent_legal"] for turn in turns if "opponent_legal" in turn.info]
    assert len(legal) >= 2 and set(legal) == {0.0}
    assert "invalid" not in str(turns[-1].info["end"])
    placed = [
        text
        for turn in turns
        for message in turn.messages
        for text in re.findall(r"\(X\) in cell \d", message["content"])
    ]
    assert placed  # by the opponent


@needs_textarena
def test_each_seat_reads_what_is_new_to_it() -> None:
    turns = play(load_environment("textarena:SecretMafia-v0", {"opponents": "policy"}), 3, named)
    texts: dict[int, list[str]] = {}
    for turn in turns[:-1]:
        texts.setdefault(turn.seat if turn.opponent else -1, []).append(turn.messages[0]["content"])
    roles = {
        seat: re.findall(r"You are (Player \d).\nYour role: (\w+)", "".join(parts)) for seat, parts in texts.items()
    }
    assert all(len(matches) == 1 for matches in roles.values())
    assert all(matches[0][0] == f"Player {seat}" for seat, matches in roles.items() if seat >= 0)
    assert len({matches[0][1] for matches in roles.values()}) > 2


def test_the_base_model_is_asked_of_the_server_that_has_it() -> None:
    client = object.__new__(LoraClient)
    client.samples_base = False
    trainer = SimpleNamespace(
        use_vllm=True,
        args=SimpleNamespace(weight_guard=True, weight_sync="lora", vllm_server_base_url=None, world_size=1),
        vllm_generation=SimpleNamespace(vllm_client=client),
    )
    with ServerRollouts(trainer).using_base_model():
        assert client.samples_base
    assert not client.samples_base
