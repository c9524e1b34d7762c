"""The parts of a report that are read, not drawn: time, benchmarks, recipe, plan, versions, files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.report.blocks import interval, meter
from grpo_recipes.report.markup import Html, element
from grpo_recipes.report.plots import PHASES
from grpo_recipes.report.read import RunRecord, Setting, number
from grpo_recipes.report.units import NOTHING, TIMES, duration, percent, short
from grpo_recipes.secrets import masked_environment
from grpo_recipes.stats import score_names

_MEANINGS = {
    "sample": "waiting for completions",
    "score": "rewards",
    "update": "forward, backward, optimizer",
    "sync": "weights to the server",
    "save": "checkpoints",
    "evaluate": "evaluations",
}
_FILES = (
    "recipe.yaml", "plan.json", "run.json", "metrics.jsonl", "eval.jsonl", "samples.jsonl",
    "slow_rewards.jsonl", "summary.json", "benchmarks", "code.patch", "model", "checkpoints",
)  # fmt: skip
_LONGEST_VALUE = 2000
# Baseline of a ModeBench result -> what it is called.
BASELINES = {"untrained": "before training", "random": "random guesser", "constant": "best constant answer"}


def table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> Html:
    """A table that scrolls where it is wider than the screen."""
    top = element("tr", *[element("th", name, scope="col") for name in head])
    lines = [element("tr", *[element("td", cell) for cell in row]) for row in rows]
    inner = element("table", element("thead", top), element("tbody", *lines), class_=kind or None)
    return element("div", inner, class_="scroll", tabindex="0")


def phase_table(run: RunRecord) -> Html | None:
    """Seconds of each phase over the whole run."""
    totals = {
        name: sum(value or 0.0 for value in run.metrics.column(f"seconds/{name}"))
        for name in PHASES
        if run.metrics.has(f"seconds/{name}")
    }
    whole = sum(totals.values())
    if not whole:
        return None
    rows = [
        (name, _MEANINGS[name], meter(total / whole, colour), duration(total), percent(total / whole))
        for name, total in totals.items()
        for colour in [PHASES.index(name) + 1]
    ]
    return table(("phase", "", "", "time", "share"), rows, "numbers")


def benchmark_table(run: RunRecord) -> Html | None:
    """The benchmarks of ``summary.json``: scores with intervals, and below them what ModeBench is held against."""
    rows: list[tuple[object, ...]] = []
    for name, result in run.benchmarks.items():
        rows += _scores(name, result)
        for baseline, scores in baselines_of(result).items():
            rows += _scores(f"{name}, {BASELINES.get(baseline, baseline)}", scores)
    if not rows:
        return None
    return table(("benchmark", "", "score", "95 % interval", ""), rows, "numbers")


def baselines_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Scores of what knows nothing, and of the model before training, in a result of ModeBench."""
    found = result.get("baselines")
    return (
        {name: scores for name, scores in found.items() if isinstance(scores, dict)} if isinstance(found, dict) else {}
    )


def score_text(key: str, value: float) -> str:
    """A score as people read it: a share in per cent, ``distinct@k`` as a number."""
    return short(value) if key.startswith("distinct@") else percent(value)


def _scores(name: str, result: dict[str, Any]) -> list[tuple[object, ...]]:
    rest = ", ".join(
        f"{key.replace('_', ' ')} {short(value) if isinstance(value, int | float) else value}"
        for key, value in result.items()
        if "@" not in key and not isinstance(value, dict | list)
    )
    scores = [key for key in score_names(result) if number(result[key]) is not None]
    return [(name, key, score_text(key, result[key]), _interval(result, key), rest) for key in scores] or [
        (name, "", "", "", rest)
    ]


def _interval(result: dict[str, Any], key: str) -> object:
    bounds = score_bounds(result, key)
    if bounds is None:
        return ""
    low, high = bounds
    if key.startswith("distinct@"):
        return f"{short(low)} to {short(high)}"
    return element(
        "span", interval(result[key], low, high), f" {short(100 * low)} to {percent(high)}", class_="with-interval"
    )


def score_bounds(result: dict[str, Any], key: str) -> tuple[float, float] | None:
    """The ends of a benchmark score's interval, or None."""
    bounds = result.get(f"{key}_ci")
    ends = [number(bound) for bound in bounds] if isinstance(bounds, list) else []
    return (ends[0], ends[1]) if len(ends) == 2 and ends[0] is not None and ends[1] is not None else None


def recipe_tables(run: RunRecord) -> Html | None:
    """The given keys, those of the command line first."""
    if not run.settings:
        return None
    kinds: dict[str, list[Setting]] = {"Set by flag": [], "Set by environment variable": [], "Set by the recipe": []}
    for setting in run.settings:
        kinds[_kind(setting.origin)].append(setting)
    parts = []
    for kind, settings in kinds.items():
        if settings:
            rows = [(element("code", one.key), value(one.value), one.origin) for one in settings]
            parts += [element("h3", kind), table(("key", "value", "origin"), rows, "keys")]
    note = "All other keys have their default."
    return element("div", *parts, element("p", note, class_="note"))


def _kind(origin: str) -> str:
    if origin.startswith("--"):
        return "Set by flag"
    return "Set by the recipe" if ":" in origin or not origin else "Set by environment variable"


def value(content: Any) -> Html:
    """A recipe value as YAML shows it."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    more = f" … {len(text) - _LONGEST_VALUE:,} more characters" if len(text) > _LONGEST_VALUE else None
    return element("code", text[:_LONGEST_VALUE], more, class_="value")


def plan_section(run: RunRecord) -> Html | None:
    """The batch arithmetic and the processes."""
    batch, plan = run.plan.get("batch"), run.plan
    if not isinstance(batch, dict):
        return None
    rows = [
        (
            process.get("role", ""),
            ", ".join(process.get("gpus") or []) or NOTHING,
            element("code", process.get("log") or NOTHING),
        )
        for process in plan.get("processes", [])
    ]
    notes = [element("li", note) for note in plan.get("notes", [])]
    return element(
        "div",
        element("p", element("b", "Batch "), _arithmetic(batch)),
        element(
            "p", element("b", "Weights "), f"by {plan.get('bridge') or 'none'} ({plan.get('why_bridge') or NOTHING})"
        ),
        element("ul", *notes, class_="notes") if notes else None,
        table(("process", "GPUs", "log"), rows),
        *[_command(process) for process in plan.get("processes", [])],
    )


def _arithmetic(batch: dict[str, Any]) -> str:
    """As ``grpo plan`` prints it."""
    completions, group = batch.get("completions", 0), batch.get("num_generations", 1)
    trainers = batch.get("world_size", 1)
    return (
        f"{completions // group:,} prompts {TIMES} {group} completions = {completions:,} a step = {trainers} "
        f"trainer{'s' * (trainers > 1)} {TIMES} {batch.get('per_device')} per device {TIMES} "
        f"{batch.get('accumulation')} accumulated"
    )


def _command(process: dict[str, Any]) -> Html:
    variables = masked_environment(process.get("environment") or {})
    lines = [f"{name}={shlex.quote(text)}" for name, text in variables.items()]
    text = " \\\n  ".join([*lines, shlex.join(process.get("argv") or [])])
    return element(
        "details", element("summary", f"Command of the {process.get('role')}"), element("pre", text), class_="more"
    )


def version_table(run: RunRecord) -> Html:
    """Packages and machine."""
    identity = run.identity
    versions = {"python": identity.get("python"), **identity.get("versions", {})}
    rows = [(name, text) for name, text in versions.items() if text]
    rows += [(name, str(identity[name])) for name in ("host", "job", "cores", "flavour") if identity.get(name)]
    return element(
        "dl", *[element("div", element("dt", name), element("dd", text)) for name, text in rows], class_="facts"
    )


def file_list(run: RunRecord, page: Path) -> Html:
    """What is beside the page."""
    beside = page.absolute().parent == run.folder
    items = [element("a", name, href=name) if beside else element("code", name)
             for name in _FILES if (run.folder / name).exists()]  # fmt: skip
    return element(
        "div",
        element("p", "Folder ", element("code", str(run.folder))),
        element("ul", *[element("li", item) for item in items], class_="files"),
    )
