"""Wait for another process."""

from __future__ import annotations

import time


def wait_for(condition, event: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {event}"
        time.sleep(0.02)
