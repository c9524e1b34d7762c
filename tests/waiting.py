"""Wait for another process, and measure CPU time."""

from __future__ import annotations

import resource
import time


def wait_for(condition, event: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {event}"
        time.sleep(0.02)


def children_seconds() -> float:
    """Return the CPU seconds of this process's ended children, which other load does not change."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
