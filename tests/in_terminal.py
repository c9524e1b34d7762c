"""Run `grpo` in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

COLOR = re.compile(r"\x1b\[[0-9;]*m")


def run_in_terminal(width: int, *words: str, cwd: Path | None = None, **variables: str) -> str:
    """Run `grpo` in a terminal of ``width`` columns and return everything that it prints there, with its colors."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", **variables}
    for name in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"} - variables.keys():
        environment.pop(name, None)
    command = [sys.executable, "-m", "grpo_recipes", *words]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=cwd):
        os.close(terminal)
        parts = []
        while True:
            try:
                part = os.read(controller, 1 << 16)
            except OSError:  # the terminal's last process has ended
                break
            parts.append(part)
    os.close(controller)
    return b"".join(parts).decode().replace("\r\n", "\n")
