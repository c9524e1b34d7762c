"""The seeds of a step's prompts in ``metrics.jsonl``, and of an evaluation's in ``eval.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from trainers.tiny_training import ON_CPU

from grpo_recipes import smoke
from grpo_recipes.data import load_eval_prompts, load_prompts
from grpo_recipes.extensions.problems.rewards import satisfiability
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.trainers.grpo import GRPOTrainer


def test_each_step_and_evaluation_names_its_seeds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    recipe = ScriptArguments(dataset_name="seeded:sat", problem_seeds=5, problem_seed_start=20, eval_problem_seeds=3)
    keys: dict[str, Any] = {
        "per_device_train_batch_size": 4, "num_generations": 2, "generation_batch_size": 4, "max_steps": 6,
        "max_completion_length": 3, "shuffle_dataset": False, "eval_strategy": "steps", "eval_steps": 6,
        "per_device_eval_batch_size": 4,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=smoke.build_model(tokenizer),
        reward_funcs=[satisfiability],
        args=GRPOConfig(output_dir=str(tmp_path / "checkpoints"), **ON_CPU | keys),
        train_dataset=load_prompts(recipe, tokenizer, 2).dataset,
        eval_dataset=load_eval_prompts(recipe, tokenizer, 0).dataset,
        processing_class=tokenizer,
        run_dir=tmp_path,
    )
    trainer.train()

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["problem_seeds"] for row in rows] == [
        [20 + (2 * step + place) % 5 for place in range(2)] for step in range(6)
    ]
    (row,) = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert row["problem_seeds"] == [5000, 5001, 5002] and row["prompts"] == 3
    assert row["eval_pass@1"] == row["eval_rewards/satisfiability/mean"] == 0.0
