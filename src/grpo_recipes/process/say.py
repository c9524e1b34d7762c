"""What the launcher tells the person who watches."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print a line of the launcher's own."""
    print_line(f"grpo: {text}")


def gigabytes(number: float) -> str:
    """Bytes as a person reads them, in units of 1000."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"


def print_line(text: str) -> None:
    """Print a line; a terminal or pipe that is gone must not end the run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
