"""The machine that the checks look at: its variables, its folders, and what its programs answer."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.finding import OK, Finding


class NoAnswer(Exception):
    """A program, host or file system did not answer in time; the message says which."""


@dataclass(frozen=True)
class Answer:
    """How a program answered."""

    code: int
    out: str
    error: str

    @property
    def complaint(self) -> str:
        """Return the last line it wrote to stderr, or else to stdout."""
        lines = (self.error.strip() or self.out.strip() or f"exit code {self.code}").splitlines()
        return lines[-1].strip()


@dataclass(frozen=True)
class Machine:
    """This machine as a run would find it."""

    environment: Mapping[str, str]  # the user's variables
    recipe: Recipe | None = None
    patience: float = 3.0  # longest wait for one program, in seconds
    _answers: dict[tuple[str, ...], Future[Answer | None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def device(self) -> str | None:
        """Return ``cpu`` or ``cuda`` by the torch that is installed, None without one."""
        version = installed("torch")
        return version and ("cpu" if version.endswith("+cpu") else "cuda")

    @property
    def run_root(self) -> Path:
        """Return the folder that gets run directories."""
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

    def ask(self, *argv: str) -> Answer | None:
        """Return what a program answers, run once however many checks ask; None where it is not installed.

        Raises:
            NoAnswer: it took too long.
        """
        with self._lock:
            first = argv not in self._answers
            future = self._answers.setdefault(argv, Future())
        if first:
            try:
                future.set_result(_run(argv, self.patience))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def table(self, argv: tuple[str, ...], separator: str, columns: int) -> list[list[str]] | None:
        """Return the rows of that many cells that a program prints; None where it is not installed.

        Raises:
            NoAnswer: it took too long, or failed.
        """
        answer = self.ask(*argv)
        if answer is None:
            return None
        if answer.code != 0:
            raise NoAnswer(f"{argv[0]} fails: {answer.complaint}")
        rows = [[cell.strip() for cell in line.split(separator)] for line in answer.out.splitlines()]
        return [row for row in rows if len(row) == columns]


def _run(argv: tuple[str, ...], seconds: float) -> Answer | None:
    if shutil.which(argv[0]) is None:
        return None
    variables = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
            check=False, env=variables,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{argv[0]} did not answer within {seconds:.0f} s") from None
    return Answer(done.returncode, done.stdout, done.stderr)


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
