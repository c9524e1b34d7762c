"""The BENCHMARK SUMMARY of a run directory: its lines, its arithmetic, and its JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.runs.benchmark import choose_mode_name, compute_numbers, format_summary, write_benchmark
from grpo_recipes.runs.rundir import Run, write_json

NUMBER = r"(\d+(?:\.\d{2,})?)"
BLOCK = re.compile(
    rf"""
={{70}}
BENCHMARK SUMMARY \((\w+)\)
={{70}}
  Total training time:     {NUMBER}s \({NUMBER} min\)
  Total steps:             {NUMBER}
[ ]{{2}}
  TIMING BREAKDOWN:
    Avg step time:         {NUMBER}s
    Total step time:       {NUMBER}s
    Avg sync time:         {NUMBER}s \(x{NUMBER} syncs\)
    Total sync time:       {NUMBER}s
    Avg data fetch time:   {NUMBER}s
    Total data fetch time: {NUMBER}s
[ ]{{2}}
  MEMORY(?: \(no GPU: RSS of the first training process\))?:
    Peak (GPU|process) memory: +{NUMBER} GB
    Avg (GPU|process) memory: +{NUMBER} GB
={{70}}"""
)
NAMES = (
    "mode", "total_time_seconds", "total_time_minutes", "total_steps", "avg_step_time_seconds",
    "total_step_time_seconds", "avg_sync_time_seconds", "syncs", "total_sync_time_seconds",
    "avg_data_fetch_time_seconds", "total_data_fetch_time_seconds", "whose", "peak", "whose_avg", "avg",
)  # fmt: skip
WORDS = ("mode", "whose", "whose_avg")


def parsed(text: str) -> SimpleNamespace:
    """Parse the benchmark block of a text."""
    (values,) = BLOCK.findall(text)
    block = dict(zip(NAMES, values, strict=True))
    return SimpleNamespace(**{name: value if name in WORDS else float(value) for name, value in block.items()})


def need_right_arithmetic(block: SimpleNamespace) -> None:
    """Check that the numbers of the block agree with each other."""
    about = {"rel": 0.01}
    assert block.total_steps * block.avg_step_time_seconds == pytest.approx(block.total_step_time_seconds, **about)
    assert block.syncs * block.avg_sync_time_seconds == pytest.approx(block.total_sync_time_seconds, **about)
    fetched = block.total_steps * block.avg_data_fetch_time_seconds
    assert fetched == pytest.approx(block.total_data_fetch_time_seconds, **about)
    assert block.total_time_minutes * 60 == pytest.approx(block.total_time_seconds, **about)
    parts = block.total_step_time_seconds + block.total_sync_time_seconds + block.total_data_fetch_time_seconds
    assert parts <= block.total_time_seconds * 1.01
    assert 0 < block.avg <= block.peak and block.whose == block.whose_avg


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    """Return ``run(plan={...}, recipe="...", summary={...}, scale=SECONDS)``, which builds a run of 20 steps."""

    def make(scale: float = 1.0, recipe: str = "", summary: dict[str, Any] | None = None, **plan: Any) -> Run:
        rows = []
        for step in range(1, 21):
            seconds = {"sample": 2.7, "score": 0.31, "sync": 0.0213, "update": 1.37 + step / 7, "save": 0.1}
            seconds["step"] = sum(seconds.values())
            row = {f"seconds/{name}": scale * value for name, value in seconds.items()}
            rows.append({"step": step, "syncs": 1, "memory/gb": 2.0 + step / 100, "memory/peak_gb": 3.0, **row})
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "recipe.yaml").write_text(recipe)
        write_json(tmp_path / "plan.json", {"bridge": "file", "mode": "server", "flavour": "cpu", **plan})
        write_json(tmp_path / "summary.json", summary or {"launch_seconds": 200.0 * scale})
        return Run(tmp_path)

    return make


@pytest.mark.parametrize("scale", [1.0, 0.003, 40.0])
def test_the_block_has_every_line_its_arithmetic_holds_and_the_json_says_the_same(run, scale):
    measured_run = run(scale)
    block = parsed("\n".join(write_benchmark(measured_run)))
    record = json.loads((measured_run.folder / "benchmark.json").read_text())
    need_right_arithmetic(block)
    assert block.mode == record.pop("mode") == "file" and block.total_steps == 20 and block.syncs == 20
    assert block.whose == "process"
    assert (block.peak, block.avg) == (record.pop("peak_process_memory_gb"), record.pop("avg_process_memory_gb"))
    assert record == {name: getattr(block, name) for name in NAMES if name in record} and len(record) == 10
    assert block.total_time_seconds == pytest.approx(200 * scale, rel=0.01)
    assert block.avg_data_fetch_time_seconds == pytest.approx(3.01 * scale, rel=0.01), "waiting for scored completions"
    assert block.avg_step_time_seconds == pytest.approx(2.87 * scale, rel=0.01), "without the wait"


def test_seconds_have_the_two_decimals_of_the_original_where_those_say_enough(run):
    text = "\n".join(format_summary(compute_numbers(run())))
    assert "  Total training time:     200.00s (3.33 min)\n" in text
    assert "    Avg step time:         2.87s\n" in text
    assert "    Avg sync time:         0.0213s (x20 syncs)\n" in text
    assert "    Peak process memory:   3.00 GB\n" in text


def test_on_gpus_the_memory_is_that_of_the_gpu(run):
    measured_run = run(flavour="cuda", bridge="nccl")
    text = "\n".join(write_benchmark(measured_run))
    assert "  MEMORY:\n    Peak GPU memory:       3.00 GB\n    Avg GPU memory:        2.10 GB\n" in text
    assert json.loads((measured_run.folder / "benchmark.json").read_text())["peak_gpu_memory_gb"] == 3.0


def test_in_the_shared_mode_nothing_is_transferred_and_its_waiting_is_part_of_the_step(run):
    block, other = (parsed("\n".join(format_summary(compute_numbers(run(bridge=name))))) for name in ("shared", "file"))
    assert block.mode == "shared_vllm"
    assert (block.syncs, block.avg_sync_time_seconds, block.total_sync_time_seconds) == (0, 0, 0)
    assert "    Avg sync time:         0.00s (x0 syncs)" in format_summary(compute_numbers(run(bridge="shared")))
    both = other.total_step_time_seconds + other.total_sync_time_seconds
    assert block.total_step_time_seconds == pytest.approx(both, rel=0.01)


@pytest.mark.parametrize(
    ("bridge", "recipe", "name"),
    [
        ("restart", "", "none"), ("restart", "use_peft: true", "lora_restart"), ("lora", "use_peft: true", "lora_only"),
        ("shared", "", "shared_vllm"), ("file", "use_peft: true", "file"), ("nccl", "", "nccl"), (None, "", "colocate"),
    ],
)  # fmt: skip
def test_the_mode_has_the_name_that_the_original_gives_it(run, bridge, recipe, name):
    assert choose_mode_name(run(bridge=bridge, recipe=recipe, mode="server" if bridge else "colocate")) == name


def test_a_launch_that_was_killed_took_at_least_its_steps(run):
    block = parsed("\n".join(format_summary(compute_numbers(run(summary={"launch_seconds": 3.0})))))
    need_right_arithmetic(block)


def test_a_run_without_a_step_has_numbers_too(run):
    measured_run = run()
    (measured_run.folder / "metrics.jsonl").write_text("")
    numbers = compute_numbers(measured_run)
    assert numbers["total_steps"] == numbers["avg_step_time_seconds"] == 0 and numbers["peak_process_memory_gb"] is None
    assert "    Peak process memory:   unknown GB" in format_summary(numbers)
