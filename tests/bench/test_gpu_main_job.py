"""``bench/gpu_main_job.py``: the plan of each stage for 1 to 8 GPUs, and how a stage fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.scripts import script
from grpo_recipes.plan.types import Plan
from grpo_recipes.recipe import read_recipe

SCRIPT = str(Path(__file__).parents[2] / "bench/gpu_main_job.py")
ROW = {"reward": 0.5, "grad_norm": 1.0, "sampling/sampling_logp_difference/mean": 1e-5, "seconds/step": 2.0}


@pytest.fixture(scope="module")
def job() -> Iterator[ModuleType]:
    with script("gpu_main_job") as module:
        yield module


def gpus(count: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_each_stage_has_a_plan_for_its_gpus(
    count: int, job: ModuleType, planned: Callable[..., Plan], tmp_path: Path
) -> None:
    machine, maps = job.Machine(gpus(count), tmp_path), {}
    for name, stage in job.STAGES.items():
        if stage.reason_to_skip(machine):
            continue
        visible = stage.visible_gpus(machine)
        plan = planned(recipe=read_recipe(stage.recipe, stage.flags(machine)), gpus=visible)
        maps[name] = (plan.server_gpus, [gpu for place in plan.placement for gpu in place.gpus], plan.bridge)

    if count == 1:
        assert maps["file"] == (("0",), ["0"], "file") and maps["colocate"][1] == ["0"]
        assert not maps.keys() & {"nccl", "restart", "ddp", "replicas"}
    elif count == 2:
        assert maps["nccl"] == (("0",), ["1"], "nccl")
        assert maps["zero3"][:2] == (("0",), ["0", "1"])
    else:
        assert set(maps) == set(job.STAGES)
        assert maps["shared"] == (("0",), ["0"], "shared")
        assert maps["replicas"][0] == maps["tensor_parallel"][0] == ("0", "1")
        assert maps["ddp"][1] == {3: ["1", "2"], 8: ["1", "2", "3", "4"]}[count]


def test_a_stage_that_needs_more_gpus_is_skipped_with_a_reason(job: ModuleType, tmp_path: Path) -> None:
    assert job.STAGES["nccl"].reason_to_skip(job.Machine(gpus(1), tmp_path)) == "needs 2 GPUs"
    assert job.STAGES["nccl"].reason_to_skip(job.Machine((), tmp_path)) == "NCCL needs GPUs"
    assert job.STAGES["zero3"].flags(job.Machine((), tmp_path))[-2:] == ["--num_processes", "2"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"grad_norm": 0.0}, "a step has no finite gradient"),
        ({"grad_norm": float("nan")}, "a step has no finite gradient"),
        ({"sampling/sampling_logp_difference/mean": 0.03}, "log-probs of vLLM and trainer differ by 0.03 on average"),
        ({"sampling/sampling_logp_difference/mean": float("nan")}, "log-probs of vLLM and trainer differ by nan"),
    ],
)
def test_a_run_passes_only_with_gradients_and_equal_log_probs(
    job: ModuleType, changes: Mapping[str, Any], reason: str | None, tmp_path: Path
) -> None:
    rows = [ROW, ROW | changes]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, **row}) + "\n" for row in rows))
    if reason is None:
        assert job.read_numbers(tmp_path, 2, job.Stage())["seconds/step"] == 2.0
        with pytest.raises(job.StageFailed, match="2 of 3 steps were logged"):
            job.read_numbers(tmp_path, 3, job.Stage())
        return
    with pytest.raises(job.StageFailed, match=reason):
        job.read_numbers(tmp_path, 2, job.Stage())


def test_the_table_has_the_reason_of_each_failure(
    job: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, stage: Any, machine: Any) -> dict[str, Any]:
        raise job.StageFailed("the launch created no run", {"steps": 0})

    monkeypatch.setitem(job.STAGES, "broken", job.Stage(run=fail))
    result = job.run_stage("broken", job.Machine((), tmp_path))
    table = job.format_table({"broken": result, "nccl": job.Result("skipped", "needs 2 GPUs")})
    assert "| broken | failed |" in table and "| nccl | skipped: needs 2 GPUs |" in table
    assert table.splitlines()[-1] == "broken failed: the launch created no run"


def test_a_command_that_fails_gives_the_line_with_its_fix(
    job: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(job.StageFailed, match="Fix: add a YAML file"):
        script = "print('wrong recipe. Fix: add a YAML file'); print('end'); raise SystemExit(2)"
        job.call("stage", [sys.executable, "-c", script], job.Stage(), job.Machine((), tmp_path))
    monkeypatch.setattr(job, "SECONDS", 0.5)
    with pytest.raises(job.StageFailed, match=r"did not end within 0\.5 s"):
        job.call("stage", ["sleep", "60"], job.Stage(), job.Machine((), tmp_path))


def test_the_stage_of_the_offline_trainer_runs_its_checks(
    job: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command itself runs in tests/e2e/test_offline_trainer.py."""
    commands: list[list[str]] = []

    def call(name: str, argv: list[str], stage: Any, machine: Any) -> None:
        commands.append(argv)
        (job.stage_folder(name, machine) / "output.txt").write_text("a line\n4/4 passed\n")

    monkeypatch.setattr(job, "call", call)
    result = job.run_stage("offline", job.Machine((), tmp_path))
    assert result.status == "passed" and result.numbers == {"checks": "4/4 passed"}
    assert commands == [[sys.executable, str(job.ROOT / "test_gpu_integration.py"), "--cpu"]]


def test_a_gpu_environment_is_needed_without_the_flag_for_cpu() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith(
        "this environment has no CUDA. Fix: add --cpu, or run DEVICE=cuda make setup on a GPU machine"
    )


def test_a_command_ends_with_its_block(job: ModuleType, tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        job.start("stage", ["sleep", "60"], job.Stage(), job.Machine((), tmp_path)) as process,
    ):
        raise KeyboardInterrupt
    assert process.wait(10) == -signal.SIGTERM
