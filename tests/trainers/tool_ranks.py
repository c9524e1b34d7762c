"""A real trainer with tools and a scripted policy, alone or as one of two ranks. A test starts the ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_recipes import smoke
from grpo_recipes.extensions.environments import tool_episodes
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.trainers.grpo import GRPOTrainer

from .test_tools import TEMPLATE, follow_script, last_texts, written
from .tiny_training import DESCENT, SUMS, as_dataset


def write_turn(row: int, turn: int) -> str:
    """Answer after 0, 1 or 2 turns with calls. Some calls fail."""
    item = "pear" if row % 2 else "kiwi"
    return written("price", item=item) * (1 + row % 2) if turn < row % 3 else "x" * (1 + row)


def make_trainer(folder: Path, model: str, schemas: dict[str, Any], size: int) -> GRPOTrainer:
    """Make a gradient-descent trainer with ``size`` rows; ``schemas`` describe its tools."""
    folder.mkdir(exist_ok=True, parents=True)
    tool_episodes.describe_tools = lambda *_: schemas
    keys = DESCENT | {"max_completion_length": 600, "per_device_train_batch_size": size}
    args = GRPOConfig(output_dir=str(folder / "checkpoints"), **keys)
    source = tool_episodes.ToolEpisodes(ScriptArguments(tools=list(schemas), environment_workers=1), args, folder)
    tokenizer = smoke.build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    trainer = GRPOTrainer(
        model=model, reward_funcs=[last_texts], args=args, train_dataset=as_dataset(SUMS),
        processing_class=tokenizer, run_dir=folder, source=source,
    )  # fmt: skip
    follow_script(trainer, write_turn)
    return trainer


def train(folder: Path, model: str, schemas: Path, size: int) -> dict[str, torch.Tensor]:
    """Train and return the weights."""
    trainer = make_trainer(folder, model, json.loads(schemas.read_text()), size)
    trainer.train()
    trainer.source.close()
    weights: dict[str, torch.Tensor] = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return weights


if __name__ == "__main__":
    torch.set_num_threads(1)
    weights = train(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    if torch.distributed.get_rank() == 0:
        torch.save(weights, Path(sys.argv[1]) / "weights.pt")
    torch.distributed.destroy_process_group()
