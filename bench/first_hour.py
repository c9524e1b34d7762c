"""Measure the first hour: set-up with uv and pip, the first run of a new home, and a launch to its first step.

    python bench/first_hour.py [--only PART...] [--repeats 3] [--out bench/results/first_hour.json]

Every part runs `scripts/setup.sh` or `grpo launch` as a user types them, in a new folder.

* ``set-up``: seconds of `scripts/setup.sh` into a new environment, with uv and with pip, each with empty caches (cold)
  and with the caches that the cold set-up has filled (warm);
* ``first run``: seconds of the smoke recipe with a new home and an empty cache, which first creates the smoke model;
* ``first step``: seconds from the command to each phase and to step 1, and the CPU seconds of all processes of the run.

A part that is not measured keeps its record. Measure on an otherwise idle machine: the record contains its load.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from made_by import begin, finished
from speed_trainers import first_step

from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.commands import base_environment
from grpo_recipes.runs.rundir import write_json

ROOT = find_code_root()
RECORD = ROOT / "bench/results/first_hour.json"
LAUNCH = [str(Path(sys.executable).with_name("grpo")), "launch", str(ROOT / "recipes/smoke/grpo.yaml")]


def set_up(scratch: Path, repeats: int) -> dict[str, Any]:
    """Return the seconds of each set-up of a CPU environment, by installer and by the state of its caches."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for installer in ("uv", "pip"):
        # An uv that fails makes setup.sh use pip, as on a machine without uv.
        program = _write_failing_uv(scratch / "no-uv") if installer == "pip" else None
        by_state = seconds.setdefault(installer, {"cold": [], "warm": []})
        for number in range(repeats):
            home = scratch / f"{installer}-{number}"
            home.mkdir()
            for state, durations in by_state.items():
                caches = {"UV_CACHE_DIR": str(home / "uv"), "PIP_CACHE_DIR": str(home / "pip")}
                path = f"{program}{os.pathsep}{os.environ['PATH']}" if program else os.environ["PATH"]
                variables = {**caches, "PATH": path, "DEVICE": "cpu", "ENV_DIR": str(home / state)}
                durations.append(_time(["bash", str(ROOT / "scripts/setup.sh")], scratch, variables))
    return seconds


def _write_failing_uv(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "uv").write_text("#!/bin/sh\nexit 1\n")
    (folder / "uv").chmod(0o755)
    return folder


def first_run(scratch: Path, repeats: int) -> dict[str, Any]:
    """Return the seconds of whole smoke runs with an empty home and cache."""
    durations = []
    for number in range(repeats):
        home = scratch / f"home-{number}"
        home.mkdir()
        durations.append(_time(LAUNCH, home, {"HOME": str(home), "CACHE_ROOT": str(home / "cache")}))
    return {"seconds": durations}


def to_first_step(scratch: Path, repeats: int) -> dict[str, Any]:
    """Return the seconds of each phase until the first step, and the CPU seconds of the whole launch of one step."""
    command = [*LAUNCH, "--max_steps", "1", "--save_strategy", "no"]
    first_step(command, scratch)  # creates the smoke model if it is missing, and reads the packages from the disk
    launches = []
    for _ in range(repeats):
        used = _read_cpu_seconds()
        phases = first_step(command, scratch)
        launches.append({"phases": phases, "cpu_seconds": round(_read_cpu_seconds() - used, 2)})
    return {"launches": launches}


def _read_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _time(argv: list[str], folder: Path, variables: Mapping[str, str]) -> float:
    """Run a command in a folder and return its wall seconds; raise CalledProcessError if it fails."""
    began = time.perf_counter()
    environment = {**base_environment(os.environ), "GRPO_HOME": str(ROOT), **variables}
    subprocess.run(argv, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return round(time.perf_counter() - began, 2)


PARTS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "set-up": set_up, "first run": first_run, "first step": to_first_step
}  # fmt: skip


def main() -> None:
    """Measure the parts and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="measure only these parts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    origin = begin(options.out)
    result = json.loads(options.out.read_text()) if options.out.exists() else {"what": "wall seconds on CPU"}
    for name in options.only or PARTS:
        load = [round(load, 2) for load in os.getloadavg()]
        with tempfile.TemporaryDirectory() as scratch:
            found = PARTS[name](Path(scratch), options.repeats)
        result[name] = finished(origin) | {"found": found, "load_before": load}
        print(f"{name}: {json.dumps(found)}", flush=True)
        write_json(options.out, result)


if __name__ == "__main__":
    main()
