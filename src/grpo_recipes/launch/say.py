"""What the launcher tells the person who watches."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print a line of the launcher's own."""
    print_line(f"grpo: {text}")


def print_line(text: str) -> None:
    """Print a line; a terminal or pipe that is gone must not end the run."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
