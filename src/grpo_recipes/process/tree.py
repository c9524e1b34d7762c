"""Find the living descendants of a process, end them reliably, and collect orphans and zombies (Linux only)."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil

from grpo_recipes.process.waiting import wait_until

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_SECONDS = 10.0
_EXIT_SECONDS = 5.0  # a killed process frees its memory within this time
# Children that belong to a Popen object. If ``reap`` collected one of them, its Popen would report exit code 0.
OWN_CHILDREN: set[int] = set()


def die_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """Let the kernel send ``signum`` to this process when its parent dies (PR_SET_PDEATHSIG).

    ``parent`` is the pid of the parent at the start of this process. If it is dead already, send the signal now.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants instead of init (PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Call prctl(2) of the C library with an option and its value; raise OSError if it fails."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists and is not a zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return the living descendants of ``pid`` (by default of this process), without zombies; [] if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children(recursive=True) if is_alive(child.pid)]
    return []


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal (SIGSTOP). False if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def request_stacks(pids: Iterable[int]) -> list[str]:
    """Send SIGUSR2 to processes, so that they write the stacks of their threads; return those that can't, as text.

    These are stopped by a signal. An engine of vLLM has its name: ``4711 (EngineCore_DP1)``. A process without a
    handler of SIGUSR2 ends.
    """
    targets, stopped = list(pids), list[str]()
    for pid in filter(is_stopped, targets):
        stopped.append(str(pid))
        with contextlib.suppress(psutil.NoSuchProcess):
            if (name := psutil.Process(pid).name()).startswith("VLLM::"):
                stopped[-1] += f" ({name.removeprefix('VLLM::')})"
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    return stopped


def end_all(processes: Iterable[psutil.Process], grace: float = 5.0) -> None:
    """Send SIGTERM to processes, and SIGKILL after ``grace`` seconds if they still run; wait until they have ended.

    After SIGKILL, the wait ends after ``_EXIT_SECONDS`` in any case. ``reap`` is called meanwhile.
    """
    targets = list(processes)

    def all_ended() -> bool:
        """Reap ended children, and return whether no target is alive."""
        reap()
        return not any(is_alive(process.pid) for process in targets)

    for signum, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _EXIT_SECONDS)):
        _send_signal(signum, targets)
        wait_until(all_ended, seconds, pause=0.05)


def end_descendants() -> None:
    """End every descendant of this process: SIGTERM, SIGKILL after five seconds, then ``kill_descendants``."""
    end_all(descendants())
    kill_descendants()


def kill_descendants(pid: int | None = None) -> None:
    """Send SIGKILL to every descendant of ``pid`` (by default of this process) until none is left.

    Give up after ``_KILL_SECONDS``. SIGSTOP stops all of them first, so that none can start another process.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        stopped: set[psutil.Process] = set()
        while (running := set(descendants(pid)) - stopped) and time.monotonic() < deadline:
            _send_signal(signal.SIGSTOP, running)
            stopped |= running
        _send_signal(signal.SIGKILL, stopped)
        if pid is None:
            reap()
        if not descendants(pid):
            return
        time.sleep(0.01)


def _send_signal(signum: int, processes: Iterable[psutil.Process]) -> None:
    """Send a signal to each process; ignore processes that have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def reap() -> None:
    """Wait for children that have exited, so that adopted orphans do not remain as zombies; never block.

    Stop at a child in ``OWN_CHILDREN``, because the Popen object that started it still needs its exit code. If
    another child is collected, its Popen object reports exit code 0.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None or info.si_pid in OWN_CHILDREN:
                return
            os.waitpid(info.si_pid, 0)
