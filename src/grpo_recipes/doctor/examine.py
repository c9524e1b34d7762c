"""The machine that the checks look at, and the loop that runs them side by side within a time limit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.finding import OK, PROBLEM, WARNING, Finding, problem, warning
from grpo_recipes.secrets import masked

Check = Callable[[Any], Finding]
_MARKS = {OK: "ok", WARNING: "warn", PROBLEM: "PROBLEM"}


class NoAnswer(Exception):
    """A program did not answer in time, or failed; the message says which and how."""


@dataclass(frozen=True)
class Machine:
    """This machine as a run would find it."""

    environment: Mapping[str, str]  # the user's variables
    recipe: Recipe | None = None
    patience: float = 3.0  # longest wait for one program, in seconds
    _answers: dict[tuple[str, ...], Future[subprocess.CompletedProcess[str] | None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def device(self) -> str | None:
        """Return ``cpu`` or ``cuda`` by the torch that is installed, None without one."""
        version = installed("torch")
        return version and ("cpu" if version.endswith("+cpu") else "cuda")

    @property
    def run_root(self) -> Path:
        """Return the folder of run directories."""
        name = self.recipe["run_root"] if self.recipe else self.environment.get("RUN_ROOT") or "runs"
        return Path(os.path.expanduser(name)).absolute()

    @property
    def temporary(self) -> Path:
        """Return the folder in which a run makes its node-local one."""
        node = self.environment.get("SLURM_TMPDIR", "")
        return Path(node if os.access(node, os.W_OK) else tempfile.gettempdir())

    @property
    def home(self) -> Path:
        """Return the user's home folder."""
        return Path(self.environment.get("HOME", "/"))

    @property
    def in_job(self) -> bool:
        """Return whether this is a Slurm job."""
        return bool(self.environment.get("SLURM_JOB_ID"))

    def ask(self, *argv: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str] | None:
        """Run a program once, however many checks ask, and return it when done; None where it is not installed.

        ``NoAnswer``: it took too long.
        """
        with self._lock:
            first = argv not in self._answers
            future = self._answers.setdefault(argv, Future())
        if first:
            try:
                future.set_result(_run(argv, self.patience, variables or {**os.environ, "LC_ALL": "C"}))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def table(self, argv: Sequence[str], separator: str, fields: Sequence[str]) -> list[dict[str, str]] | None:
        """Return the rows that a program prints, each cell under the name of its field; None without the program.

        ``NoAnswer``: it took too long, or failed.
        """
        done = self.ask(*argv)
        if done is None:
            return None
        if done.returncode != 0:
            said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            raise NoAnswer(f"{argv[0]} fails: {said.splitlines()[-1].strip()}")
        rows = [[cell.strip() for cell in line.split(separator)] for line in done.stdout.splitlines()]
        return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]

    def rows(self, argv: Sequence[str], separator: str, fields: Sequence[str]) -> list[dict[str, str]]:
        """Return the rows of ``table``, none where the program is missing or fails: another check reports that."""
        with contextlib.suppress(NoAnswer):
            return self.table(argv, separator, fields) or []
        return []


def _run(argv: Sequence[str], seconds: float, variables: dict[str, str]) -> subprocess.CompletedProcess[str] | None:
    if shutil.which(argv[0]) is None:
        return None
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
            check=False, env=variables,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{Path(argv[0]).name} did not answer within {seconds:.0f} s") from None


def installed(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge(value: str, *rules: tuple[object, str, str]) -> Finding:
    """Return ``value`` with status and fix of the first rule (condition, status, fix) that holds, ok without one."""
    status, fix = next(((status, fix) for holds, status, fix in rules if holds), (OK, ""))
    return Finding(status, value, fix)


def name_of(check: Check) -> str:
    """Return the name of a check: its function's, with spaces."""
    return check.__name__.replace("_", " ")


def about(check: Check) -> str:
    """Return what a check looks at: the first line of its docstring."""
    return (inspect.getdoc(check) or "").splitlines()[0]


def examine(checks: Sequence[tuple[Check, Any]], seconds: float) -> dict[str, Finding]:
    """Run checks side by side, each on its subject, for at most ``seconds`` together.

    Return for the name of each what it found, in one line and without secrets.
    """
    late = warning(f"no answer within {seconds:.0f} s", "what it looks at hangs: a file system, driver or daemon")
    found = dict.fromkeys((name_of(check) for check, _ in checks), late)

    def look(check: Check, subject: Any) -> None:
        found[name_of(check)] = _guarded(check, subject)

    # Daemon threads: one that hangs on a dead file system must not keep the command from ending.
    threads = [threading.Thread(target=look, args=pair, daemon=True) for pair in checks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {
        name: Finding(one.status, *(" ".join(masked(text).split()) for text in (one.value, one.fix)))
        for name, one in list(found.items())
    }


def _guarded(check: Check, subject: Any) -> Finding:
    """Return the check's finding; a config error is a problem, and a check that fails hides no other."""
    try:
        return check(subject)
    except ConfigError as error:
        first, more = error.problems[0], len(error.problems) - 1
        return problem(f"{first.where}: {first.what}{f' (and {more} more)' if more else ''}", first.fix)
    except NoAnswer as error:
        return warning(str(error), "look at it by hand, or wait longer with --deep")
    except Exception as error:
        return warning(f"could not be looked at: {type(error).__name__}: {error}", "look at it by hand")


def as_text(results: Mapping[str, Finding]) -> str:
    """Return a line for each check, below it what to do, and the count."""
    width = max(map(len, results))
    lines = []
    for name, found in results.items():
        lines.append(f"{_MARKS[found.status]:<8} {name:<{width}}  {found.value}")
        if found.fix:
            lines.append(f"{'':<8} {'':<{width}}  -> {found.fix}")
    counts = [f"{len(results)} checks"]
    for status in (WARNING, PROBLEM):
        number = sum(found.status == status for found in results.values())
        counts.append(f"{number or 'no'} {status}{'' if number == 1 else 's'}")
    return "\n".join([*lines, f"grpo: {', '.join(counts)}"])
