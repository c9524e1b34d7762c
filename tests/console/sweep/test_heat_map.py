"""Heat maps of a sweep: which cells they have, and how dark these are."""

from __future__ import annotations

import re
from pathlib import Path

from console.report.synthetic_runs import make_sweep
from console.report.test_pages_run import Page
from grpo_recipes.console.sweep.folder import Sweep, write_sweep_page
from grpo_recipes.console.sweep.heat_map import make_heat_maps
from grpo_recipes.runs.rundir import read_json, write_json

KEYS = ["learning_rate", "beta", "seed"]


def trial(rate: str, beta: str, seed: str, result: float | None) -> tuple[dict[str, str], float | None]:
    return {"learning_rate": rate, "beta": beta, "seed": seed}, result


def test_a_cell_is_the_mean_of_its_trials() -> None:
    trials = [
        trial("1e-5", "0", "1", 0.5), trial("1e-5", "0", "2", 0.7), trial("1e-6", "0", "1", 0.1),
        trial("1e-6", "0.04", "1", None), trial("1e-5", "0.04", "1", 0.2),
    ]  # fmt: skip
    (chart,) = make_heat_maps(KEYS, trials)
    assert (chart.row_key, chart.column_key) == ("learning_rate", "beta")
    assert (chart.rows, chart.columns) == (["1e-6", "1e-5"], ["0", "0.04"])
    assert chart.mean("1e-5", "0") == 0.6 and chart.mean("1e-6", "0.04") is None
    assert [round(chart.opacity(row, "0"), 2) for row in chart.rows] == [0.04, 0.45]
    assert chart.opacity("1e-6", "0.04") == 0.0


def test_keys_with_one_or_many_values_and_seeds_have_no_map() -> None:
    assert make_heat_maps(KEYS, [trial("1e-5", "0", str(seed), 0.5) for seed in range(3)]) == []
    assert make_heat_maps(KEYS, [trial(f"{rate}e-6", str(rate % 2), "1", 0.5) for rate in range(13)]) == []
    assert make_heat_maps(KEYS, [trial("1e-5", "0", "1", None), trial("1e-6", "0.1", "1", None)]) == []


def test_the_page_of_a_sweep_of_two_keys_begins_with_the_map(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    record = read_json(tmp_path / "sweep.json")
    record["axes"]["beta"] = ["0", "0.04"]
    for index, cell in enumerate(record["cells"]):
        cell["values"]["beta"] = ("0", "0.04")[index % 2]
    write_json(tmp_path / "sweep.json", record)
    path, _ = write_sweep_page(Sweep.read(sweep.folder))
    page = Page(path.read_text())
    assert page.problems == []
    text = page.text[page.text.rindex("Heat map") :]
    assert re.search(r"Final reward by learning_rate \(rows\) and beta \(columns\), mean over seed", text)
    assert text.index("Final reward by") < text.index("Curves")
    darkest = max(re.findall(r'fill-opacity="([\d.]+)"/></svg><span>([\d.]+)', path.read_text()))
    assert darkest[0] == "0.45" and float(darkest[1]) > 0.5
