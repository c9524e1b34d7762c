"""The parent's end of one child process of rewards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from grpo_recipes.rewards.children.limits import child_environment, end_family, use_of
from grpo_recipes.rewards.children.wire import framed

_END_SECONDS = 5.0  # a keeper that is asked to end needs milliseconds


class Child:
    """A process that calls rewards. Nothing here blocks.

    Attributes:
        ready: whether its rewards are loaded.
        rows: numbers of the rows it was given and has not answered, the one it is at first.
        since: when it began with that row, or to start; ``time.monotonic()``.
        called: rewards, by number, that it has called at least once.
        looked_at: when it was last looked at what it uses.
    """

    def __init__(self, setup: dict[str, Any]):
        command = [sys.executable, "-P", "-m", "grpo_recipes.rewards.children.worker", str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=child_environment(os.environ),
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)
        self.ready = False
        self.rows: list[int] = []
        self.since = time.monotonic()
        self.called: set[int] = set()
        self.looked_at = 0.0
        self._unsent = bytearray()
        self._unread = b""
        self._ends: float | None = None
        self._send(setup)

    @property
    def pid(self) -> int:
        """Of the keeper, below which everything else of this child is."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether it waits for rows."""
        return self.ready and not self.rows

    @property
    def sending(self) -> bool:
        """Whether the pipe was full and something waits to be sent."""
        return bool(self._unsent)

    def give(self, reward: int, rows: list[tuple[int, dict[str, Any]]]) -> None:
        """Have it call a reward on each of these rows."""
        self.rows = [number for number, _ in rows]
        self._send({"reward": reward, "rows": rows})

    def _send(self, request: dict[str, Any]) -> None:
        self._unsent += framed(request)
        self.push()

    def push(self) -> None:
        """Send what the pipe takes."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self.stdin, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # it died, which the end of its replies tells
        self.since = time.monotonic()

    def replies(self) -> list[dict[str, Any]]:
        """What it said since the last call; ``{"died": how}`` is the last of all."""
        while True:
            try:
                part = os.read(self.stdout, 1 << 16)
            except BlockingIOError:
                break
            if not part:
                return [*self._lines(), {"died": "death of its process"}]
            self._unread += part
        return self._lines()

    def _lines(self) -> list[dict[str, Any]]:
        *whole, self._unread = self._unread.split(b"\n")
        try:
            return [json.loads(line) for line in whole]
        except ValueError:
            return [{"died": "garbled replies of its process"}]

    def use(self) -> tuple[int, int]:
        """Processes of this child and the bytes they hold, the keeper left out."""
        return use_of(self.pid)

    def end(self) -> None:
        """Ask its keeper to kill everything of it."""
        if self._ends is None:
            self._ends = time.monotonic() + _END_SECONDS
            self._process.terminate()

    def ended(self) -> bool:
        """Whether nothing of it is left; a keeper that does not obey is killed with its family."""
        assert self._ends is not None
        if self._process.poll() is None and time.monotonic() > self._ends:
            end_family(self.pid)
            self._process.kill()
            self._process.wait()
        if self._process.poll() is None:
            return False
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return True
