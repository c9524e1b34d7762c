"""Write the tables and figures of the documentation from the records under bench/results. Nothing is measured.

    make evidence

``evidence/maxent_tables.py`` does the same for the MaxEnt study.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overlap_figure
import speed_figure
import speed_page
import time_to_reward_figure
from pages import DOCS, filled_pages, markdown_table, write_changed

from grpo_recipes.paths import find_code_root

SCRIPT = "bench/tables.py"
RESULTS = find_code_root() / "bench/results"
REWARDS_TO_REACH = {"smoke": 0.95, "modebench": 0.9}  # of the tasks of dynamic_sampling


def main() -> None:
    """Write the pages and figures that differ."""
    write_changed(pages_and_figures())


def pages_and_figures() -> dict[Path, str]:
    """Return every page with tables of records, and every figure."""
    speed = json.loads((RESULTS / "speed.json").read_text())
    drawn = {speed_figure.DRAWN: speed_figure.figure(speed), **drawings()}
    pages = filled_pages(SCRIPT, TABLES)
    pages[speed_page.PAGE] = speed_page.page(speed, pages.get(speed_page.PAGE))
    return {**pages, **drawn}


def drawings() -> dict[Path, str]:
    """Return the figures of docs/performance.md and docs/measurements.md."""
    drawn = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, draw in (("overlap", overlap_figure.draw), ("time_to_reward", time_to_reward_figure.draw)):
            path = Path(folder, f"{name}.svg")
            draw(path, _rows(name))
            drawn[DOCS / f"assets/{name}.svg"] = path.read_text()
    return drawn


def memory() -> str:
    """Return estimated and measured memory, in GiB."""
    rows = []
    for name, case in _record("memory_estimate")["cases"].items():
        sizes = [case[role][kind] / 2**30 for role in ("trainer", "server") for kind in ("estimated", "measured")]
        rows.append([name, f"{case['parameters'] / 1e6:.0f}", *(f"{size:.2f}" for size in sizes)])
    head = ["trainer, estimated", "measured", "server, estimated", "measured"]
    return markdown_table(["run", "parameters (M)", *head], rows)


def gpu_seconds() -> str:
    """Return the table of seconds of a GPU step compared with bare TRL."""
    rows = []
    for arm, figures in _record("gpu_step")["lognormal"]["found"].items():
        ends = f"{figures['ratio']['low']:.2f} to {figures['ratio']['high']:.2f}"
        rows.append([arm, f"{figures['ratio']['median']:.2f}", ends, f"{figures['seconds_median']:.2f}"])
    return markdown_table(["lognormal lengths", "ratio", "95 %", "seconds"], rows)


def gpu_memory() -> str:
    """Return the table of GPU memory of a training process and its estimate, in GiB."""
    rows = []
    for lengths, arms in _record("gpu_step")["memory"]["found"].items():
        for arm, figures in arms.items():
            used = [figures["allocated"], figures["reserved"], figures["reserved"] + figures["beside torch"]]
            cells = [f"{size / 2**30:.2f}" for size in (*used, figures["estimated"]["total"])]
            rows.append([lengths, arm, *cells, f"{figures['estimated']['total'] / used[-1]:.2f}"])
    return markdown_table(["lengths", "trainer", "allocated", "reserved", "on the GPU", "estimated", "ratio"], rows)


def gpu_gradients() -> str:
    """Return the table of differences between gradients on a GPU and bare TRL's."""
    norms = _record("gpu_step")["gradients"]["found"]
    rows = [
        [precision, f"`{loss}`", *(f"{apart:.1e}" for apart in arms.values())]
        for precision, losses in norms.items()
        for loss, arms in losses.items()
    ]
    return markdown_table(["precision", "loss_type", *next(iter(norms["float32"].values()))], rows)


def syncs() -> str:
    """Return the table of the cost of a sync per method, in copies of the weights, and of its guard in seconds."""
    record, rows = _record("weights"), []
    for size, bridges in record["figures"].items():
        for name, figures in bridges.items():
            memory = f"{figures['pss to weights']:.2f}" if "pss to weights" in figures else "-"
            times = [f"{figures[kind]:.1f}" for kind in ("sync to copy", "sync without guard to copy")]
            case = record["cases"][size][name]
            guard = statistics.median(row["sync"] - row["sync without guard"] for row in case["rounds"])
            # With lora, the guard checks only the adapter.
            per_gb = "-" if name == "lora" else f"{guard / case['weight_bytes'] * 1e9:.2f}"
            cells = [*times, per_gb, f"{figures['moved to weights']:.2f}", memory]
            rows.append([f"`{name}`", f"{case['parameters'] / 1e6:.0f}M", *cells])
    head = ["sync", "without guard", "guard, s/GB", "bytes that travel", "memory (PSS)"]
    return markdown_table(["bridge", "parameters", *head], rows)


def learned() -> str:
    """Return the table of rewards of environment recipes: means over seeds, with minimum and maximum."""
    runs: dict[tuple[str, str], list[list[float]]] = {}
    for row in (row for row in _rows("environments") if row.get("benchmarks")):
        (scored,) = row["benchmarks"].values()
        values = [row["initial_reward"], row["final_reward"], scored["pass@1"], scored["pass@8"]]
        runs.setdefault((row["recipe"].rpartition("/")[2], row["mode"]), []).append(values)
    rows = [
        [
            f"`{recipe}`",
            mode,
            str(len(seeds)),
            *(_mean_and_ends(list(column), "-") for column in zip(*seeds, strict=True)),
        ]
        for (recipe, mode), seeds in runs.items()
    ]
    return markdown_table(["recipe", "vLLM", "seeds", "reward before", "after", "pass@1", "pass@8"], rows)


def tools() -> str:
    """Return the table of right answers to held-out questions, with and without tools: mean, lowest and highest."""
    runs = dict[str, list[list[float]]]()
    for row in (row for row in _rows("environments") if row["recipe"].endswith("/tools_smoke.yaml")):
        runs.setdefault("without" if "tools" in row.get("unset", ()) else "with", []).append(row["evaluated_rewards"])
    rows = [
        [name, str(len(seeds)), *(_mean_and_ends(list(column), "-") for column in zip(*seeds, strict=True))]
        for name, seeds in runs.items()
    ]
    return markdown_table(["tools", "seeds", "right before", "after"], rows)


def programs_and_judges() -> str:
    """Return the table of rewards with programs and a failing judge: means over seeds, with lowest and highest."""
    rows = []
    for case in ("code", "judge"):
        runs = [row for row in _rows("learning") if row["case"] == case]
        rewards = [_mean_and_ends([run[name] for run in runs], "-") for name in ("first_reward", "last_reward")]
        unscored = f"{statistics.fmean(run['unscored'] for run in runs):.1%}".replace("%", " %")
        rows.append([f"`{runs[0]['recipe'].rpartition('/')[2]}`", str(len(runs)), *rewards, unscored])
    return markdown_table(["recipe", "seeds", "reward before", "after", "unscored"], rows)


def played() -> str:
    """Return the table of SecretMafia: a row for each baseline, and rows before and after training."""
    rows, runs = [], dict[tuple[str, str], list[dict[str, float]]]()
    for row in (row for row in _rows("environments") if row["recipe"].endswith("/secret_mafia_smoke.yaml")):
        if "seed" not in row:
            rows.append([row["mode"], "-", "-", *_played(row["evaluated"])])
            continue
        for when, episodes in zip(("before", "after"), row["evaluated"], strict=True):
            runs.setdefault((f"policy {when} training", row["mode"]), []).append(episodes)
    rows += [[who, mode, str(len(seeds)), *_played(seeds)] for (who, mode), seeds in runs.items()]
    return markdown_table(["who plays", "vLLM", "seeds", "legal", "won", "reward"], rows)


def dynamic_sampling() -> str:
    """Return the table of steps, tokens and seconds to a reward with dynamic_sampling, divided by those without it."""
    runs = {(row["task"], row["seed"], row["dynamic"]): row for row in _rows("dynamic_sampling") if "dynamic" in row}
    rows = []
    for task, target in REWARDS_TO_REACH.items():
        seeds = [seed for name, seed, dynamic in runs if name == task and dynamic]
        pairs = [[_cost_of_reward(runs[task, seed, dynamic], target) for dynamic in (True, False)] for seed in seeds]
        ratios = [[with_it / without for with_it, without in zip(*pair, strict=True)] for pair in pairs]
        cells = [
            f"{statistics.median(column):.2f} ({min(column):.2f} to {max(column):.2f})"
            for column in zip(*ratios, strict=True)
        ]
        rows.append([task, str(target), str(len(seeds)), *cells])
    return markdown_table(["task", "reward", "seeds", "steps", "tokens", "seconds"], rows)


def _cost_of_reward(run: dict[str, Any], target: float) -> tuple[float, float, float]:
    """Return the steps, tokens and seconds of a run until the mean reward of five steps is ``target``."""
    means = [statistics.fmean(run["reward"][step - 5 : step]) for step in range(5, run["steps"] + 1)]
    steps = 5 + next(index for index, mean in enumerate(means) if mean >= target)
    return steps, run["tokens"][steps - 1], run["seconds"][steps - 1]


def _played(episodes: list[dict[str, float]]) -> list[str]:
    names = [f"eval_episodes/{name}" for name in ("legal", "won", "reward_detective")]
    return [_mean_and_ends([episode[name] for episode in episodes], " to ") for name in names]


def _mean_and_ends(values: list[float], between: str) -> str:
    ends = f" ({min(values):.2f}{between}{max(values):.2f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.2f}{ends}"


def _record(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


TABLES: dict[str, Callable[[], str]] = {
    "overlap": lambda: overlap_figure.tables(_rows("overlap")).strip(),
    "time to reward": lambda: time_to_reward_figure.tables(_rows("time_to_reward")),
    "memory": memory,
    "gpu seconds": gpu_seconds,
    "gpu memory": gpu_memory,
    "gpu gradients": gpu_gradients,
    "syncs": syncs,
    "environments": learned,
    "tools": tools,
    "programs and judges": programs_and_judges,
    "games": played,
    "dynamic sampling": dynamic_sampling,
}


if __name__ == "__main__":
    main()
