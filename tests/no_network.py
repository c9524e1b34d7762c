"""Run a command with the network cut off, as `unshare -n` does, with loopback up: python no_network.py COMMAND ..."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


def without_network(*command: str) -> list[str]:
    """The argv that runs ``command`` without a network; skips the test if the kernel does not allow that."""
    wrapped = [sys.executable, str(Path(__file__)), *command]
    if subprocess.run([sys.executable, __file__, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel lets us make no network namespace")
    return wrapped


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) == 0:
        return
    if ctypes.get_errno() != errno.EPERM:
        raise OSError(ctypes.get_errno(), "unshare failed")
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare failed")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


if __name__ == "__main__":
    _unshare()
    _loopback_up()
    os.execvp(sys.argv[1], sys.argv[1:])
