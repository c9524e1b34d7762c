"""Verify the checkpoint of a resumed run in a thread while its server starts.

Reading a checkpoint of 100 GB takes a minute or more. Only trainers load it, so they start after ``wait``.

    with Verification(run_dir / "checkpoints") as verification:
        ...                                   # start the server
        if verification.wait(monitor.tick):   # raises CheckpointsDamaged
            attempt.rewind()
        ...                                   # start the trainers
"""

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from grpo_recipes.errors import ConfigError
from grpo_recipes.process.reports import say
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.runs.checkpoints import find_newest_complete, find_verified_checkpoint

_TICK_SECONDS = 0.2


class CheckpointsDamaged(ConfigError):
    """No checkpoint of the run can be resumed, which was found before its trainers started."""


def require_checkpoint(folder: Path) -> None:
    """Raise ConfigError if no checkpoint in ``folder`` can be resumed according to the sizes of its files.

    Contents are not read. Without any checkpoint, nothing is raised.
    """
    if find_newest_complete(folder) is None:
        find_verified_checkpoint(folder, say)


class Verification:
    """The verification of the checkpoints in ``folder``, which runs in its block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checkpoint = find_newest_complete(folder)  # the trainers would resume from it
        self._result = Future[Path | None]()
        self._messages: list[str] = []  # to be printed by the main thread
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._verify, daemon=True)

    def __enter__(self) -> "Verification":
        """Start the verification."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the verification, and wait for the end of its thread."""
        self._stopped.set()
        self._thread.join()

    def _verify(self) -> None:
        """Store the verified checkpoint, or the error."""
        try:
            self._result.set_result(find_verified_checkpoint(self._folder, self._messages.append, self._stopped.is_set))
        except BaseException as error:
            self._result.set_exception(error)

    def wait(self, on_tick: Callable[[], object]) -> bool:
        """Wait for the result, print its messages, and return whether the newest checkpoint was damaged.

        The trainers then resume from an older checkpoint. ``on_tick`` is called several times per second. Later calls
        return False. Raise CheckpointsDamaged if no checkpoint can be resumed.
        """

        def is_done() -> bool:
            """Print new messages, and return whether the thread has ended."""
            on_tick()
            done = self._result.done()  # before the messages, so that none is left
            while self._messages:
                say(self._messages.pop(0))
            return done

        wait_until(is_done, math.inf, pause=_TICK_SECONDS)
        try:
            previous, self._checkpoint = self._checkpoint, self._result.result()
        except ConfigError as error:
            raise CheckpointsDamaged(*error.problems) from None
        return previous != self._checkpoint
