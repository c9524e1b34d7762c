"""What a check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_SEVERITY = (OK, WARNING, PROBLEM)


@dataclass(frozen=True)
class Finding:
    """One check's result.

    Attributes:
        status: ``ok``; ``warning``: a run may suffer; ``problem``: a run will fail or not be what it seems.
        value: what was found, one line.
        fix: what to do, one line; empty when ok.
    """

    status: str
    value: str
    fix: str = ""


def ok(value: str) -> Finding:
    """Nothing to do."""
    return Finding(OK, value)


def warning(value: str, fix: str) -> Finding:
    """A run may suffer from it."""
    return Finding(WARNING, value, fix)


def problem(value: str, fix: str) -> Finding:
    """A run fails on it, or is not what it seems."""
    return Finding(PROBLEM, value, fix)


def together(findings: Iterable[Finding]) -> Finding:
    """Several findings of one check as one: the worst status; values and fixes of that status, all values when ok."""
    found = list(findings)
    status = max((finding.status for finding in found), key=_SEVERITY.index)
    worst = [finding for finding in found if finding.status == status]
    fixes = dict.fromkeys(finding.fix for finding in worst if finding.fix)
    return Finding(status, "; ".join(finding.value for finding in worst), "; ".join(fixes))
