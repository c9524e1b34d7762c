"""A user's reward that executes the command in the completion. The tests in this folder run it in child processes."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PLANTED = "plantedsecret"


def score(completions: list[str], answer: list[str], prompts: list[Any], **columns: Any) -> Any:
    (completion,), (expected,) = completions, answer
    command, _, argument = completion.partition(" ")
    action = ACTIONS.get(command)
    return [float(completion == expected)] if action is None else action(argument)


def shape(prompts: list[Any], completions: list[Any], completion_ids: list[Any], **columns: Any) -> list[float]:
    """Score 1 if every argument is a list with exactly the entry of its row."""
    lists = [prompts, completions, completion_ids, *columns.values()]
    row = completions[0]
    matches = prompts == [f"p{row}"] and completion_ids == [[int(row)]] and columns == {"answer": [f"a{row}"]}
    return [float(matches and all(len(values) == 1 for values in lists))]


def few_arguments(completions: list[str]) -> list[float]:
    return [float(len(completions[0]))]


async def slow_judge(completions: list[str], **_: Any) -> list[float]:
    return [0.25]


async def judge(completions: list[str], **_: Any) -> list[float]:
    """Wait like a client of a server; an event loop cannot interrupt ``block`` and ``die``."""
    command, _, seconds = completions[0].partition(" ")
    if command == "block":
        time.sleep(1000)
    if command == "die":
        os._exit(1)
    if command == "raise":
        raise ConnectionError("the judge is down")
    await asyncio.sleep(float(seconds or 0))
    return [float(command)]


def variables(completions: list[str]) -> list[float]:
    """Return the value of an environment variable, or raise it as a message."""
    command, _, name = completions[0].partition(" ")
    if command == "say":
        raise ValueError(f"401: no key {os.environ[name]}")
    return [float(os.environ[name])]


def _spin(_: str) -> None:
    while True:
        pass


def _deaf(_: str) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while True:
        pass


def _leave(file: str, count: int = 3) -> None:
    """Start processes that survive a kill of the process group: new sessions and orphans."""
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                with Path(file).open("a") as out:
                    out.write(f"{os.getpid()}\n")
                time.sleep(1000)
            os._exit(0)


def _leave_and_spin(file: str) -> None:
    _leave(file)
    _spin("")


def _leave_and_die(file: str) -> None:
    _leave(file)
    while not Path(file).exists() or Path(file).read_text().count("\n") < 3:
        time.sleep(0.01)
    ctypes.string_at(0)


def _leave_a_program(file: str) -> list[float]:
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
    Path(file).write_text(f"{program.pid}\n")
    return [1.0]


def _many(_: str) -> None:
    for _ in range(80):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)


def _return_twice(_: str) -> list[float]:
    os.fork()
    return [0.5]


def _shared_memory(_: str) -> None:
    mapping = mmap.mmap(-1, 1 << 29)
    for place in range(0, 1 << 29, 4096):
        mapping[place] = 1
    time.sleep(1000)


HELD: list[int] = []


def _memfd(mebibytes: str) -> list[float]:
    """Keep one more unmapped file in memory."""
    HELD.append(os.memfd_create("wild"))
    for _ in range(int(mebibytes)):
        os.write(HELD[-1], b"x" * (1 << 20))
    time.sleep(0.1)
    return [1.0]


def _shared_file(mebibytes: str) -> list[float]:
    """Leave one more closed file in /dev/shm."""
    with open(f"/dev/shm/wild-{os.getpid()}-{time.monotonic_ns()}", "wb") as file:
        for _ in range(int(mebibytes)):
            file.write(b"x" * (1 << 20))
    time.sleep(0.1)
    return [1.0]


def _print(mebibytes: str) -> list[float]:
    for _ in range(int(mebibytes)):
        os.write(2, b"x" * (1 << 20))
    return [1.0]


def _noise(_: str) -> list[float]:
    print('{"row": 0, "value": 9}\n' * 100)
    os.write(1, b"\x00garbage\n" * 10000)
    subprocess.run(["echo", "more"], check=True)
    return [float(sys.stdin.read() == "")]


def _secrets(_: str) -> list[float]:
    program = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    return [float(sum(PLANTED in text for text in (*os.environ.values(), program)))]


def _write(reply: str) -> list[float]:
    """Write into every pipe of this process, including the reply pipe."""
    for descriptor in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
                os.write(descriptor, reply.encode() + b"\n")
        except OSError:
            continue
    return [1.0]


def _stop_keeper(_: str) -> list[float]:
    os.kill(os.getppid(), signal.SIGSTOP)
    return [1.0]


def _raise(_: str) -> None:
    raise ValueError("first line\nsecond line")


def _exit(_: str) -> None:
    raise SystemExit(3)


ACTIONS = {
    "spin": _spin,
    "deaf": _deaf,
    "sleep": lambda seconds: (time.sleep(float(seconds)), [1.0])[1],
    "leave-and-spin": _leave_and_spin,
    "leave-and-die": _leave_and_die,
    "leave-a-program": _leave_a_program,
    "many": _many,
    "return-twice": _return_twice,
    "8GB": lambda _: [float(len(bytearray(8 << 30)))],
    "shared-memory": _shared_memory,
    "memfd": _memfd,
    "shared-file": _shared_file,
    "print": _print,
    "segfault": lambda _: ctypes.string_at(0),
    "killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda _: os._exit(0),
    "sys-exit": _exit,
    "raise": _raise,
    "nan": lambda _: [float("nan")],
    "inf": lambda _: [float("inf")],
    "1e39": lambda _: [1e39],
    "text": lambda _: ["0.5"],
    "text-alone": lambda _: "0.5",
    "number-alone": lambda _: 0.5,
    "none-alone": lambda _: None,
    "two": lambda _: [0.5, 0.5],
    "empty": lambda _: [],
    "none": lambda _: [None],
    "integer": lambda _: (2,),
    "true": lambda _: [True],
    "noise": _noise,
    "secrets": _secrets,
    "torch": lambda _: [float("torch" in sys.modules or "trl" in sys.modules)],
    "session": lambda _: [float(os.getsid(0))],
    "write": _write,
    "stop-keeper": _stop_keeper,
    "cores": lambda _: [float(os.environ["OMP_NUM_THREADS"])],
}
