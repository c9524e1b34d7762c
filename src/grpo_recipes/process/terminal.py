"""Output of the launcher: lines for its terminal and ``launch.log``, and a live line at the end of a terminal.

The launcher supervises processes, so a stopped terminal (Ctrl-S) or an unread pipe (``| less``) must not block it. A
line that the terminal or pipe does not accept within a second is only written to ``launch.log``.
"""

import contextlib
import os
import re
import select
import shlex
import stat
import sys
import textwrap
import time
from collections import deque
from pathlib import Path
from typing import Any

from grpo_recipes.secrets import mask_secrets

LOG = "launch.log"
WIDTH = 80  # columns of a line without a terminal
_MAX_EARLY_LINES = 1000  # lines that are stored until there is a run directory
_WRITABLE_SECONDS = 1.0  # longest wait until a terminal or pipe accepts text
_FRAMES = re.compile(
    r'(?m)(?:^(?:\[rank\d+\]: ?)?  File "[^"\n]*/(?:site-packages|grpo_recipes|lib/python[\d.]+)/.*\n'
    r"(?:(?:\[rank\d+\]: ?)?    .*\n)*)+"
)
_METRIC_ROWS = re.compile(r"(?m)(?:^\{'(?:loss|eval|train)\S*: .*\}\n)+")
_CLEAR_LINE = "\r\x1b[K"  # removes the live line
_COLORS = (  # pattern in a line -> code of the terminal: 1 bold, 2 dim, 31 red, 32 green, 33 yellow, 36 cyan
    (r"^(step|eval\S*) .*?\d+/\d+", 1), (r"(?<=  reward )[-\d.]+", 36), (r"^grpo: note:", 33),
    (r"(unscored|unfinished|cut off|clipped) \d+%", 33), (r"^grpo: next .*", 1), (r"^grpo:.* failed with exit .*", 31),
    (r"^grpo: status  completed", 32), (r"^  [>|] .*", 2),
)  # fmt: skip


def strip_control_codes(text: str) -> str:
    """Return a text without color codes and control characters, and with only the last state of each progress bar."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\r\n", "\n"))
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", re.sub(r"[^\n]*\r(?=[^\n])", "", text))


def collapse_library_frames(text: str) -> str:
    """Replace consecutive traceback frames of libraries by a line with their number; the user's own frames remain."""
    return _FRAMES.sub(lambda frames: f"  … {frames[0].count('  File ')} frames of libraries\n", text)


def columns() -> int:
    """Return the width of the terminal in characters, or ``WIDTH`` without a terminal."""
    with contextlib.suppress(OSError):
        return os.get_terminal_size().columns or WIDTH
    return WIDTH


def use_color() -> bool:
    """Return whether stdout is a terminal with colors, and NO_COLOR is not set."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def collapse_metrics(text: str) -> str:
    """Replace consecutive rows of metrics, which TRL prints after each step, by a line with their number."""
    return _METRIC_ROWS.sub(lambda rows: f"… rows of metrics: {rows[0].count(chr(10))}\n", text)


class Output:
    """Print lines to stdout and stderr and copy them to ``launch.log``; on a terminal, also show a live status line."""

    def __init__(self) -> None:
        self._live = ""
        self._early_lines: deque[str] | None = None  # printed before there is a run directory
        self._log = -1
        self._full: set[int] = set()  # descriptors that did not accept the last text

    def store_lines(self) -> contextlib.AbstractContextManager[Any]:
        """Keep a copy of the last 1,000 printed lines in memory until ``start_log`` writes them to a log.

        Return a context manager that calls ``close`` at the end of its block.
        """
        self._early_lines = deque(maxlen=_MAX_EARLY_LINES)
        return contextlib.closing(self)

    def close(self) -> None:
        """Remove the live line from the terminal, close the log, and drop stored lines."""
        self.show_live("")
        if self._log >= 0:
            os.close(self._log)
        self._early_lines, self._log = None, -1

    def start_log(self, folder: Path) -> None:
        """Open ``launch.log`` in ``folder``, and write the time, the command and the stored lines to it.

        All lines that are printed later are also written there. If the log can't be created, lines are only printed.
        """
        with contextlib.suppress(OSError):
            self._log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
        self._log_line(f"grpo: {time.strftime('%Y-%m-%d %H:%M:%S')} {mask_secrets(command)}", -1)
        lines, self._early_lines = self._early_lines or (), None
        for line in lines:
            self._log_line(line, 1)

    def _log_line(self, line: str, stream: int) -> None:
        """Write a line to the log, or store it if ``start_log`` was not called yet; ignore errors such as a full disk.

        Nothing is written if the descriptor ``stream`` is the log itself, as in a sweep. -1 is no descriptor.
        """
        if self._log >= 0:
            with contextlib.suppress(OSError):
                if stream < 0 or not os.path.sameopenfile(stream, self._log):
                    os.write(self._log, f"{line}\n".encode(errors="replace"))
        elif self._early_lines is not None:
            self._early_lines.append(line)

    def print_line(self, text: str, error: bool = False) -> None:
        """Print a line without secrets to stdout, or to stderr if ``error`` is true, and write it to the log.

        No error is raised if stdout is gone; /dev/null then replaces it. A terminal or pipe that does not accept
        the line within a second loses it.
        """
        stream, descriptor = (sys.stderr, 2) if error else (sys.stdout, 1)
        text = strip_control_codes(mask_secrets(text))
        self._log_line(text, descriptor)
        if stream.isatty():
            line = _wrap_line(text, columns())
            for pattern, code in _COLORS if use_color() else ():
                line = re.sub(pattern, f"\x1b[{code}m\\g<0>\x1b[0m", line)
            clear, live = (_CLEAR_LINE, self._live) if self._live else ("", "")
            self._write(descriptor, f"{clear}{line}\n{live}")
        elif _is_pipe(stream):
            self._write(descriptor, f"{text}\n")
        else:
            try:
                print(text, file=stream, flush=True)
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def show_live(self, text: str) -> None:
        """Show ``text`` as the last line of the terminal until the next call; an empty text removes it.

        Lines that are printed later appear above it. Without a terminal, do nothing.
        """
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and text != self._live:
            text = text[: columns() - 1]
            self._live = text
            self._write(1, _CLEAR_LINE + text)

    def _write(self, descriptor: int, text: str) -> None:
        """Write a text to a terminal or pipe; drop the rest if it accepts nothing for a second or is gone.

        After a drop, the next text is only tried without a wait.
        """
        content = text.encode(errors="replace")
        with contextlib.suppress(OSError):
            while content:
                seconds = 0.0 if descriptor in self._full else _WRITABLE_SECONDS
                if not select.select([], [descriptor], [], seconds)[1]:
                    self._full.add(descriptor)
                    return
                self._full.discard(descriptor)
                content = content[os.write(descriptor, content[: select.PIPE_BUF]) :]


def _wrap_line(line: str, width: int) -> str:
    """Break a line of the launcher at spaces if it is longer than the terminal is wide.

    It continues below its text. Lines with a command or a fix are not broken, so that they can be copied.
    """
    if len(line) <= width or not line.startswith("grpo: ") or re.search(r"^grpo: next |Fix: ", line):
        return line
    start = re.match(r"grpo: (\w+ {2,})?", line)
    indent = " " * (start.end() if start else 0)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def _is_pipe(stream: Any) -> bool:
    """Return whether a stream writes to a pipe; False for a stream without a file descriptor."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no file
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    return False


OUTPUT = Output()
