"""Node-local folders of one attempt, the shared memory of its processes, and the removal of what dead runs left.

A folder holds a marker file, on which the launcher (or node worker) that made it keeps a lock, and so do its process
guards, which inherit it. The kernel drops the lock when the last of them dies, however they die, and it holds across
containers, where process ids mean nothing. A folder without a marker is never removed: the marker appears under its
name only once it is locked, so a folder that is being made has none, and neither has a user's own. On a file system
without locks no folder gets a marker: what a killed run leaves there stays.

Python's ``multiprocessing`` draws the names of shared-memory segments at random (``psm_948e8e13`` of vLLM's message
queues, ``sem.mp-kgh1xwy0`` of the trainers): a helper process removes them at the end, but a SIGKILL of the whole job
kills it too. A name does not show its owner, and another program of the user may keep a segment that nobody maps. So
each process guard looks once a second which new segments the processes below it map, and records them in the run's
folder in ``/dev/shm``. A segment that was made in the last second before a kill stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from grpo_recipes.paths import is_locked
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.process.tree import descendants

SHARED_MEMORY = Path("/dev/shm")
_MARKER = ".grpo-scratch"
_SEGMENT_RECORD = ".segments"
_MOST_SECONDS = 20.0  # another node's worker must answer within a minute
_MOST_FOLDERS = 200  # each holds a descriptor while it is looked at
_MOST_NAMES = 5
# Kinds of segments whose makers draw the name and remove them at their end; what a user keeps there has its own name.
_SEGMENT_KINDS = ("psm_", "sem.mp-", "torch_", "nccl-")
_LOOK_SECONDS = 1.0
_LOOKS = 3  # a maker maps its segment at once; what nobody below us maps after these is another program's


@dataclass(frozen=True)
class Scratch:
    """Node-local folders of one attempt."""

    disk: Path  # TMPDIR and compiled caches; a short path, since unix sockets end at 107 bytes
    memory: Path  # where the file bridge writes, in shared memory where there is any
    locks: list[int] = field(default_factory=list)  # descriptors that hold the folders' locks; children inherit them

    @property
    def token(self) -> Path:
        """The file that holds the run's token."""
        return self.disk / "token"

    def remove(self) -> None:
        """Remove both folders, and the shared-memory segments that a killed process of the run left."""
        with contextlib.suppress(OSError):
            remove_segments(self.memory)
        for folder in (self.disk, self.memory):
            with contextlib.suppress(OSError):
                _remove(folder)
        while self.locks:
            os.close(self.locks.pop())


def make_scratch(environment: Mapping[str, str]) -> Scratch:
    """Make the folders and a new token, readable by the user alone."""
    disk = Path(tempfile.mkdtemp(prefix="grpo-", dir=_node_folder(environment)))
    memory = SHARED_MEMORY / disk.name
    folders = [disk]
    if memory != disk and os.access(SHARED_MEMORY, os.W_OK):
        memory.mkdir(mode=0o700)
        folders.append(memory)
    else:
        memory = disk / "weights"
        memory.mkdir()
    scratch = Scratch(disk, memory, [lock for folder in folders if (lock := _mark(folder)) is not None])
    scratch.token.touch(mode=0o600)
    scratch.token.write_text(secrets.token_hex(16))
    return scratch


def remove_dead_scratch(environment: Mapping[str, str]) -> str:
    """Remove scratch that dead runs of this user left on this node, in seconds, and return one line on it, or none.

    It never fails the launch. Each folder is held while it is looked at, so that two launches remove none twice.
    """
    roots = dict.fromkeys([Path(_node_folder(environment) or tempfile.gettempdir()), SHARED_MEMORY])
    with contextlib.ExitStack() as locks:
        try:
            dead: list[Path] = []
            for folder in (folder for root in roots for folder in sorted(root.glob("grpo-*"))):
                if len(dead) < _MOST_FOLDERS and (lock := _lock_of_dead(folder)) is not None:
                    locks.callback(os.close, lock)
                    dead.append(folder)
            used = names_in_use(folder.name for folder in dead)
            return _remove_all([folder for folder in dead if folder.name not in used])
        except OSError as error:
            return f"could not look for scratch that dead runs left: {error}"


def names_in_use(names: Iterable[str]) -> set[str]:
    """Return those of the folder names that a living process of this user has in its environment or command line.

    Every process of a run has: a rank that outlived its launcher and process guards still works in the folder.
    """
    wanted, used = set(names), set[str]()
    for process in psutil.process_iter() if wanted else ():
        with contextlib.suppress(psutil.Error):  # another user's, or gone
            text = "\0".join([*process.cmdline(), *process.environ().values()])
            used.update(name for name in wanted if name in text)
    return used


def is_held(folder: Path) -> bool:
    """Return whether the launcher or a process guard of a folder's run lives."""
    return is_locked(folder / _MARKER)


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    return sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(folder) for name in names)


def _node_folder(environment: Mapping[str, str]) -> str | None:
    """Return Slurm's node-local folder where it can be written; None stands for the temporary folder."""
    node = environment.get("SLURM_TMPDIR", "")
    return node if os.access(node, os.W_OK) else None


def _mark(folder: Path) -> int | None:
    """Put the marker into a folder, locked before it is seen, and return the lock's descriptor.

    Without locks on the file system nobody may remove the folder: then return None.
    """
    new = folder / f"{_MARKER}.new"
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts = {"name": folder.name, "inode": folder.stat().st_ino, "boot": _boot()}
        os.write(descriptor, json.dumps(facts).encode())
        new.rename(folder / _MARKER)
    except OSError:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        return None
    return descriptor


def _lock_of_dead(folder: Path) -> int | None:
    """Take the lock of a folder that is certainly ours and whose owner is dead; return None for every other."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        descriptor = os.open(folder / _MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with contextlib.suppress(OSError, ValueError):  # held by a living run, or no marker of ours
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_marker_of(descriptor, folder.name, status):
            return descriptor
    os.close(descriptor)
    return None


def _is_marker_of(descriptor: int, name: str, folder: os.stat_result) -> bool:
    """Return whether a marker was made for this very folder, not a copy of it, and on this machine.

    A network folder is seen by nodes whose locks may be invisible here: there the marker must be of this boot. On a
    disk of this machine it may be of an earlier one.
    """
    marker = os.fstat(descriptor)
    if not stat.S_ISREG(marker.st_mode) or marker.st_uid != os.geteuid() or marker.st_nlink != 1:
        return False  # without a link, another launch has just removed it
    facts = json.loads(os.read(descriptor, 4096))
    if not isinstance(facts, dict) or (facts.get("name"), facts.get("inode")) != (name, folder.st_ino):
        return False
    return facts.get("boot") == _boot() or os.major(folder.st_dev) != 0


def _boot() -> str:
    """Identify the running kernel: the same in all containers of a machine, another one after a restart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _remove_all(folders: list[Path]) -> str:
    """Remove folders for a bounded time, and return the line for the person at the terminal."""
    deadline = time.monotonic() + _MOST_SECONDS
    removed: dict[str, int] = {}  # bytes of each run
    failed = []
    segments = 0
    for folder in folders:
        if time.monotonic() > deadline:
            failed.append("more is left for the next launch")
            break
        try:
            size = size_of(folder)
            segments += remove_segments(folder)
            _remove(folder)
            removed[folder.name] = removed.get(folder.name, 0) + size
        except OSError as error:
            failed.append(f"could not remove {folder} ({error.strerror})")
    if not removed:
        return "; ".join(failed)
    more = f" and {len(removed) - _MOST_NAMES} more" if len(removed) > _MOST_NAMES else ""
    which = f"{', '.join(list(removed)[:_MOST_NAMES])}{more}: {gigabytes(sum(removed.values()))}"
    runs = f"{len(removed)} run{'s' if len(removed) > 1 else ''}"
    theirs = f", and {segments} shared-memory segment{'s' if segments > 1 else ''} of theirs" if segments else ""
    return "; ".join([f"removed scratch of {runs} that died on this node ({which}){theirs}", *failed])


def _remove(folder: Path) -> None:
    """Remove a folder, its marker last: if this is killed or fails, the next launch still knows what is left."""
    errors: list[OSError] = []
    for path in (path for path in folder.iterdir() if path.name != _MARKER):
        remove = shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink
        try:
            remove(path)
        except OSError as error:  # the rest goes all the same
            errors.append(error)
    if errors:
        raise errors[0]
    shutil.rmtree(folder)


class SegmentRecorder:
    """Record the segments that the descendants of this process make from now on.

    ``memory`` is the run's folder in shared memory; nothing is recorded where that folder is elsewhere.
    """

    def __init__(self, memory: Path) -> None:
        self._record = memory / _SEGMENT_RECORD
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
    """Remove the recorded segments of a run that has ended, but none that a living process maps; return how many."""
    if memory.parent != SHARED_MEMORY:
        return 0
    record = memory / _SEGMENT_RECORD
    text = ""
    with contextlib.suppress(OSError):  # none was recorded, or the record cannot be read
        text = record.read_text(errors="replace")
    there = _segments()
    # Whole lines only: a kill can tear the last one.
    recorded = re.findall(r"^(\d+) ([^/\s]+)\n", text, re.MULTILINE)
    left = [name for inode, name in recorded if there.get(name) == int(inode)]
    mapped = _mapped(psutil.pids()) if left else set()
    removed = 0
    for name in (name for name in left if there[name] not in mapped):
        with contextlib.suppress(OSError):
            (SHARED_MEMORY / name).unlink()
            removed += 1
    return removed


def _segments() -> dict[str, int]:
    """Return names and inodes of the segments of this user."""
    found = {}
    with contextlib.suppress(OSError):  # no shared memory here, or none that we may list
        for name in os.listdir(SHARED_MEMORY):
            if name.startswith(_SEGMENT_KINDS):
                with contextlib.suppress(OSError):
                    status = os.lstat(SHARED_MEMORY / name)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        found[name] = status.st_ino
    return found


def _mapped(pids: Iterable[int]) -> set[int]:
    """Return inodes of the shared memory that processes map; glibc's semaphores are mapped under another name."""
    device = SHARED_MEMORY.stat().st_dev
    pattern = re.compile(rb" %02x:%02x (\d+) " % (os.major(device), os.minor(device)))
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's, or gone
            inodes.update(map(int, pattern.findall(Path(f"/proc/{pid}/maps").read_bytes())))
    return inodes
