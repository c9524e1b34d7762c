"""One of the ranks that replace groups of the same 6 prompts x 4 completions. A test starts one or two of them.

python -m tests.trainers.dynamic_ranks FILE [ahead]    # writes FILE-<rank>.json; needs RANK, WORLD_SIZE and so on
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather, gather_object
from datasets import Dataset

from grpo_recipes.trainers.dynamic_sampling import DynamicSampling
from grpo_recipes.weights.sampling import SamplingSeeds

PROMPTS, GROUP = 6, 4


class FakeRollouts:
    """Stores the names of generations and, with ``samples_rounds``, the prompts of rounds started before scoring."""

    def __init__(self, samples_rounds: bool) -> None:
        self.samples_rounds = samples_rounds
        self.seeds = SamplingSeeds()
        self.started: dict[str, list[str]] = {}
        self.used: list[str] = []

    def start_round(self, name: str, prompts: list[str]) -> None:
        self.started[name] = prompts

    def restore_pending_generation(self, pending: None) -> None:
        """Receive the end of the generation."""


class FakeTrainer:
    """A trainer with completions that depend only on the generation's name, the prompt and the index in the group."""

    num_generations = GROUP
    reward_weights = torch.tensor([1.0, 0.5])

    def __init__(self, samples_rounds: bool) -> None:
        self.accelerator = Accelerator(cpu=True)
        self.args = SimpleNamespace(
            seed=7, dynamic_sampling_max_rounds=10, multi_objective_aggregation="sum_then_normalize"
        )
        self.train_dataset = Dataset.from_list([{"prompt": f"prompt {index}", "answer": index} for index in range(40)])
        self.rollouts = FakeRollouts(samples_rounds)
        last = {"dynamic_sampling/groups_drawn": 12.0, "dynamic_sampling/groups_dropped": 9.0}
        self.state = SimpleNamespace(log_history=[last, {"eval_reward": 0.5}])
        self.metrics: dict[str, float] = {}

    def generate(self, prompts: list[str]) -> tuple[Any, ...]:
        """Return TRL's columns for these prompts of a rank, each repeated for its group."""
        name = self.rollouts.seeds.generation_name
        if name in self.rollouts.started:
            assert gather_object(prompts)[::GROUP] == self.rollouts.started[name]
            self.rollouts.used.append(name)
        numbers = [int(prompt.split()[1]) for prompt in prompts]
        lengths = [
            1 if number % 3 else random.Random(f"{name}/{number}/{row % GROUP}").randint(1, 3)
            for row, number in enumerate(numbers)
        ]
        ids = [[row % GROUP] * length for row, length in enumerate(lengths)]
        return (
            [[number] for number in numbers],
            ids,
            None,
            [str(row) for row in ids],
            [[-0.5] * len(row) for row in ids],
            {},
            None,
            [],
        )

    def _calculate_rewards(self, rows: list[Any], prompts: list[str], completions: list[str], ids: Any) -> torch.Tensor:
        """Score the length. Two thirds of the prompts have only completions of one length."""
        assert [row["prompt"] for row in rows] == prompts and [str(row) for row in ids] == completions
        return gather(torch.tensor([[float(len(row)), 0.0] for row in ids]))

    def add_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


def main(file: str, *options: str) -> None:
    trainer = FakeTrainer(samples_rounds=options == ("ahead",))
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    everything = [dict(trainer.train_dataset[index]) for index in range(PROMPTS) for _ in range(GROUP)]
    count = len(everything) // world
    rows = everything[rank * count : (rank + 1) * count]
    prompts = [row["prompt"] for row in rows]
    dynamic = DynamicSampling(trainer)  # type: ignore[arg-type]
    dynamic.start_generation(rows, "0/0")
    trainer.rollouts.seeds.name_generation("0/0")
    generated = trainer.generate(prompts)
    dynamic.replace_groups(prompts, generated, trainer.generate)
    rewards_BR = dynamic.take_rewards()
    assert rewards_BR is not None and dynamic.take_rewards() is None
    columns = {"prompts": prompts, "answers": [row["answer"] for row in rows], "prompt_ids": generated[0]}
    columns |= {"ids": generated[1], "completions": generated[3], "logprobs": generated[4]}
    result = {"columns": list(columns), **columns, "rewards": rewards_BR.tolist(), "metrics": trainer.metrics}
    result["started"] = {name: len(set(prompts)) for name, prompts in trainer.rollouts.started.items()}
    result["used"] = trainer.rollouts.used
    Path(f"{file}-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
