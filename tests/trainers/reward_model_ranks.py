"""One of two processes that share a trained model and a reward model. A test starts them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from grpo_recipes import smoke
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.rank import allow_fsdp_on_cpu

from .fixed_completions import make_trainer, tokens_mod_5

NAMES = ("rewards/scorer/mean", "rewards/scorer/std", "loss", "grad_norm")
# Two groups of four completions in each step. TRL shuffles the rows, so a step has all rows of a generation.
KEYS = {"max_steps": 3, "gradient_accumulation_steps": 1}
ROWS = 8


def train(folder: Path, model: str, scorer: str, ranks: int) -> list[dict[str, Any]]:
    """Train some steps and return their logs."""
    keys = {**KEYS, "per_device_train_batch_size": ROWS // ranks}
    trainer = make_trainer(folder, model, GRPOTrainer, (tokens_mod_5, scorer), **keys)
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def main(folder: str, model: str, scorer: str) -> None:
    """Print the logged rows of the steps."""
    build_tokenizer = smoke.build_tokenizer

    def after_the_arguments() -> Any:  # the processes are set up by then
        allow_fsdp_on_cpu()
        return build_tokenizer()

    smoke.build_tokenizer = after_the_arguments
    for row in train(Path(folder), model, scorer, ranks=2):
        print("logged", *(row[name] for name in NAMES), flush=True)
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process


if __name__ == "__main__":
    main(*sys.argv[1:])
