"""Shared-memory segments that a killed run leaves in ``/dev/shm``: whose they are, and their removal.

Python's ``multiprocessing`` draws their names at random (``psm_948e8e13`` of vLLM's message queues, ``sem.mp-kgh1xwy0``
of the trainers) and removes them by a helper process at the end, which a SIGKILL of the whole job takes along. A name
does not tell its owner, and a segment that nobody maps may be waiting for another program of the same user. So each
warden looks once a second which new segments the processes below it map, and records these in the run's folder in
``/dev/shm``. Naming the segments ourselves would mean patching private parts of Python in every process, and would
miss those that C libraries make. A segment made in the last second before a kill is not recorded, and stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from grpo_recipes.process.descendants import descendants

SHARED_MEMORY = Path("/dev/shm")
# Kinds whose makers draw the name and remove them at their end. What a user keeps there has a name of its own.
_KINDS = ("psm_", "sem.mp-", "torch_", "nccl-")
_LOOK_SECONDS = 1.0
_LOOKS = 3  # a maker maps its segment at once; what nobody below us maps after these is another program's


class SegmentRecorder:
    """Record the segments that the descendants of this process make from now on.

    Args:
        memory: the run's folder in shared memory; nothing is recorded where it is elsewhere.
    """

    def __init__(self, memory: Path) -> None:
        self._record = _record(memory)
        self._active = memory.parent == SHARED_MEMORY
        self._next_look = 0.0
        self._looks = dict.fromkeys(_segments().values(), _LOOKS) if self._active else {}

    def look(self) -> None:
        """Record what is new; without anything new this lists one folder, once a second."""
        if not self._active or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        there = {inode: name for name, inode in _segments().items()}
        self._looks = {inode: self._looks.get(inode, 0) for inode in there}
        unknown = [inode for inode, looks in self._looks.items() if looks < _LOOKS]
        if not unknown:
            return
        mapped = _mapped(process.pid for process in descendants())
        for inode in unknown:
            self._looks[inode] += 1
            if inode in mapped:
                self._looks[inode] = _LOOKS
                with contextlib.suppress(OSError), self._record.open("a") as record:  # shared memory may be full
                    record.write(f"{inode} {there[inode]}\n")


def remove_segments(memory: Path) -> int:
    """Remove the recorded segments of a run that has ended, but none that a living process maps.

    Returns:
        How many were removed.
    """
    if memory.parent != SHARED_MEMORY:
        return 0
    there = _segments()
    left = [name for name, inode in _recorded(memory) if there.get(name) == inode]
    mapped = _mapped(psutil.pids()) if left else set()
    removed = 0
    for name in left:
        if there[name] not in mapped:
            with contextlib.suppress(OSError):
                (SHARED_MEMORY / name).unlink()
                removed += 1
    return removed


def _record(memory: Path) -> Path:
    return memory / ".segments"


def _recorded(memory: Path) -> list[tuple[str, int]]:
    """Names and inodes, without a last line that was torn by a kill."""
    try:
        text = _record(memory).read_text(errors="replace")
    except OSError:
        return []
    return [(name, int(inode)) for inode, name in re.findall(r"^(\d+) ([^/\s]+)\n", text, re.MULTILINE)]


def _segments() -> dict[str, int]:
    """Names and inodes of the segments of this user."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHARED_MEMORY):
            if entry.name.startswith(_KINDS):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        found[entry.name] = status.st_ino
    return found


def _mapped(pids: Iterable[int]) -> set[int]:
    """Inodes of shared memory that these processes map. Not names: glibc's semaphores are mapped under another one."""
    device = SHARED_MEMORY.stat().st_dev
    pattern = re.compile(rb" %02x:%02x (\d+) " % (os.major(device), os.minor(device)))
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's, or gone
            inodes.update(map(int, pattern.findall(Path(f"/proc/{pid}/maps").read_bytes())))
    return inodes
