"""Run `grpo` like ``subprocess.run``, in a process forked from a server that has already imported its modules.

A short command spends most of its time on these imports. The server imports them once, and nothing heavy such as torch.
It calls none of our functions: each process starts with empty caches, its own environment and working folder. The
server ends with the test session. Tests of the interpreter's start (encodings, signals, ``bin/grpo``) start Python.

    done = run_grpo("check", "my.yaml", cwd=tmp_path, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

# The modules of the commands that tests run most, if they are installed; tests/e2e/test_deletable.py deletes some.
IMPORTED = (
    "grpo_recipes.cli.recipes", "grpo_recipes.cli.plan", "grpo_recipes.cli.runs", "grpo_recipes.cli.keys",
    "grpo_recipes.cli.fetch", "grpo_recipes.cli.follow", "grpo_recipes.cli.status",
    "grpo_recipes.launch.run", "grpo_recipes.launch.resolve",
    "grpo_recipes.recipe.check_data", "grpo_recipes.recipe.datafiles", "grpo_recipes.console",
    "grpo_recipes.console.doctor", "grpo_recipes.extensions.environments.play",
    "grpo_recipes.extensions.environments.rules", "grpo_recipes.extensions.environments.roles",
    "grpo_recipes.extensions.atropos.rules", "grpo_recipes.extensions.atropos.processes",
    "grpo_recipes.extensions.code.rules", "grpo_recipes.extensions.judge.rules",
    "grpo_recipes.extensions.problems.rules", "grpo_recipes.extensions.sft.rules",
    "grpo_recipes.extensions.offline.keys", "grpo_recipes.cli.entry_points", "hydra",
)  # fmt: skip
_LARGEST_REQUEST = 1 << 17  # bytes, with the environment
_Stream = IO[Any] | int | None


def run_grpo(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run `grpo` with these words; ``run_python`` describes the settings."""
    return run_python("-m", "grpo_recipes", *words, **settings)


def run_python(
    *words: str,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    stdin: _Stream = None,
    stdout: _Stream = None,
    stderr: _Stream = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE ...`` or ``python -c CODE ...`` to its end, and return its exit code and output.

    Without ``stdout`` or ``stderr``, this output is returned. Raise TimeoutExpired after ``timeout`` seconds.
    """
    request = {"words": words, "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env)}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(input.encode())
        files[0].seek(0)
        streams = [file if given is None else given for given, file in zip((stdin, stdout, stderr), files, strict=True)]
        code = _server().run(request, [file if isinstance(file, int) else file.fileno() for file in streams], timeout)
        out, err = (_read(file) for file in files[1:])
    return subprocess.CompletedProcess(words, code, out, err)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode().replace("\r\n", "\n")


def _server() -> _Server:
    """Return the server; start another if a test has ended all processes below pytest."""
    if not _start_server().is_alive():
        _start_server.cache_clear()
    return _start_server()


@functools.cache
def _start_server() -> _Server:
    return _Server()


class _Server:
    """The server as its tests see it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, __file__, str(theirs.fileno())]
            settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            # It ends when this process has ended: its socket is then closed.
            self._process = subprocess.Popen(
                argv, cwd="/", env=settings, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, request: Mapping[str, Any], streams: list[int], timeout: float) -> int:
        """Run a process with these file descriptors as stdin, stdout and stderr, and return its exit code."""
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], streams)
            pid = int(self._receive(None))  # the first process also waits for the server's imports
            try:
                return int(self._receive(timeout))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._receive(None)
                raise subprocess.TimeoutExpired(list(request["words"]), timeout) from None
        except subprocess.TimeoutExpired:
            raise
        except BaseException:  # e.g. the test's own time limit: the next test gets another server
            self._process.kill()
            self._process.wait()
            raise

    def _receive(self, timeout: float | None) -> bytes:
        if not select.select([self._channel], [], [], timeout)[0]:
            raise TimeoutError
        return self._channel.recv(100)


def _serve(channel: socket.socket) -> list[str]:
    """Fork a process for each request; return its words, in this process only."""
    while True:
        message, streams, _, _ = socket.recv_fds(channel, _LARGEST_REQUEST, 3)
        if not message:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            channel.close()
            _become(json.loads(message), streams)
            return list(json.loads(message)["words"])
        for stream in streams:
            os.close(stream)
        channel.send(str(pid).encode())
        channel.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(request: Mapping[str, Any], streams: list[int]) -> None:
    """Give this process the working folder, environment and streams of a request, like a new Python."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    sys.path[0] = request["cwd"]
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        file = os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _run(words: list[str]) -> None:
    kind, program, *sys.argv[1:] = words
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = "-c"
        exec(program, {"__name__": "__main__", "__builtins__": builtins})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which ends the server
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()  # else each process looks at all of their objects when it ends
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
