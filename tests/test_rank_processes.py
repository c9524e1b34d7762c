"""The process that ranks are forked from."""

from __future__ import annotations

import os
import signal
from multiprocessing import forkserver

import pytest
from rank_processes import start_fork_server


@pytest.mark.slow
def test_a_fork_server_that_was_ended_and_waited_for_is_started_again() -> None:
    """The launcher ends all processes below it, and in its tests, this is pytest."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    start_fork_server()
    first = server._forkserver_pid
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    start_fork_server()
    assert server._forkserver_pid != first
    start_fork_server()
