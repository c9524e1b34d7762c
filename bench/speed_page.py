"""The tables of docs/measurements.md, from the record that ``speed.py`` writes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from grpo_recipes.paths import find_code_root

PAGE = find_code_root() / "docs/measurements.md"
FIGURE = "![Ratios with their intervals and goals](assets/speed.svg)"
BEGIN = "## Measured\n"  # this script writes the text below it
# Part -> heading, base of the ratios, and (case, arm) -> goal. A case of None matches any case.
PARTS: dict[str, tuple[str, str, dict[tuple[str | None, str], float]]] = {
    "update": ("Update phase", "bare TRL", {
        ("lognormal", "ours"): 0.50, ("equal", "ours"): 1.02,
    }),
    "step": ("Whole step, through a server", "bare TRL", {
        ("lognormal", "ours"): 0.60, ("lognormal, 8 x 16", "ours"): 0.60, ("equal", "ours"): 1.02,
    }),
    "added": ("What we add to a step", "bare TRL", {(None, "ours"): 1.02}),
    "overlap": ("Sampling while training", "in turn", {(None, "overlapped"): 0.75}),
    "maxent": ("MaxEnt", "GRPO", {(None, "tempered"): 1.02, (None, "weighted_mle"): 1.02}),
    "growth": ("As it grows", "bare TRL", {}),
}  # fmt: skip
GOALS = {"check": 1.0, "plan": 1.0, "launch": 25.0}  # seconds


def page(record: dict[str, Any], text: str | None = None) -> str:
    """Return the page with the tables of a record below its last heading. ``text`` is the page, by default its file."""
    return (text or PAGE.read_text()).split(BEGIN)[0] + BEGIN + tables(record)


def tables(record: dict[str, Any]) -> str:
    """Return the page's figure, and a table for each measured part."""
    parts = [FIGURE, *[_ratios(name, record[name]) for name in PARTS if name in record]]
    parts += [_commands(record["commands"])] if "commands" in record else []
    return "\n" + "\n\n".join(parts) + "\n"


def goal_of(part: str, case: str | None, arm: str) -> float | None:
    """Return the ratio that an arm should have, or None."""
    goals = PARTS[part][2]
    return goals.get((case, arm), goals.get((None, arm)))


def _ratios(name: str, part: dict[str, Any]) -> str:
    heading, base, _ = PARTS[name]
    arms = list(arms_of(part["found"], base))
    cases, sampled = any(case for case, _, _ in arms), all("seconds_sampling" in figures for _, _, figures in arms)
    names = ["", f"ratio to {base}", "95 %", "goal", "seconds", "tokens fed per real one"]
    rows = [[""] * cases + names + ["seconds of sampling"] * sampled]
    rows.append(["---"] * len(rows[0]))
    for case, arm, figures in arms:
        goal, ratio = goal_of(name, case, arm), figures["ratio"]
        numbers = [
            figures["seconds_median"],
            figures["fed_per_real_token"],
            *[figures.get("seconds_sampling")] * sampled,
        ]
        # Spaces that break no line.
        interval = f"{ratio['low']:.2f}\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}{ratio['high']:.2f}"
        shown = [f"{ratio['median']:.2f}", interval, "" if goal is None else f"{goal:.2f}"]
        rows.append([case or ""] * cases + [arm, *shown, *(f"{number:.2f}" for number in numbers)])
    pairs = min(len(figures["seconds"]) for _, _, figures in arms)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"### {heading}\n\n{_circumstances(part, pairs)}\n", *lines])


def arms_of(
    findings: dict[str, Any], base: str, case: str | None = None
) -> Iterator[tuple[str | None, str, dict[str, Any]]]:
    """Yield the case, the name and the figures of each arm, but of the base."""
    for name, entry in findings.items():
        if isinstance(entry, dict) and "ratio" in entry:
            if name != base:
                yield case, name, entry
        elif isinstance(entry, dict):
            yield from arms_of(entry, base, None if name == "arms" else " ".join(filter(None, (case, name))))


def _commands(part: dict[str, Any]) -> str:
    findings, rows = part["found"], []
    for name in ("check", "plan"):
        seconds, cpu = (median(findings[name][kind]) for kind in ("seconds", "cpu"))
        rows.append(f"| `grpo {name}` | {seconds:.2f} | {cpu:.2f} | {GOALS[name]:.0f} |")
    first = median(launch["step 1"] for launch in findings["launch"])
    rows.append(f"| `grpo launch` to its first step | {first:.1f} | | {GOALS['launch']:.0f} |")
    head = "| command | seconds | of these on a core | goal |\n|---|---|---|---|"
    return f"### Commands\n\n{_circumstances(part, len(findings['launch']))}\n\n{head}\n" + "\n".join(rows)


def _circumstances(part: dict[str, Any], count: int) -> str:
    load = part["load_before"][0]
    changed = " with changes that were not committed" if part["uncommitted_changes"] else ""
    return f"Medians of {count}, at a load of {load:.1f} before it; commit {part['commit'][:10]}{changed}."
