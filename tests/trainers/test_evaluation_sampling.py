"""Evaluations with their own sampling keys, on transformers. test_external.py has the same tests for a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .tiny_training import train

STEPS = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "per_device_eval_batch_size": 4}


class Sampled:
    """A reward that records its completions in evaluation and in training."""

    def __init__(self) -> None:
        self.evaluated: list[str] = []
        self.trained: list[str] = []
        self.__name__ = "sampled"
        self.trainer: Any = None

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        (self.trained if self.trainer.model.training else self.evaluated).extend(texts)
        return [float(len(set(text))) for text in texts]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> tuple[Sampled, dict[str, Any]]:
    """Run a training and return its samples and the evaluation row."""
    from grpo_recipes.trainers.grpo import GRPOTrainer

    reward = Sampled()
    built = GRPOTrainer.__init__

    def remember(self: Any, **arguments: Any) -> None:
        reward.trainer = self
        built(self, **arguments)

    monkeypatch.setattr(GRPOTrainer, "__init__", remember)
    train(folder, reward, **STEPS | keys)
    monkeypatch.setattr(GRPOTrainer, "__init__", built)
    (row,) = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    return reward, row


@pytest.mark.slow
def test_greedy_evaluations_do_not_depend_on_the_seed_and_leave_the_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = run(tmp_path / "plain", monkeypatch)
    greedy = {"eval_temperature": 0.0, "num_generations_eval": 1}
    rewards = [run(tmp_path / f"greedy-{seed}", monkeypatch, **greedy, eval_sampling_seed=seed)[0] for seed in (1, 2)]
    assert rewards[0].evaluated == rewards[1].evaluated and len(rewards[0].evaluated) >= 5
    assert rewards[0].trained == rewards[1].trained == plain.trained


@pytest.mark.slow
def test_seeds_of_evaluations_are_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        run(tmp_path / str(place), monkeypatch, eval_sampling_seed=seed)[0].evaluated
        for place, seed in enumerate((5, 5, 6))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_length_and_nucleus_of_evaluations_are_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, row = run(tmp_path / "long", monkeypatch, eval_max_completion_length=7)
    assert row["eval_completions/max_length"] == 7  # the training has 4
    reward, _ = run(tmp_path / "narrow", monkeypatch, eval_top_p=1e-4, num_generations_eval=2)
    pairs = list(zip(reward.evaluated[::2], reward.evaluated[1::2], strict=True))
    assert len(pairs) >= 5 and all(first == other for first, other in pairs)  # only the most likely token remains
