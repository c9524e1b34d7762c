"""A real trainer with episodes played in real child processes. Its completions come from a table by row and turn."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_recipes import smoke
from grpo_recipes.extensions.environments.episodes import Episodes
from grpo_recipes.extensions.environments.rows import make_training_rows
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.rewards.load import EpisodeReward
from grpo_recipes.trainers.grpo import GRPOTrainer

from .tiny_training import DESCENT, GROUP

FILE = Path(__file__).parents[1] / "rollouts/wild_environment.py"


def make_trainer(folder: Path, model: str, kind: str = "Sums", ends: bool = True, **keys: Any) -> GRPOTrainer:
    """Make a gradient-descent trainer. Its completions ``end`` with the end token, or are cut."""
    folder.mkdir(exist_ok=True, parents=True)
    script_keys = {key: keys.pop(key) for key in list(keys) if key.startswith(("environment_", "max_prompt"))}
    args = GRPOConfig(output_dir=str(folder / "checkpoints"), **DESCENT | {"max_completion_length": 60} | keys)
    script_args = ScriptArguments(
        environment=f"{FILE.name}:{kind}", environment_episodes=8,
        **{"environment_max_turns": 3, "environment_turn_length": 8, "environment_workers": 1, **script_keys},
    )  # fmt: skip
    (folder / "rewards").mkdir(exist_ok=True)
    episodes = Episodes(script_args, args, folder)
    episodes._specs = {f"{FILE.name}:{kind}": f"{FILE}:{kind}"}
    tokenizer = smoke.build_tokenizer()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[EpisodeReward()],
        args=args,
        train_dataset=make_training_rows(script_args, args.seed),
        processing_class=tokenizer,
        run_dir=folder,
        source=episodes,
    )
    requests: list[Any] = []

    def named(name: str, rows: list[int]) -> Any:
        requests[:] = [name, rows]
        return trainer.rollouts.resending_weights()

    def from_table(prompt_ids: list[Any], *_: Any) -> tuple[list[list[int]], None]:
        name, rows = requests
        assert len(rows) == len(prompt_ids)
        end = [tokenizer.eos_token_id] if ends else []
        return [completion(name, row, 7 if ends else 8) + end for row in rows], None

    trainer.rollouts.named_generation = named
    trainer._generate_single_turn = from_table
    return trainer


def completion(name: str, row: int, longest: int) -> list[int]:
    """Make one to ``longest`` letter tokens for a row's turn. Cut completions have exactly ``longest`` tokens."""
    draw = random.Random(f"{name}/{row}")
    return [draw.randrange(64, 90) for _ in range(longest if longest == 8 else draw.randrange(longest) + 1)]


def generation(trainer: GRPOTrainer, prompts: int = 2) -> dict[str, Any]:
    """Return the inputs of a training step: this many groups, played, scored and weighted."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[row] for row in range(prompts) for _ in range(GROUP)]
    return trainer._generate_and_score_completions(rows)


if __name__ == "__main__":  # torchrun: train with several ranks, rank 0 leaves the weights
    folder, model, credit, size = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    trainer = make_trainer(folder, model, environment_credit=credit, per_device_train_batch_size=size)
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), folder / "weights.pt")
    trainer.source.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
