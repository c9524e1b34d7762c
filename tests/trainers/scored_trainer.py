"""A real trainer with a second reward judged in child processes, for the tests in this folder and their processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset

from grpo_recipes import smoke
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.rewards.load import load_rewards
from grpo_recipes.trainers.checks import TooManyWithoutVerdict
from grpo_recipes.trainers.grpo import GRPOTrainer

# Scores by the sum of the token ids modulo 6: 0 raises an exception (no verdict), 1 returns None (no opinion).
REWARD = """
def own(completions, completion_ids):
    kind = sum(completion_ids[0]) % 6
    if kind == 0:
        raise ValueError(f"about {completions[0]}")
    return [None] if kind == 1 else [kind / 4]
"""


def own_value(ids: list[int]) -> float | str | None:
    """Return the score of ``REWARD``, or 'none' for no verdict."""
    kind = sum(ids) % 6
    return "none" if kind == 0 else None if kind == 1 else kind / 4


def length(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Score in the trainer's own process."""
    return [float(len(set(ids))) for ids in completion_ids]


def make_trainer(folder: Path, rewards: list[Any], **changes: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    group, stop = changes.pop("num_generations", 8), changes.pop("stop", None)
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=group,
        num_generations=group,
        max_completion_length=4,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **{"use_vllm": False, **changes},
    )
    return GRPOTrainer(
        model=smoke.build_model(tokenizer),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"{a}+1="}], "answer": str(a + 1)} for a in range(8)]
        ),
        processing_class=tokenizer,
        run_dir=folder,
        reward_max_no_verdict=1.0,
        stop=stop,
    )


def own_rewards(folder: Path, code: str = REWARD, **keys: Any) -> list[Any]:
    """Load the reward ``own`` from ``code`` in a child process."""
    written = folder / f"own-{os.getpid()}.py"
    written.write_text(code)
    written.replace(folder / "own.py")  # another rank may be reading it
    defaults = {"reward_isolation": "completion", "reward_workers": 1, "reward_timeout": 1.0, "reward_memory_gib": 1.0}
    defaults |= {"reward_environment": [], "reward_concurrency": 4, "dataset_mixture": None}
    defaults |= {"dataset_solution_column": "answer", "eval_dataset_solution_column": None}
    script_args = SimpleNamespace(reward_funcs=[f"{folder}/own.py:own"], **{**defaults, **keys})
    rewards = load_rewards(script_args, SimpleNamespace(seed=0), folder)
    rewards[0](completions=["the first call may take longer"], completion_ids=[[1]])
    return rewards


def scored(trainer: GRPOTrainer, prompts: int, each: int) -> list[dict[str, Any]]:
    """Sample and score like a training step. Return ids and advantage of each completion on this process."""
    rows = [trainer.train_dataset[row] for row in range(prompts) for _ in range(each)]
    output = trainer._generate_and_score_completions([dict(row) for row in rows])
    mask = output["completion_mask"].bool()
    ids = [row[row_mask].tolist() for row, row_mask in zip(output["completion_ids"], mask, strict=True)]
    return [
        {"ids": row_ids, "advantage": value} for row_ids, value in zip(ids, output["advantages"].tolist(), strict=True)
    ]


def main(folder: Path) -> None:
    """Run one of two processes that share a group of 8. A test starts them."""
    trainer = make_trainer(folder, [length, *own_rewards(folder)])
    torch.manual_seed(trainer.accelerator.process_index)
    rows = scored(trainer, prompts=3, each=4)
    result = {"rows": rows, "metrics": {name: values[-1] for name, values in trainer._metrics["train"].items()}}
    trainer.scoring.max_unscored = 0.0
    try:
        scored(trainer, prompts=3, each=4)
    except TooManyWithoutVerdict as error:
        result["stopped"] = f"{type(error).__name__}: {error}"
    (folder / f"rank_{trainer.accelerator.process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
