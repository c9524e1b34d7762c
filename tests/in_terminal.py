"""Run `grpo` in a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grpo_command import run_grpo

COLOR = re.compile(r"\x1b\[[0-9;]*m")


def run_in_terminal(width: int, *words: str, cwd: Path | None = None, **variables: str) -> str:
    """Run `grpo` in a terminal of ``width`` columns and return everything that it prints there, with its colors."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", **variables}
    for name in {"COLUMNS", "NO_COLOR", "FORCE_COLOR"} - variables.keys():
        environment.pop(name, None)
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(_read, controller)
        try:
            run_grpo(*words, cwd=cwd, env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
        finally:
            os.close(terminal)
    os.close(controller)
    return output.result().decode().replace("\r\n", "\n")


def _read(controller: int) -> bytes:
    """Read until no process has the terminal anymore."""
    parts = []
    while True:
        try:
            parts.append(os.read(controller, 1 << 16))
        except OSError:
            return b"".join(parts)
