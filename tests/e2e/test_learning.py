"""Runs that learn nothing, through the real launcher: their endings and notes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import Launch, override

from grpo_recipes import smoke
from grpo_recipes.runs.health import ENOUGH_STEPS

SHORT = ("--use_vllm", "false", "--prompts_per_step", "4", "--num_generations", "4")
# AdamW with such a rate is refused; the step of SGD is the gradient times the rate.
EXPLODES = ("--optim", "sgd", "--max_grad_norm", "0", "--learning_rate", "1e38")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharing",
    [
        pytest.param((), id="one-process"),
        pytest.param(("--num_processes", "2"), id="ddp"),
        pytest.param(("--num_processes", "2", "--accelerator", "zero2"), id="zero2"),
        pytest.param(("--num_processes", "2", "--accelerator", "fsdp2"), id="fsdp2"),
    ],
)
def test_a_learning_rate_that_breaks_the_weights_ends_the_run(launch: Callable[..., Launch], sharing: tuple) -> None:
    run = launch(*SHORT, *EXPLODES, *sharing, "--max_steps", "6", "--save_steps", "1")

    assert run.wait() == 1, run.output

    summary = run.summary()
    assert summary["status"] == "failed" and "NotFinite: the weights are not finite after step 1" in summary["cause"]
    assert "Fix: lower learning_rate (now 1e+38)" in summary["cause"]
    last = [line for line in run.output.splitlines() if line.startswith("grpo: ")][-4:]
    assert "failed with exit code 1: " in last[0] and "NotFinite: the weights are not finite" in last[0]
    assert last[3].startswith("grpo: next    start a new run with that change")
    assert list((run.run_dir / "checkpoints").glob("checkpoint-*")) == []
    assert not (run.run_dir / "model").exists()


@pytest.mark.slow
def test_a_reward_that_is_the_same_for_all_is_said_everywhere(launch: Callable[..., Launch], tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def score(completions, **kwargs):\n    return [0.25] * len(completions)\n")
    steps = str(ENOUGH_STEPS + 2)
    run = launch(*SHORT, "--reward_funcs", f"{tmp_path}/same.py:score", "--max_steps", steps, "--save_strategy", "no")

    assert run.wait() == 0, run.output

    note = "every completion got the reward 0.25 in {} steps in a row, from step 1 on: nothing is learned"
    lines = run.output.splitlines()
    note_lines = [index for index, line in enumerate(lines) if line.startswith("grpo: note: every completion got")]
    assert len(note_lines) == 2, run.output
    first, second = note_lines
    assert lines[first - 1].startswith(f"step {ENOUGH_STEPS}/") and note.format(ENOUGH_STEPS) in lines[first]
    assert second > lines.index(next(line for line in lines if line.startswith(f"step {steps}/")))
    assert note.format(steps) in lines[second] and ". Fix: test the reward" in lines[second]
    grpo = str(Path(sys.executable).with_name("grpo"))
    status = subprocess.run([grpo, "status", str(run.run_dir)], capture_output=True, text=True, check=True)
    assert re.search(rf"^note +{re.escape(note.format(steps))}\. Fix: ", status.stdout, re.MULTILINE)
    page = (run.run_dir / "report.html").read_text()
    assert "Next steps" in page and f"E{note.format(steps)[1:]}" in page


POISON = """
import math
from transformers import TrainerCallback

class Poison(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == 2:
            next(model.parameters()).data.fill_(math.nan)
"""


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["ddp", "zero2"])  # DeepSpeed skips such a step by itself and continues
def test_a_loss_that_is_no_number_ends_the_run_on_every_rank(
    launch: Callable[..., Launch], tmp_path: Path, accelerator: str
) -> None:
    (tmp_path / "poison.py").write_text(POISON)
    window = override(SHORT, prompts_per_step="null", per_device_train_batch_size=8, steps_per_generation=4)
    sharing = ("--num_processes", "2", "--accelerator", accelerator)
    steps = ("--max_steps", "4", "--save_steps", "1", "--callbacks", f"{tmp_path}/poison.py:Poison")
    run = launch(*window, *sharing, *steps)

    assert run.wait() == 1, run.output

    cause = run.summary()["cause"]
    assert "NotFinite: loss nan, gradient norm " in cause and "in step 3, which was not taken" in cause
    assert "the last complete checkpoint is checkpoint-2. Fix: lower learning_rate (now 0.0003)" in cause
    assert [row["step"] for row in run.rows()] == [1, 2]
    saved = sorted(path.name for path in (run.run_dir / "checkpoints").glob("checkpoint-*"))
    assert saved == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.slow
def test_bfloat16_weights_are_refused_when_the_trainer_sees_them(launch: Callable[..., Launch], tmp_path: Path) -> None:
    smoke.main([str(tmp_path / "made"), "--dtype", "bfloat16"])
    model = ("--model_name_or_path", str(tmp_path / "made/model"), "--dtype", "auto")
    run = launch(*SHORT, *model, "--accelerator", "single", "--learning_rate", "1e-6", "--max_steps", "2")

    assert run.wait() == 1, run.output

    assert "steps of about learning_rate 1e-06 are rounded away in bfloat16 weights" in run.summary()["cause"]
    assert "Fix: write accelerator: zero2, or dtype: float32" in run.summary()["cause"]
    assert run.rows() == []
