"""`grpo launch --benchmark` at the end of a real run: the block that the terminal shows, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch
from runs.test_benchmark import need_right_arithmetic, parsed


@pytest.mark.slow
def test_a_real_run_ends_with_its_benchmark(launch: Callable[..., Launch]) -> None:
    smoke = {"recipes/smoke/grpo.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml")}
    words = documented("grpo launch recipes/smoke/grpo.yaml --benchmark", smoke)
    run = launch(*words[2:], "--max_steps", "4", "--save_strategy", "no")
    assert run.wait() == 0, run.output
    printed = parsed(run.output)
    need_right_arithmetic(printed)
    assert (printed.mode, printed.total_steps, printed.syncs, printed.whose) == ("file", 4, 4, "process")
    assert printed.total_time_seconds > printed.total_step_time_seconds > 0 and printed.total_sync_time_seconds > 0
    saved = json.loads((run.run_dir / "benchmark.json").read_text())
    assert saved["total_sync_time_seconds"] == printed.total_sync_time_seconds and saved["mode"] == "file"
    assert saved["peak_process_memory_gb"] == printed.peak > 0.2
    assert run.output.splitlines()[-4].startswith("grpo: status  completed; smoke test on CPU")
