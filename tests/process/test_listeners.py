"""Who listens on a port: sockets of this process, and of another user."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from other_user import needs_root, other_user

from grpo_recipes.process import listeners
from grpo_recipes.process.listeners import ForeignListener, OwnListener, find_listening_sockets, has_closing_connections

LOOPBACK = "127.0.0.1"
LISTENS = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print(listener.getsockname()[1], flush=True)
input()"""


def owner(port: int, root: int | None = None) -> OwnListener:
    return OwnListener(LOOPBACK, port, lambda: os.getpid() if root is None else root)


def test_a_listener_of_this_process_or_of_a_child_is_ours() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        assert owner(port).find_own_sockets() == {os.fstat(listener.fileno()).st_ino}
    child = subprocess.Popen([sys.executable, "-c", LISTENS, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    port = int(child.stdout.readline())
    assert len(owner(port).find_own_sockets()) == 1
    with pytest.raises(ForeignListener):
        owner(port, root=2**22 + 1).find_own_sockets()
    child.communicate(b"\n")


def test_a_port_without_a_listener_refuses_the_connection() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match="Connection refused"):
        owner(port).find_own_sockets()


def test_the_most_specific_address_counts() -> None:
    """The kernel gives a connection to the listener of its very address, before one of every address."""
    with socket.socket() as exact:
        exact.bind((LOOPBACK, 0))  # nobody else can listen there now
        port = exact.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)):
            assert find_listening_sockets(LOOPBACK, port) == set()
            exact.listen()
            assert find_listening_sockets(LOOPBACK, port) == {os.fstat(exact.fileno()).st_ino}
    with socket.create_server(("", 0)) as everywhere:
        assert find_listening_sockets(LOOPBACK, everywhere.getsockname()[1]) == {os.fstat(everywhere.fileno()).st_ino}
    if socket.has_dualstack_ipv6():
        with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as both:
            assert find_listening_sockets(LOOPBACK, both.getsockname()[1]) == {os.fstat(both.fileno()).st_ino}


@pytest.mark.parametrize("address", [LOOPBACK, ""])
def test_the_kernels_list_is_read_again_only_when_our_socket_is_closed(address: str, monkeypatch) -> None:
    lists = []

    def count_and_find(host: str, port: int) -> frozenset[int]:
        lists.append(port)
        return find_listening_sockets(host, port)

    monkeypatch.setattr(listeners, "find_listening_sockets", count_and_find)
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        ours = owner(port)
        assert {ours.find_own_sockets() for _ in range(3)} == {frozenset({os.fstat(listener.fileno()).st_ino})}
        assert len(lists) == 1
        for other in (LOOPBACK, ""):  # until then no process can listen there
            with pytest.raises(OSError, match="in use"):
                socket.create_server((other, port))
    child = subprocess.Popen([sys.executable, "-c", LISTENS, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert int(child.stdout.readline()) == port
    assert ours.find_own_sockets() and len(lists) == 2
    child.communicate(b"\n")
    with pytest.raises(ConnectionRefusedError):
        ours.find_own_sockets()


def test_a_listener_that_was_replaced_while_we_connected_gets_nothing() -> None:
    """R6: another process can take the port between the look and the connection."""
    first = socket.create_server((LOOPBACK, 0))
    port = first.getsockname()[1]
    with pytest.raises(ForeignListener, match="changed"), owner(port).connecting():
        first.close()
        second = socket.create_server((LOOPBACK, port))
    second.close()


@needs_root
def test_a_listener_of_another_user_is_not_ours_whatever_its_pid(tmp_path: Path) -> None:
    """R6: a process guard's pid can be another user's by the time it is looked at."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    with other_user(port, tmp_path / "received") as user:
        user.wait()
        for root in (os.getpid(), user.process.pid, 2**22 + 1):
            with pytest.raises(ForeignListener):
                owner(port, root).find_own_sockets()
        assert psutil.Process(user.process.pid).uids().effective != os.geteuid()


def test_closed_connections_linger() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection((LOOPBACK, port))
        accepted, _ = listener.accept()
        accepted.close()  # the side that closes first waits
        client.close()
    assert has_closing_connections(port)
