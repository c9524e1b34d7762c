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
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from grpo_recipes.process.tree import descendants

_LISTEN, _TIME_WAIT = "0A", "06"  # states in /proc/net/tcp
_MAPPED = 16 * "0" + "FFFF0000"  # prefix of an IPv4 address in /proc/net/tcp6
_ANY = {8 * "0", 32 * "0", _MAPPED + 8 * "0"}


class ForeignListener(ConnectionError):
    """A process that does not belong to this run listens on the port; nothing was sent to it."""


@dataclass(eq=False)
class OwnListener:
    """Check that the listener on ``host:port`` of this machine is the process ``root()`` or one of its descendants."""

    host: str
    port: int
    root: Callable[[], int | None]
    """Returns a pid, or None if the run has no such process at that time. Then every listener is foreign."""
    _verified: dict[int, str] = field(default_factory=dict, init=False)
    """Our listening sockets: inode -> a descriptor below /proc that has it open. The kernel does not reuse inodes."""

    def find_own_sockets(self) -> frozenset[int]:
        """Return the inodes of the sockets that listen on the port, if all of them belong to the run's processes.

        Raise ConnectionRefusedError if no process listens, and ForeignListener if a process outside the run listens.
        """
        # This is asked often, and the kernel's list of sockets takes 10 ms; a refusal and open descriptors much less.
        # While a socket of ours listens, no other process can listen there.
        if self._verified and all(_read_socket_inode(file) == inode for inode, file in self._verified.items()):
            return frozenset(self._verified)
        starting = not self._verified and _refuses_connections(self.host, self.port)
        listening = frozenset() if starting else find_listening_sockets(self.host, self.port)
        if not listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{os.strerror(errno.ECONNREFUSED)}: nothing listens")
        # The root and its living descendants that run as this user: another user may reuse a pid.
        root = self.root()
        family = [] if root is None else [root, *(child.pid for child in descendants(root))]
        pids = []
        for pid in family:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).uids().effective == os.geteuid():
                    pids.append(pid)
        sockets = dict(list_open_sockets(pids))
        if not listening <= sockets.keys():
            raise ForeignListener(f"another process listens on {self.host}:{self.port}: nothing was sent to it")
        self._verified = {inode: sockets[inode] for inode in listening}
        return listening

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """Guard a block that opens a connection: the run's own process must listen before and after it.

        Raise ForeignListener if another process listens, or if the listener changed in the block. Raise
        ConnectionRefusedError if no process listens.
        """
        sockets_before = self.find_own_sockets()
        yield
        if self.find_own_sockets() != sockets_before:
            raise ForeignListener(f"the listener on {self.host}:{self.port} changed: nothing was sent to it")


def _refuses_connections(host: str, port: int) -> bool:
    """Return whether the machine refuses a connection, because no process listens. Nothing is sent."""
    with socket.socket() as connection, contextlib.suppress(BlockingIOError):
        connection.setblocking(False)
        return connection.connect_ex((host, port)) == errno.ECONNREFUSED
    return False


def find_listening_sockets(host: str, port: int) -> frozenset[int]:
    """Return the inodes of the listening TCP sockets that a connection to ``host:port`` of this machine would reach.

    ``host`` is resolved. The result has the sockets bound to its address, otherwise the sockets bound to every address.
    It is empty if no process listens. Raise OSError if ``host`` can't be resolved.
    """
    host_address = socket.inet_aton(socket.gethostbyname(host))[::-1].hex().upper()
    listening = [(address, inode) for address, state, inode in _read_tcp_sockets(port) if state == _LISTEN]
    specific = frozenset(inode for address, inode in listening if address in (host_address, _MAPPED + host_address))
    return specific or frozenset(inode for address, inode in listening if address in _ANY)


def has_closing_connections(port: int) -> bool:
    """Return whether the kernel lists a TCP connection of this local port in the state TIME_WAIT."""
    return any(state == _TIME_WAIT for _, state, _ in _read_tcp_sockets(port))


def _read_tcp_sockets(port: int) -> Iterator[tuple[str, str, int]]:
    """Yield address, state and inode of each TCP socket with this local port, from /proc/net/tcp and tcp6.

    Address and state are the kernel's hexadecimal texts.
    """
    # slot, local address and port, remote address, state, queues, timer, retransmits, uid, timeout, inode
    row = rf"^ *\d+: ([0-9A-F]+):{port:04X} \S+ ([0-9A-F]{{2}}) \S+ \S+ \S+ +\d+ +\d+ (\d+)"
    pattern = re.compile(row, re.MULTILINE)
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for address, state, inode in pattern.findall(Path(f"/proc/net/{name}").read_text()):
                yield address, state, int(inode)


def list_open_sockets(pids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Yield the inode of each socket that the processes have open, and its file in ``/proc/PID/fd``.

    Processes that this user can't inspect are skipped.
    """
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                file = f"/proc/{pid}/fd/{descriptor}"
                if (inode := _read_socket_inode(file)) is not None:
                    yield inode, file


def _read_socket_inode(file: str) -> int | None:
    """Return the inode of the socket that a file in ``/proc/PID/fd`` stands for; None if it is closed or no socket."""
    with contextlib.suppress(OSError):
        if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(file)):
            return int(match[1])
    return None
