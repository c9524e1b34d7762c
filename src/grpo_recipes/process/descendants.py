"""Finding and ending processes of a run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

import psutil


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Living descendants of ``pid`` (ourselves by default), zombies left out."""
    try:
        children = psutil.Process(pid or os.getpid()).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if is_alive(child.pid)]


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_all(processes: Iterable[psutil.Process], grace: float = 5.0) -> list[psutil.Process]:
    """SIGTERM, then SIGKILL after ``grace`` seconds.

    Returns:
        Those that needed SIGKILL.
    """
    targets = list(processes)
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(is_alive(process.pid) for process in targets):
        reap()
        time.sleep(0.05)
    stubborn = [process for process in targets if is_alive(process.pid)]
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return stubborn


def end_descendants(grace: float = 5.0, rounds: int = 5) -> None:
    """End every descendant of this process, those born meanwhile included."""
    for _ in range(rounds):
        living = descendants()
        if not living:
            return
        end_all(living, grace)
        time.sleep(0.05)
        reap()


def reap() -> None:
    """Collect adopted children that have exited, so that they do not count as alive."""
    with contextlib.suppress(ChildProcessError):
        while True:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None or not _adopted(info.si_pid):
                return
            os.waitpid(info.si_pid, 0)


# Children that a Popen object waits for; taking their exit status away would make it report 0.
OWN_CHILDREN: set[int] = set()


def _adopted(pid: int) -> bool:
    return pid not in OWN_CHILDREN
