"""What a check found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_SEVERITY = (OK, WARNING, PROBLEM)


@dataclass(frozen=True)
class Finding:
    """One check's result."""

    status: str
    value: str  # what was found, one line
    fix: str = ""  # what to do, one line; empty when ok


ok = partial(Finding, OK)
warning = partial(Finding, WARNING)  # a run may suffer from it
problem = partial(Finding, PROBLEM)  # a run fails on it, or is not what it seems


def together(findings: Iterable[Finding]) -> Finding:
    """Return findings of one check as one: the worst status with all that is not ok, the worst first."""
    found = sorted(findings, key=lambda finding: -_SEVERITY.index(finding.status))
    shown = [finding for finding in found if finding.status != OK] or found
    fixes = dict.fromkeys(finding.fix for finding in shown if finding.fix)
    return Finding(found[0].status, "; ".join(finding.value for finding in shown), "; ".join(fixes))
