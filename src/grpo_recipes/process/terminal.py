"""What the launcher prints: lines on its terminal and in ``launch.log``, and a live line where a terminal shows one.

A terminal that is stopped (Ctrl-S), or a pipe that nobody reads (``| less``), must not hold up the launcher, which
supervises processes. A line that it does not accept within a second is only in ``launch.log``.
"""

import contextlib
import os
import re
import select
import shlex
import stat
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from grpo_recipes.secrets import masked

LOG = "launch.log"
WIDTH = 80  # columns of a line where there is no terminal
_MOST_EARLY_LINES = 1000  # lines that are remembered until there is a run directory
_WRITABLE_SECONDS = 1.0  # longest wait for room in a terminal or pipe
_FRAMES = re.compile(
    r'(?m)(?:^(?:\[rank\d+\]: ?)?  File "[^"\n]*/(?:site-packages|grpo_recipes|lib/python[\d.]+)/.*\n'
    r"(?:(?:\[rank\d+\]: ?)?    .*\n)*)+"
)
_NEW_LINE = "\r\x1b[K"  # over the live line
_COLOURS = (  # parts of a line -> the terminal's codes: 1 bold, 2 dim, 31 red, 32 green, 33 yellow, 36 cyan
    (r"^(step|eval\S*) .*?\d+/\d+", 1), (r"(?<=  reward )[-\d.]+", 36), (r"^grpo: note:", 33),
    (r"(unscored|unfinished|cut off|clipped) \d+%", 33), (r"^grpo: fix:", 1), (r"^grpo:.* failed with exit .*", 31),
    (r"^grpo:.* done:", 32), (r"^  [>|] .*", 2),
)  # fmt: skip


def readable(text: str) -> str:
    """Return text without colours and control characters, and of progress bars what they showed last."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace("\r\n", "\n"))
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", re.sub(r"[^\n]*\r(?=[^\n])", "", text))


def without_library_frames(text: str) -> str:
    """Return a log with a count in place of the frames of libraries in its tracebacks: the user's own lines remain."""
    return _FRAMES.sub(lambda found: f"  … {found[0].count('  File ')} frames of libraries\n", text)


def columns() -> int:
    """Return the width of the terminal, ``WIDTH`` where there is none."""
    with contextlib.suppress(OSError):
        return os.get_terminal_size().columns or WIDTH
    return WIDTH


def in_colour() -> bool:
    """Return whether stdout takes colours: a terminal that is not dumb, and no NO_COLOR."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def coloured(text: str) -> str:
    """Return a line of the launcher in the colours of a terminal."""
    for pattern, code in _COLOURS:
        text = re.sub(pattern, f"\x1b[{code}m\\g<0>\x1b[0m", text)
    return text


class Output:
    """Standard output of a launcher, and what it keeps of it in ``launch.log``."""

    def __init__(self) -> None:
        self._live = ""
        self._said: deque[str] | None = None  # until there is a run directory to keep it in
        self._log = -1
        self._full: set[int] = set()  # descriptors that had no room for the last text

    def launch(self) -> contextlib.AbstractContextManager[Any]:
        """Remember from now on what is printed, for the log of the run directory that is made inside."""
        self._said = deque(maxlen=_MOST_EARLY_LINES)
        return contextlib.closing(self)

    def close(self) -> None:
        """Remove the live line, and print no longer for a run."""
        self.live("")
        if self._log >= 0:
            os.close(self._log)
        self._said, self._log = None, -1

    def keep(self, folder: Path) -> None:
        """Write to the run's log what was printed in this launch, under its time and command, and all that follows."""
        with contextlib.suppress(OSError):
            self._log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
        self._note(f"grpo: {time.strftime('%Y-%m-%d %H:%M:%S')} {masked(command)}", -1)
        said, self._said = self._said or (), None
        for line in said:
            self._note(line, 1)

    def _note(self, line: str, stream: int) -> None:
        """Add a line to the log, unless ``stream`` is that file, as in a sweep; a full disk loses the line."""
        if self._log >= 0:
            with contextlib.suppress(OSError):
                if stream < 0 or not os.path.sameopenfile(stream, self._log):
                    os.write(self._log, f"{line}\n".encode(errors="replace"))
        elif self._said is not None:
            self._said.append(line)

    def line(self, text: str, error: bool = False) -> None:
        """Print a line, of errors on stderr, secrets masked; a terminal or pipe that is gone must not end the run."""
        stream, fd = (sys.stderr, 2) if error else (sys.stdout, 1)
        text = readable(masked(text))
        self._note(text, fd)
        if stream.isatty():
            shown = coloured(text) if in_colour() else text
            start, again = (_NEW_LINE, self._live) if self._live else ("", "")
            self._write(fd, f"{start}{shown}\n{again}")
        elif _is_pipe(stream):
            self._write(fd, f"{text}\n")
        elif not _printed(text, stream):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    def live(self, text: str) -> None:
        """Show ``text`` below all lines, on a terminal alone, until the next; an empty one removes it."""
        if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and text != self._live:
            text = text[: columns() - 1]
            self._live = text
            self._write(1, _NEW_LINE + text)

    def _write(self, descriptor: int, text: str) -> None:
        """Write to a terminal or pipe; drop the text if it has no room or is gone."""
        content = text.encode(errors="replace")
        with contextlib.suppress(OSError):
            while content:
                seconds = 0.0 if descriptor in self._full else _WRITABLE_SECONDS
                if not select.select([], [descriptor], [], seconds)[1]:
                    self._full.add(descriptor)
                    return
                self._full.discard(descriptor)
                content = content[os.write(descriptor, content[: select.PIPE_BUF]) :]


def _is_pipe(stream: Any) -> bool:
    with contextlib.suppress(OSError, ValueError):  # of a test, without a file behind it
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    return False


def _printed(text: str, stream: object) -> bool:
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)  # type: ignore[call-overload]
        return True
    return False


OUTPUT = Output()
