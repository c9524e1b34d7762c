"""Two processes with private networks listen on the same port, and reach the machine's network on request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import socket, sys
from private_network import ADDRESS, enter_private_network, machine_network
server_of_the_machine = socket.create_server(("127.0.0.1", 0))
try:
    enter_private_network()
except PermissionError:
    print("not allowed", flush=True)
    raise SystemExit
servers = [socket.create_server((host, 8765)) for host in ("127.0.0.1", ADDRESS)]
found = socket.getaddrinfo("localhost", 80, socket.AF_INET, flags=socket.AI_ADDRCONFIG)
with machine_network():
    socket.create_connection(server_of_the_machine.getsockname(), timeout=5)
print("listens and resolves", found[0][4][0], flush=True)
sys.stdin.read()
"""


def test_processes_with_private_networks_use_the_same_port() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=Path(__file__).parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    lines = [process.stdout.readline() for process in processes if process.stdout]  # then both listen
    for process in processes:
        process.communicate(timeout=20)

    if lines == ["not allowed\n"] * 2:
        pytest.skip("private networks need root")
    assert lines == ["listens and resolves 127.0.0.1\n"] * 2
