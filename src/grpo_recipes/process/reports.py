"""Print and format lines, record the phase of a rank, write stacks of hung threads, and check network connections.

Every process of a run uses this module. ``say``, ``plural`` and ``align_columns`` format and print lines. ``PhaseFile``
reports the phase of a rank to the launcher. ``dump_stacks_on_signal`` shows where a process hangs. ``can_reach`` checks
that a URL, or the proxy for it, accepts connections.
"""

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

_PHASE_LENGTH = 120  # characters; longer than any text of a phase


def run_folder() -> Path:
    """Return the run directory, which the launcher passes in GRPO_RUN_DIR; raise SystemExit if it is not set."""
    folder = os.environ.get("GRPO_RUN_DIR")
    if not folder:
        raise SystemExit("grpo: GRPO_RUN_DIR is not set: the launcher starts this script. Fix: run grpo launch RECIPE")
    return Path(folder)


def say(text: str) -> None:
    """Print ``grpo: <text>`` to stdout without secrets; in a launcher, also write it to ``launch.log``."""
    print_line(f"grpo: {text}")


print_line = OUTPUT.print_line


def format_bytes(number: float) -> str:
    """Format a number of bytes in TB, GB, MB or kB (powers of 1,000), for example ``1.5 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"


def plural(count: float, name: str) -> str:
    """Format a count with its noun, for example ``1 step`` or ``2,000 steps``."""
    return f"{count:,.0f} {name}{'s' * (count != 1)}"


class PhaseFile:
    """The file ``processes/phase_<rank>.json``: a rank records its current phase there.

    The launcher reads it to distinguish a hung rank from a slow rank.

    The phases are start, connect (server and trainer form their group for the weights), sample, score, sync, update,
    save, evaluate and end. ``since`` is ``time.time()`` at the start of the phase.
    """

    def __init__(self, run_dir: Path, rank: int):
        """Create ``processes/`` if needed, and record the phase ``start``."""
        folder = run_dir / "processes"
        folder.mkdir(exist_ok=True)
        self._path = str(folder / f"phase_{rank}.json")
        self.phase = "start"
        self.enter("start", 0)

    def enter(self, phase: str, step: int) -> str:
        """Write the phase, ``step`` (completed optimizer steps) and the time to the file; return the previous phase.

        Call this again for each batch of a long phase, so that the launcher sees progress.
        """
        previous, self.phase = self.phase, phase
        text = json.dumps({"phase": phase, "since": time.time(), "step": step}).ljust(_PHASE_LENGTH)
        # A single write of constant length replaces the old text. On ext4, a rename or a truncation would flush the
        # file to disk, which takes a millisecond several times per step. Readers on other nodes need the close.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, text.encode())
        os.close(descriptor)
        return previous


def dump_stacks_on_signal(run_dir: Path, name: str) -> None:
    """Install a handler of SIGUSR2 that appends the stacks of all threads to ``<run_dir>/stacks/<name>.txt``.

    The handler works even if Python code is blocked.
    """
    folder = run_dir / "stacks"
    folder.mkdir(mode=0o700, exist_ok=True)
    faulthandler.register(signal.SIGUSR2, file=(folder / f"{name}.txt").open("a"), all_threads=True)


def align_columns(rows: Sequence[Sequence[str]], numbers: bool = False) -> list[str]:
    """Format a table as one line for each row, with its cells padded to equal widths and separated by two spaces.

    All rows have the same number of cells. With ``numbers``, all columns except the first are aligned to the right.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    justify = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(columns) - 1)]
    return [
        "  ".join(pad(cell, width) for pad, cell, width in zip(justify, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def can_connect(host: str, port: int, timeout: float = 5.0) -> bool:
    """Return whether a TCP connection to ``host:port`` opens within ``timeout`` seconds, including the name lookup."""
    opened = threading.Event()

    def connect() -> None:
        """Set ``opened`` if the connection opens; ignore errors."""
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout):
            opened.set()

    # A thread limits the name lookup, too: without a name server it can take half a minute.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(timeout)
    return opened.is_set()


def find_route(address: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and port that an HTTP client of the URL ``address`` connects to.

    They belong to the proxy if ``environment`` sets one for this URL (``HTTPS_PROXY``, ``ALL_PROXY``, ``NO_PROXY``),
    otherwise to the URL.
    """
    url = urlsplit(address)
    host = url.hostname or ""
    variables = {name.lower(): value for name, value in environment.items()}
    proxy = variables.get(f"{url.scheme}_proxy") or variables.get("all_proxy")
    no_proxy = variables.get("no_proxy", "").split(",")
    domains = [entry.strip().partition(":")[0].removeprefix("*").removeprefix(".") for entry in no_proxy]
    is_direct = "*" in no_proxy or any(name and (host == name or host.endswith(f".{name}")) for name in domains)
    if proxy and not is_direct:
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname or "", url.port or (80 if url.scheme == "http" else 443)


def can_reach(address: str, environment: Mapping[str, str], timeout: float = 5.0) -> bool:
    """Return whether a TCP connection opens to the host of the URL ``address``, or to its proxy in ``environment``."""
    return can_connect(*find_route(address, environment), timeout)
