"""Runs that are forked from a template (forked.py) are like runs that are started by exec."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_runs import Launch, same_rows, weights_hash

from grpo_recipes.runs.rundir import read_json


def describe(run: Launch, role: str) -> dict[str, Any]:
    """Return the facts of a process in /proc that do not differ between two runs of a recipe."""
    pid = run.pid_of(role)
    process = psutil.Process(pid)
    names = {str(run.folder): "FOLDER", run.mark: "MARK"}  # text that differs between runs -> its name
    for name in ("GRPO_RUN", "GRPO_SYNC_DIR", "TMPDIR", "WANDB_RUN_ID", "GRPO_RUN_DIR"):
        names[process.environ()[name]] = name

    def replace_names(text: str) -> str:
        for value in sorted(names, key=len, reverse=True):
            text = text.replace(value, names[value])
        return re.sub(r"\d{8}-\d{6}|(?<=port )\d+", "N", text)

    return {
        "command": replace_names(" ".join(process.cmdline())),
        "variables": {name: replace_names(value) for name, value in sorted(process.environ().items())},
        "folder": process.cwd() == str(run.cwd),
        "parent": process.ppid() == read_json(run.run_dir / "processes" / f"{role}.json")["guard"],
        "engines": sorted(child.name() for child in process.children(recursive=True) if "VLLM" in child.name()),
        "session": os.getsid(pid) == pid,
        "ignored signals": re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text()),
        "input": os.readlink(f"/proc/{pid}/fd/0"),
        "memory of the start": Path(f"/proc/{pid}/auxv").read_bytes(),  # AT_RANDOM: the same after a fork
        "output": os.readlink(f"/proc/{pid}/fd/1") == str(run.log_path(role)),
    }


@pytest.mark.slow
def test_a_forked_run_is_like_one_that_was_started_by_exec(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_FORK_RUNS", "1")
    runs, processes = [], []
    for folder, by_exec in (("forked", False), ("exec", True)):
        run = launch("--max_steps", "3", folder=folder, by_exec=by_exec)
        run.wait_for_step(1)
        processes.append({role: describe(run, role) for role in ("server", "trainer")})
        assert run.wait() == 0, run.output
        run.wait_for_nothing_left()
        runs.append(run)
    starts = [{role: fields.pop("memory of the start") for role, fields in each.items()} for each in processes]
    assert starts[0]["server"] == starts[0]["trainer"] and starts[1]["server"] != starts[1]["trainer"]
    for role in processes[0]:
        assert processes[0][role] == processes[1][role], role
    assert same_rows(*runs) and weights_hash(runs[0]) == weights_hash(runs[1])


@pytest.mark.slow
def test_a_forked_launcher_has_the_exit_code_and_output_of_its_program(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_FORK_RUNS", "1")
    wrong = [launch("--max_step", "3", folder=f"{by_exec}", by_exec=by_exec) for by_exec in (False, True)]
    assert [run.wait() for run in wrong] == [2, 2]
    assert wrong[0].output == wrong[1].output and "max_step" in wrong[0].output
