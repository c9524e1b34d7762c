"""Another user of the machine, who binds names and ports and answers requests: a child process without rights."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

# Listen on a port once it is free, and write each request to a file.
_LISTENS = """
import os, socket, sys, time

os.setuid(int(sys.argv[1]))
port, seconds = int(sys.argv[2]), float(sys.argv[3])
until = time.monotonic() + seconds
while True:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        break
    except OSError:
        listener.close()
        if time.monotonic() > until:
            raise
        time.sleep(0.01)
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    connection.settimeout(1)
    try:
        received = connection.recv(65536)
    except OSError:
        received = b""
    if received:
        print(received, flush=True)
    try:
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
    except OSError:
        pass
    connection.close()
"""


class OtherUser:
    """A process of the user `nobody` that listens on a port; ``received`` are the requests that reached it."""

    def __init__(self, port: int, output: Path, seconds: float) -> None:
        self._output = output
        command = [sys.executable, "-S", "-c", _LISTENS, str(NOBODY), str(port), str(seconds)]
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, cwd="/")

    def wait(self) -> None:
        """Wait until it listens."""
        deadline = time.monotonic() + 60
        while "listening" not in self._output.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def received(self) -> list[str]:
        """The requests, as text."""
        return self._output.read_text().splitlines()[1:]


@contextlib.contextmanager
def other_user(port: int, output: Path, seconds: float = 60.0) -> Iterator[OtherUser]:
    """Let the user `nobody` listen on a port once it is free, for ``seconds`` at most until then."""
    user = OtherUser(port, output, seconds)
    try:
        yield user
    finally:
        user.process.kill()
        user.process.wait()
