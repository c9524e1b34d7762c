"""Which processes listen on a port of this machine, so that secrets are only sent to our own.

When a server dies, any user can listen on its port. A client therefore compares the listening socket with the sockets
of the processes below a process of the run, before and after it connects, and sends nothing to another one::

    own = OwnListener("127.0.0.1", 8000, lambda: guard_pid)
    with own.connecting():
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
_MAPPED = 16 * "0" + "FFFF0000"  # begins an IPv4 address in /proc/net/tcp6
_ANY = {8 * "0", 32 * "0", _MAPPED + 8 * "0"}


class ForeignListener(ConnectionError):
    """Something that is not a process of this run listens on the port: nothing was sent."""


class OwnListener:
    """The listener that a run expects on ``host:port``: a descendant of the process ``root()``, or that process.

    ``root`` returns a pid, or None if no such process is known now.
    """

    def __init__(self, host: str, port: int, root: Callable[[], int | None]) -> None:
        self._host, self._port, self._root = host, port, root
        self._own: frozenset[int] = frozenset()  # sockets that were found to be ours; the kernel gives no number twice

    def sockets(self) -> frozenset[int]:
        """Return the inodes of the listening sockets, all of which are ours.

        Raise ConnectionRefusedError if nothing listens, ForeignListener if another process does.
        """
        listening = listening_sockets(self._host, self._port)
        if not listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{os.strerror(errno.ECONNREFUSED)}: nothing listens")
        if not listening <= self._own:
            root = self._root()
            found = frozenset(sockets_of(_family(root))) if root is not None else frozenset()
            if not listening <= found:
                raise ForeignListener(f"another process listens on {self._host}:{self._port}: nothing was sent to it")
            self._own |= listening
        return listening

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Connect inside; raise ForeignListener unless one socket of ours listened before and after."""
        before = self.sockets()
        yield
        if self.sockets() != before:
            raise ForeignListener(f"the listener on {self._host}:{self._port} changed: nothing was sent to it")


def _family(root: int) -> list[int]:
    """Return the pids of a process and its descendants that run as this user; a pid may be another user's by now."""
    return [pid for pid in (root, *(child.pid for child in descendants(root))) if _is_own(pid)]


def _is_own(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).uids().effective == os.geteuid())
    return False


def listening_sockets(host: str, port: int) -> frozenset[int]:
    """Return the inodes of the sockets that a connection to ``host:port`` reaches; the most specific address wins."""
    address = socket.inet_aton(socket.gethostbyname(host))[::-1].hex().upper()
    found = [(at, inode) for at, state, inode in _sockets(port) if state == _LISTEN]
    specific = frozenset(inode for at, inode in found if at in (address, _MAPPED + address))
    return specific or frozenset(inode for at, inode in found if at in _ANY)


def lingers(port: int) -> bool:
    """Return whether the kernel still keeps closed connections of the port (TIME_WAIT)."""
    return any(state == _TIME_WAIT for _, state, _ in _sockets(port))


def _sockets(port: int) -> Iterator[tuple[str, str, int]]:
    """Yield address, state and inode of each TCP socket with this local port that the kernel lists."""
    # slot, local address and port, remote address, state, queues, timer, retransmits, uid, timeout, inode
    row = rf"^ *\d+: ([0-9A-F]+):{port:04X} \S+ ([0-9A-F]{{2}}) \S+ \S+ \S+ +\d+ +\d+ (\d+)"
    pattern = re.compile(row, re.MULTILINE)
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for at, state, inode in pattern.findall(Path(f"/proc/net/{name}").read_text()):
                yield at, state, int(inode)


def sockets_of(pids: Iterable[int]) -> Iterator[int]:
    """Yield the inodes of the sockets that processes have open, as far as we may look."""
    for pid in pids:
        with contextlib.suppress(OSError):  # ended, or another user's
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{descriptor}")):
                        yield int(match[1])
