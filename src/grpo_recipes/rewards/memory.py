"""Measure the memory of a reward's child process, and limit its files in ``/dev/shm``.

The kernel only limits the private memory of each process (``RLIMIT_DATA``, set in ``child``). Therefore
``mount_own_shared_memory`` gives the child its own ``/dev/shm`` of limited size, which ends with the child. The pool
stops a child if ``measure_memory`` exceeds the limit. It counts private and shared memory, memfd files, and files in
``/dev/shm``.

    from grpo_recipes.rewards.memory import measure_memory

    measure_memory(tree.descendants(pid))  # bytes
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

_SHARED_MEMORY = "/dev/shm"
_NEW_MOUNTS, _NEW_IPC, _NEW_USER = 0x00020000, 0x08000000, 0x10000000
_RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEVICES = 1 << 14, 1 << 18, 2, 4


def mount_own_shared_memory(most_bytes: int) -> None:
    """Mount an empty ``/dev/shm`` of at most ``most_bytes`` that only this process and its descendants see.

    If the system does not allow it, change nothing. This process must have a single thread.
    """
    probe = os.fork()  # a child tries first: a partial failure would leave this process in another user namespace
    if probe == 0:
        code = 1
        with contextlib.suppress(OSError):
            code = 0 if _try_mount(most_bytes) else 1
        os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1]) == 0:
        _try_mount(most_bytes)


def _try_mount(most_bytes: int) -> bool:
    """Move this process to new namespaces and mount an empty ``/dev/shm`` there; return whether all calls succeeded.

    A failure may leave the process in new namespaces without the mount.
    """
    libc, user, group = ctypes.CDLL(None), os.geteuid(), os.getegid()
    if libc.unshare(_NEW_MOUNTS | _NEW_IPC | (_NEW_USER if user else 0)) != 0:
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if libc.mount(None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None) != 0:
        return False
    flags, options = ctypes.c_ulong(_NO_SUID | _NO_DEVICES), f"size={most_bytes},mode=1777".encode()
    return bool(libc.mount(b"tmpfs", _SHARED_MEMORY.encode(), b"tmpfs", flags, options) == 0)


def measure_memory(processes: Sequence[psutil.Process]) -> int:
    """Return the bytes of memory that processes use in total, private and shared; a shared page counts once.

    It includes their open memfd files and their files in ``/dev/shm``. Ended processes count as 0.
    """
    private = mapped = 0
    files: dict[tuple[int, int], int] = {}
    for process in processes:
        with contextlib.suppress(OSError, KeyError):  # it has ended, or belongs to another user
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
            fields = (line.partition(":") for line in lines)
            sizes = {name: int(value.split()[0]) << 10 for name, _, value in fields}
            mapped += sizes.get("Pss_Shmem", 0)
            private += sizes["Pss"] - sizes.get("Pss_Shmem", 0)
            files |= _measure_open_files(process.pid)
    own_folder_size = max((_measure_own_folder(process.pid) for process in processes), default=0)
    # Pages of open files may also be mapped: adding both would count them twice.
    return private + max(mapped, sum(files.values()) + own_folder_size)


def _measure_open_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the size in bytes of each open memfd file of a process, by (device, inode).

    Open files in ``/dev/shm`` are included if the process uses the machine's ``/dev/shm``, not its own.
    """
    sizes, uses_machine_folder = {}, not _measure_own_folder(pid)
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            target = os.readlink(entry.path)
            if target.startswith("/memfd:") or (uses_machine_folder and target.startswith(f"{_SHARED_MEMORY}/")):
                status = os.stat(entry.path)
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sizes


def _measure_own_folder(pid: int) -> int:
    """Return the bytes used in a process's own ``/dev/shm``, or 0 if it uses the machine's or has ended."""
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/root{_SHARED_MEMORY}"
        if os.stat(folder).st_dev != os.stat(_SHARED_MEMORY).st_dev:
            space = os.statvfs(folder)
            return (space.f_blocks - space.f_bfree) * space.f_frsize
    return 0
