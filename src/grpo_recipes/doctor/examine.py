"""Runs checks side by side; each has an answer when the time is over, whatever it hangs on."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.doctor.machine import NoAnswer
from grpo_recipes.errors import ConfigError
from grpo_recipes.runs.finding import OK, PROBLEM, WARNING, Finding, problem, warning
from grpo_recipes.secrets import masked

_MARKS = {OK: "ok", WARNING: "warn", PROBLEM: "PROBLEM"}


@dataclass(frozen=True)
class Result:
    """A check's name and what it found; nothing in it is secret."""

    name: str
    status: str
    value: str
    fix: str


def name_of(check: Callable[..., Finding]) -> str:
    """What a check is called: its function's name with spaces."""
    return check.__name__.replace("_", " ")


def about(check: Callable[..., Finding]) -> str:
    """What a check looks at: the first line of its docstring."""
    return (inspect.getdoc(check) or "").splitlines()[0]


def examine(looks: Sequence[tuple[Callable[[Any], Finding], Any]], seconds: float) -> list[Result]:
    """Run checks side by side.

    Args:
        looks: checks, each with what it looks at.
        seconds: longest wait for all of them together.

    Returns:
        One result a check, in their order.
    """
    findings: dict[int, Finding] = {}

    def look(number: int) -> None:
        findings[number] = _guarded(*looks[number])

    # Daemon threads: one that hangs on a dead file system must not keep the command from ending.
    threads = [threading.Thread(target=look, args=(number,), daemon=True) for number in range(len(looks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = warning(f"no answer within {seconds:.0f} s", "what it looks at hangs: a file system, driver or daemon")
    return [_result(check, findings.get(number, late)) for number, (check, _) in enumerate(looks)]


def _guarded(check: Callable[[Any], Finding], subject: Any) -> Finding:
    """The check's finding; a refusal is a problem, and a check that fails hides no other."""
    try:
        return check(subject)
    except ConfigError as refused:
        first = refused.problems[0]
        more = f" (and {len(refused.problems) - 1} more)" if len(refused.problems) > 1 else ""
        return problem(f"{first.where}: {first.what}{more}", first.fix)
    except NoAnswer as error:
        return warning(str(error), "look at it by hand, or wait longer with --deep")
    except Exception as error:
        return warning(f"could not be looked at: {type(error).__name__}: {error}", "look at it by hand")


def _result(check: Callable[..., Finding], finding: Finding) -> Result:
    value, fix = (" ".join(masked(text).split()) for text in (finding.value, finding.fix))
    return Result(name_of(check), finding.status, value, fix)


def as_text(results: Sequence[Result]) -> str:
    """A line a check, a line below it what to do, and the count."""
    width = max(len(result.name) for result in results)
    lines = []
    for result in results:
        lines.append(f"{_MARKS[result.status]:<8} {result.name:<{width}}  {result.value}")
        if result.fix:
            lines.append(f"{'':<8} {'':<{width}}  -> {result.fix}")
    counts = {status: sum(result.status == status for result in results) for status in _MARKS}
    lines.append(f"grpo: {len(results)} checks, {_count(counts[WARNING], WARNING)}, {_count(counts[PROBLEM], PROBLEM)}")
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
