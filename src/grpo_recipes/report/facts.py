"""The first screen of a report: did it work, and what was it?"""

from __future__ import annotations

import shlex
import time
from typing import Any

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.paths import shown
from grpo_recipes.report.curves import known
from grpo_recipes.report.markup import Html, element
from grpo_recipes.report.outcome import Numbers, numbers, verdict
from grpo_recipes.report.read import RunRecord
from grpo_recipes.report.units import TIMES, duration, short, signed
from grpo_recipes.runs.checkpoints import newest_complete

_MARKS = {"completed": "✓", "running": "●", "stopped": "■", "requeued": "↻", "failed": "✕"}
_SILENT_SECONDS = 900.0  # and ten usual steps, without a row: a running run may be dead


def heading(run: RunRecord) -> Html:
    """Status, sentence, cause, tiles and identity."""
    count = numbers(run)
    smoke = element("span", "smoke test, not an experiment", class_="badge smoke") if run.summary.get("smoke") else None
    status = element("span", f"{_MARKS.get(run.status, '?')} {run.status}", class_=f"badge {_known_status(run)}")
    return element(
        "header",
        element("p", status, smoke, element("span", run.name, class_="run-name"), class_="eyebrow"),
        element("h1", verdict(run, count)),
        _trouble(run),
        element("dl", *_tiles(run, count), class_="tiles"),
        element("dl", *_identity(run), class_="facts"),
    )


def _known_status(run: RunRecord) -> str:
    return run.status if run.status in _MARKS else "unknown"


def _trouble(run: RunRecord) -> Html | None:
    """The cause of a bad end, and what to do."""
    if run.status == "completed":
        return None
    if run.status == "running":
        return _silence(run)
    cause = run.summary.get("cause") or "no cause was recorded"
    code = run.summary.get("exit_code")
    rank = run.summary.get("failed_rank")
    where = f" (rank {rank} failed first)" if rank is not None and "rank" not in str(cause) else ""
    lines = [element("p", element("b", f"Exit code {code}: "), cause, where)]
    if code != EXIT_STOPPED:
        lines += [element("p", f"Log of the {one['role']}: ", element("code", one["log"])) for one in _logged(run)]
    return element("div", *lines, _advice(run), class_=f"trouble {_known_status(run)}")


def _advice(run: RunRecord) -> Html:
    folder = shlex.quote(shown(run.folder))
    if newest_complete(run.folder / "checkpoints"):
        return element("p", "Continue from the last checkpoint: ", element("code", f"grpo launch --resume {folder}"))
    first = "mend the cause, then " if run.status == "failed" else ""
    return element("p", f"No complete checkpoint was saved: {first}launch the recipe again.")


def _logged(run: RunRecord) -> list[dict[str, Any]]:
    return [process for process in run.plan.get("processes", []) if process.get("role") and process.get("log")]


def _silence(run: RunRecord) -> Html | None:
    """A run that says it runs and has been silent for long was most likely killed."""
    file = run.folder / "metrics.jsonl"
    silent = time.time() - (file if file.exists() else run.folder / "run.json").stat().st_mtime
    steps = sorted(known(run.metrics.column("seconds/step")))
    usual = steps[len(steps) // 2] if steps else 0.0
    if silent < max(_SILENT_SECONDS, 10 * usual):
        return None
    text = f"No step for {duration(silent)}: it may have been killed without a word. "
    return element("div", element("p", text, "Look at its logs. "), _advice(run), class_="trouble stopped")


def _tiles(run: RunRecord, count: Numbers) -> list[Html]:
    tiles = [_tile("Reward", f"{short(count.first)} → {short(count.last)}", _reward_note(count))]
    if run.evals.has("eval_reward"):
        values = known(run.evals.column("eval_reward"))
        note = f"{len(values)} evaluation{'s' * (len(values) > 1)}"
        tiles.append(_tile("Evaluation", f"{short(values[0])} → {short(values[-1])}", note))
    steps = f"{count.steps:,.0f}" + (f" of {count.of:,.0f}" if count.of else "")
    restarts = run.summary.get("restarts") or 0
    tiles.append(_tile("Steps", steps, f"{restarts} restart{'s' * (restarts != 1)}" if restarts else ""))
    a_step = f"{duration(count.seconds / len(run.metrics.steps))} a step" if run.metrics.steps else ""
    tiles.append(_tile("Time in steps", duration(count.seconds), a_step + _time_left(run, count)))
    completions = run.plan.get("batch", {}).get("completions")
    note = f"{completions:,} completions a step" if isinstance(completions, int) else ""
    tiles.append(_tile("Tokens per second", short(count.tokens_per_second), note))
    return tiles


def _reward_note(count: Numbers) -> str:
    if count.first is None or count.last is None or count.best is None:
        return ""
    return f"{signed(count.last - count.first)}; best {short(count.best[0])} at step {count.best[1]:,.0f}"


def _time_left(run: RunRecord, count: Numbers) -> str:
    recent = known(run.metrics.column("seconds/step"))[-20:]
    if run.status != "running" or not count.of or not recent:
        return ""
    return f", {duration((count.of - count.steps) * sum(recent) / len(recent))} left"


def _tile(name: str, value: str, note: str) -> Html:
    return element(
        "div", element("dt", name), element("dd", element("b", value), element("span", note) if note else None)
    )


def _identity(run: RunRecord) -> list[Html]:
    plan, code = run.plan, run.identity.get("code", {})
    commit = str(code.get("commit") or "unknown")[:10] + (" with uncommitted changes" if code.get("dirty") else "")
    batch = plan.get("batch", {})
    devices = f"{batch.get('world_size', '?')} {TIMES} {plan.get('flavour', '?')}, vLLM {plan.get('mode') or 'off'}"
    objective = run.setting("maxent_objective")
    pairs = [
        ("Model", run.setting("model_name_or_path") or plan.get("model")),
        ("Data", run.setting("dataset_name") or plan.get("dataset")),
        ("Trainer", f"{plan.get('task', '?')}{f' ({objective})' if objective else ''}, {devices}"),
        ("Started", _when(str(run.identity.get("timestamp", "")))),
        ("Commit", commit),
        ("Host", run.identity.get("job") or run.identity.get("host")),
    ]
    return [element("div", element("dt", name), element("dd", value)) for name, value in pairs if value]


def _when(stamp: str) -> str:
    """20261120-141818 as 2026-11-20 14:18."""
    date, _, clock = stamp.partition("-")
    return (
        f"{date[:4]}-{date[4:6]}-{date[6:8]} {clock[:2]}:{clock[2:4]}" if len(date) == 8 and len(clock) == 6 else stamp
    )
