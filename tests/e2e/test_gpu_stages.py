"""Stages of `make gpu` pass on CPU: each function of the script, and the kinds of launches.

The other stages are launches with other keys. tests/bench/test_gpu_main_job.py plans all of them, and other whole runs
train with these keys on CPU. test_offline_trainer.py runs the command of the stage `offline`.
`make gpu GPU_ARGS=--cpu` runs all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from bench.scripts import script
from forked import ForkedProcess
from real_runs import REPOSITORY, template

SCRIPT = str(REPOSITORY / "bench/gpu_main_job.py")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, whose launches are forked from the template of whole runs with GRPO_FORK_RUNS."""
    with script("gpu_main_job") as module, restored_handler(signal.SIGTERM):
        if os.environ.get("GRPO_FORK_RUNS"):

            def start(argv: list[str], **options: Any) -> ForkedProcess | subprocess.Popen[bytes]:
                if argv[0] != module.GRPO:
                    return subprocess.Popen(argv, **options)
                return template().start(argv, options["cwd"], options["env"], options["stdout"])

            monkeypatch.setattr(module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))
        yield module


@contextlib.contextmanager
def restored_handler(number: signal.Signals) -> Iterator[None]:
    """Restore the handler of a signal after the block."""
    handler = signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal(number, handler)


def check_record(path: Path, stages: tuple[str, ...], table: str) -> None:
    """Check that all stages passed on CPU, in the record and in the printed table."""
    record = json.loads(path.read_text())
    results = {name: result["status"] for name, result in record["stages"].items()}
    assert results == {name: "skipped" if name == "nccl" else "passed" for name in stages}, record
    assert record["versions"]["trl"] and len(record["commit"]) == 40
    assert all(f"| {name} |" in table for name in stages)


@pytest.mark.slow
def test_the_script_runs_a_stage_and_skips_another(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, SCRIPT, "--cpu", "--out", str(record), "--only", "file", "nccl"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    check_record(record, ("file", "nccl"), done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [("engine", "update"), ("resume", "model_0.5b", "colocate", "ddp")],
    ids=lambda stages: "-".join(stages),
)
def test_the_stages_pass_on_cpu(
    stages: tuple[str, ...],
    job: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--cpu", "--out", str(record), "--only", *stages])
    code = job.main()
    output = capsys.readouterr().out
    assert code == 0, output
    check_record(record, stages, output)
