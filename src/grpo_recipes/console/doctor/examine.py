"""The machine that the checks look at, and the loop that runs them side by side within a time limit."""

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, translate
from grpo_recipes.process.scratch import node_folder
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import run_root
from grpo_recipes.runs.endings import OK, PROBLEM, WARNING, Finding, combine_findings, ok, problem, warning
from grpo_recipes.secrets import masked

Check = Callable[[Any], Finding]
_MARKS = {OK: "ok", WARNING: "warn", PROBLEM: "PROBLEM"}


class NoAnswer(Exception):
    """A program did not answer in time, or failed; the message says which and how, ``fix`` what to do."""

    def __init__(self, what: str, fix: str = "look at it by hand, or wait longer with --deep"):
        super().__init__(what)
        self.fix = fix


@dataclass(frozen=True)
class Machine:
    """This machine as a run would find it."""

    environment: Mapping[str, str]  # the user's variables
    recipe: Recipe | None = None
    patience: float = 3.0  # longest wait for one program, in seconds

    @property
    def device(self) -> str | None:
        """Return ``cpu`` or ``cuda`` by the torch that is installed, None without one."""
        version = installed("torch")
        return version and ("cpu" if version.endswith("+cpu") else "cuda")

    @property
    def run_root(self) -> Path:
        """Return the folder of run directories."""
        named = os.path.expanduser(self.recipe["run_root"]) if self.recipe else run_root(self.environment)
        return Path(named).absolute()

    @property
    def temporary(self) -> Path:
        """Return the folder in which a run makes its node-local one."""
        return node_folder(self.environment)

    @property
    def home(self) -> Path:
        """Return the user's home folder."""
        return Path(self.environment.get("HOME", "/"))

    @property
    def in_job(self) -> bool:
        """Return whether this is a Slurm job."""
        return bool(self.environment.get("SLURM_JOB_ID"))

    def ask(self, *argv: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program and return it when done, with exit code 127 where it is missing; ``NoAnswer`` when it hangs."""
        if shutil.which(argv[0]) is None:
            return subprocess.CompletedProcess(argv, 127, "", "")
        silence = NoAnswer(f"{Path(argv[0]).name} did not answer within {self.patience:.0f} s")
        with translate(subprocess.TimeoutExpired, lambda _: silence):
            return subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=self.patience, check=False, env=variables or {**os.environ, "LC_ALL": "C"},
            )  # fmt: skip

    def table(self, separator: str, fields: Sequence[str], *argv: str) -> list[dict[str, str]]:
        """Return a program's rows, each cell under its field; none where it is missing, ``NoAnswer`` if it fails."""
        done = self.ask(*argv)
        if done.returncode not in (0, 127):
            said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            raise NoAnswer(f"{argv[0]} fails: {said.splitlines()[-1].strip()}")
        rows = [[cell.strip() for cell in line.split(separator)] for line in done.stdout.splitlines()]
        return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def installed(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)


def judge(value: str, *rules: tuple[object, str, str]) -> Finding:
    """Return ``value`` with status and fix of the first rule (condition, status, fix) that holds, ok without one."""
    status, fix = next(((status, fix) for holds, status, fix in rules if holds), (OK, ""))
    return Finding(status, value, fix)


def each(value: str, *rules: tuple[object, str, str, str]) -> Finding:
    """Return together what every rule (condition, status, value, fix) that holds found, ``value`` without one."""
    return combine_findings([ok(value), *(Finding(status, what, fix) for holds, status, what, fix in rules if holds)])


@contextlib.contextmanager
def noted(findings: list[Finding]) -> Iterator[None]:
    """Add an error inside to the findings, so that it hides no other."""
    try:
        yield
    except Exception as error:
        findings.append(finding_of(error))


def name_of(check: Check) -> str:
    """Return the name of a check: its function's, with spaces."""
    return check.__name__.replace("_", " ")


def examine(checks: Sequence[Check], subject: Any, seconds: float) -> dict[str, Finding]:
    """Run checks side by side for at most ``seconds``; return what each found by its name, without secrets."""
    late = warning(f"no answer within {seconds:.0f} s", "what it looks at hangs: a file system, driver or daemon")
    found = dict.fromkeys(map(name_of, checks), late)

    def look(check: Check) -> None:
        one: list[Finding] = []
        with noted(one):
            one.append(check(subject))
        texts = (" ".join(masked(text).split()) for text in (one[0].value, one[0].fix))
        found[name_of(check)] = Finding(one[0].status, *texts)

    # Daemon threads: one that hangs on a dead file system must not keep the command from ending.
    threads = [threading.Thread(target=look, args=(check,), daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def finding_of(error: Exception) -> Finding:
    """Return an error as a finding: a problem where it is a config error."""
    if isinstance(error, ConfigError):
        first, more = error.problems[0], len(error.problems) - 1
        return problem(f"{first.where}: {first.what}{f' (and {more} more: grpo check)' if more else ''}", first.fix)
    if isinstance(error, NoAnswer):
        return warning(str(error), error.fix)
    return warning(f"could not be looked at: {type(error).__name__}: {error}", "look at it by hand")


def as_text(results: Mapping[str, Finding]) -> str:
    """Return a line for each check, below it what to do, and the count."""
    width = max(map(len, results))
    lines = []
    for name, found in results.items():
        lines.append(f"{_MARKS[found.status]:<8} {name:<{width}}  {found.value}")
        lines += [f"{'':<8} {'':<{width}}  -> {found.fix}"] if found.fix else []
    numbers = {kind: sum(found.status == kind for found in results.values()) for kind in (WARNING, PROBLEM)}
    counts = ", ".join(f"{number or 'no'} {kind}{'s' * (number != 1)}" for kind, number in numbers.items())
    return "\n".join([*lines, f"grpo: {len(results)} checks, {counts}"])
