"""What ``bench/gpu_step.py`` measures, in small and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("gpu") / "gpu_step.json"
    command = [sys.executable, str(REPOSITORY / "bench/gpu_step.py"), "--quick", "--out", str(out)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads slow such small models down
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(out.read_text())
    return {name: part["found"] for name, part in content.items() if isinstance(part, dict) and "found" in part}


def test_no_part_fails_and_gradients_are_those_of_trl(record) -> None:
    assert all("failed" not in record[part] for part in ("gradients", "memory", "updates", "lognormal", "equal"))
    apart = [norm for loss in record["gradients"]["float32"].values() for norm in loss.values()]
    assert len(apart) == 9 and max(apart) < 1e-5
    assert record["updates"]["bfloat16"] < 0.2 and record["updates"]["float32"] > 0.8


def test_the_estimate_is_that_of_the_micro_batch(record) -> None:
    estimates = {arm: figures["estimated"] for arm, figures in record["memory"]["equal"].items()}
    arms = ("ours, half of the micro-batch", "ours", "bare TRL")
    half, whole, bare_trl = (estimates[arm]["activations"] for arm in arms)
    assert half < whole == bare_trl
