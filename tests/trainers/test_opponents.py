"""Episodes against models in a real trainer: requests to each model, and trained tokens."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes import smoke
from grpo_recipes.extensions.environments.episode import Episode
from grpo_recipes.rollouts.turns import Turn, derive_seed
from grpo_recipes.trainers.grpo import GRPOTrainer

from .played_episodes import GROUP, generation, make_trainer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="EXTRAS=environments bash scripts/setup.sh"
)
TEXT = smoke.build_tokenizer()
LENGTHS: dict[str, Any] = {"max_completion_length": 2000, "environment_max_turns": 5}


def make_player(folder: Path, model: str, opponents: str, **keys: Any) -> tuple[GRPOTrainer, list[list[int]]]:
    """Make a TicTacToe trainer with a policy that takes the last free cell, and the list of its prompts."""
    trainer = make_trainer(folder, model, **LENGTHS | keys)
    trainer.source._specs = {}
    requests: list[list[int]] = []

    def last_free(prompts: list[Any], *_: Any) -> tuple[list[list[int]], None]:
        requests.extend(prompts)
        free = [re.findall(r"'(\[\d\])'", TEXT.decode(ids))[-1] for ids in prompts]
        return [[*TEXT(cell).input_ids, TEXT.eos_token_id] for cell in free], None

    trainer._generate_single_turn = last_free
    args = f'{{"opponents": "{opponents}", "player": "seed"}}'
    seats = [next(seed for seed in range(99) if derive_seed("seat", seed) % 2 == seat) for seat in (0, 1)]
    trainer.train_dataset = trainer.train_dataset.map(
        lambda _, place: {"environment": "textarena:TicTacToe-v0", "arguments": args, "seed": seats[place % 2]},
        with_indices=True,
    )
    return trainer, requests


def test_the_policy_plays_all_seats_and_learns_from_its_own(tmp_path: Path, model: str) -> None:
    trainer, requests = make_player(tmp_path, model, "policy")
    output = generation(trainer)
    played = trainer.source.played
    assert all(episode.done and len(episode.actions) > len(episode.policy_actions) > 1 for episode in played)
    assert len(requests) == sum(len(episode.actions) for episode in played)  # both seats ask the policy
    assert {episode.turns[-1].info["role"] for episode in played} == {"Player 0", "Player 1"}
    for row, episode in enumerate(played):
        mask = (output["tool_mask"] * output["completion_mask"])[row].bool()
        trained = output["completion_ids"][row][mask].tolist()
        assert trained == [
            token for cell in episode.policy_actions for token in [*TEXT(cell).input_ids, TEXT.eos_token_id]
        ]
        assert max(turn for turn in episode.turn_ids if turn is not None) == len(episode.policy_actions) - 1
        assert trainer.source.reward(episode) == math.fsum(turn.reward for turn in episode.turns)
        assert [turn["action"] for turn in episode.record()["turns"]] == episode.policy_actions
    logged = trainer._metrics["train"]
    assert logged["episodes/opponent_legal"] == [1.0]
    for seat in "player 0", "player 1":
        rewards = [
            trainer.source.reward(episode) for episode in played if str(episode.turns[-1].info["role"]).lower() == seat
        ]
        assert logged[f"episodes/reward_{seat}"] == [pytest.approx(sum(rewards) / len(rewards))]
    trainer.source.close()


def test_an_opponent_reads_its_own_seat_and_what_it_wrote(tmp_path: Path, model: str) -> None:
    trainer, requests = make_player(tmp_path, model, "policy")
    generation(trainer)
    texts = [TEXT.decode(ids) for ids in requests]
    for text in texts:
        assert len(re.findall(r"You are Player \d", text)) == 1
    seats = [text.partition("You are Player ")[2][0] for text in texts]
    assert set(seats) == {"0", "1"}
    longer = [text for text in texts if text.count("<|assistant|>") == 2]
    assert longer and all(re.search(r"<\|assistant\|>\[\d\]<\|im_end\|>", text) for text in longer)
    trainer.source.close()


def test_an_opponent_without_room_has_its_moves_drawn(tmp_path: Path, model: str) -> None:
    trainer, requests = make_player(tmp_path, model, "policy")
    generation(trainer)
    first = [ids for ids in requests if "<|assistant|>[" not in TEXT.decode(ids)]
    shorter, longer = min(map(len, first)), max(map(len, first))  # who begins, and who then reads the first move too
    trainer.source._script.max_prompt_length = (shorter + longer) // 2
    requests.clear()
    generation(trainer)
    begun = [episode for episode in trainer.source.played if not episode.failed]
    assert len(begun) == GROUP and all(
        episode.done and episode.turns[-1].info["role"] == "Player 0" for episode in begun
    )
    assert {
        action
        for episode in begun
        for turn, action in zip(episode.turns, episode.actions, strict=False)
        if turn.opponent
    } == {""}
    assert trainer._metrics["train"]["episodes/opponent_legal"][1] < 1
    assert all("You are Player 0" in TEXT.decode(ids) for ids in requests[2 * GROUP :])
    trainer.source.close()


def test_an_episode_that_ends_before_the_policys_first_turn_has_a_reward_and_nothing_to_train(
    tmp_path: Path, model: str
) -> None:
    trainer, _ = make_player(tmp_path, model, "policy")
    over = Turn([], 0.25, True, {"role": "Player 0", "won": 0.0})

    def ends(episodes: list[Episode], trainer: Any) -> None:
        for episode in episodes:
            episode.turns, episode.done = [over], True

    trainer.source._step_environments = ends
    output = generation(trainer)
    assert output["tool_mask"].sum() == 0
    assert all(trainer.source.reward(episode) == 0.25 for episode in trainer.source.played)
    trainer.source.close()
