"""Tables and figures of the documentation, made again from the records under bench/results; nothing is measured.

    make evidence

A table stands in its page between two markers, ``<!-- made by bench/evidence.py: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import multi_answer_report
import overlap_figure
import speed_figure
import speed_page
import tabular_figure
import tabular_length
import tabular_maxent

from grpo_recipes.paths import home

RESULTS, DOCS = home() / "bench/results", home() / "docs"
_MARKED = re.compile(r"(<!-- made by bench/evidence\.py: (.+?) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
# Rows of the table of tabular_maxent.json: their names on the page, and what shows the point is bold.
TABULAR = {
    "random answer": "random", "best constant answer": "constant", "untrained": "untrained", "GRPO": "grpo",
    "GRPO, other noise": "grpo, again", "Dr.GRPO": "dr_grpo", "Dr.GRPO, other noise": "dr_grpo, again",
    "MaxRL": "maxrl", "GRPO, pass@8 advantage": "pass_at_k",
    "GRPO, KL 0.3": "grpo, KL 0.3", "GRPO, KL 0.5": "grpo, KL 0.5",
    "**GRPO, entropy 0.4**": "grpo, entropy 0.4", "**GRPO, entropy 0.5**": "grpo, entropy 0.5",
    "placebo: tempered, tau 1000": "tempered, tau 1000", "**listwise, sums, tau 0.1**": "listwise, tau 0.1",
    "listwise, sums, tau 0.3": "listwise, tau 0.3", "listwise, sums, tau 0.5": "listwise, tau 0.5",
    "listwise, sums, tau 0.1, maxent_beta 0.1": "listwise, tau 0.1, beta 0.1",
    "listwise, per token, tau 0.2": "listwise per token, tau 0.2",
    "listwise, per token, tau 1": "listwise per token, tau 1", "weighted_mle, tau 0.2": "weighted_mle, tau 0.2",
    "weighted_mle, tau 0.2, maxent_beta 3": "weighted_mle, tau 0.2, beta 3",
    "tempered, advantage, tau 0.1": "tempered, tau 0.1", "tempered, advantage, tau 0.5": "tempered, tau 0.5",
    "tempered, length_scaled, tau 0.1": "tempered length_scaled, tau 0.1",
    "mode-adaptive tempered, tau 0.2": "adaptive, tau 0.2", "SEED, alpha 1": "seed, alpha 1",
}  # fmt: skip


def main() -> None:
    """Write what differs, and name it."""
    for path, text in made().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"{path.relative_to(home())} is new")


def made() -> dict[Path, str]:
    """Return every page with tables of records, and every figure, as the records have them."""
    speed = json.loads((RESULTS / "speed.json").read_text())
    pages = {path: path.read_text() for path in sorted(DOCS.glob("*.md"))}
    pages = {path: filled(text) for path, text in pages.items() if _MARKED.search(text)}
    drawn = {speed_figure.DRAWN: speed_figure.figure(speed)}
    return {**pages, speed_page.PAGE: speed_page.page(speed), **drawn, **figures()}


def filled(text: str) -> str:
    """Return a page with the tables that its markers name."""
    return _MARKED.sub(lambda marked: f"{marked[1]}{TABLES[marked[2]]()}{marked[3]}", text)


def figures() -> dict[Path, str]:
    """Return the drawings of the pages."""
    with tempfile.TemporaryDirectory() as folder:
        for name, panels, spoken in multi_answer_report.figures():
            tabular_figure.write_figure(Path(folder, f"{name}.svg"), panels, spoken)
        tabular = tabular_maxent.figure_panels(_record("tabular_maxent"))
        tabular_figure.write_figure(Path(folder, "maxent_tabular.svg"), tabular, tabular_maxent.SPOKEN)
        by_length = tabular_length.figure_panels(_record("tabular_length"))
        tabular_figure.write_figure(Path(folder, "tabular_length.svg"), by_length, tabular_length.SPOKEN)
        overlap_figure.draw(Path(folder, "overlap.svg"), _rows("overlap"))
        return {DOCS / "assets" / path.name: path.read_text() for path in Path(folder).iterdir()}


def tabular() -> str:
    """Return the rows of ``TABULAR``: measures at the end, and when the matched reward is first reached."""
    record, rows = _record("tabular_maxent"), []
    for name, key in TABULAR.items():
        if key in record["baselines"]:
            values, reached = record["baselines"][key], ["-", "-"]
        else:
            arm = record["arms"][key]
            values, matched = {one: ends[0] for one, ends in arm["final"].items()}, arm.get("at_matched_reward")
            reached = [f"{matched['coverage@8'][0]:.3f}", f"{matched['step'][0]:.0f}"] if matched else []
            reached = reached or ["not reached", "-"]
        digits = {"reward": 3, "pass@8": 3, "modes": 2, "coverage@8": 3}
        cells = ["-" if values[one] is None else f"{values[one]:.{count}f}" for one, count in digits.items()] + reached
        if name.startswith("**"):
            cells = [f"**{cell}**" if place in (2, 3, 4) else cell for place, cell in enumerate(cells)]
        rows.append([name, *cells])
    when = f"coverage@8 when reward reaches {record['setting']['matched_reward']:g}"
    return _table(["arm", "reward", "pass@8", "right answers alive", "coverage@8", when, "at step"], rows)


def memory() -> str:
    """Return estimated and measured memory, in GiB."""
    rows = []
    for name, case in _record("memory_estimate")["cases"].items():
        sizes = [case[role][kind] / 2**30 for role in ("trainer", "server") for kind in ("estimated", "measured")]
        rows.append([name, f"{case['parameters'] / 1e6:.0f}", *(f"{size:.2f}" for size in sizes)])
    head = ["trainer, estimated", "measured", "server, estimated", "measured"]
    return _table(["run", "parameters (M)", *head], rows)


def gpu_seconds() -> str:
    """Return what a step on a GPU takes beside bare TRL's."""
    rows = []
    for arm, one in _record("gpu_step")["lognormal"]["found"].items():
        ends = f"{one['ratio']['low']:.2f} to {one['ratio']['high']:.2f}"
        rows.append([arm, f"{one['ratio']['median']:.2f}", ends, f"{one['seconds_median']:.2f}"])
    return _table(["lognormal lengths", "ratio", "95 %", "seconds"], rows)


def gpu_memory() -> str:
    """Return what a training process on a GPU holds, beside the estimate, in GiB."""
    rows = []
    for lengths, arms in _record("gpu_step")["memory"]["found"].items():
        for arm, one in arms.items():
            taken = [one["allocated"], one["reserved"], one["reserved"] + one["beside torch"]]
            cells = [f"{size / 2**30:.2f}" for size in (*taken, one["estimated"]["total"])]
            rows.append([lengths, arm, *cells, f"{one['estimated']['total'] / taken[-1]:.2f}"])
    return _table(["lengths", "trainer", "allocated", "reserved", "on the GPU", "estimated", "ratio"], rows)


def gpu_gradients() -> str:
    """Return how far gradients on a GPU are from bare TRL's."""
    found = _record("gpu_step")["gradients"]["found"]
    rows = [
        [precision, f"`{loss}`", *(f"{apart:.1e}" for apart in arms.values())]
        for precision, losses in found.items()
        for loss, arms in losses.items()
    ]
    return _table(["precision", "loss_type", *next(iter(found["float32"].values()))], rows)


def syncs() -> str:
    """Return what a sync costs by each bridge, in copies of the weights."""
    record, rows = _record("weights"), []
    for size, bridges in record["figures"].items():
        for name, found in bridges.items():
            memory = f"{found['pss to weights']:.2f}" if "pss to weights" in found else "-"
            times = [f"{found[kind]:.1f}" for kind in ("sync to copy", "sync without guard to copy")]
            millions = f"{record['cases'][size][name]['parameters'] / 1e6:.0f}M"
            rows.append([f"`{name}`", millions, *times, f"{found['moved to weights']:.2f}", memory])
    return _table(["bridge", "parameters", "sync", "without guard", "bytes that travel", "memory (PSS)"], rows)


def learned() -> str:
    """Return what the recipes of environments learn: means over the seeds with the lowest and the highest."""
    runs: dict[tuple[str, str], list[list[float]]] = {}
    for row in (row for row in _rows("environments") if row.get("benchmarks")):
        (scored,) = row["benchmarks"].values()
        found = [row["initial_reward"], row["final_reward"], scored["pass@1"], scored["pass@8"]]
        runs.setdefault((row["recipe"].rpartition("/")[2], row["mode"]), []).append(found)
    rows = [
        [f"`{recipe}`", mode, str(len(found)), *(_mean_and_ends(list(one), "-") for one in zip(*found, strict=True))]
        for (recipe, mode), found in runs.items()
    ]
    return _table(["recipe", "vLLM", "seeds", "reward before", "after", "pass@1", "pass@8"], rows)


def played() -> str:
    """Return how SecretMafia is played: rows of baselines name who plays, those of runs have before and after."""
    rows, runs = [], dict[tuple[str, str], list[dict[str, float]]]()
    for row in (row for row in _rows("environments") if row["recipe"].endswith("/secret_mafia_smoke.yaml")):
        if "seed" not in row:
            rows.append([row["mode"], "-", "-", *_played(row["evaluated"])])
            continue
        for when, found in zip(("before", "after"), row["evaluated"], strict=True):
            runs.setdefault((f"policy {when} training", row["mode"]), []).append(found)
    rows += [[who, mode, str(len(found)), *_played(found)] for (who, mode), found in runs.items()]
    return _table(["who plays", "vLLM", "seeds", "legal", "won", "reward"], rows)


def _played(episodes: list[dict[str, float]]) -> list[str]:
    names = [f"eval_episodes/{name}" for name in ("legal", "won", "reward_detective")]
    return [_mean_and_ends([one[name] for one in episodes], " to ") for name in names]


def _mean_and_ends(values: list[float], between: str) -> str:
    ends = f" ({min(values):.2f}{between}{max(values):.2f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.2f}{ends}"


def _record(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


TABLES: dict[str, Callable[[], str]] = {
    "tabular": tabular,
    "tabular length": lambda: tabular_length.tables(_record("tabular_length")),
    **{f"maxent {name}": made for name, made in multi_answer_report.TABLES.items()},
    "overlap": lambda: overlap_figure.tables(_rows("overlap")).strip(),
    "memory": memory,
    "gpu seconds": gpu_seconds,
    "gpu memory": gpu_memory,
    "gpu gradients": gpu_gradients,
    "syncs": syncs,
    "environments": learned,
    "games": played,
}


if __name__ == "__main__":
    main()
