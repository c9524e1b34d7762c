"""What the checks of a machine look at: its environment, its folders, and what its programs answer."""

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

from grpo_recipes.paths import cache_root
from grpo_recipes.recipe import Recipe


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
        """The last line it wrote to stderr, or else to stdout."""
        lines = (self.error.strip() or self.out.strip() or f"exit code {self.code}").splitlines()
        return lines[-1].strip()


@dataclass(frozen=True)
class Machine:
    """This machine as a run would find it.

    Attributes:
        environment: the user's variables.
        recipe: the recipe asked about, or None.
        patience: longest wait for one program, in seconds.
        deep: whether checks may take torch and a minute.
    """

    environment: Mapping[str, str]
    recipe: Recipe | None = None
    patience: float = 3.0
    deep: bool = False
    _answers: dict[tuple[str, ...], Future[Answer | None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def flavour(self) -> str | None:
        """``cpu`` or ``cuda`` by the torch that is installed, None without one."""
        version = installed("torch")
        return version and ("cpu" if version.endswith("+cpu") else "cuda")

    @property
    def run_root(self) -> Path:
        """Where run directories are made."""
        name = self.recipe["run_root"] if self.recipe else self.environment.get("RUN_ROOT") or "runs"
        return Path(os.path.expanduser(name)).absolute()

    @property
    def cache(self) -> Path:
        """Where downloads go."""
        return cache_root(self.environment)

    @property
    def temporary(self) -> Path:
        """Where a run makes its node-local folder."""
        node = self.environment.get("SLURM_TMPDIR", "")
        return Path(node if os.access(node, os.W_OK) else tempfile.gettempdir())

    @property
    def in_job(self) -> bool:
        """Whether this is a Slurm job."""
        return bool(self.environment.get("SLURM_JOB_ID"))

    def ask(self, *argv: str) -> Answer | None:
        """What a program answers, run once however many checks ask; None where it is not installed.

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


def _run(argv: tuple[str, ...], seconds: float) -> Answer | None:
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{argv[0]} did not answer within {seconds:.0f} s") from None
    return Answer(done.returncode, done.stdout, done.stderr)


def installed(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def existing(path: Path) -> Path:
    """``path``, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
