"""What is made of the rows of ``multi_answer.py``: chosen settings, contrasts, the verdict, tables.

Runs are compared where their reward is the same: at the first crossing of ``LEVEL`` by mean@8 on the equations trained
on, between measurements by a straight line. A run that never gets there counts with a coverage of 0, and by its end in
the other primary measure. protocol.md says why, and was written first.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_tools import RESULTS, Line, Panel

Rows = Sequence[dict[str, Any]]
LEVEL = 0.7  # mean@8 on what is trained on
GRAPH_LEVEL = 0.5  # the same on graphs, where fewer arms come to 0.7; taken after these runs
SURE = 0.8  # what a setting has to pass in each run of the tuning: other draws may be harder
PRIMARY = {"coverage": ("trained on", "coverage@8"), "unseen": ("never seen", "pass@8")}
BASELINES = ("GRPO + KL", "MaxRL")
CANDIDATES = ("listwise, kappa", "tempered")
# Arm, baseline and primary measure of each contrast: six, corrected together.
CONTRASTS = [(arm, other, "coverage") for arm in CANDIDATES for other in BASELINES]
CONTRASTS += [(arm, BASELINES[0], "unseen") for arm in CANDIDATES]
RUNS = {"tuning": 324, "report": 320, "replication": 320, "lengths": 54, "graph": 48}  # of the protocol
REPORTS = ("report", "replication")  # the same runs on two processors, which make other models of the same seeds
SHOWN = ("GRPO", "GRPO + KL", "GRPO + entropy", "MaxRL", *CANDIDATES)  # arms whose way the figures show
DRAWS = 5  # of the report
RESAMPLES, ALPHA = 20_000, 0.05


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a record; none where nothing was run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows_of(part: str) -> list[dict[str, Any]]:
    """Return the recorded rows of a part."""
    return read(RESULTS / f"maxent_{part}.jsonl")


def at_level(row: dict[str, Any], part: str, metric: str, level: float = LEVEL) -> float:
    """Return a metric where the run's reward first reaches the level; where it never does, coverage's 0, or the end."""
    reward, values = row["curve"]["trained on"]["mean@8"], row["curve"][part][metric]
    if reward[0] >= level:
        return float(values[0])
    for at, (before, after) in enumerate(itertools.pairwise(reward)):
        if before < level <= after:
            return float(values[at] + (values[at + 1] - values[at]) * (level - before) / (after - before))
    return 0.0 if (part, metric) == PRIMARY["coverage"] else float(values[-1])


def _at(of: tuple[str, str], row: dict[str, Any]) -> float:
    return at_level(row, *of)


def step_of_level(row: dict[str, Any], level: float = LEVEL) -> float:
    """Return the step at which the reward reaches the level; infinity where it never does."""
    as_metric = {**row, "curve": {**row["curve"], "step": {"of": row["curve"]["steps"]}}}
    reached = max(row["curve"]["trained on"]["mean@8"]) >= level
    return at_level(as_metric, "step", "of", level) if reached else math.inf


def chosen(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return the setting of each arm that the protocol picks: the highest mean coverage at the level over the draws.

    A setting is none of these where one of its runs does not pass ``SURE``.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        value = at_level(row, *PRIMARY["coverage"]) if math.isfinite(step_of_level(row, SURE)) else -math.inf
        found.setdefault(row["arm"], {}).setdefault(json.dumps(row["keys"]), []).append(value)
    means = {arm: {keys: math.fsum(of) / len(of) for keys, of in some.items()} for arm, some in found.items()}
    return {arm: json.loads(max(some, key=lambda keys: some[keys])) for arm, some in means.items()}


def values_of(rows: Rows, arm: str, measure: Any) -> np.ndarray:
    """Return what ``measure`` says of each run of an arm, draws x seeds, both in order."""
    own = [row for row in rows if row["arm"] == arm]
    if len({json.dumps(row["keys"]) for row in own}) > 1:
        raise ValueError(f"{arm} has runs of several settings: remove those that the tuning did not choose")
    found: dict[int, list[tuple[int, float]]] = {}
    for row in own:
        found.setdefault(row["draw"], []).append((row["seed"], measure(row)))
    return np.array([[value for _, value in sorted(found[draw])] for draw in sorted(found)])


def bootstrap(values_DS: np.ndarray) -> np.ndarray:
    """Return resampled means of values by draw and seed: draws with replacement, then seeds within each of them."""
    generator = np.random.default_rng(0)
    draws, seeds = values_DS.shape
    chosen_RD = generator.integers(draws, size=(RESAMPLES, draws))
    chosen_RDS = generator.integers(seeds, size=(RESAMPLES, draws, seeds))
    return values_DS[chosen_RD[:, :, None], chosen_RDS].mean(axis=(1, 2))


def interval(values_DS: np.ndarray, alpha: float = ALPHA) -> dict[str, float]:
    """Return mean and percentile interval."""
    low, high = np.quantile(bootstrap(values_DS), (alpha / 2, 1 - alpha / 2))
    return {"mean": float(values_DS.mean()), "low": float(low), "high": float(high)}


def t_quantile(share: float) -> float:
    """Return the quantile, above one half, of Student's t with four degrees of freedom: ``DRAWS`` less one."""
    root = math.sqrt(4 * share * (1 - share))
    return 2 * math.sqrt(math.cos(math.acos(root) / 3) / root - 1)


def contrasts(rows: Rows) -> list[dict[str, Any]]:
    """Return the contrasts, smallest p first, each with the intervals of its place in Holm's order.

    Differences are paired by draw and seed. The bootstrap sees how runs vary, and too little of how a handful of draws
    does: a contrast is clear only where Student's t over the means of the draws excludes 0 as well. Once one is not
    clear, nor is any that follows.
    """
    found: list[dict[str, Any]] = []
    for arm, other, measure in CONTRASTS:
        ours, theirs = (values_of(rows, name, partial(_at, PRIMARY[measure])) for name in (arm, other))
        steps = [values_of(rows, name, step_of_level) for name in (arm, other)]
        both = np.isfinite(steps[0]) & np.isfinite(steps[1])
        differences = ours - theirs
        means = bootstrap(differences)
        p = min(1.0, 2 * max(1 / RESAMPLES, min(float((means <= 0).mean()), float((means >= 0).mean()))))
        among = float(differences[both].mean()) if both.any() else math.nan
        found.append({"arm": arm, "minus": other, "measure": measure, "p": p, "both": among, "of": differences})
    found.sort(key=lambda one: one["p"])
    clear = True
    for place, one in enumerate(found):
        differences, alpha = one.pop("of"), ALPHA / (len(found) - place)
        one |= interval(differences, alpha)
        margin = t_quantile(1 - alpha / 2) * float(differences.mean(axis=1).std(ddof=1)) / DRAWS**0.5
        one["t_low"], one["t_high"] = one["mean"] - margin, one["mean"] + margin
        clear = one["clear"] = clear and not (one["low"] <= 0 <= one["high"] or one["t_low"] <= 0 <= one["t_high"])
    return found


def verdict(found: Sequence[dict[str, Any]]) -> str | None:
    """Return the objective that earns the default by the protocol, or None."""
    for arm in CANDIDATES:
        own = [one for one in found if one["arm"] == arm]
        wins = all(one["clear"] and one["mean"] > 0 for one in own if one["measure"] == "coverage")
        if wins and not any(one["clear"] and one["mean"] < 0 for one in own):
            return arm
    return None


def outcome(found: Sequence[dict[str, Any]]) -> str:
    """Return which outcome of the protocol the contrasts of a report are, in words."""
    if (arm := verdict(found)) is not None:
        return f"**{arm}** has clearly more coverage than both baselines, and none of its contrasts is clearly below 0."
    won = [one for one in found if one["clear"] and one["mean"] > 0 and one["measure"] == "coverage"]
    lost = [one for one in found if one["clear"] and one["mean"] < 0 and one["measure"] == "unseen"]
    above = ", ".join(f"{one['arm']} over {one['minus']}" for one in won) or "nothing"
    price = f" It costs pass@8 on what was never seen: {', '.join(one['arm'] for one in lost)}." if lost else ""
    return f"No objective is clear of both baselines. Clearly more coverage: {above}.{price}"


def given_by(reports: Sequence[Rows]) -> list[str | None]:
    """Return the objective to which each report gives the default, or None."""
    return [verdict(contrasts(rows)) for rows in reports]


def settled(given: Sequence[str | None]) -> str | None:
    """Return the objective to which all reports give the default, or None."""
    return given[0] if len(set(given)) == 1 else None


def _verdict(*reports: Rows) -> str:
    given = given_by(reports)
    lines = [
        [name, rows[0]["machine"]["cpu"], arm or "none", str(len(rows))]
        for name, rows, arm in zip(("first", "replication"), reports, given, strict=True)
    ]
    head = ["report", "processor", "gives the default to", "runs"]
    earns = f"**{settled(given) or 'No objective'} earns the default**"
    return f"{earns}: both reports have to give it.\n\n{table(head, lines)}"


def arms_of(rows: Rows) -> list[str]:
    """Return the arms in the order in which they come."""
    return list(dict.fromkeys(row["arm"] for row in rows))


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    marks = ["|---" * len(head) + "|"]
    return "\n".join([f"| {' | '.join(head)} |", *marks, *(f"| {' | '.join(line)} |" for line in lines)])


def with_interval(values_DS: np.ndarray) -> str:
    """Return a mean with its interval, for a table."""
    one = interval(values_DS)
    return f"{one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def setting(keys: dict[str, Any]) -> str:
    """Return the keys of a setting for a table."""
    return ", ".join(f"`{key}: {value:g}`" for key, value in keys.items() if isinstance(value, float))


def _tuning(rows: Rows) -> str:
    lines = []
    for arm, keys in chosen(rows).items():
        own = [row for row in rows if row["arm"] == arm]
        values = [at_level(row, *PRIMARY["coverage"]) for row in own if row["keys"] == keys]
        lines.append([arm, setting(keys), f"{math.fsum(values) / len(values):.3f}", str(len(own))])
    return table(["arm", "chosen", "coverage@8 at the level", "runs"], lines)


def _primary(rows: Rows) -> str:
    lines = []
    for arm in arms_of(rows):
        steps = values_of(rows, arm, step_of_level)
        there = np.isfinite(steps)
        median = f"{np.median(steps):.0f}" if there.mean() > 0.5 else "-"
        measured = [with_interval(values_of(rows, arm, partial(_at, m))) for m in PRIMARY.values()]
        lines.append([arm, *measured, median, f"{there.sum()} of {there.size}"])
    head = ["arm", "coverage@8, trained on", "pass@8, never seen", "at step (median)", "runs that reach the level"]
    return table(head, lines)


def _contrasts(rows: Rows) -> str:
    found = contrasts(rows)
    lines = [
        [f"{one['arm']} minus {one['minus']}", "{}, {}".format(*PRIMARY[one["measure"]][::-1]),
         f"{one['mean']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]", f"[{one['t_low']:+.3f}, {one['t_high']:+.3f}]",
         "< 0.0001" if one["p"] <= 2 / RESAMPLES else f"{one['p']:.4f}", "yes" if one["clear"] else "no",
         f"{one['both']:+.3f}"]
        for one in found
    ]  # fmt: skip
    head = [
        "contrast",
        "measure",
        "difference, Holm's interval",
        "t over draws",
        "p",
        "clear of 0",
        "pairs that both reach",
    ]
    return f"{outcome(found)}\n\n{table(head, lines)}"


def _at_the_end(rows: Rows) -> str:
    shown = [("trained on", "mean@8"), ("trained on", "coverage@8"), ("trained on", "modes"), ("held out", "mean@8")]
    shown += [("held out", "pass@8"), ("held out", "coverage@8"), ("never seen", "pass@8")]
    first = [row["curve"] for row in rows if row["arm"] == rows[0]["arm"]]
    lines = [["untrained", *(f"{np.mean([one[part][metric][0] for one in first]):.3f}" for part, metric in shown)]]
    for arm in arms_of(rows):
        ends = [values_of(rows, arm, lambda row, at=at: row["curve"][at[0]][at[1]][-1]) for at in shown]
        lines.append([arm, *(f"{one.mean():.3f}" for one in ends)])
    return table(["arm", *(f"{metric}, {part}" for part, metric in shown)], lines)


def _lengths(rows: Rows) -> str:
    lines = []
    sizes = sorted({row["tokens"] for row in rows})
    for arm in arms_of(rows):
        cells = []
        for tokens in sizes:
            own = [row for row in rows if row["tokens"] == tokens]
            for measure in (lambda row: at_level(row, *PRIMARY["coverage"]), lambda row: _end(row, "mean@8")):
                cells.append(f"{values_of(own, arm, measure).mean():.3f}")
        lines.append([arm, *cells])
    head = [f"{what}, {tokens} tokens" for tokens in sizes for what in ("coverage@8 at the level", "reward at the end")]
    return table(["arm", *head], lines)


def _end(row: dict[str, Any], metric: str, part: str = "trained on") -> float:
    return float(row["curve"][part][metric][-1])


def _graph(rows: Rows) -> str:
    shown = [(part, metric) for part in ("trained on", "held out") for metric in ("mean@8", "pass@8", "coverage@8")]
    first = rows[0]["curve"]
    lines = [["untrained", *(f"{first[part][metric][0]:.3f}" for part, metric in shown), "-", "-"]]
    for arm in arms_of(rows):
        ends = [values_of(rows, arm, lambda row, at=at: _end(row, at[1], at[0])) for at in shown]
        steps = values_of(rows, arm, lambda row: step_of_level(row, GRAPH_LEVEL))
        kept = values_of(rows, arm, lambda row: at_level(row, *PRIMARY["coverage"], GRAPH_LEVEL))
        reached = [with_interval(kept), f"{np.median(steps):.0f}"] if np.isfinite(steps).all() else ["not reached", "-"]
        lines.append([arm, *(with_interval(one) for one in ends), *reached])
    last = [f"coverage@8, trained on, when reward reaches {GRAPH_LEVEL:g}", "at step (median)"]
    return table(["arm", *(f"{metric}, {part}" for part, metric in shown), *last], lines)


def _of(made: Callable[..., str], *parts: str) -> Callable[[], str]:
    def text() -> str:
        """Return the table; where runs are missing, what would change it, their number."""
        found = [rows_of(part) for part in parts]
        for part, rows in zip(parts, found, strict=True):
            if len(rows) != RUNS[part]:
                return (
                    f"*{len(rows)} of {RUNS[part]} runs are recorded so far; the table follows with the last of them.*"
                )
        return made(*found)

    return text


# Name of each table of docs/maxent.md -> what makes it.
TABLES = {
    "tuning": _of(_tuning, "tuning"), "verdict": _of(_verdict, *REPORTS),
    "primary": _of(_primary, "report"), "contrasts": _of(_contrasts, "report"), "ends": _of(_at_the_end, "report"),
    "replicated primary": _of(_primary, "replication"), "replicated contrasts": _of(_contrasts, "replication"),
    "lengths": _of(_lengths, "lengths"), "graph": _of(_graph, "graph"),
}  # fmt: skip


def figures() -> list[tuple[str, list[Panel], str]]:
    """Return the drawings of docs/maxent.md whose runs are all there: the file's name, panels, and what it shows."""
    spoken = "Coverage of the right answers over the mean reward, from the untrained model to the end of the training"
    drawn = {"report": ("maxent_multi_answer", "equations"), "graph": ("maxent_graph", "graphs")}
    found = []
    for part, (name, what) in drawn.items():
        if len(rows := rows_of(part)) == RUNS[part]:
            panels = [_ways(rows, place, f"{what} {place}") for place in rows[0]["curve"] if place != "steps"]
            found.append((name, panels, spoken))
    return found


def _ways(rows: Rows, part: str, title: str) -> Panel:
    """Return coverage@8 over mean@8: of each arm the means over its runs at each measurement."""
    lines = []
    for colour, arm in enumerate((one for one in arms_of(rows) if one in SHOWN), 1):
        own = [row["curve"][part] for row in rows if row["arm"] == arm]
        xs, ys = (np.mean([one[metric] for one in own], axis=0).tolist() for metric in ("mean@8", "coverage@8"))
        lines.append(Line(arm, xs, ys, colour, marked=True))
    return Panel(title, "mean@8; coverage@8 upwards", lines)
