"""Episodes against models, in a real trainer: who is asked for what, and what is trained on."""

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
    """A trainer of TicTacToe whose policy takes the last free cell, and the prompts that it is asked with."""
    trainer = make_trainer(folder, model, **LENGTHS | keys)
    trainer.source._specs = {}
    asked: list[list[int]] = []

    def last_free(prompts: list[Any], *_: Any) -> tuple[list[list[int]], None]:
        asked.extend(prompts)
        free = [re.findall(r"'(\[\d\])'", TEXT.decode(ids))[-1] for ids in prompts]
        return [[*TEXT(cell).input_ids, TEXT.eos_token_id] for cell in free], None

    trainer._generate_single_turn = last_free
    args = f'{{"opponents": "{opponents}", "player": "seed"}}'
    seats = [next(seed for seed in range(99) if derive_seed("seat", seed) % 2 == seat) for seat in (0, 1)]
    trainer.train_dataset = trainer.train_dataset.map(
        lambda _, place: {"environment": "textarena:TicTacToe-v0", "arguments": args, "seed": seats[place % 2]},
        with_indices=True,
    )
    return trainer, asked


def test_the_policy_plays_all_seats_and_learns_from_its_own(tmp_path: Path, model: str) -> None:
    trainer, asked = make_player(tmp_path, model, "policy")
    output = generation(trainer)
    played = trainer.source.played
    assert all(one.done and len(one.actions) > len(one.policy_actions) > 1 for one in played)
    assert len(asked) == sum(len(one.actions) for one in played)  # both seats ask the policy
    assert {one.turns[-1].info["role"] for one in played} == {"Player 0", "Player 1"}
    for row, one in enumerate(played):
        mask = (output["tool_mask"] * output["completion_mask"])[row].bool()
        trained = output["completion_ids"][row][mask].tolist()
        assert trained == [token for cell in one.policy_actions for token in [*TEXT(cell).input_ids, TEXT.eos_token_id]]
        assert max(turn for turn in one.turn_ids if turn is not None) == len(one.policy_actions) - 1
        assert trainer.source.reward(one) == math.fsum(turn.reward for turn in one.turns)
        assert [turn["action"] for turn in one.record()["turns"]] == one.policy_actions
    logged = trainer._metrics["train"]
    assert logged["episodes/opponent_legal"] == [1.0]
    for seat in "player 0", "player 1":
        own = [trainer.source.reward(one) for one in played if str(one.turns[-1].info["role"]).lower() == seat]
        assert logged[f"episodes/reward_{seat}"] == [pytest.approx(sum(own) / len(own))]
    trainer.source.close()


def test_an_opponent_reads_its_own_seat_and_what_it_wrote(tmp_path: Path, model: str) -> None:
    trainer, asked = make_player(tmp_path, model, "policy")
    generation(trainer)
    texts = [TEXT.decode(ids) for ids in asked]
    for text in texts:
        assert len(re.findall(r"You are Player \d", text)) == 1
    seats = [text.partition("You are Player ")[2][0] for text in texts]
    assert set(seats) == {"0", "1"}
    longer = [text for text in texts if text.count("<|assistant|>") == 2]
    assert longer and all(re.search(r"<\|assistant\|>\[\d\]<\|im_end\|>", text) for text in longer)
    trainer.source.close()


def test_an_opponent_without_room_has_its_moves_drawn(tmp_path: Path, model: str) -> None:
    trainer, asked = make_player(tmp_path, model, "policy")
    generation(trainer)
    first = [ids for ids in asked if "<|assistant|>[" not in TEXT.decode(ids)]
    shorter, longer = min(map(len, first)), max(map(len, first))  # who begins, and who then reads the first move too
    trainer.source._script.max_prompt_length = (shorter + longer) // 2
    asked.clear()
    generation(trainer)
    begun = [one for one in trainer.source.played if not one.failed]
    assert len(begun) == GROUP and all(one.done and one.turns[-1].info["role"] == "Player 0" for one in begun)
    assert {action for one in begun for turn, action in zip(one.turns, one.actions, strict=False) if turn.opponent} == {
        ""
    }
    assert trainer._metrics["train"]["episodes/opponent_legal"][1] < 1
    assert all("You are Player 0" in TEXT.decode(ids) for ids in asked[2 * GROUP :])
    trainer.source.close()


def test_an_episode_that_ends_before_the_policys_first_turn_has_a_reward_and_nothing_to_train(
    tmp_path: Path, model: str
) -> None:
    trainer, _ = make_player(tmp_path, model, "policy")
    over = Turn([], 0.25, True, {"role": "Player 0", "won": 0.0})

    def ends(episodes: list[Episode], trainer: Any) -> None:
        for one in episodes:
            one.turns, one.done = [over], True

    trainer.source._advance = ends
    output = generation(trainer)
    assert output["tool_mask"].sum() == 0
    assert all(trainer.source.reward(one) == 0.25 for one in trainer.source.played)
    trainer.source.close()
