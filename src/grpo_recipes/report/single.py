"""The page of one run: did it work, what did it come to, and all that its files say."""

from __future__ import annotations

import json
import math
import shlex
import statistics
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.paths import shown
from grpo_recipes.report.page import (
    NOTHING,
    TIMES,
    Section,
    chart_grid,
    duration,
    fragment,
    page,
    plural,
    short,
    signed,
    stacked,
    table,
)
from grpo_recipes.report.read import RunRecord, Scored, baselines_of, read_run, read_samples
from grpo_recipes.report.run_charts import (
    METRICS,
    PHASES,
    curve_charts,
    how_to_read,
    other_metrics,
    phase_chart,
    reward_chart,
    reward_spread,
)
from grpo_recipes.runs.checkpoints import newest_complete
from grpo_recipes.runs.health import known, notices_of, number, percent
from grpo_recipes.runs.rundir import write_whole
from grpo_recipes.secrets import masked_environment
from grpo_recipes.stats import score_names

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
_LONGEST_VALUE = 2000
LONGEST_TEXT = 2500  # characters of one text in the page
MOST_MARKUP = 700_000  # characters of all samples in the page
# Baseline of a ModeBench result -> what it is called.
BASELINES = {"untrained": "before training", "random": "random guesser", "constant": "best constant answer"}
SMOKE_BADGE = ("smoke test, not an experiment", "smoke")
Trouble = tuple[str, list[tuple[str, str, str]]]  # kind, and lines of a strong text, a text and code


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of a run, running or ended, and return its path: by default ``report.html`` in the directory.

    Raises:
        ConfigError: the folder is not a run directory.
        OSError: the page cannot be written.
    """
    run = read_run(folder)
    path = path or run.folder / "report.html"
    write_whole(path, run_page(run, path))
    return path


def report_line(folder: Path) -> str:
    """Write the report of a run that has just ended, and return a line that says where it is.

    Whatever goes wrong becomes the line and is not raised: the run's own end counts.
    """
    try:
        return f"report in {shown(write_report(folder))}"
    except Exception as error:
        return f"report not written ({type(error).__name__}: {error}); try again: grpo report {shown(folder)}"


def run_page(run: RunRecord, path: Path) -> str:
    """Return the page as text; ``path`` is where it will stand, for its links."""
    small, texts = chart_grid(curve_charts(run)), notices(run)
    how = how_to_read(run) if small else ""
    curves = stacked(
        fragment("run.html.j2", "notices", texts) if texts else None,
        reward_chart(run),
        fragment("parts.html.j2", "note", how) if how else None,
        small,
        other_metrics(run),
    )
    sections: list[Section] = [
        ("Curves", curves),
        ("Rewards", chart_grid(reward_spread(run.scored), wide=True)),
        ("Benchmarks", _benchmarks(run)),
        ("Completions", _completions(run)),
        ("Time", chart_grid([phase_chart(run), _phases(run)], wide=True)),
        ("Recipe", _recipe(run)),
        ("Plan", _plan(run)),
        ("Versions", _versions(run)),
        ("Files", _files(run, path)),
    ]
    return page(f"{run.name}: {run.status}", _heading(run), sections)


def _heading(run: RunRecord) -> Markup:
    """Return the first screen: status, sentence, cause, tiles and identity."""
    kind = run.status if run.status in _STATUSES else "unknown"
    badges = [(f"{_STATUSES.get(run.status, '?')[0]} {run.status}", kind)]
    badges += [SMOKE_BADGE] if run.summary.get("smoke") else []
    troubles = [trouble] if (trouble := _trouble(run, kind)) else []
    return fragment("parts.html.j2", "header", badges, run.name, sentence(run), troubles, _tiles(run), _identity(run))


def sentence(run: RunRecord) -> str:
    """Return how it ended and what became of the reward.

    A change counts where it is more than two standard errors of the difference between the first and the last tenth of
    the steps (at least 3 each).
    """
    count = run.outcome
    ended = _STATUSES.get(run.status, ("", ""))[1]
    if count.first is None or count.last is None:
        return ended + ("No step has a reward." if count.steps else "No step was finished.")
    ends = f"from {short(count.first)} to {short(count.last)} over {plural(count.steps, 'step')}"
    if not _changed(known(run.metrics.column("reward"))):
        return f"{ended}Reward changed little, {ends}."
    return f"{ended}Reward {'rose' if count.last > count.first else 'fell'} {ends}."


def _changed(rewards: list[float]) -> bool:
    size = max(3, len(rewards) // 10)
    if len(rewards) < 2 * size:
        return False
    before, after = rewards[:size], rewards[-size:]
    error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / size)
    return abs(sum(after) - sum(before)) / size > 2 * error


def _trouble(run: RunRecord, kind: str) -> Trouble | None:
    """Return the cause of a bad end, or how long a run that should run was silent, and what to do."""
    if run.status == "completed":
        return None
    if run.status == "running":
        silent = _silent_seconds(run)
        text = f"No step for {duration(silent)}: it may have been killed without a word. Look at its logs."
        return ("stopped", [("", text, ""), _advice(run)]) if silent else None
    cause, code, rank = (run.summary.get(key) for key in ("cause", "exit_code", "failed_rank"))
    cause = cause or "no cause was recorded"
    where = f" (rank {rank} failed first)" if rank is not None and "rank" not in str(cause) else ""
    lines = [(f"Exit code {code}: ", f"{cause}{where}", "")]
    if code != EXIT_STOPPED:
        named = [one for one in run.plan.get("processes", []) if one.get("role") and one.get("log")]
        lines += [("", f"Log of the {one['role']}: ", one["log"]) for one in named]
    return kind, [*lines, _advice(run)]


def _advice(run: RunRecord) -> tuple[str, str, str]:
    if newest_complete(run.folder / "checkpoints"):
        command = f"grpo launch --resume {shlex.quote(shown(run.folder))}"
        return "", "Continue from the last checkpoint: ", command
    first = "correct the cause, then " if run.status == "failed" else ""
    return "", f"No complete checkpoint was saved: {first}launch the recipe again.", ""


def _silent_seconds(run: RunRecord) -> float:
    """Return how long a run has written nothing, 0 where that is not long: it was most likely killed."""
    file = run.folder / "metrics.jsonl"
    silent = time.time() - (file if file.exists() else run.folder / "run.json").stat().st_mtime
    steps = sorted(known(run.metrics.column("seconds/step")))
    usual = steps[len(steps) // 2] if steps else 0.0
    return silent if silent >= max(_SILENT_SECONDS, 10 * usual) else 0.0


def _tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return name, value and note of each number of the first screen."""
    count, note = run.outcome, ""
    if count.first is not None and count.last is not None and count.best is not None:
        note = f"{signed(count.last - count.first)}; best {short(count.best[0])} at step {count.best[1]:,.0f}"
    tiles = [("Reward", f"{short(count.first)} → {short(count.last)}", note)]
    if run.evals.has("eval_reward"):
        values = known(run.evals.column("eval_reward"))
        tiles.append(("Evaluation", f"{short(values[0])} → {short(values[-1])}", plural(len(values), "evaluation")))
    steps = f"{count.steps:,.0f}" + (f" of {count.of:,.0f}" if count.of else "")
    restarts = run.summary.get("restarts") or 0
    tiles.append(("Steps", steps, plural(restarts, "restart") if restarts else ""))
    note = f"{duration(count.seconds / len(run.metrics.steps))} a step" if run.metrics.steps else ""
    recent = known(run.metrics.column("seconds/step"))[-20:]
    if run.status == "running" and count.of and recent:
        note += f", {duration((count.of - count.steps) * sum(recent) / len(recent))} left"
    tiles.append(("Time in steps", duration(count.seconds), note))
    completions = run.batch.get("completions")
    note = f"{completions:,} completions a step" if isinstance(completions, int) else ""
    return [*tiles, ("Tokens per second", short(count.tokens_per_second), note)]


def _identity(run: RunRecord) -> list[tuple[str, Any]]:
    plan, code = run.plan, run.identity.get("code", {})
    commit = str(code.get("commit") or "unknown")[:10] + (" with uncommitted changes" if code.get("dirty") else "")
    devices = f"{run.batch.get('world_size', '?')} {TIMES} {plan.get('flavour', '?')}, vLLM {plan.get('mode') or 'off'}"
    objective = run.setting("maxent_objective")
    pairs = [
        ("Model", run.setting("model_name_or_path") or plan.get("model")),
        ("Data", run.setting("dataset_name") or plan.get("dataset")),
        ("Trainer", f"{plan.get('task', '?')}{f' ({objective})' if objective else ''}, {devices}"),
        ("Started", _when(str(run.identity.get("timestamp", "")))),
        ("Commit", commit),
        ("Host", run.identity.get("job") or run.identity.get("host")),
    ]
    return [(name, value) for name, value in pairs if value]


def _when(stamp: str) -> str:
    """Return 20261120-141818 as 2026-11-20 14:18."""
    day, _, clock = stamp.partition("-")
    if len(day) != 8 or len(clock) != 6:
        return stamp
    return f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}"


def notices(run: RunRecord) -> list[str]:
    """Return what a person who knows GRPO would point at."""
    metrics = run.metrics
    found = [
        f"{notice.text[0].upper()}{notice.text[1:]}: {notice.fix}."
        for notice in notices_of(_rows(run), run.value, over=run.status != "running")
        if notice.name != "not finite"  # said of each metric, from what could not be read as a number
    ]
    for name, seen in metrics.odd.items():
        meant = seen["inf"] if name in METRICS and METRICS[name].infinite else 0
        if times := seen.total() - meant:
            found.append(f"{name} was inf or nan in {plural(times, 'step')}.")
    if metrics.unreadable:
        found.append(f"{plural(metrics.unreadable, 'line')} of metrics.jsonl could not be read.")
    return found


def _rows(run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the rows that the columns came from, without what is no number."""
    names = list(run.metrics.columns)
    for step, *values in zip(run.metrics.steps, *run.metrics.columns.values(), strict=True):
        yield {"step": step, **dict(zip(names, values, strict=True))}


def _benchmarks(run: RunRecord) -> Markup | None:
    """Return the benchmarks: scores with intervals, and below them what ModeBench is held against."""
    rows: list[tuple[object, ...]] = []
    for name, result in run.benchmarks.items():
        rows += _scores(name, result)
        for baseline, scores in baselines_of(result).items():
            rows += _scores(f"{name}, {BASELINES.get(baseline, baseline)}", scores)
    return table(("benchmark", "", "score", "95 % interval", ""), rows, "numbers") if rows else None


def _scores(name: str, result: dict[str, Any]) -> list[tuple[object, ...]]:
    rest = ", ".join(
        f"{key.replace('_', ' ')} {short(value) if isinstance(value, int | float) else value}"
        for key, value in result.items()
        if "@" not in key and not isinstance(value, dict | list)
    )
    rows: list[tuple[object, ...]] = []
    for key in score_names(result):
        if number(result[key]) is not None:
            interval: object = ""
            if bounds := score_bounds(result, key):
                interval = f"{short(bounds[0])} to {short(bounds[1])}"
                if not is_count(key):
                    interval = fragment("run.html.j2", "with_interval", result[key], *bounds)
            rows.append((name, key, score_text(key, result[key]), interval, rest))
    return rows or [(name, "", "", "", rest)]


def is_count(key: str) -> bool:
    """Return whether a score is a number of answers, ``distinct@k``; all others are shares."""
    return key.startswith("distinct@")


def score_text(key: str, value: float) -> str:
    """Return a score as people read it: a share in per cent, ``distinct@k`` as a number."""
    return short(value) if is_count(key) else percent(value)


def score_bounds(result: dict[str, Any], key: str) -> tuple[float, float] | None:
    """Return the ends of a benchmark score's interval, or None."""
    bounds = result.get(f"{key}_ci")
    ends = known(number(bound) for bound in bounds) if isinstance(bounds, list) and len(bounds) == 2 else []
    return (ends[0], ends[1]) if len(ends) == 2 else None


def _completions(run: RunRecord) -> Markup | None:
    """Return sampled completions of steps spread over the run, the first and the last among them."""
    for most in (24, 12, 6, 3, 1):  # fewer where the texts are long
        chosen = _spread(run.scored, most)
        steps = [part for part in (_step(run, row, row is chosen[-1]) for row in chosen) if part is not None]
        if sum(len(step) for step in steps) <= MOST_MARKUP:
            break
    note = (
        f"{len(steps)} of {len(run.scored):,} steps, spread over the run; all are in samples.jsonl. Of each step: the "
        "best and the worst of its first group, and of the group whose rewards differ most."
    )
    return fragment("run.html.j2", "completions", note, steps) if steps else None


def _spread(scored: list[Scored], most: int) -> list[Scored]:
    if most == 1 or len(scored) <= most:
        return scored[-most:]
    places = sorted({round(index * (len(scored) - 1) / (most - 1)) for index in range(most)})
    return [scored[place] for place in places]


def _step(run: RunRecord, row: Scored, unfolded: bool) -> Markup | None:
    samples = read_samples(run.folder / "samples.jsonl", row)
    if not samples:
        return None
    mean = f"mean reward {short(sum(row.rewards) / len(row.rewards))}" if row.rewards else "no score"
    groups = []
    for prompt, members in groupby(samples, key=lambda sample: sample.get("prompt")):
        completions = list(members)
        answer = completions[0].get("answer")
        answer = None if answer is None else _cut(answer)
        groups.append({"prompt": _cut(prompt), "answer": answer, "completions": [_completion(x) for x in completions]})
    return fragment("run.html.j2", "step", row.step, f"{mean} over {len(row.rewards)} completions", groups, unfolded)


def _completion(sample: dict[str, Any]) -> dict[str, Any]:
    advantage, rewards = number(sample.get("advantage")), sample.get("rewards")
    named = rewards if isinstance(rewards, dict) else {}
    scores = [("reward", _score(sample.get("reward")))] if "reward" in sample else []
    scores.append(("advantage", signed(advantage)))
    if len(named) > 1 or "reward" not in sample:
        scores += [(str(name), _score(value)) for name, value in named.items()]
    side = "" if not advantage else " up-side" if advantage > 0 else " down-side"
    return {"side": side, "scores": scores, "text": _cut(sample.get("completion"))}


def _score(value: Any) -> str:
    score = number(value)
    return "no score" if score is None else short(score)


def _cut(content: Any) -> tuple[str, str]:
    """Return what is shown of a text, and a word on the rest."""
    text = "" if content is None else str(content)
    return (text, "") if len(text) <= LONGEST_TEXT else (text[:LONGEST_TEXT], f"… {len(text) - LONGEST_TEXT:,} more")


def _phases(run: RunRecord) -> Markup | None:
    """Return seconds of each phase over the whole run."""
    columns = {name: known(run.metrics.column(f"seconds/{name}")) for name in PHASES}
    totals = {name: sum(column) for name, column in columns.items() if column}
    whole = sum(totals.values())
    if not whole:
        return None
    rows = []
    for colour, (name, meaning) in enumerate(PHASES.items(), start=1):
        if name in totals:
            share = totals[name] / whole
            meter = fragment("charts.html.j2", "meter", share, colour)
            rows.append((name, meaning, meter, duration(totals[name]), percent(share)))
    return table(("phase", "", "", "time", "share"), rows, "numbers")


def _recipe(run: RunRecord) -> Markup | None:
    """Return the given keys, those of the command line first."""
    kinds: dict[str, list[tuple[object, ...]]] = {
        "Set by flag": [], "Set by environment variable": [], "Set by the recipe": []
    }  # fmt: skip
    for one in run.settings:
        by_recipe = ":" in one.origin or not one.origin
        kind = "flag" if one.origin.startswith("--") else "the recipe" if by_recipe else "environment variable"
        kinds[f"Set by {kind}"].append((fragment("parts.html.j2", "code", one.key), value_cell(one.value), one.origin))
    tables = [(kind, table(("key", "value", "origin"), rows, "keys")) for kind, rows in kinds.items() if rows]
    return fragment("run.html.j2", "recipe", tables) if tables else None


def value_cell(content: Any) -> Markup:
    """Return a recipe value as YAML shows it."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    more = f" … {len(text) - _LONGEST_VALUE:,} more characters" if len(text) > _LONGEST_VALUE else ""
    return fragment("parts.html.j2", "recipe_value", text[:_LONGEST_VALUE], more)


def _plan(run: RunRecord) -> Markup | None:
    """Return the batch arithmetic, as ``grpo plan`` prints it, and the processes."""
    plan, batch, processes = run.plan, run.batch, run.plan.get("processes", [])
    if "batch" not in plan:
        return None
    completions, group, trainers = (
        batch.get(key, default) for key, default in (("completions", 0), ("num_generations", 1), ("world_size", 1))
    )
    arithmetic = (
        f"{completions // group:,} prompts {TIMES} {group} completions = {completions:,} a step = "
        f"{plural(trainers, 'trainer')} {TIMES} {batch.get('per_device')} per device {TIMES} "
        f"{batch.get('accumulation')} accumulated"
    )
    weights = f"by {plan.get('bridge') or 'none'} ({plan.get('why_bridge') or NOTHING})"
    rows = [
        (one.get("role", ""), ", ".join(one.get("gpus") or []) or NOTHING,
         fragment("parts.html.j2", "code", one.get("log") or NOTHING))
        for one in processes
    ]  # fmt: skip
    commands = [(one.get("role"), _command(one)) for one in processes]
    listed = table(("process", "GPUs", "log"), rows)
    return fragment("run.html.j2", "plan", arithmetic, weights, plan.get("notes", []), listed, commands)


def _command(process: dict[str, Any]) -> str:
    variables = masked_environment(process.get("environment") or {})
    lines = [f"{name}={shlex.quote(text)}" for name, text in variables.items()]
    return " \\\n  ".join([*lines, shlex.join(process.get("argv") or [])])


def _versions(run: RunRecord) -> Markup:
    """Return packages and machine."""
    identity = run.identity
    facts = {"python": identity.get("python"), **identity.get("versions", {})}
    facts |= {name: identity.get(name) for name in ("host", "job", "cores", "flavour")}
    return fragment("parts.html.j2", "facts_of", [(name, text) for name, text in facts.items() if text])


def _files(run: RunRecord, path: Path) -> Markup:
    """Return what is beside the page."""
    names = [name for name in _FILES if (run.folder / name).exists()]
    return fragment("run.html.j2", "files", run.folder, names, path.absolute().parent == run.folder)
