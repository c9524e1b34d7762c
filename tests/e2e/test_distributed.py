"""Two training processes on CPU under each way of sharing the model, through the real server."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import Launch

from grpo_recipes.runs.checkpoints import find_damage

SHORT = ("--num_processes", "2", "--max_steps", "3", "--prompts_per_step", "8", "--num_generations", "8")


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["ddp", "zero2", "zero3", "fsdp2"])
def test_two_processes_train_through_the_server(
    launch: Callable[..., Launch], tmp_path: Path, accelerator: str
) -> None:
    flags, compiled = (*SHORT, "--accelerator", accelerator, "--save_steps", "2"), tmp_path / "compiled"
    run = launch(*flags, "--run_name", accelerator, TORCH_EXTENSIONS_DIR=str(compiled))

    assert run.wait() == 0, run.output
    assert not compiled.exists(), "DeepSpeed compiled an operator"

    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert plan["batch"] == {
        "completions": 64, "num_generations": 8, "world_size": 2, "per_device": 32, "accumulation": 1,
        "tokens": 2560,
    }  # fmt: skip
    records = [json.loads((run.run_dir / "processes" / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert records[0]["pid"] != records[1]["pid"] and all(record["exit"] == 0 for record in records)
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["reward"] > 0.2 and row["grad_norm"] > 0 for row in rows)
    # The server sampled with the trainer's weights after every update, however they were sharded.
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
    assert run.log("server").count("grpo: weights loaded") == 3
    assert find_damage(run.run_dir / "checkpoints" / "checkpoint-2", print) is None
    assert_final_model_differs_from_the_first(run, plan["model"])


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["ddp", "zero2", "zero3", "fsdp2"])
def test_two_processes_train_in_bfloat16(launch: Callable[..., Launch], accelerator: str) -> None:
    """R15, G4: both sides compute in bfloat16, and the guard compares weights and log-probs."""
    short = ("--num_processes", "2", "--max_steps", "2", "--prompts_per_step", "8", "--num_generations", "8")
    run = launch(*short, "--accelerator", accelerator, "--bf16", "true", "--save_strategy", "no")

    assert run.wait(900) == 0, run.output

    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in rows)
    differences = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    assert all(0 < difference < 0.05 for difference in differences)
    engine = next(line for line in run.log("server").splitlines() if "Initializing a V1 LLM engine" in line)
    assert "dtype=torch.bfloat16" in engine
    assert run.log("server").count("grpo: weights loaded") == 2


@pytest.mark.slow
@pytest.mark.parametrize("bridge", ["file", "restart"])
def test_config_file_replaces_the_packaged_accelerate_file(
    launch: Callable[..., Launch], tmp_path: Path, bridge: str
) -> None:
    # Found, not imported: TRL lowers vLLM's log level in the environment of whoever imports it.
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    packaged = Path(spec.origin).parent / "accelerate_configs" / "zero2.yaml"
    mine = tmp_path / "mine.yaml"
    mine.write_text(packaged.read_text())
    run = launch(*SHORT, "--weight_sync", bridge, "--run_name", "custom", CONFIG_FILE=str(mine))

    assert run.wait() == 0, run.output

    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert plan["accelerator"] == "custom" and str(mine) in plan["processes"][1]["argv"]
    assert list(run.run_dir.glob("checkpoints/*/zero_to_fp32.py"))  # DeepSpeed writes it
    assert len(run.rows()) == 3


def assert_final_model_differs_from_the_first(run: Launch, first: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    before = dict(AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32).named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained(run.run_dir / "model", dtype=torch.float32).named_parameters())
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) > len(before) / 2
    assert max((before[name] - after[name]).abs().max() for name in before) < 0.1
