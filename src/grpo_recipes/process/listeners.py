"""Find the process that listens on a port of this machine, so that secrets are only sent to the run's own server.

When a server dies, any user can listen on its port. A client therefore checks before and after it connects that the
listening socket belongs to a process of the run. It sends nothing to any other process.

    owner = OwnListener("127.0.0.1", 8000, lambda: guard_pid)
    with owner.connecting():
        connection.connect()
"""

import contextlib
import errno
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from grpo_recipes.process.tree import descendants

_LISTEN, _TIME_WAIT = "0A", "06"  # states in /proc/net/tcp
_MAPPED = 16 * "0" + "FFFF0000"  # prefix of an IPv4 address in /proc/net/tcp6
_ANY = {8 * "0", 32 * "0", _MAPPED + 8 * "0"}


class ForeignListener(ConnectionError):
    """A process that does not belong to this run listens on the port; nothing was sent to it."""


class OwnListener:
    """The listener that a run expects on ``host:port``: the process ``root()`` or one of its descendants.

    ``root`` returns a pid, or None if no such process is known at that time.
    """

    def __init__(self, host: str, port: int, root: Callable[[], int | None]) -> None:
        self._host, self._port, self._root = host, port, root
        self._verified: frozenset[int] = frozenset()  # inodes of our sockets; the kernel does not reuse them

    def sockets(self) -> frozenset[int]:
        """Return the inodes of the listening sockets, after checking that all of them belong to the run.

        Raise ConnectionRefusedError if no process listens, and ForeignListener if another process listens.
        """
        listening = listening_sockets(self._host, self._port)
        if not listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{os.strerror(errno.ECONNREFUSED)}: nothing listens")
        if not listening <= self._verified:
            root = self._root()
            sockets = frozenset(sockets_of(_family(root))) if root is not None else frozenset()
            if not listening <= sockets:
                raise ForeignListener(f"another process listens on {self._host}:{self._port}: nothing was sent to it")
            self._verified |= listening
        return listening

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Check the listener before and after the block, which connects; raise ForeignListener if it changed."""
        sockets_before = self.sockets()
        yield
        if self.sockets() != sockets_before:
            raise ForeignListener(f"the listener on {self._host}:{self._port} changed: nothing was sent to it")


def _family(root: int) -> list[int]:
    """Return the pids of a process and its descendants, without those that another user has reused."""
    pids = []
    for pid in (root, *(child.pid for child in descendants(root))):
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).uids().effective == os.geteuid():
                pids.append(pid)
    return pids


def listening_sockets(host: str, port: int) -> frozenset[int]:
    """Return the inodes of the sockets that a connection to ``host:port`` of this machine reaches; empty without any.

    A socket that listens on exactly this address takes precedence over sockets that listen on every address.
    """
    host_address = socket.inet_aton(socket.gethostbyname(host))[::-1].hex().upper()
    listening = [(address, inode) for address, state, inode in _sockets(port) if state == _LISTEN]
    specific = frozenset(inode for address, inode in listening if address in (host_address, _MAPPED + host_address))
    return specific or frozenset(inode for address, inode in listening if address in _ANY)


def has_closing_connections(port: int) -> bool:
    """Return whether the kernel still lists closed connections of the port (TIME_WAIT)."""
    return any(state == _TIME_WAIT for _, state, _ in _sockets(port))


def _sockets(port: int) -> Iterator[tuple[str, str, int]]:
    """Yield address, state and inode of each TCP socket that the kernel lists with this local port."""
    # slot, local address and port, remote address, state, queues, timer, retransmits, uid, timeout, inode
    row = rf"^ *\d+: ([0-9A-F]+):{port:04X} \S+ ([0-9A-F]{{2}}) \S+ \S+ \S+ +\d+ +\d+ (\d+)"
    pattern = re.compile(row, re.MULTILINE)
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for address, state, inode in pattern.findall(Path(f"/proc/net/{name}").read_text()):
                yield address, state, int(inode)


def sockets_of(pids: Iterable[int]) -> Iterator[int]:
    """Yield the inodes of the sockets that processes have open, if this user may read them."""
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed since it was listed
                    if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{descriptor}")):
                        yield int(match[1])
