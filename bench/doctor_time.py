"""Measure the seconds of `grpo doctor`: alone, with a recipe, on a run, and if programs or hosts hang.

    python bench/doctor_time.py [--repeats 9] [--out bench/results/doctor_time.json]

The hanging programs are scripts at the front of PATH. The silent host is a socket that listens and never answers.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from made_by import begin, write_record

from grpo_recipes.paths import find_code_root

GRPO = str(Path(sys.executable).with_name("grpo"))
PROGRAMS = ("nvidia-smi", "sinfo")
LIMIT_SECONDS = 9.0  # the doctor waits 8


def main() -> None:
    """Time each case and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/doctor_time.json")
    options = parser.parse_args()
    origin = begin(options.out)
    recipe = str(find_code_root() / "recipes/smoke/grpo.yaml")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hanging = f"{_hanging(Path(folder))}{os.pathsep}{os.environ['PATH']}"
        cases = {
            "machine": _time(options.repeats, [], HF_HUB_OFFLINE="1"),
            "machine and recipe": _time(options.repeats, [recipe], HF_HUB_OFFLINE="1"),
            "silent hub": _time(options.repeats, [], HF_ENDPOINT=address, HF_HUB_OFFLINE="0"),
            f"hanging {', '.join(PROGRAMS)}": _time(options.repeats, [], PATH=hanging, HF_HUB_OFFLINE="1"),
        }
    result = {
        "what": "wall seconds of grpo doctor",
        "cases": cases,
        "limit_seconds": LIMIT_SECONDS,
        "repeats": options.repeats,
    }
    write_record(options.out, result, origin)
    for name, seconds in cases.items():
        print(f"{name:<40} median {seconds['median']:.2f} s, longest {seconds['longest']:.2f} s")


def _hanging(folder: Path) -> Path:
    for name in PROGRAMS:
        (folder / name).write_text("#!/bin/bash\nexec sleep 600\n")
        (folder / name).chmod(0o755)
    return folder


def _time(repeats: int, arguments: list[str], **variables: str) -> dict[str, float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        done = subprocess.run(
            [GRPO, "doctor", *arguments, "--json"], env={**os.environ, **variables}, capture_output=True, check=False
        )
        seconds.append(time.perf_counter() - began)
        if not done.stdout:
            raise SystemExit(done.stderr.decode())
    return {"median": round(statistics.median(seconds), 3), "longest": round(max(seconds), 3)}


if __name__ == "__main__":
    main()
