"""Tables and figures of evidence/README.md, made again from the study's records; nothing is measured.

make evidence
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import multi_answer_report
import tabular_length
import tabular_maxent
from bench_tools import DOCS, RESULTS, filled_pages, markdown_table, write_changed, write_figure

SCRIPT = "evidence/maxent_tables.py"
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
    """Write the pages and figures that differ."""
    write_changed(pages_and_figures())


def pages_and_figures() -> dict[Path, str]:
    """Return every page with tables of the study, and its figures."""
    return {**filled_pages(SCRIPT, TABLES), **figures()}


def figures() -> dict[Path, str]:
    """Return the figures of evidence/README.md."""
    with tempfile.TemporaryDirectory() as folder:
        for name, panels, spoken in multi_answer_report.figures():
            write_figure(Path(folder, f"{name}.svg"), panels, spoken)
        by_answer = tabular_maxent.figure_panels(read_record("tabular_maxent"))
        write_figure(Path(folder, "maxent_tabular.svg"), by_answer, tabular_maxent.SPOKEN)
        by_length = tabular_length.figure_panels(read_record("tabular_length"))
        write_figure(Path(folder, "tabular_length.svg"), by_length, tabular_length.SPOKEN)
        return {DOCS / "assets" / path.name: path.read_text() for path in Path(folder).iterdir()}


def tabular() -> str:
    """Return the rows of ``TABULAR``: measures at the end, and when the matched reward is first reached."""
    record, rows = read_record("tabular_maxent"), []
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
    return markdown_table(["arm", "reward", "pass@8", "right answers alive", "coverage@8", when, "at step"], rows)


def read_record(name: str) -> dict[str, Any]:
    """Return a record of one JSON object."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


TABLES: dict[str, Callable[[], str]] = {
    "tabular": tabular,
    "tabular length": lambda: tabular_length.tables(read_record("tabular_length")),
    **{f"maxent {name}": table for name, table in multi_answer_report.TABLES.items()},
}


if __name__ == "__main__":
    main()
