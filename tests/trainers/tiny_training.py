"""A training that takes seconds: a random two-layer model, sampling by transformers, sums as prompts."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2ForSequenceClassification, TrainerCallback

from grpo_recipes import smoke
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.stop_request import StoppedOnRequest, StopRequest
from grpo_recipes.trainers.grpo import GRPOTrainer

SUMS = [(a, b) for a in range(6) for b in range(2)]
HELD_OUT = [(a, 7) for a in range(5)]
STEPS = 6
ON_CPU = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "use_vllm": False,
    "save_strategy": "no",
    "report_to": "none",
}

GROUP = 4
# Plain gradient descent, for trainers with completions made by a test. Its updates are as close as the gradients.
DESCENT = {
    **ON_CPU,
    "max_steps": 2,
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": 2 * GROUP,
    "num_generations": GROUP,
    "seed": 3,
    "model_init_kwargs": {"dtype": "float32"},
}


def different_characters(completions: list[Any], **_: Any) -> list[float | None]:
    """Score the number of different characters. A random model gets different scores, and sometimes no verdict."""
    texts = [completion[0]["content"] for completion in completions]
    return [None if text.startswith("1") else float(len(set(text))) for text in texts]


def train(
    folder: Path,
    reward: Any = different_characters,
    callbacks: tuple[TrainerCallback, ...] = (),
    stop: StopRequest | None = None,
    held_out: Any = None,
    **keys: Any,
) -> tuple[GRPOTrainer, StoppedOnRequest | None]:
    """Train, or resume from the newest checkpoint of ``folder``. Also return the stop, if the run was stopped.

    ``held_out`` is the evaluation set, or a dict of sets; ``HELD_OUT`` by default. Callbacks know the trainer.
    """
    folder.mkdir(exist_ok=True)
    tokenizer = smoke.build_tokenizer()
    model = copy.deepcopy(build_random_model())
    torch.manual_seed(0)
    defaults = {
        "max_steps": STEPS,
        "max_completion_length": 4,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,  # evaluations fall inside a generation window
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
    }
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        **ON_CPU | defaults | keys,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward],
        args=args,
        train_dataset=as_dataset(SUMS),
        eval_dataset=(held_out or as_dataset(HELD_OUT)) if args.eval_strategy != "no" else None,
        processing_class=tokenizer,
        callbacks=list(callbacks),
        run_dir=folder,
        stop=stop,
    )
    for callback in callbacks:
        callback.trainer = trainer
    checkpoint = find_newest_complete(folder / "checkpoints")
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except StoppedOnRequest as stopped:
        return trainer, stopped
    return trainer, None


@functools.cache
def build_random_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return smoke.build_model(smoke.build_tokenizer())


def save_random_model(folder: Path, seed: int = 0) -> Path:
    """Save a two-layer model with random weights, and its tokenizer, in a folder, and return the folder."""
    torch.manual_seed(seed)
    tokenizer = smoke.build_tokenizer()
    smoke.build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_reward_model(folder: Path, labels: int = 1) -> Path:
    """Save a two-layer reward model with random weights, and its tokenizer, in a folder, and return the folder."""
    torch.manual_seed(2)
    tokenizer = smoke.build_tokenizer()
    config = smoke.build_model(tokenizer).config
    config.num_labels = labels
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def as_dataset(sums: list[tuple[int, int]]) -> Dataset:
    return _as_dataset(tuple(sums))


@functools.cache
def _as_dataset(sums: tuple[tuple[int, int], ...]) -> Dataset:
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in sums]
    return Dataset.from_list(rows)
