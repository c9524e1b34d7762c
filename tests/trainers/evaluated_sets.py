"""Evaluations of many sets in a single trainer, in the test's process or in two processes that a test starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from grpo_recipes import smoke
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.grpo import GRPOTrainer

from .tiny_training import ON_CPU, as_dataset

OWN = [30, 41, 52, 63, 79]  # 5 prompts x 2 completions in batches of 4: the last batch is short, or filled up


def numbers(values: list[int]) -> Dataset:
    """Make a set with a known mean reward: the mean of its numbers without the negative numbers."""
    return as_dataset([(value, 0) for value in values])


def value(answer: list[str], **_: Any) -> list[float | None]:
    """Score only by the prompt, so that the true mean of a set is known."""
    return [float(text) if int(text) >= 0 else None for text in answer]


def make_trainer(folder: Path, eval_dataset: Any = None, **keys: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        **ON_CPU
        | {
            "max_completion_length": 2,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "num_generations": 4,
            "num_generations_eval": 2,
        }
        | keys,
    )
    return GRPOTrainer(
        model=smoke.build_model(tokenizer),
        reward_funcs=[value],
        args=args,
        train_dataset=numbers(list(range(4))),
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        run_dir=folder,
    )


def rewards_of(metrics: dict[str, float]) -> dict[str, float]:
    return {name: mean for name, mean in metrics.items() if name.endswith("_reward")}


def evaluate_all(folder: Path) -> dict[str, Any]:
    """Evaluate in every possible way and return the mean rewards by name."""
    trainer = make_trainer(folder, numbers(OWN))
    twenty, seven, two = numbers(list(range(20))), numbers(list(range(7))), numbers([5, 8])
    results = {
        "own": trainer.evaluate(),
        "larger": trainer.evaluate(eval_dataset=twenty),
        "smaller": trainer.evaluate(two, metric_key_prefix="test"),
        "dict": trainer.evaluate({"low": two, "high": twenty}),
        "dict, prefix": trainer.evaluate({"low": two, "high": seven}, metric_key_prefix="test"),
        "own, prefix": trainer.evaluate(metric_key_prefix="final"),
        "own, passed": trainer.evaluate(trainer.eval_dataset),
        "stream": trainer.evaluate(seven.to_iterable_dataset(), metric_key_prefix="stream"),
        "stream in parts": trainer.evaluate(seven.to_iterable_dataset(num_shards=3), metric_key_prefix="parts"),
        "no verdict": trainer.evaluate(numbers([-1, 6, 9, -4, -5]), metric_key_prefix="partly"),
        "empty": trainer.evaluate(numbers([]), metric_key_prefix="empty"),
    }
    trainer.eval_dataset = {"low": two, "high": seven}
    results |= {"own dict": trainer.evaluate(), "one of the own dict": trainer.evaluate("high")}
    trainer.eval_dataset = None
    results["no own"] = trainer.evaluate(seven, metric_key_prefix="eval_seven")
    return {name: rewards_of(metrics) for name, metrics in results.items()}


def main(folder: Path) -> None:
    results = evaluate_all(folder)
    (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
