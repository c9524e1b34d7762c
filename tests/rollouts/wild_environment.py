"""Environments for tests: a correct environment, and an environment for each kind of failure."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any


class Sums:
    """Ask a sum a turn; an episode has 1 to ``most`` of them, by its seed, or ``exactly`` so many."""

    def __init__(self, most: int = 3, exactly: int | None = None):
        self._most, self._exactly = most, exactly

    def reset(self, seed: int) -> str:
        self._draw = random.Random(seed)
        drawn = self._draw.randrange(self._most) + 1
        self._left = self._exactly or drawn
        return self._asked()

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._left -= 1
        done, known = self._left == 0, {"letters": len(action), "said": action}
        return "" if done else self._asked(), len(action) % 4 / 4, done, known

    def _asked(self) -> str:
        return f"{self._draw.randrange(10)}+{self._draw.randrange(10)}="


class Wild(Sums):
    """Fail in the way that the first letter of an action selects."""

    def __init__(self, folder: str = "", **arguments: Any):
        super().__init__(**arguments)
        self._folder = folder

    def reset(self, seed: int) -> str:
        if self._folder:
            with (Path(self._folder) / "resets").open("a") as file:
                file.write(f"{seed}\n")
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        match action[:1]:
            case "k":
                os.kill(os.getpid(), signal.SIGKILL)
            case "s":
                time.sleep(0.4)
            case "g":
                self._grown = bytearray(1 << 30)
            case "h":
                time.sleep(600)
            case "r":
                raise ValueError("a rule was broken")
            case "u":
                return "\ud800", 0.0, False, {}
            case "n":
                socket.create_connection(("127.0.0.1", int(action[1:])), timeout=5).close()
        return super().step(action)


class Closing(Sums):
    """Write down which of its episodes were closed."""

    def __init__(self, folder: str = "", **arguments: Any):
        super().__init__(**arguments)
        self._closed = Path(folder) / "closed"

    def reset(self, seed: int) -> str:
        self._seed = seed
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        if action == "r":
            raise ValueError("a rule was broken")
        return super().step(action)

    def close(self) -> None:
        with self._closed.open("a") as file:
            file.write(f"{self._seed}\n")
        raise OSError("it was closed before")


class Forgetful(Sums):
    """Never say the same twice."""

    def _asked(self) -> str:
        return str(time.monotonic_ns())
