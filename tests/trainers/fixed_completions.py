"""Real trainers that take completions of different lengths from a table, the same for any number of processes."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_recipes import smoke
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer
from grpo_recipes.trainers.reward_models import load_reward_models

from .tiny_training import DESCENT, GROUP, SUMS, as_dataset

LONGEST = 6


def tokens_mod_5(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Score in quarters from 0 to 1. Every ninth kind of completion has no verdict."""
    return [None if sum(ids) % 9 == 4 else sum(ids) % 5 / 4 for ids in completion_ids]


def pure_accuracy_math(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Score correct or wrong, under the name of an accuracy reward."""
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


def make_trainer(
    folder: Path,
    model: str,
    kind: type[GRPOTrainer] = MaxEntGRPOTrainer,
    rewards: tuple[Any, ...] = (tokens_mod_5,),
    callbacks: tuple[Any, ...] = (),
    peft_config: Any = None,
    **keys: Any,
) -> GRPOTrainer:
    """Make a trainer with plain gradient descent. ``rewards`` are functions, or folders of reward models."""
    folder.mkdir(exist_ok=True, parents=True)
    objective = {"maxent_objective": "tempered"} if issubclass(kind, MaxEntGRPOTrainer) else {}
    keys = DESCENT | {"max_completion_length": LONGEST} | objective | keys
    args = GRPOConfig(output_dir=str(folder / "checkpoints"), **keys)
    tokenizer = smoke.build_tokenizer()
    reward_funcs, reward_tokenizers = load_reward_models(rewards, folder, args)
    trainer = kind(
        model=model,
        reward_funcs=reward_funcs,
        reward_processing_classes=reward_tokenizers,
        args=args,
        train_dataset=as_dataset(SUMS),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        run_dir=folder,
        peft_config=peft_config,
    )
    end = tokenizer.eos_token_id

    def from_table(prompt_ids: list[Any], *_: Any) -> tuple[list[list[int]], None]:
        first = trainer.accelerator.process_index * len(prompt_ids)
        return [_completion(trainer.state.global_step, first + row, end) for row in range(len(prompt_ids))], None

    trainer._generate_single_turn = from_table
    return trainer


def _completion(step: int, row: int, end: int) -> list[int]:
    """Make 1 to LONGEST tokens. Shorter completions end with the end token."""
    draw = random.Random(f"{step}/{row}")
    ids = [draw.randrange(60, 120) for _ in range(draw.randrange(LONGEST) + 1)]
    return ids if len(ids) == LONGEST else [*ids, end]


def generation(trainer: GRPOTrainer, prompts: int = 2) -> dict[str, Any]:
    """Return the inputs of a training step: this many groups, scored and weighted."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[row] for row in range(prompts) for _ in range(GROUP)]
    return trainer._generate_and_score_completions([dict(row) for row in rows])


def weights_of(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def main(folder: Path) -> None:
    """Run one of two processes that share three groups. A test starts them."""
    keys = json.loads((folder / "keys.json").read_text())
    rewards = (tokens_mod_5, *keys.pop("reward_models", []))
    kind = MaxEntGRPOTrainer if "maxent_objective" in keys else GRPOTrainer
    trainer = make_trainer(folder / "two", str(folder / "model"), kind, rewards, **keys)
    trainer.train()
    torch.save(
        {"weights": weights_of(trainer), "tau": getattr(trainer, "tau", None), "beta": trainer.beta},
        folder / f"rank_{trainer.accelerator.process_index}.pt",
    )
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
