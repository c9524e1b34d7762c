"""Create the node-local scratch folders of an attempt, and remove what killed runs left on a node.

Leftovers are scratch folders and shared-memory segments of libraries.

A scratch folder contains a marker file. The launcher (or node worker) that created the folder keeps a lock on the
marker, and its process guards inherit the lock. The kernel drops the lock when the last of these processes dies. Locks
also work across containers, which number their processes separately. A folder without a marker is never removed,
because a user may have created it: the marker gets its name only after it is locked, so an unfinished folder has no
marker either. On a file system without locks, folders get no marker, and the scratch of a killed run is not removed.

Python's ``multiprocessing`` chooses random names for shared-memory segments: ``psm_948e8e13`` for vLLM's message
queues, ``sem.mp-kgh1xwy0`` in the trainers. Its helper process removes them, but a SIGKILL of the whole job ends the
helper, too. Therefore each process guard checks once per second which new segments its descendants map, and records
them in the run's folder in ``/dev/shm``. A segment that was created within the last second before a kill remains.
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

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.paths import is_locked
from grpo_recipes.process.reports import format_bytes
from grpo_recipes.process.tree import descendants

SHARED_MEMORY = Path("/dev/shm")
_MARKER = ".grpo-scratch"
_SEGMENT_RECORD = ".segments"
_MAX_SECONDS = 20.0  # limit of a removal, since another node's worker must answer within a minute
_MAX_NAMES_LENGTH = 80  # characters for the names of the removed folders
# Prefixes of segments that libraries name at random and remove at their end. Users choose other names.
_SEGMENT_KINDS = ("psm_", "sem.mp-", "torch_", "nccl-", "vllm_dist_")
_CHECK_SECONDS = 1.0  # between two checks for new segments


@dataclass(frozen=True)
class Scratch:
    """The node-local folders of one attempt at a run: one on disk, one in shared memory if possible."""

    disk: Path  # TMPDIR and compiled caches; the path is short, since paths of unix sockets have at most 107 bytes
    memory: Path  # weights of the method "file"; in shared memory if possible
    locks: list[int] = field(default_factory=list)  # descriptors of the folders' locks; children inherit them

    @property
    def token_file(self) -> Path:
        """The file that contains the run's token."""
        return self.disk / "token"

    def write_token(self, token: str) -> None:
        """Replace the content of ``token_file`` atomically by ``token``; only the user can read the file."""
        new_file = self.disk / ".token"
        new_file.touch(mode=0o600)
        new_file.write_text(token)
        new_file.replace(self.token_file)

    def remove(self) -> None:
        """Remove both folders and the shared-memory segments recorded in them, then close the descriptors of the locks.

        Segments remain if a living process maps them. Files that can't be removed remain, too.
        """
        for folder in (self.memory, self.disk):
            with contextlib.suppress(OSError):
                _remove_folder(folder)
        while self.locks:
            os.close(self.locks.pop())


def make_scratch(environment: Mapping[str, str]) -> Scratch:
    """Create and lock new scratch folders on this node, and write a new random token to ``token_file``.

    The folder ``memory`` is in /dev/shm if that is writable, otherwise below the folder ``disk``. Raise
    ConfigError if the folders can't be created, for example on a full disk.
    """
    node = node_folder(environment)
    problem = f"cannot create the run's folder in {node}"
    fix = "free space there, or set TMPDIR to another disk of the node"
    as_config_error = translate_errors(
        OSError, lambda error: config_error("TMPDIR", f"{problem} ({error.strerror})", fix)
    )
    with as_config_error, contextlib.ExitStack() as undo:
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
        scratch.locks.extend(lock for folder in folders if (lock := _create_lock_marker(folder)) is not None)
        scratch.write_token(secrets.token_hex(16))
        undo.pop_all()
    return scratch


def remove_dead_scratch(environment: Mapping[str, str]) -> str:
    """Remove scratch folders that dead runs of this user left on this node; return a sentence for the user.

    The sentence names the removed folders with their size, and failures. It is empty if there was nothing to remove.
    No error is raised. After ``_MAX_SECONDS``, the remaining folders are left to the next launch. Each folder
    is locked while it is examined, so that two launches do not remove it at the same time.
    """
    roots = dict.fromkeys([node_folder(environment), SHARED_MEMORY])
    deadline = time.monotonic() + _MAX_SECONDS
    removed: dict[str, int] = {}  # bytes by name of the folder
    failures = []
    try:
        folders = [folder for root in roots for folder in sorted(root.glob("grpo-*"))]
        for folder in folders:
            size = 0
            with contextlib.ExitStack() as lock:
                if not _lock_dead_folder(folder, lock):
                    continue
                if time.monotonic() > deadline:
                    failures.append("the next launch removes the rest")
                    break
                if find_used_names([folder.name]):  # checked under the lock: its launcher may have died a moment ago
                    continue
                with contextlib.suppress(OSError):
                    size = measure_folder(folder)
                    _remove_folder(folder)
            if folder.exists():
                failures.append(f"could not remove {folder}")
            else:
                removed[folder.name] = removed.get(folder.name, 0) + size
    except OSError as error:
        failures.append(f"could not search for scratch of dead runs: {error}")
    names = textwrap.shorten(", ".join(removed), _MAX_NAMES_LENGTH, placeholder=" ...")
    removal = f"removed scratch of runs that died on this node ({names}: {format_bytes(sum(removed.values()))})"
    return "; ".join([removal, *failures] if removed else failures)


def find_used_names(names: Iterable[str]) -> set[str]:
    """Return the folder ``names`` that occur in the environment or command line of a living process of this user.

    Every process of a run has the name there. A rank that outlived its launcher and guards may still use the folder.
    """
    unchecked, used = set(names), set[str]()
    for process in psutil.process_iter() if unchecked else ():
        with contextlib.suppress(psutil.Error):  # the process has ended, or belongs to another user
            text = "\0".join([*process.cmdline(), *process.environ().values()])
            used.update(name for name in unchecked if name in text)
    return used


def is_owner_alive(folder: Path) -> bool:
    """Return whether another process holds the lock of a scratch folder: the run's launcher or a process guard.

    False for a folder without a marker file, or on a file system without locks.
    """
    return is_locked(folder / _MARKER)


def measure_folder(folder: Path) -> int:
    """Return the total size of the files in a folder, in bytes."""
    size = 0
    for path in (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(OSError):  # removed since it was listed
            size += os.lstat(path).st_size
    return size


def node_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder for scratch folders: SLURM_TMPDIR if it is writable, otherwise Python's temporary folder."""
    node = environment.get("SLURM_TMPDIR", "")
    return Path(node if os.access(node, os.W_OK) else tempfile.gettempdir())


def _create_lock_marker(folder: Path) -> int | None:
    """Create the marker file in a new scratch folder and lock it; return the descriptor that holds the lock.

    The file gets its final name after it is locked. Return None, and leave no file, if the file system has no locks.
    """
    new_file = folder / f"{_MARKER}.new"
    descriptor = os.open(new_file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(_identify_folder(folder)).encode())
        new_file.rename(folder / _MARKER)
    except OSError:
        os.close(descriptor)
        new_file.unlink(missing_ok=True)
        return None
    return descriptor


def _lock_dead_folder(folder: Path, lock: contextlib.ExitStack) -> bool:
    """Lock a scratch folder of a dead run of this user; return False if it is not one, or if its run is alive.

    The lock is released when ``lock`` is closed. The marker must have been created for this folder on this machine: the
    marker in a copied folder has another identity. Locks of
    other nodes may be invisible on a network file system, so there the marker must be from the current boot.
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
            identity = {**identity, "boot": _read_boot_id()}
        # If the marker has no link, another launch has just removed it.
        is_ours = (status.st_uid, marker.st_uid, marker.st_nlink) == (os.geteuid(), os.geteuid(), 1)
        if is_ours and identity == _identify_folder(folder):
            lock.push(opened.pop_all())
            return True
    return False


def _identify_folder(folder: Path) -> dict[str, Any]:
    """Return name, inode and boot id, which identify a folder of this machine; its marker file contains them."""
    return {"name": folder.name, "inode": folder.lstat().st_ino, "boot": _read_boot_id()}


def _read_boot_id() -> str:
    """Return the id of the running kernel: equal in all containers of a machine, different after a restart."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _remove_folder(folder: Path) -> None:
    """Remove a scratch folder and the shared-memory segments that it records.

    The marker is removed last, and only if everything else is gone, so that the next launch can try again.
    """
    remove_segments(folder)
    for path in (path for path in folder.iterdir() if path.name != _MARKER):
        with contextlib.suppress(OSError):  # the path is a folder
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
    if all(path.name == _MARKER for path in folder.iterdir()):
        shutil.rmtree(folder)


class SegmentRecorder:
    """Record new shared-memory segments of this process's descendants in the file ``.segments`` of ``memory``."""

    def __init__(self, memory: Path) -> None:
        """Take the segments that exist now as known, so that they are not recorded."""
        self._record = memory / _SEGMENT_RECORD
        self._known = set(_list_segments())  # inodes that are recorded, or belong to another program
        self._unknown: set[int] = set()  # inodes that the last check could not assign
        self._next_check = 0.0

    def record_new(self) -> None:
        """Append the segments that descendants have mapped since the last check to the record.

        Do nothing within a second of the last check. Segments of other programs are skipped.
        """
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_SECONDS
        segments = _list_segments()
        unknown = segments.keys() - self._known
        mapped = unknown & _find_mapped_inodes(process.pid for process in descendants()) if unknown else set()
        if mapped:
            with contextlib.suppress(OSError), self._record.open("a") as record:  # shared memory may be full
                record.writelines(f"{inode} {segments[inode]}\n" for inode in mapped)
        # A process maps its segment at once. A segment that no descendant maps in two checks is another program's.
        self._known = segments.keys() & (self._known | mapped | self._unknown)
        self._unknown = unknown


def remove_segments(memory: Path) -> None:
    """Delete the segments in /dev/shm that the record in ``memory`` lists, except those that a living process maps.

    Segments with another inode than recorded, or of another user, remain too.
    """
    with contextlib.suppress(OSError):  # there is no record, or it cannot be read
        text = (memory / _SEGMENT_RECORD).read_text(errors="replace")
        mapped = _find_mapped_inodes(psutil.pids())
        # Only complete lines count: a kill can truncate the last line.
        for inode, name in re.findall(r"^(\d+) ([^/\s]+)\n", text, re.MULTILINE):
            with contextlib.suppress(OSError):
                status = os.lstat(SHARED_MEMORY / name)
                if (status.st_ino, status.st_uid) == (int(inode), os.geteuid()) and int(inode) not in mapped:
                    (SHARED_MEMORY / name).unlink()


def _list_segments() -> dict[int, str]:
    """Return inode -> name of the files in /dev/shm whose names start as a library's segments do (``_SEGMENT_KINDS``).

    ``SegmentRecorder`` calls this during the run. The result is empty on a system without /dev/shm.
    """
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:  # this system has no shared memory
        return {entry.inode(): entry.name for entry in entries if entry.name.startswith(_SEGMENT_KINDS)}
    return {}


def _find_mapped_inodes(pids: Iterable[int]) -> set[int]:
    """Return the inodes of the files in /dev/shm that the processes map; skip processes that can't be inspected.

    Names are not compared, since glibc renames its semaphores.
    """
    device = SHARED_MEMORY.stat().st_dev
    pattern = re.compile(rb" %02x:%02x (\d+) " % (os.major(device), os.minor(device)))
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            inodes.update(map(int, pattern.findall(Path(f"/proc/{pid}/maps").read_bytes())))
    return inodes
