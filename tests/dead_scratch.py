"""Scratch folders of a killed process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from grpo_recipes.process.scratch import Scratch

# Makes scratch in these two folders, says its name, and waits to be killed.
OWNER = """
import subprocess, sys, time
from pathlib import Path
from grpo_recipes.process import scratch
scratch.SHARED_MEMORY = Path(sys.argv[2])
made = scratch.make_scratch({"SLURM_TMPDIR": sys.argv[1]})
(made.disk / "inductor").mkdir()
(made.disk / "inductor" / "kernel").write_bytes(bytes(3_000_000))
print(made.disk.name, flush=True)
time.sleep(300)
"""


def start_owner(disk: Path, memory: Path) -> tuple[subprocess.Popen[str], Scratch]:
    """Start a process that makes scratch in these folders."""
    argv = [sys.executable, "-c", OWNER, str(disk), str(memory)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    return process, Scratch(disk / name, memory / name)


def dead_scratch(disk: Path, memory: Path) -> Scratch:
    """Make scratch in these folders and kill its owner."""
    process, scratch = start_owner(disk, memory)
    kill(process)
    assert scratch.token_file.exists() and scratch.memory.is_dir()
    return scratch


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()
