"""What a process reports (lines at the terminal, a rank's phase, stacks of its threads), and what hosts it reaches."""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from grpo_recipes.process.terminal import OUTPUT

_PHASE_LENGTH = 120  # characters; longer than any content


def run_folder() -> Path:
    """Return the run directory that the launcher made; exit without one."""
    folder = os.environ.get("GRPO_RUN_DIR")
    if not folder:
        raise SystemExit("grpo: this script is started by the launcher; use: grpo launch RECIPE")
    return Path(folder)


def say(text: str) -> None:
    """Print a line of the launcher's own."""
    print_line(f"grpo: {text}")


print_line = OUTPUT.line


def gigabytes(number: float) -> str:
    """Return a number of bytes as text, in units of 1000: ``1.5 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"


def plural(count: float, name: str) -> str:
    """Return "1 step" or "2,000 steps"."""
    return f"{count:,.0f} {name}{'s' * (count != 1)}"


class PhaseFile:
    """``processes/phase_<rank>.json``, by which the launcher distinguishes a hung run from a slow one.

    A phase is start, connect (server and trainer form their group for the weights), sample, score, sync, update, save,
    evaluate or end; ``since`` is ``time.time()``.
    """

    def __init__(self, run_dir: Path, rank: int):
        folder = run_dir / "processes"
        folder.mkdir(exist_ok=True)
        self._path = str(folder / f"phase_{rank}.json")
        self.phase = "start"
        self.enter("start", 0)

    def enter(self, phase: str, step: int) -> str:
        """Note that a phase begins, or goes on with the next batch, after ``step`` steps; return the phase before."""
        before, self.phase = self.phase, phase
        text = json.dumps({"phase": phase, "since": time.time(), "step": step}).ljust(_PHASE_LENGTH)
        # One write of one length over the last: on ext4 a rename over a file, or truncating it, flushes it to disk, a
        # millisecond several times a step. Closed each time, for readers on other nodes.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, text.encode())
        os.close(descriptor)
        return before


def dump_stacks_on_signal(run_dir: Path, name: str) -> None:
    """From now on SIGUSR2 adds the stacks of all threads to ``stacks/<name>.txt``, whatever Python is waiting for."""
    folder = run_dir / "stacks"
    folder.mkdir(mode=0o700, exist_ok=True)
    faulthandler.register(signal.SIGUSR2, file=(folder / f"{name}.txt").open("a"), all_threads=True)


def aligned(rows: Sequence[Sequence[str]], numbers: bool = False) -> list[str]:
    """Return the lines of a table; with ``numbers`` all columns but the first are flush right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    sides = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(columns) - 1)]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def reachable(host: str, port: int, timeout: float = 5.0) -> bool:
    """Return whether a TCP connection to ``host:port`` opens within ``timeout`` seconds, name lookup included."""
    opened = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout):
            opened.set()

    # In a thread: on a node without a name server the lookup of the name alone can take half a minute.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(timeout)
    return opened.is_set()


def route_to(address: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port that a client of ``address`` (with its scheme) connects to.

    These are the proxy's where ``HTTPS_PROXY`` or its like in ``environment`` names one for that address.
    """
    wanted = urlsplit(address)
    host = wanted.hostname or ""
    lower = {name.lower(): value for name, value in environment.items()}
    proxy = lower.get(f"{wanted.scheme}_proxy") or lower.get("all_proxy")
    direct = lower.get("no_proxy", "").split(",")
    names = [entry.strip().partition(":")[0].removeprefix("*").removeprefix(".") for entry in direct]
    if proxy and "*" not in direct and not any(name and (host == name or host.endswith(f".{name}")) for name in names):
        wanted = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return wanted.hostname or "", wanted.port or (80 if wanted.scheme == "http" else 443)


def address_reachable(address: str, environment: Mapping[str, str], timeout: float = 5.0) -> bool:
    """Return whether a client of ``address`` would get a connection, to it or to its proxy."""
    return reachable(*route_to(address, environment), timeout)
