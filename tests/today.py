"""Run pytest with today's share of the rotating tests, as CI does: make e2e-today.

Rotating tests start only within ``MINUTES`` after the start of `make test`. Without a record of `make test`, the
minutes count from the start of this script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

MINUTES = 40  # CI has 60; before `make test` it takes about 5, and the last test, coverage and the docs up to 12


def main() -> int:
    """Run pytest and return its exit code."""
    record, now = Path(os.environ["GRPO_RAN_TESTS"]), time.time()
    lines = record.read_text().splitlines() if record.is_file() else []
    started = next((float(line.split()[1]) for line in lines if line.startswith("started ")), now)
    day = int(now // 86400)
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a") as file:
        file.write(f"day {day}\n")  # make coverage then excuses the tests of other days
    environment = {"GRPO_DAY": str(day), "GRPO_ROTATE_UNTIL": str(started + MINUTES * 60)}
    return subprocess.run([sys.executable, "-m", "pytest", *sys.argv[1:]], env=os.environ | environment).returncode


if __name__ == "__main__":
    sys.exit(main())
