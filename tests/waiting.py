"""Wait for what another process does, and measure what it costs."""

from __future__ import annotations

import resource
import time


def wait_for(condition, what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def children_seconds() -> float:
    """Return the CPU seconds of this process's children that have ended: unlike the clock, no other load is in them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
