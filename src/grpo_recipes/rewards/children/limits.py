"""What keeps a reward's process within bounds: its environment, its memory, its processes."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from grpo_recipes.process.tree import descendants
from grpo_recipes.secrets import secret_name, secret_value

MOST_PROCESSES = 64  # of one child process, itself included

# Rank, port and token variables would let a reward into the training's process group, or the vLLM server.
_KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "JAVA_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "NLTK_DATA", "GRPO_HOME",
    "GRPO_CODE",
)  # fmt: skip
_KEPT_PREFIXES = ("PYTHON", "LC_")
_ADDED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the GPUs are full
}


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The few variables a reward's process gets: those that programs need, none that names or holds a secret."""
    kept = {
        name: value
        for name, value in environment.items()
        if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and not (secret_name(name) or secret_value(value))
    }
    return {**kept, **_ADDED}


def limit_this_process(memory_bytes: int) -> None:
    """Bound the memory that this process and those it starts may write to, each by itself, and their number.

    RLIMIT_DATA counts private writable memory alone: RLIMIT_AS would count libraries and reservations never touched.
    Root is not bound by RLIMIT_NPROC; ``use_of`` is for the rest. The kernel's memory killer takes us first.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # NPROC counts all the user's tasks on the machine: room for ours above all there are, whosever they are.
    everyone = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    wanted = everyone + 4 * MOST_PROCESSES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    score = Path("/proc/self/oom_score_adj")
    score.write_text(str(max(800, int(score.read_text()))))


def use_of(pid: int) -> tuple[int, int]:
    """Processes below ``pid``, and bytes of memory they hold together (shared pages counted once)."""
    family = descendants(pid)
    return len(family), sum(_memory(process) for process in family)


def _memory(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # ended meanwhile, or changed its user
        return 0


def end_family(pid: int | None = None, seconds: float = 10.0) -> None:
    """Kill every descendant of ``pid``, ourselves by default: stopped first, so that none escapes by starting others.

    Args:
        pid: the process whose descendants end; it lives on.
        seconds: how long to try.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stopped: set[int] = set()
        while living := [process for process in descendants(pid) if process.pid not in stopped]:
            for process in living:
                _signal(process.pid, signal.SIGSTOP)
            stopped |= {process.pid for process in living}
            if time.monotonic() > deadline:
                break
        for one in stopped:
            _signal(one, signal.SIGKILL)
        if pid is None:
            reap_all()
        if not descendants(pid):
            return
        time.sleep(0.01)


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def reap_all() -> dict[int, int]:
    """Collect every child that has ended: pid -> wait status."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status
