"""An evaluation of completions from a table, in the test's process or in each of two processes that it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from grpo_recipes import smoke
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.rewards import functions
from grpo_recipes.rewards.answers import get_completion_text
from grpo_recipes.trainers.grpo import GRPOTrainer

from .tiny_training import ON_CPU, as_dataset

SAMPLES = 6
# Prompt, which is also its answer -> its completions in their order. "?" has no verdict. With two processes the last
# batch is filled up.
TABLE = {
    "7": (*map("<answer>{}</answer>".format, ("7", "1", "1", "7.0")), "7", r"\boxed{2}"),
    "8": tuple(map("{}<answer>{}</answer>".format, ("", "?", "", "?", "", ""), (3, 8, 8, 1, 3, 8))),
    "9": (*["<answer>9</answer>"] * 2, "", "<answer></answer>", "<answer>9</answer>", "<answer>4</answer>"),
}


def pure_accuracy_math(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    """Score with the built-in reward, but leave completions that start with a question mark unscored."""
    scores = functions.pure_accuracy_math(completions, answer)
    texts = map(get_completion_text, completions)
    return [None if text.startswith("?") else score for text, score in zip(texts, scores, strict=True)]


def half_length(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    """Score half the length. It does not count as a verdict and leaves the same completions unscored."""
    texts = map(get_completion_text, completions)
    return [None if text.startswith("?") else len(text) / 2 for text in texts]


def evaluate(folder: Path, rewards: tuple[Any, ...] = (pure_accuracy_math,), **keys: Any) -> dict[str, float]:
    """Evaluate the table's completions and return TRL's logged metrics."""
    folder.mkdir(exist_ok=True)
    tokenizer = smoke.build_tokenizer()
    keys = {"num_generations_eval": SAMPLES, "per_device_eval_batch_size": SAMPLES} | keys
    keys |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 40}
    args = GRPOConfig(output_dir=str(folder / "checkpoints"), **ON_CPU | keys)
    trainer = GRPOTrainer(
        model=smoke.build_model(tokenizer),
        reward_funcs=list(rewards),
        args=args,
        train_dataset=as_dataset([(1, 2)] * 4),
        eval_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": n}], "answer": n} for n in TABLE]),
        processing_class=tokenizer,
        run_dir=folder,
    )

    def from_table(prompt_ids: list[Any], *_: Any) -> tuple[list[list[int]], None]:
        first = trainer.accelerator.process_index * len(prompt_ids)
        prompts = [next(known for known in TABLE if known in tokenizer.decode(ids)) for ids in prompt_ids]
        texts = [TABLE[prompt][(first + row) % args.num_generations_eval] for row, prompt in enumerate(prompts)]
        return [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts], None

    trainer._generate_single_turn = from_table
    metrics = trainer.evaluate()
    json.dumps(trainer.state.log_history)
    return metrics


def main(folder: Path) -> None:
    """Run one of two processes. A test starts them."""
    metrics = evaluate(folder)
    (folder / f"rank_{torch.distributed.get_rank()}.json").write_text(json.dumps(metrics))
    torch.distributed.destroy_process_group()  # a thread of gloo that outlives Python aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
