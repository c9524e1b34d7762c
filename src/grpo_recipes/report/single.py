"""The page of one run: did it work, what did it come to, and all that its files say."""

from __future__ import annotations

import math
import re
import statistics
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.paths import shown
from grpo_recipes.report.chart import buckets, histogram, window_of
from grpo_recipes.report.page import SMOKE_BADGE, fragment, plural, render, short
from grpo_recipes.report.read import RunRecord, read_run, read_samples
from grpo_recipes.report.run_charts import METRICS, PHASES, curve_charts, other_metrics, phase_chart, reward_chart
from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.runs.health import notices_of
from grpo_recipes.runs.rundir import write_whole

# Status -> its mark, and how the sentence on the reward begins.
_STATUSES = {
    "completed": ("✓", ""),
    "running": ("●", "Running. "),
    "stopped": ("■", "Stopped. "),
    "requeued": ("↻", "Waiting to go on. "),
    "failed": ("✕", "Failed. "),
}
_SILENT_SECONDS = 900.0  # and ten usual steps, without a row: a running run may be dead
_FILES = (
    "recipe.yaml", "plan.json", "run.json", "metrics.jsonl", "eval.jsonl", "samples.jsonl",
    "slow_rewards.jsonl", "summary.json", "benchmarks", "code.patch", "model", "checkpoints",
)  # fmt: skip
MOST_MARKUP = 700_000  # characters of all samples in the page
# Baseline of a ModeBench result -> its name on the page.
BASELINES = {"untrained": "before training", "random": "random guesser", "constant": "best constant answer"}


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of a run, running or ended, and return its path: by default ``report.html`` in the directory.

    Raise ConfigError where the folder is not a run directory, OSError where the page cannot be written.
    """
    run = read_run(folder)
    path = path or run.folder / "report.html"
    write_whole(path, run_page(run, path))
    return path


def report_line(folder: Path) -> str:
    """Write the report of a run that has just ended, and return a line that names its path.

    Any error becomes the line and is not raised: how the run itself ended counts.
    """
    try:
        return f"report in {shown(write_report(folder))}"
    except Exception as error:
        return f"report not written ({type(error).__name__}: {error}); try again: grpo report {shown(folder)}"


def run_page(run: RunRecord, path: Path) -> str:
    """Return the page as text; ``path`` is its later place, for its links."""
    kind = run.status if run.status in _STATUSES else "unknown"
    badges = [(f"{_STATUSES.get(run.status, '?')[0]} {run.status}", kind)]
    stamp = str(run.identity.get("timestamp", ""))
    totals = {name: sum(found) for name in PHASES if (found := run.metrics.known(f"seconds/{name}"))}
    charts, same = other_metrics(run)
    rows = len(run.metrics.steps)
    return render(
        "run.html.j2",
        run=run, title=f"{run.name}: {run.status}", name=run.name, headline=sentence(run), kind=kind,
        badges=[*badges, SMOKE_BADGE] if run.summary.get("smoke") else badges,
        folder=shown(run.folder), silent=_silent_seconds(run) if run.status == "running" else 0.0,
        asked=run.summary.get("exit_code") == EXIT_STOPPED, checkpoint=newest_complete(run.folder / "checkpoints"),
        started=re.sub(r"^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)\d\d$", r"\1-\2-\3 \4:\5", stamp),
        notices=notices(run), reward=reward_chart(run), curves=curve_charts(run),
        rows=rows, points=len(buckets(rows)), window=window_of(rows),
        others=charts, same=same, histogram=histogram(run.scored), results=_results(run), steps=_completions(run),
        phase_chart=phase_chart(run), phases=PHASES, totals=totals,
        files=[name for name in _FILES if (run.folder / name).exists()], linked=path.absolute().parent == run.folder,
    )  # fmt: skip


def sentence(run: RunRecord) -> str:
    """Return how a run ended and how the reward changed.

    A change counts where it is more than two standard errors of the difference between the first and the last tenth of
    the steps (at least 3 each).
    """
    count, rewards = run.outcome, run.metrics.known("reward")
    ended = _STATUSES.get(run.status, ("", ""))[1]
    if count.first is None or count.last is None:
        return ended + ("No step has a reward." if count.steps else "No step was finished.")
    ends = f"from {short(count.first)} to {short(count.last)} over {plural(count.steps, 'step')}"
    size = max(3, len(rewards) // 10)
    if len(rewards) >= 2 * size:
        before, after = rewards[:size], rewards[-size:]
        error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / size)
        if abs(sum(after) - sum(before)) / size > 2 * error:
            return f"{ended}Reward {'rose' if count.last > count.first else 'fell'} {ends}."
    return f"{ended}Reward changed little, {ends}."


def _silent_seconds(run: RunRecord) -> float:
    """Return how long a run has written nothing, 0 where that is not long: it was most likely killed."""
    file = run.folder / "metrics.jsonl"
    silent = time.time() - (file if file.exists() else run.folder / "run.json").stat().st_mtime
    usual = statistics.median_high(run.metrics.known("seconds/step") or [0.0])
    return silent if silent >= max(_SILENT_SECONDS, 10 * usual) else 0.0


def notices(run: RunRecord) -> list[str]:
    """Return what a person who knows GRPO would point at."""
    metrics = run.metrics
    rows = (dict(zip(metrics.columns, values, strict=True)) for values in zip(*metrics.columns.values(), strict=True))
    found = [
        f"{notice.text[0].upper()}{notice.text[1:]}: {notice.fix}."
        for notice in notices_of(rows, run.value, over=run.status != "running")
        if notice.name != "not finite"  # reported for each metric, from what could not be read as a number
    ]
    for name, seen in metrics.odd.items():
        meant = seen["inf"] if name in METRICS and METRICS[name].infinite else 0
        if times := seen.total() - meant:
            found.append(f"{name} was inf or nan in {plural(times, 'step')}.")
    if metrics.unreadable:
        found.append(f"{plural(metrics.unreadable, 'line')} of metrics.jsonl could not be read.")
    return found


def _results(run: RunRecord) -> list[tuple[str, dict[str, Any], str]]:
    """Return name, result and further facts of each benchmark; ModeBench's baselines follow their own."""
    results: dict[str, dict[str, Any]] = {}
    for benchmark, result in run.benchmarks.items():
        results[benchmark] = result
        for baseline, scores in (result.get("baselines") or {}).items():
            results[f"{benchmark}, {BASELINES.get(baseline, baseline)}"] = scores
    rows = []
    for name, result in results.items():
        facts = {key: value for key, value in result.items() if "@" not in key and not isinstance(value, dict | list)}
        texts = (f"{key.replace('_', ' ')} {short(value) if isinstance(value, int | float) else value}"
                 for key, value in facts.items())  # fmt: skip
        rows.append((name, result, ", ".join(texts)))
    return rows


def _completions(run: RunRecord) -> list[Markup]:
    """Return sampled completions of steps spread over the run, the first and the last among them."""
    for most in (24, 12, 6, 3, 1):  # fewer where the texts are long
        count, last = min(most, len(run.scored)), len(run.scored) - 1
        steps = []
        for place in sorted({round(last - index * last / max(1, count - 1)) for index in range(count)}):
            row = run.scored[place]
            samples = read_samples(run.folder / "samples.jsonl", row)
            groups = [(prompt, list(members)) for prompt, members in groupby(samples, lambda one: one.get("prompt"))]
            if groups:
                steps.append(fragment("completions.html.j2", "step", row, groups, place == last))
        if sum(len(step) for step in steps) <= MOST_MARKUP:
            break
    return steps
