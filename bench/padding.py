"""Padding that the model is fed, and the time of an optimizer step, with ``trim_padding`` and in bare TRL.

    python bench/padding.py [--steps 20] [--out bench/results/padding.json]

Bare TRL, bare TRL once more (the noise), ours and ours without ``trim_padding`` take a step each in turn, in one
process, on one thread each, at learning rate 0. All get the same completions from a table, so sampling costs nothing
and a step is the update phase, with metrics and logging: 32 completions in micro-batches of 16, prompts of 20 to 60
tokens, a four-layer model of 256 hidden units.

* ``lognormal``: completions of up to 128 tokens whose mean is about 0.3 of that;
* ``equal``: completions of 128 tokens each.

Tokens are counted where they enter the model; the real ones are those that the attention mask does not leave out.
Targets: at most 1.1 fed tokens per real one and 0.50 of TRL's time on lognormal lengths, 1.02 of it on equal ones.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import trl
from datasets import Dataset
from interleave import interleave
from made_by import made_by
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from grpo_recipes import smoke
from grpo_recipes.paths import home
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.trainers.grpo import GRPOTrainer

LONGEST, PROMPTS, GROUP, MICRO_BATCH = 128, 4, 8, 16
SKIPPED = 2  # steps
ARMS: dict[str, dict[str, Any]] = {
    "bare TRL": {},
    "bare TRL again": {},
    "ours": {"trim_padding": True},
    "ours without trim_padding": {"trim_padding": False},
}


def main() -> None:
    """Measure and write the result."""
    options = _options()
    load = [round(load, 2) for load in os.getloadavg()]
    result: dict[str, Any] = {"what": "seconds of an optimizer step on given completions, and tokens fed to the model"}
    with tempfile.TemporaryDirectory() as scratch:
        for lengths in ("lognormal", "equal"):
            result[lengths] = measured(Path(scratch) / lengths, lengths, options.steps)
    result |= {
        "machine": {"cores": os.cpu_count(), "cpu": platform.processor() or platform.machine(), "load_before": load},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "trl", "transformers")},
        **made_by(),
    }
    write_json(options.out, result)
    print(json.dumps(result, indent=1))


def measured(folder: Path, lengths: str, steps: int) -> dict[str, Any]:
    """Return each arm's fed tokens per real one, and the ratio of its steps to bare TRL's neighbouring ones."""
    trainers: dict[str, Any] = {}
    fed: dict[str, list[int]] = {name: [0, 0] for name in ARMS}

    def make(name: str, callback: TrainerCallback) -> Any:
        trainers[name] = trainer_of(folder / name.replace(" ", "_"), lengths, steps, callback, **ARMS[name])
        trainers[name].model.model.register_forward_pre_hook(partial(_count, fed[name]), with_kwargs=True)
        return trainers[name]

    seconds = interleave({name: partial(make, name) for name in ARMS})
    losses = {name: [row["loss"] for row in one.state.log_history if "loss" in row] for name, one in trainers.items()}
    return {
        name: {
            "fed_per_real_token": round(fed[name][0] / fed[name][1], 3),
            "ratio_to_bare_trl": _ratios(seconds[name][SKIPPED:], seconds["bare TRL"][SKIPPED:]),
            "seconds": [round(one, 4) for one in seconds[name][SKIPPED:]],
            "largest_difference_of_losses": max(
                abs(a - b) for a, b in zip(losses[name], losses["bare TRL"], strict=True)
            ),
        }
        for name in ARMS
    }


def trainer_of(folder: Path, lengths: str, steps: int, callback: TrainerCallback, **ours: Any) -> Any:
    """Return a trainer, ours where it gets keys, whose completions come from a table."""
    folder.mkdir(parents=True)
    tokenizer = smoke.build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    options = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": PROMPTS * GROUP // MICRO_BATCH,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        **({"use_vllm": False, **ours} if ours else {}),
    }
    draw = random.Random(7)
    problems = ["".join(draw.choices("0123456789+", k=draw.randrange(10, 50))) for _ in range(64)]
    trainer = (GRPOTrainer if ours else trl.GRPOTrainer)(
        model=Qwen2ForCausalLM(config),
        reward_funcs=[last_token_is_even],
        args=(GRPOConfig if ours else trl.GRPOConfig)(**options),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in problems]),
        processing_class=tokenizer,
        callbacks=[callback],
        **({"run_dir": folder} if ours else {}),
    )

    def from_table(prompt_ids: list[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        return completions(len(prompt_ids), lengths, trainer.state.global_step), None

    trainer._generate_single_turn = from_table
    return trainer


def last_token_is_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that differ within a group."""
    return [float(ids[-1] % 2 == 0) for ids in completion_ids]


def completions(rows: int, lengths: str, seed: int) -> list[list[int]]:
    """Return random tokens of such lengths: of a lognormal, the longest has LONGEST."""
    draw = random.Random(seed)
    if lengths == "equal":
        return [draw.choices(range(60, 120), k=LONGEST) for _ in range(rows)]
    drawn = [draw.lognormvariate(0.0, 0.7) for _ in range(rows)]
    return [draw.choices(range(60, 120), k=max(1, round(LONGEST * one / max(drawn)))) for one in drawn]


def _count(fed: list[int], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    fed[0] += kwargs["input_ids"].numel()
    fed[1] += int(kwargs["attention_mask"].sum())


def _ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
    found = sorted(own / other for own, other in zip(ours, theirs, strict=True))
    count = len(found)
    half = 0.98 * count**0.5  # the order statistics of a 95 % interval of the median
    low, high = max(0, int(count / 2 - half)), min(count - 1, int(count / 2 + half))
    return {"median": round(statistics.median(found), 3), "low": round(found[low], 3), "high": round(found[high], 3)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=home() / "bench/results/padding.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
