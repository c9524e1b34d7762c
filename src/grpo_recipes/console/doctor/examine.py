"""Run the checks of ``grpo doctor``: ``examine`` calls them in parallel threads within a time limit.

A check is a function that gets a ``Machine`` (or a ``Run``) and returns a ``Finding``. An exception, a hang or a slow
program never ends the command: it becomes a finding of its check.
"""

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

from grpo_recipes.errors import ConfigError, translate_errors
from grpo_recipes.process.scratch import node_folder
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import run_root
from grpo_recipes.runs.endings import OK, PROBLEM, WARNING, Finding, combine_findings, ok, problem, warning
from grpo_recipes.secrets import mask_secrets

Check = Callable[[Any], Finding]
MARK_WIDTH = 8  # characters of a mark in the list of findings
_MARKS = {OK: "ok", WARNING: "warn", PROBLEM: "PROBLEM"}


class NoAnswer(Exception):
    """A program that a check runs did not end in time, or failed; ``fix`` is the advice in the check's finding."""

    def __init__(self, message: str, fix: str = "run it yourself, or wait longer with --deep"):
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class Machine:
    """This machine, as a run would use it; the checks read their inputs from here."""

    environment: Mapping[str, str]  # the user's variables
    recipe: Recipe | None = None
    timeout: float = 3.0  # seconds to wait for one program

    @property
    def device(self) -> str | None:
        """The build of the installed torch, ``cpu`` or ``cuda``; None without torch."""
        version = find_installed_version("torch")
        return version and ("cpu" if version.endswith("+cpu") else "cuda")

    @property
    def run_root(self) -> Path:
        """The folder of run directories of the recipe, or without a recipe, of the environment."""
        folder = os.path.expanduser(self.recipe.run.root) if self.recipe else run_root(self.environment)
        return Path(folder).absolute()

    @property
    def temporary(self) -> Path:
        """The folder in which a run creates its node-local folder."""
        return node_folder(self.environment)

    @property
    def home(self) -> Path:
        """The user's home folder."""
        return Path(self.environment.get("HOME", "/"))

    @property
    def in_job(self) -> bool:
        """Whether this is a Slurm job."""
        return bool(self.environment.get("SLURM_JOB_ID"))

    def run_program(self, *argv: str, variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program and return its exit code and output as text; a missing program gives exit code 127.

        ``variables`` is the complete environment of the program, by default the current environment in English. Raise
        ``NoAnswer`` if the program does not end within ``timeout`` seconds.
        """
        if shutil.which(argv[0]) is None:
            return subprocess.CompletedProcess(argv, 127, "", "")
        timed_out = NoAnswer(f"{Path(argv[0]).name} did not answer within {self.timeout:.0f} s")
        with translate_errors(subprocess.TimeoutExpired, lambda _: timed_out):
            return subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=self.timeout, check=False, env=variables or {**os.environ, "LC_ALL": "C"},
            )  # fmt: skip

    def read_table(self, separator: str, fields: Sequence[str], *argv: str) -> list[dict[str, str]]:
        """Run a program and return each row of its output as a mapping from ``fields`` to cells.

        Rows with another number of cells are skipped. The result is empty if the program is missing. Raise ``NoAnswer``
        if it fails or hangs.
        """
        done = self.run_program(*argv)
        if done.returncode not in (0, 127):
            output = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            raise NoAnswer(f"{argv[0]} fails: {output.splitlines()[-1].strip()}")
        rows = [[cell.strip() for cell in line.split(separator)] for line in done.stdout.splitlines()]
        return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def find_installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed; nothing is imported."""
    return next((package.version for package in importlib.metadata.distributions(name=name)), None)


def apply_first_rule(value: str, *rules: tuple[object, str, str]) -> Finding:
    """Return a finding with the text ``value``, and with the status and the fix of the first rule that is true.

    A rule is (condition, status, fix). If no condition is true, the finding is ok and has no fix.
    """
    status, fix = next(((status, fix) for holds, status, fix in rules if holds), (OK, ""))
    return Finding(status, value, fix)


def apply_all_rules(value: str, *rules: tuple[object, str, str, str]) -> Finding:
    """Return a finding that combines the findings of all rules that are true; ok with ``value`` if none is true.

    A rule is (condition, status, value, fix).
    """
    findings = [Finding(status, text, fix) for holds, status, text, fix in rules if holds]
    return combine_findings([ok(value), *findings])


@contextlib.contextmanager
def record_errors_as_findings(findings: list[Finding]) -> Iterator[None]:
    """Suppress an exception in the ``with`` block, and append a finding about it to ``findings``."""
    try:
        yield
    except Exception as error:
        findings.append(make_error_finding(error))


def get_check_name(check: Check) -> str:
    """Return the name of a check for the output: its function's name with spaces instead of underscores."""
    return check.__name__.replace("_", " ")


def examine(checks: Sequence[Check], subject: Any, seconds: float) -> dict[str, Finding]:
    """Call each check with ``subject`` in a thread of its own; return the findings by name of the check.

    Wait at most ``seconds`` for all of them. A late check gets a warning instead, and an exception becomes a finding.
    Secrets in the findings are masked.
    """
    late = warning(f"no answer within {seconds:.0f} s", "check the file system, driver or daemon: it hangs")
    results = dict.fromkeys(map(get_check_name, checks), late)

    def run_check(check: Check) -> None:
        """Run one check, and store its finding, with secrets masked, under the check's name."""
        findings: list[Finding] = []
        with record_errors_as_findings(findings):
            findings.append(check(subject))
        value, fix = (" ".join(mask_secrets(text).split()) for text in (findings[0].value, findings[0].fix))
        results[get_check_name(check)] = Finding(findings[0].status, value, fix)

    # Daemon threads: a check that hangs on a dead file system must not keep the command from ending.
    threads = [threading.Thread(target=run_check, args=(check,), daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)


def make_error_finding(error: Exception) -> Finding:
    """Return a finding about an exception of a check: a problem for a ConfigError, otherwise a warning.

    Only the first problem of a ConfigError is shown, with the number of the others.
    """
    if isinstance(error, ConfigError):
        first, further = error.problems[0], len(error.problems) - 1
        return problem(
            f"{first.where}: {first.what}{f' (and {further} more: grpo check)' if further else ''}", first.fix
        )
    if isinstance(error, NoAnswer):
        return warning(str(error), error.fix)
    return warning(f"the check failed: {type(error).__name__}: {error}", "check it yourself")


def format_findings(results: Mapping[str, Finding], verbose: bool = False) -> list[str]:
    """Return lines with the findings: problems, warnings, then checks without a finding, and the counts.

    A finding has its fix on a second line. Checks without a finding share one line with their names; with ``verbose``,
    each has a line with its value.
    """
    width = max(map(len, results))
    lines = []
    for status in (PROBLEM, WARNING, OK):
        findings = {name: finding for name, finding in results.items() if finding.status == status}
        if status == OK and findings and not verbose:
            lines.append(f"{_MARKS[OK]:<{MARK_WIDTH}} {', '.join(findings)} (details: grpo doctor -v)")
            continue
        for name, finding in findings.items():
            lines.append(f"{_MARKS[status]:<{MARK_WIDTH}} {name:<{width}}  {finding.value}")
            lines += [f"{'':<{MARK_WIDTH}} {'':<{width}}  -> {finding.fix}"] if finding.fix else []
    numbers = {kind: sum(finding.status == kind for finding in results.values()) for kind in (WARNING, PROBLEM)}
    counts = ", ".join(f"{number or 'no'} {kind}{'s' * (number != 1)}" for kind, number in numbers.items())
    return [*lines, f"grpo: {len(results)} checks, {counts}"]
