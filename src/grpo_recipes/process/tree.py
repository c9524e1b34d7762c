"""The tree of a run's processes: who descends from us, who lives, and how all of them end."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0
_EXIT_SECONDS = 5.0  # in which a killed process frees its memory
# Children that a Popen object waits for: collecting one in ``reap`` would make its Popen report exit code 0.
OWN_CHILDREN: set[int] = set()


def die_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """Have the kernel send us ``signum`` when our parent dies; send it now if our parent is no longer ``parent``."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Make orphaned descendants our children, so that none escapes the clean-up."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Set a process attribute of Linux that Python has no name for."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def is_alive(pid: int) -> bool:
    """Return whether ``pid`` runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return the living descendants of ``pid`` (of this process by default), without zombies."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children(recursive=True) if is_alive(child.pid)]
    return []


def end_all(processes: Iterable[psutil.Process], grace: float = 5.0) -> None:
    """Send SIGTERM, and after ``grace`` seconds SIGKILL to those that are left; wait until they hold no port."""
    targets = list(processes)
    for signum, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _EXIT_SECONDS)):
        _send(signum, targets)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(is_alive(process.pid) for process in targets):
            reap()
            time.sleep(0.05)


def end_descendants() -> None:
    """End every descendant of this process, by SIGTERM first; what was born meanwhile is killed at once."""
    end_all(descendants())
    kill_descendants()


def kill_descendants(pid: int | None = None) -> None:
    """Kill every descendant of ``pid`` (of this process by default), for some seconds at most.

    All are stopped first, so that none escapes by starting others.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        stopped: set[psutil.Process] = set()
        while (running := set(descendants(pid)) - stopped) and time.monotonic() < deadline:
            _send(signal.SIGSTOP, running)
            stopped |= running
        _send(signal.SIGKILL, stopped)
        if pid is None:
            reap()
        if not descendants(pid):
            return
        time.sleep(0.01)


def _send(signum: int, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def reap() -> None:
    """Collect adopted children that have exited, so that they do not count as alive."""
    with contextlib.suppress(ChildProcessError):
        while True:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None or info.si_pid in OWN_CHILDREN:
                return
            os.waitpid(info.si_pid, 0)
