"""One way to wait: poll a condition until it holds, a deadline passes, or waiting becomes pointless.

    ready = wait_until(lambda: path.exists(), seconds=10, stopped=lambda: process.poll() is not None)

The deadline limits the wait as a whole. The condition is checked at least once, and once more after the wait has ended:
a process may produce its result and exit between two checks.
"""

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def wait_until(
    condition: Callable[[], Value], seconds: float, pause: float = 0.1, stopped: Callable[[], bool] | None = None
) -> Value:
    """Return the first true value of ``condition()``, or its last false value if the wait ends without one.

    The wait ends after ``seconds`` (``math.inf`` for no limit), or as soon as ``stopped()`` is true. Both functions
    are called every ``pause`` seconds, and their exceptions are raised.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_over = stopped is not None and stopped()
        value = condition()
        remaining = deadline - time.monotonic()
        if value or is_over or remaining <= 0:
            return value
        time.sleep(min(pause, remaining))
