"""Continuing from a checkpoint equals not having stopped, on CPU bit for bit."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from grpo_recipes import smoke
from grpo_recipes.configs import GRPOConfig
from grpo_recipes.launch.checkpoints import newest_complete
from grpo_recipes.launch.rundir import stop_file
from grpo_recipes.rewards.pure_accuracy_math import pure_accuracy_math
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.stop import StoppedOnRequest

SUMS = [(a, b) for a in range(6) for b in range(2)]
# A generation window of 8 micro steps, 4 optimizer steps; an epoch of 3 windows: steps 6 and 7 stop inside a window,
# step 14 in the second epoch.
WINDOW = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
}


class StopAt(TrainerCallback):
    """Requests a stop in the update of a step."""

    def __init__(self, folder: Path, step: int | None):
        self._file, self._step = stop_file(folder), step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self._step:
            self._file.touch()


def train(folder: Path, steps: int, stop_at: int | None = None) -> tuple[list[dict], dict[str, torch.Tensor]]:
    folder.mkdir(exist_ok=True)
    stop_file(folder).unlink(missing_ok=True)
    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        max_completion_length=4,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        use_vllm=False,
        **WINDOW,
    )
    trainer = GRPOTrainer(
        model=smoke.build_model(tokenizer),
        reward_funcs=[
            lambda completions, **_: [float(len(set(str(text)))) for text in completions],
            pure_accuracy_math,
        ],
        args=args,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b)} for a, b in SUMS]
        ),
        processing_class=tokenizer,
        callbacks=[StopAt(folder, stop_at)],
        run_dir=folder,
    )
    checkpoint = newest_complete(folder / "checkpoints")
    with suppress(StoppedOnRequest):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds/", "tokens_per_second", "step_time")
    rows = [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows]
    return rows, {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], dict[str, torch.Tensor]]:
    return train(tmp_path_factory.mktemp("whole"), steps=16)


@pytest.mark.parametrize("stop_at", [4, 6, 7, 14], ids=lambda step: f"step-{step}")
def test_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, uninterrupted: tuple[list[dict], dict[str, torch.Tensor]], stop_at: int
) -> None:
    rows_before, _ = train(tmp_path / "run", steps=16, stop_at=stop_at)
    assert [row["step"] for row in rows_before] == list(range(1, stop_at + 1))

    rows, weights = train(tmp_path / "run", steps=16)

    expected_rows, expected_weights = uninterrupted
    assert rows == expected_rows
    assert len({json.dumps(row["loss"]) for row in rows}) > 8  # the run does something to compare
    for name, weight in weights.items():
        assert torch.equal(weight, expected_weights[name]), name
