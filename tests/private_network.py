"""A private network for each process of pytest-xdist, so that whole runs at the same time do not share ports.

The variable GRPO_PRIVATE_NETWORK, which `make e2e` sets, turns it on. The network has only a loopback device.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESS = "10.213.0.1"  # without an address other than 127.0.0.1, Slurm's daemons can't resolve names
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of unshare(2)
_NETWORK = "/proc/thread-self/ns/net"
_machine: list[int] = []  # file descriptor of the machine's network, if this process has left it
_SET_FLAGS, _SET_ADDRESS, _UP = 0x8914, 0x8916, 1  # SIOCSIFFLAGS, SIOCSIFADDR and IFF_UP of netdevice(7)


def pytest_configure(config: pytest.Config) -> None:
    """Move a process of pytest-xdist to its network, before its first test."""
    if hasattr(config, "workerinput") and os.environ.get("GRPO_PRIVATE_NETWORK"):
        enter_private_network()


def enter_private_network() -> None:
    """Give this thread, and the processes that it starts, a new network. Raise OSError if Linux does not allow it."""
    machine = os.open(_NETWORK, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "no private network: set RUNS_AT_ONCE=1")
    address = struct.pack("H2x4s8x", socket.AF_INET, socket.inet_aton(ADDRESS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
        fcntl.ioctl(device, _SET_ADDRESS, struct.pack("16s16s8x", b"lo:1", address))
    _machine.append(machine)


@contextmanager
def machine_network() -> Iterator[None]:
    """Return to the machine's network inside, for tests that need a package index."""
    if not _machine:
        yield
        return
    private = os.open(_NETWORK, os.O_RDONLY)
    _enter(_machine[0])
    try:
        yield
    finally:
        _enter(private)
        os.close(private)


def _enter(network: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(network, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "can't change the network")
