"""Node-local folders of one attempt, and the removal of those whose owners died.

A folder holds a marker file. The launcher (or agent) that made it keeps a lock on the marker, and so do its wardens,
which inherit it. The kernel drops the lock when the last of them dies, however they die, and it holds across
containers, where process ids mean nothing. A folder without a marker is never removed: the marker appears under its
name only once it is locked, so a folder that is being made has none, and neither has a user's own, or one on a file
system without locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import psutil

from grpo_recipes.paths import is_locked
from grpo_recipes.process.say import gigabytes
from grpo_recipes.process.segments import SHARED_MEMORY, remove_segments

_MARKER = ".grpo-scratch"
_MOST_SECONDS = 20.0  # another node's agent must answer within a minute
_MOST_FOLDERS = 200  # each holds a descriptor while it is looked at
_MOST_NAMES = 5


@dataclass(frozen=True)
class Scratch:
    """Node-local folders of one attempt.

    Attributes:
        disk: TMPDIR and compiled caches; a short path, since unix sockets end at 107 bytes.
        memory: where the file bridge writes, in shared memory where there is any.
        locks: descriptors that hold the locks of the folders; children that inherit them hold them too.
    """

    disk: Path
    memory: Path
    locks: list[int] = field(default_factory=list)

    @property
    def token(self) -> Path:
        """The file that holds the run's token."""
        return self.disk / "token"

    def remove(self) -> None:
        """Remove both, and the shared-memory segments that a killed process of the run left."""
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
    if memory != disk and os.access(SHARED_MEMORY, os.W_OK):
        memory.mkdir(mode=0o700)
        folders = [disk, memory]
    else:
        memory = disk / "weights"
        memory.mkdir()
        folders = [disk]
    scratch = Scratch(disk, memory, [lock for folder in folders if (lock := _mark(folder)) is not None])
    scratch.token.touch(mode=0o600)
    scratch.token.write_text(secrets.token_hex(16))
    return scratch


def remove_dead_scratch(environment: Mapping[str, str]) -> str:
    """Remove scratch that dead runs of this user left on this node; takes seconds, and never fails the launch.

    Returns:
        One line that says what was removed, and what could not be; empty where there was nothing.
    """
    locks: list[int] = []
    try:
        dead = _dead_folders(environment, locks)
        return _remove_all(dead)
    except OSError as error:
        return f"could not look for scratch that dead runs left: {error}"
    finally:
        for lock in locks:
            os.close(lock)


def names_in_use(names: Iterable[str]) -> set[str]:
    """Return those of the folder names that a living process of this user has in its environment or command line.

    Every process of a run has: a rank that outlived its launcher and wardens still works in the folder.
    """
    wanted = {name: name.encode() for name in names}
    used: set[str] = set()
    for pid in psutil.pids() if wanted else ():
        with contextlib.suppress(OSError):  # another user's, or gone
            text = b"\0".join(Path(f"/proc/{pid}/{part}").read_bytes() for part in ("cmdline", "environ"))
            used.update(name for name, word in wanted.items() if word in text)
    return used


def is_held(folder: Path) -> bool:
    """Return whether the launcher or a warden of a folder's run lives."""
    return is_locked(folder / _MARKER)


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(folder) for name in names)


def _node_folder(environment: Mapping[str, str]) -> str | None:
    """Slurm's node-local folder where it can be written; None is the temporary folder."""
    node = environment.get("SLURM_TMPDIR", "")
    return node if os.access(node, os.W_OK) else None


def _mark(folder: Path) -> int | None:
    """Put the marker into a folder, locked before it is seen.

    Returns:
        The descriptor that holds the lock, None where the file system has none: nobody may remove that folder then.
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


def _dead_folders(environment: Mapping[str, str], locks: list[int]) -> list[Path]:
    """Find folders whose owners are dead; ``locks`` gets what holds them, so that two launches share no folder."""
    roots = dict.fromkeys([Path(_node_folder(environment) or tempfile.gettempdir()), SHARED_MEMORY])
    dead: list[Path] = []
    for folder in (folder for root in roots for folder in sorted(root.glob("grpo-*"))):
        if len(dead) == _MOST_FOLDERS:
            break
        if (lock := _lock_of_dead(folder)) is not None:
            locks.append(lock)
            dead.append(folder)
    used = names_in_use(folder.name for folder in dead)
    return [folder for folder in dead if folder.name not in used]


def _lock_of_dead(folder: Path) -> int | None:
    """Take the lock of a folder that is ours beyond doubt and whose owner is dead; None for every other."""
    try:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        descriptor = os.open(folder / _MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_marker_of(descriptor, folder.name, status):
            return descriptor
    except (OSError, ValueError):  # held by a living run, or no marker of ours
        pass
    os.close(descriptor)
    return None


def _is_marker_of(descriptor: int, name: str, folder: os.stat_result) -> bool:
    """Whether a marker was made for this very folder, not a copy of it, and on this machine.

    A network folder is seen by nodes whose locks may not be ours to see: there the marker must be of this boot. On a
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
    deadline = time.monotonic() + _MOST_SECONDS
    removed, failed = [], []
    size = segments = 0
    for folder in folders:
        if time.monotonic() > deadline:
            failed.append("more is left for the next launch")
            break
        try:
            bytes_here = size_of(folder)
            segments += remove_segments(folder)
            _remove(folder)
        except OSError as error:
            failed.append(f"could not remove {folder} ({error.strerror})")
        else:
            removed.append(folder.name)
            size += bytes_here
    return "; ".join([*_removed(list(dict.fromkeys(removed)), size, segments), *failed])


def _removed(names: list[str], size: int, segments: int) -> Iterator[str]:
    if not names:
        return
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    which = f"{', '.join(islice(names, _MOST_NAMES))}{more}: {gigabytes(size)}"
    runs = f"{len(names)} run{'s' if len(names) > 1 else ''}"
    theirs = f", and {segments} shared-memory segment{'s' if segments > 1 else ''} of theirs" if segments else ""
    yield f"removed scratch of {runs} that died on this node ({which}){theirs}"


def _remove(folder: Path) -> None:
    """Remove a folder, its marker last: if this is killed, the next launch still knows what is left.

    Raises:
        OSError: something in it cannot be removed; the rest is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    errors: list[OSError] = []
    try:
        for name in sorted(os.listdir(descriptor), key=_MARKER.__eq__):
            if name == _MARKER and errors:
                break
            try:
                _remove_entry(name, descriptor)
            except OSError as error:
                errors.append(error)
    finally:
        os.close(descriptor)
    if errors:
        raise errors[0]
    folder.rmdir()


def _remove_entry(name: str, folder: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)
