"""The tables of docs/performance.md, from the record that ``speed.py`` writes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from grpo_recipes.paths import home

PAGE = home() / "docs/performance.md"
BEGIN = "## Measured\n"  # what stands below it is made here
# Part -> its heading, what its ratios are to, and (case, arm) -> the goal; a case of None is any.
PARTS: dict[str, tuple[str, str, dict[tuple[str | None, str], float]]] = {
    "update": ("Update phase", "bare TRL", {
        ("lognormal", "ours"): 0.50, ("equal", "ours"): 1.02,
    }),
    "step": ("Whole step, through a server", "bare TRL", {("lognormal", "ours"): 0.60, ("equal", "ours"): 1.02}),
    "added": ("What we add to a step", "bare TRL", {(None, "ours"): 1.02}),
    "overlap": ("Sampling while training", "in turn", {(None, "overlapped"): 0.75}),
    "maxent": ("MaxEnt", "GRPO", {(None, "tempered"): 1.02, (None, "weighted_mle"): 1.02}),
    "growth": ("As it grows", "bare TRL", {}),
}  # fmt: skip
GOALS = {"check": 1.0, "plan": 1.0, "launch": 25.0}  # seconds


def write_page(record: dict[str, Any]) -> None:
    """Put the tables below the last heading of the page."""
    PAGE.write_text(PAGE.read_text().split(BEGIN)[0] + BEGIN + tables(record))


def tables(record: dict[str, Any]) -> str:
    """Return a table for each part that was measured."""
    parts = [_ratios(name, record[name]) for name in PARTS if name in record]
    parts += [_commands(record["commands"])] if "commands" in record else []
    return "\n" + "\n\n".join(parts) + "\n"


def _ratios(name: str, part: dict[str, Any]) -> str:
    heading, base, goals = PARTS[name]
    if "refused" in part["found"]:
        return f"### {heading}\n\nNot measured: {part['found']['refused']}."
    rows = []
    for case, arm, found in _arms(part["found"], base):
        goal = goals.get((case, arm), goals.get((None, arm)))
        ratio = found["ratio"]
        rows.append(
            f"| {case or ''} | {arm} | {ratio['median']:.2f} | {ratio['low']:.2f} to {ratio['high']:.2f} | "
            f"{'' if goal is None else f'{goal:.2f}'} | {found['seconds_median']:.2f} | "
            f"{found['fed_per_real_token']:.2f} |"
        )
    pairs = min(len(found["seconds"]) for _, _, found in _arms(part["found"], base))
    head = f"| | | ratio to {base} | 95 % | goal | seconds | tokens fed per real one |\n|---|---|---|---|---|---|---|"
    return f"### {heading}\n\n{_circumstances(part, pairs)}\n\n{head}\n" + "\n".join(rows)


def _arms(
    found: dict[str, Any], base: str, case: str | None = None
) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
    """Yield the case, the name and the figures of each arm, but of the base."""
    for name, inner in found.items():
        if isinstance(inner, dict) and "ratio" in inner:
            if name != base:
                yield case, name, inner
        elif isinstance(inner, dict):
            yield from _arms(inner, base, None if name == "arms" else " ".join(filter(None, (case, name))))


def _commands(part: dict[str, Any]) -> str:
    found, rows = part["found"], []
    for name in ("check", "plan"):
        seconds, cpu = (median(found[name][kind]) for kind in ("seconds", "cpu"))
        rows.append(f"| `grpo {name}` | {seconds:.2f} | {cpu:.2f} | {GOALS[name]:.0f} |")
    first = median(one["step 1"] for one in found["launch"])
    rows.append(f"| `grpo launch` to its first step | {first:.1f} | | {GOALS['launch']:.0f} |")
    head = "| command | seconds | of these on a core | goal |\n|---|---|---|---|"
    return f"### Commands\n\n{_circumstances(part, len(found['launch']))}\n\n{head}\n" + "\n".join(rows)


def _circumstances(part: dict[str, Any], count: int) -> str:
    load = part["load_before"][0]
    changed = " with changes that were not committed" if part["uncommitted_changes"] else ""
    return f"Medians of {count}, at a load of {load:.1f} before it; commit {part['commit'][:10]}{changed}."
