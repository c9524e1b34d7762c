"""One rank of ``test_exact_resume.py``: trains three epochs, then resumes from chosen checkpoints of that run.

python resumed_ranks.py FOLDER SHAPE...    # needs RANK, WORLD_SIZE and so on from the launcher
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import TrainerCallback

from grpo_recipes import smoke
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StoppedOnRequest
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.reward_models import load_reward_models

from .tiny_training import save_reward_model

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
GROUP = 4
TIMED = ("seconds", "tokens_per_second", "step_time", "memory/", "syncs")
# The length of an epoch, in windows (one generation each) and in optimizer steps. A window is two optimizer steps. In
# `uneven` it is half a step, and an epoch ends with a step of half as many micro-batches. Each has another objective.
SHAPES: dict[str, dict[str, Any]] = {
    "one-iteration": {
        "windows": 1,
        "epoch": 2,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "teacher_coef": 2.0,
    },
    "two-iterations": {
        "windows": 2,
        "epoch": 4,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "loss_type": "gmpo",
        "epsilon": 0.01,
        "advantage_estimator": "reinforce_plus_plus",
    },
    "uneven": {
        "windows": 3,
        "epoch": 2,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 4,
        "advantage_estimator": "rloo",
        "teacher_coef": 0.5,
    },
}
ROWS = 4  # per micro-batch and rank


def points(shape: str) -> list[int]:
    """List the steps before, at and after the end of the first three epochs, up to the last step."""
    epoch = SHAPES[shape]["epoch"]
    around = [end + offset for end in (epoch, 2 * epoch, 3 * epoch) for offset in (-1, 0, 1)]
    return sorted({step for step in around if step < last_step(shape)})


def last_step(shape: str) -> int:
    """Return the last step: two steps into the fourth epoch."""
    return 3 * SHAPES[shape]["epoch"] + 2


class StopAt(TrainerCallback):
    """Request a stop in the update of a step."""

    def __init__(self, folder: Path, step: int | None):
        self._file, self._step = stop_file(folder), step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            self._file.touch()


def train(folder: Path, shape: str, stop_at: int | None = None, **keys: Any) -> dict[str, Any]:
    """Train to the last step, from the newest checkpoint of ``folder`` if it has one.

    Returns:
        ``prompts`` of this rank, a list of [steps done before, prompts] for each of its generations; ``rows`` of
        metrics.jsonl without times, and ``weights``, a hash of the final weights.
    """
    newest = find_newest_complete(folder / "checkpoints")
    _together()
    if RANK == 0:
        folder.mkdir(exist_ok=True)
        stop_file(folder).unlink(missing_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    _together()
    batches: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        batches.append([trainer_state.global_step, [prompt[0]["content"] for prompt in prompts]])
        return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]

    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    facts = SHAPES[shape]
    prompts_at_once = WORLD * ROWS * facts["steps_per_generation"] // GROUP
    teacher = {"teacher_model_name_or_path": str(folder.parent / "teacher")} if "teacher_coef" in facts else {}
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=last_step(shape),
        per_device_train_batch_size=ROWS,
        num_generations=GROUP,
        max_completion_length=4,
        learning_rate=1e-3,
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        use_vllm=False,
        **{name: value for name, value in facts.items() if name not in ("windows", "epoch")},
        **{"save_strategy": "no", **teacher, **keys},
    )
    models = [str(folder.parent / "scorer")] if shape == "uneven" else []
    rewards, reward_tokenizers = load_reward_models([reward, *models], folder, args)
    trainer = GRPOTrainer(
        model=smoke.build_model(tokenizer),
        reward_funcs=rewards,
        reward_processing_classes=reward_tokenizers,
        args=args,
        train_dataset=_sums((facts["windows"] + 1) * prompts_at_once - 1),
        processing_class=tokenizer,
        callbacks=[StopAt(folder, stop_at)],
        run_dir=folder,
    )
    with suppress(StoppedOnRequest):
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    return {
        "prompts": batches,
        "rows": _rows(folder) if RANK == 0 else [],
        "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }


def restarts(shape: str) -> list[int]:
    """List the resumed steps with ``ignore_data_skip``: at the second epoch's start, and inside it."""
    epoch = SHAPES[shape]["epoch"]
    return [epoch, epoch + 1, *([epoch + 2] if epoch > 2 else [])]  # inside a window, and between two


def cases(folder: Path, shape: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train an uninterrupted run, a run resumed from each of its checkpoints, and a run stopped repeatedly."""
    yield "whole", train(folder / "whole", shape, save_strategy="steps", save_steps=1, save_total_limit=99)
    for step in points(shape):
        yield f"from-{step}", train(_copy(folder, step, f"from-{step}"), shape)
    for step in restarts(shape):
        yield f"restarted-{step}", train(_copy(folder, step, f"restarted-{step}"), shape, ignore_data_skip=True)
    stopped: dict[str, Any] = {"prompts": [], "rows": []}
    for stop_at in [*points(shape)[::2], None]:
        part = train(folder / "stopped", shape, stop_at)
        stopped = {name: stopped[name] + part[name] for name in ("prompts", "rows")} | {"weights": part["weights"]}
    yield "stopped", stopped


def _copy(folder: Path, step: int, name: str) -> Path:
    """Copy the run directory up to the checkpoint of ``step``."""
    copy = folder / name
    if RANK == 0:
        checkpoint = f"checkpoint-{step}"
        shutil.copytree(folder / "whole" / "checkpoints" / checkpoint, copy / "checkpoints" / checkpoint)
    _together()
    return copy


def _sums(count: int) -> Dataset:
    """Make this many prompts. Each epoch leaves out different prompts that do not fill a whole generation."""
    rows = [{"prompt": [{"role": "user", "content": f"{n // 10}+{n % 10}="}]} for n in range(count)]
    return Dataset.from_list(rows)


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


def _together() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def main(folder: Path, *shapes: str) -> None:
    """Write the results of this rank, by shape and case, to ``rank_<n>.json``."""
    torch.set_num_threads(1)
    PartialState(cpu=True)
    gc.collect()
    gc.freeze()  # accelerate collects garbage before each training, half a second with all that is imported
    results = {shape: dict(cases(_made(folder / shape), shape)) for shape in shapes}
    (folder / f"rank_{RANK}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _made(folder: Path) -> Path:
    """Make a shape's folder with its teacher and its reward model."""
    folder.mkdir(exist_ok=True)
    if RANK == 0:
        torch.manual_seed(1)
        smoke.build_model(smoke.build_tokenizer()).save_pretrained(folder / "teacher")
        save_reward_model(folder / "scorer")
    _together()
    return folder


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
