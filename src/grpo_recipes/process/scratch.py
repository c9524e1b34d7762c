"""Node-local folders of one attempt, the shared memory of its processes, and the removal of what dead runs left.

A folder holds a marker file, on which the launcher (or node worker) that made it keeps a lock, and so do its process
guards, which inherit it. The kernel drops the lock when the last of them dies, however they die, and it holds across
containers, where process ids mean nothing. A folder without a marker is never removed: the marker appears under its
name only once it is locked, so a folder that is being made has none, and neither has a user's own. On a file system
without locks no folder gets a marker: what a killed run leaves there stays.

Python's ``multiprocessing`` draws the names of shared-memory segments at random (``psm_948e8e13`` of vLLM's message
queues, ``sem.mp-kgh1xwy0`` of the trainers), and its helper process, which removes them, dies in a SIGKILL of the whole
job too. So each process guard looks once a second which new segments the processes below it map, and records them in
the run's folder in ``/dev/shm``. A segment that was made in the last second before a kill stays.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.errors import ConfigError, config_error, translate
from grpo_recipes.paths import is_locked
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.process.tree import descendants

SHARED_MEMORY = Path("/dev/shm")
_MARKER = ".grpo-scratch"
_SEGMENT_RECORD = ".segments"
_MOST_SECONDS = 20.0  # another node's worker must answer within a minute
_MOST_TEXT = 80  # characters for the names of runs
# Kinds of segments whose makers draw the name and remove them at their end; what a user keeps there has its own name.
_SEGMENT_KINDS = ("psm_", "sem.mp-", "torch_", "nccl-", "vllm_dist_")
_LOOK_SECONDS = 1.0


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

    def write_token(self, token: str) -> None:
        """Write the token, readable by the user alone; a reader sees the old one or the new one."""
        new = self.disk / ".token"
        new.touch(mode=0o600)
        new.write_text(token)
        new.replace(self.token)

    def remove(self) -> None:
        """Remove both folders, and the shared-memory segments that a killed process of the run left."""
        for folder in (self.memory, self.disk):
            with contextlib.suppress(OSError):
                _remove(folder)
        while self.locks:
            os.close(self.locks.pop())


def make_scratch(environment: Mapping[str, str]) -> Scratch:
    """Make the folders and a new token, readable by the user alone; a full disk is a ConfigError."""
    node, fix = node_folder(environment), "make room there, or set TMPDIR to another disk of the node"

    def failed(error: OSError) -> ConfigError:
        return config_error("TMPDIR", f"cannot make the run's folder in {node} ({error.strerror})", fix)

    with translate(OSError, failed), contextlib.ExitStack() as undo:
        disk = Path(tempfile.mkdtemp(prefix="grpo-", dir=node))
        undo.callback(shutil.rmtree, disk, ignore_errors=True)
        memory = SHARED_MEMORY / disk.name
        folders = [disk, memory]
        if memory == disk or not os.access(SHARED_MEMORY, os.W_OK):
            memory, folders = disk / "weights", [disk]
        memory.mkdir(mode=0o700)
        undo.callback(shutil.rmtree, memory, ignore_errors=True)
        scratch = Scratch(disk, memory)
        undo.callback(scratch.remove)
        scratch.locks.extend(lock for folder in folders if (lock := _mark(folder)) is not None)
        scratch.write_token(secrets.token_hex(16))
        undo.pop_all()
    return scratch


def remove_dead_scratch(environment: Mapping[str, str]) -> str:
    """Remove scratch that dead runs of this user left on this node, in seconds, and return one line on it, or none.

    It never fails the launch. Each folder is held while it is looked at, so that two launches remove none twice.
    """
    roots = dict.fromkeys([node_folder(environment), SHARED_MEMORY])
    deadline = time.monotonic() + _MOST_SECONDS
    removed: dict[str, int] = {}  # bytes of each run
    failed = []
    try:
        found = [folder for root in roots for folder in sorted(root.glob("grpo-*"))]
        for folder in found:
            size = 0
            with contextlib.ExitStack() as held:
                if not _lock_dead(folder, held):
                    continue
                if time.monotonic() > deadline:
                    failed.append("more is left for the next launch")
                    break
                if names_in_use([folder.name]):  # asked under the lock: its launcher may have died a moment ago
                    continue
                with contextlib.suppress(OSError):
                    size = size_of(folder)
                    _remove(folder)
            if folder.exists():
                failed.append(f"could not remove {folder}")
            else:
                removed[folder.name] = removed.get(folder.name, 0) + size
    except OSError as error:
        failed.append(f"could not look for scratch that dead runs left: {error}")
    which = textwrap.shorten(", ".join(removed), _MOST_TEXT, placeholder=" ...")
    done = f"removed scratch of runs that died on this node ({which}: {gigabytes(sum(removed.values()))})"
    return "; ".join([done, *failed] if removed else failed)


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
    size = 0
    for path in (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(OSError):  # removed meanwhile
            size += os.lstat(path).st_size
    return size


def node_folder(environment: Mapping[str, str]) -> Path:
    """Return where scratch is made: Slurm's node-local folder where it can be written, else the temporary folder."""
    node = environment.get("SLURM_TMPDIR", "")
    return Path(node if os.access(node, os.W_OK) else tempfile.gettempdir())


def _mark(folder: Path) -> int | None:
    """Put the marker into a folder, locked before it is seen; return the lock's descriptor, None without file locks."""
    new = folder / f"{_MARKER}.new"
    descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(_identity(folder)).encode())
        new.rename(folder / _MARKER)
    except OSError:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        return None
    return descriptor


def _lock_dead(folder: Path, held: contextlib.ExitStack) -> bool:
    """Return whether a folder is certainly ours and its owner is dead; then keep its lock until ``held`` is left.

    Its marker must be made for this very folder, not a copy of it, and on this machine. A network folder is seen by
    nodes whose locks may be invisible here: there the marker must be of this boot.
    """
    with contextlib.suppress(OSError, ValueError, TypeError), contextlib.ExitStack() as opened:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return False
        descriptor = os.open(folder / _MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        opened.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        marker, identity = os.fstat(descriptor), json.loads(os.read(descriptor, 4096))
        if os.major(status.st_dev) != 0:  # a disk of this machine
            identity = {**identity, "boot": _boot()}
        # A marker without a link: another launch has just removed it.
        ours = (status.st_uid, marker.st_uid, marker.st_nlink) == (os.geteuid(), os.geteuid(), 1)
        if ours and identity == _identity(folder):
            held.push(opened.pop_all())
            return True
    return False


def _identity(folder: Path) -> dict[str, Any]:
    return {"name": folder.name, "inode": folder.lstat().st_ino, "boot": _boot()}


def _boot() -> str:
    """Identify the running kernel: the same in all containers of a machine, another one after a restart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _remove(folder: Path) -> None:
    """Remove a folder and the segments it records, its marker last: by it the next launch knows what is left."""
    remove_segments(folder)
    for path in (path for path in folder.iterdir() if path.name != _MARKER):
        with contextlib.suppress(OSError):  # a folder
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
    if all(path.name == _MARKER for path in folder.iterdir()):
        shutil.rmtree(folder)


class SegmentRecorder:
    """Record, in a run's folder in shared memory, the segments that descendants of this process make from now on."""

    def __init__(self, memory: Path) -> None:
        self._record = memory / _SEGMENT_RECORD
        self._known = set(_segments())  # inodes that are recorded, or of another program
        self._seen: set[int] = set()  # those that the last look found unknown
        self._next_look = 0.0

    def look(self) -> None:
        """Record what is new; without anything new this lists one folder, once a second."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        there = _segments()
        unknown = there.keys() - self._known
        mapped = unknown & _mapped(process.pid for process in descendants()) if unknown else set()
        if mapped:
            with contextlib.suppress(OSError), self._record.open("a") as record:  # shared memory may be full
                record.writelines(f"{inode} {there[inode]}\n" for inode in mapped)
        # A maker maps its segment at once: what nobody below us maps at two looks is of another program.
        self._known = there.keys() & (self._known | mapped | self._seen)
        self._seen = unknown


def remove_segments(memory: Path) -> None:
    """Remove the recorded segments of a run that has ended, but none that a living process maps."""
    with contextlib.suppress(OSError):  # none was recorded, or the record cannot be read
        text = (memory / _SEGMENT_RECORD).read_text(errors="replace")
        mapped = _mapped(psutil.pids())
        # Whole lines only: a kill can tear the last one.
        for inode, name in re.findall(r"^(\d+) ([^/\s]+)\n", text, re.MULTILINE):
            with contextlib.suppress(OSError):
                status = os.lstat(SHARED_MEMORY / name)
                if (status.st_ino, status.st_uid) == (int(inode), os.geteuid()) and int(inode) not in mapped:
                    (SHARED_MEMORY / name).unlink()


def _segments() -> dict[int, str]:
    """Return inodes and names of the segments whose names are drawn."""
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:  # no shared memory here
        return {entry.inode(): entry.name for entry in entries if entry.name.startswith(_SEGMENT_KINDS)}
    return {}


def _mapped(pids: Iterable[int]) -> set[int]:
    """Return inodes of the shared memory that processes map; glibc's semaphores are mapped under another name."""
    device = SHARED_MEMORY.stat().st_dev
    pattern = re.compile(rb" %02x:%02x (\d+) " % (os.major(device), os.minor(device)))
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's, or gone
            inodes.update(map(int, pattern.findall(Path(f"/proc/{pid}/maps").read_bytes())))
    return inodes
