"""The launcher restarts a dead server at its old address; here the trainer waits for that."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from grpo_recipes.weights.transport import ServerError, ServerLost

_LOOK_SECONDS = 0.2
_NOTICE_SECONDS = 90.0  # for the launcher to see that its server is gone, and us to see that through an NFS cache
_MARGIN_SECONDS = 60.0  # beyond the server's own start: the launcher ends the old one, and has its say first


class GenerationAborted(Exception):
    """A generation was given up because ``BridgeClient.abort`` was called."""


class ServerRestarts:
    """Follows ``processes/server_state.json``, which the launcher writes.

    Args:
        state_file: the file; where there is none, nobody restarts servers.
        start_seconds: longest time a server may take to be ready.
        aborted: ends every wait.
    """

    def __init__(self, state_file: Path, start_seconds: float, aborted: threading.Event):
        self._file = state_file
        self._start_seconds = start_seconds
        self._aborted = aborted
        self._epoch = self._read()[0]

    @property
    def changed(self) -> bool:
        """Whether another server than the one last waited for is there, or soon will be."""
        return self._read() != (self._epoch, "ready")

    def wait_until_noticed(self, lost: ServerLost) -> None:
        """Wait for the launcher to see what we saw.

        Raises:
            ServerLost: the given one, when the launcher leaves things as they are.
            GenerationAborted: meanwhile.
        """
        deadline = time.monotonic() + _NOTICE_SECONDS
        while not self.changed:
            if time.monotonic() > deadline or not self._file.exists():
                raise lost
            self._pause()

    def wait_until_ready(self) -> None:
        """Wait for the next server.

        Raises:
            ServerError: there will be none, or it takes too long.
            GenerationAborted: meanwhile.
        """
        limit = self._start_seconds + _MARGIN_SECONDS
        deadline = time.monotonic() + limit
        while True:
            epoch, state = self._read()
            if state == "gone":
                raise ServerError("the vLLM server is gone and is not started again")
            if state == "ready":
                self._epoch = epoch
                return
            if time.monotonic() > deadline:
                raise ServerError(f"the vLLM server was not ready again after {limit:g} s")
            self._pause()

    def _pause(self) -> None:
        if self._aborted.wait(_LOOK_SECONDS):
            raise GenerationAborted

    def _read(self) -> tuple[int, str]:
        try:
            content = json.loads(self._file.read_text())
        except FileNotFoundError:
            return 1, "ready"
        return int(content["epoch"]), str(content["state"])
