"""Describe a run's progress in text: its phase, and one line per step, evaluation and sampled completion.

Ranks write their phases to ``processes/``. The lines come from the rows of ``metrics.jsonl`` and similar files.

    progress = Progress(run_dir)
    for row in progress.rows.read_new():
        print(progress.line(row))
"""

import contextlib
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.process.reports import plural
from grpo_recipes.process.terminal import WIDTH, strip_control_codes
from grpo_recipes.runs.health import AVERAGED_STEPS, drop_missing, finite_number, mean, percent
from grpo_recipes.runs.rundir import SERVER_STATE, format_duration, load_json_mapping

PACE_ROWS = 20  # steps over which the times of a step and of its phases are averaged
_MANY = 0.1  # a share of completions or tokens above this is part of a step's line
_MOST_NUMBERS = 12  # numbers of an environment on one line
_PROMPT, _COMPLETION = 160, 400  # characters shown of a sample
_PHASES = {
    "start": "loading model and data", "connect": "joining server and trainers", "sample": "sampling",
    "score": "scoring", "sync": "sending weights", "update": "updating", "save": "saving", "evaluate": "evaluating",
    "end": "saving the model, then benchmarks",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Phase:
    """The current phase of a rank, from ``processes/phase_<rank>.json``."""

    rank: int
    name: str  # start, connect, sample, score, sync, update, save, evaluate or end
    step: int  # optimizer steps done
    since: float  # time of the rank's clock; only compared with the same rank, since clocks jump and differ


def read_phases(run_dir: Path) -> list[Phase]:
    """Read ``processes/phase_RANK.json`` of every rank; return the valid ones, sorted by rank."""
    phases = []
    for path in (run_dir / "processes").glob("phase_*.json"):
        rank, record = path.stem.removeprefix("phase_"), load_json_mapping(path) or {}
        step, since = finite_number(record.get("step")), finite_number(record.get("since"))
        if rank.isdecimal() and step is not None and since is not None:
            phases.append(Phase(int(rank), str(record.get("phase")), int(step), since))
    return sorted(phases)


def has_trained(run_dir: Path) -> bool:
    """Return whether all ranks have made their last step; False if no rank has written its phase yet."""
    phases = read_phases(run_dir)
    return bool(phases) and all(phase.name == "end" for phase in phases)


def find_current_activity(run_dir: Path) -> tuple[str, float]:
    """Return a run's current activity as text, and its start as a Unix time (0 if unknown).

    The activity is the phase of the rank with the fewest steps, for example "sampling". While the server starts, or
    before any rank has written a phase, it is ``starting the server`` or ``importing packages``. Its start is then
    the time of a file's last change.
    """
    phases, state_file = read_phases(run_dir), run_dir / SERVER_STATE
    server_starts = (load_json_mapping(state_file) or {}).get("state") == "starting"
    slowest = min(phases, key=lambda phase: (phase.step, phase.since), default=None)
    if slowest and not (server_starts and slowest.name == "start"):  # in "start" the trainer waits for the server
        return _PHASES.get(slowest.name, slowest.name), slowest.since
    if server_starts:
        with contextlib.suppress(OSError):
            return "starting the server", state_file.stat().st_mtime
    last_write = 0.0
    for path in (run_dir / "processes").glob("*.json"):
        with contextlib.suppress(OSError):
            last_write = max(last_write, path.stat().st_mtime)
    return "importing packages", last_write


def format_seconds_since(since: float) -> str:
    """Return the seconds from a Unix time until now as text, for example "12 s"; "?" if the time is 0."""
    return f"{max(0.0, time.time() - since):.0f} s" if since else "?"


class RowReader:
    """Read the rows that are appended to a JSONL file of a run.

    It starts at the file's current end, or ``last_bytes`` before the end.
    """

    def __init__(self, path: Path, last_bytes: int = 0):
        self._path = path
        self._offset = max(0, path.stat().st_size - last_bytes) if path.exists() else 0

    def read_new(self) -> list[dict[str, Any]]:
        """Return the rows that were written since the last call. An incomplete last line is returned by a later call.

        Lines that are not a mapping with a step are skipped. A missing file has no rows.
        """
        content = b""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            self._offset = min(self._offset, file.seek(0, os.SEEK_END))  # a resume may have moved rows to another file
            file.seek(self._offset)
            content = file.read()
        end_of_lines = content.rfind(b"\n") + 1
        self._offset += end_of_lines
        rows = map(load_json_mapping, content[:end_of_lines].splitlines())
        return [row for row in rows if row and isinstance(row.get("step"), int)]


class Progress:
    """Read the new rows of a run's ``metrics.jsonl``, and format one line for each step."""

    def __init__(self, run_dir: Path):
        self.rows = RowReader(run_dir / "metrics.jsonl")
        self._start: tuple[float, int] | None = None
        self._has_rewards = False

    def line(self, row: Mapping[str, Any], width: int = WIDTH) -> str:
        """Format a row of ``metrics.jsonl`` as one line: step, reward or loss, length, KL, seconds, remaining time.

        If the line is longer than ``width``, the least important parts are left out. Unusual fractions, such as cut-off
        completions, are added. The remaining time is estimated from the rows of this launch.
        """
        now, step, last_step = time.monotonic(), row["step"], row.get("max_steps", row["step"])
        seconds = finite_number(row.get("seconds/step")) or 0.0
        self._start = start_time, start_step = self._start or (now - seconds, step - 1)
        length, kl, entropy = (finite_number(row.get(key)) for key in ("completions/mean_length", "kl", "entropy"))
        # A step that reuses completions of an earlier generation has no reward either.
        self._has_rewards = self._has_rewards or "reward" in row
        loss = None if self._has_rewards else finite_number(row.get("loss"))
        reward = f"reward {_format_reward(row['reward'])}" if "reward" in row else ""
        parts = {
            "step": f"step {step}/{last_step}",
            "reward": reward if loss is None else f"loss {loss:.4g}",
            "won": format_won_share(row),
            "length": "" if length is None else f"length {length:.0f}",
            "kl": f"kl {kl:.3f}" if kl is not None else f"entropy {entropy:.2f}" if entropy is not None else "",
            "seconds": _format_seconds(seconds),
            "unusual": "  ".join(format_unusual_shares(row)),
            "left": f"left {format_duration((now - start_time) / max(1, step - start_step) * (last_step - step))}",
        }
        for least_important in ("kl", "length", "seconds", "won"):
            if len("  ".join(filter(None, parts.values()))) > width:
                parts[least_important] = ""
        return "  ".join(filter(None, parts.values()))


def format_position(rows: Sequence[Mapping[str, Any]], over: bool) -> tuple[str, str, str]:
    """Return a run's step, reward and remaining time as three texts, such as "6/100"; each is empty if unknown.

    The reward is the mean of the last 5 steps. The time is estimated from the last 20 steps, and is empty if the
    run is ``over``.
    """
    if not rows:
        return "", "", ""
    last_row, seconds = rows[-1], drop_missing(finite_number(row.get("seconds/step")) for row in rows[-PACE_ROWS:])
    reward = mean(drop_missing(finite_number(row.get("reward")) for row in rows[-AVERAGED_STEPS:]))
    time_left = ""
    if seconds and "max_steps" in last_row and not over:
        time_left = format_duration(sum(seconds) / len(seconds) * (last_row["max_steps"] - last_row["step"]))
    step = f"{last_row['step']}/{last_row.get('max_steps', '?')}"
    return step, "" if reward is None else f"{reward:.3f}", time_left


# Signs of trouble in a step: the label, the metric, and the share above which the line shows it.
_UNUSUAL = {
    "unscored": ("rewards/no_verdict", 0.0),
    "unfinished": ("episodes/unfinished", _MANY),
    "cut off": ("completions/clipped_ratio", _MANY),
    "clipped": ("clip_ratio/region_mean", _MANY),
}


def format_unusual_shares(row: Mapping[str, Any]) -> list[str]:
    """Return a text such as ``cut off 12%`` for each fraction of a row that is above its limit.

    The fractions are unscored completions, unfinished episodes, cut-off completions and clipped tokens.
    """
    shares = [(name, finite_number(row.get(key)) or 0.0, least) for name, (key, least) in _UNUSUAL.items()]
    return [f"{name} {max(1, round(100 * share))}%" for name, share, least in shares if share > least]


def format_won_share(row: Mapping[str, Any]) -> str:
    """Return the fraction of a step's episodes that were won, such as ``won 51%``; "" if the row does not have it."""
    share = finite_number(row.get("episodes/won"))
    return "" if share is None else f"won {100 * share:.0f}%" if 0 <= share <= 1 else f"won {share:.3g}"


def format_episode_metrics(row: Mapping[str, Any]) -> str:
    """Return a row's ``episodes/`` metrics as text, such as ``turns 2 legal 0.97``; empty without an environment.

    At most 12 metrics are shown, followed by the number of the others.
    """
    values = {key: finite_number(value) for key, value in row.items() if key.startswith("episodes/")}
    parts = [f"{key.removeprefix('episodes/')} {value:.3g}" for key, value in values.items() if value is not None]
    if len(parts) > _MOST_NUMBERS:
        parts = [*parts[:_MOST_NUMBERS], f"and {len(parts) - _MOST_NUMBERS} more"]
    return "  ".join(" ".join(strip_control_codes(part).split()) for part in parts)


def format_unusual_totals(rows: list[dict[str, Any]]) -> str:
    """Average the fractions of ``format_unusual_shares`` over rows that have them; return those above their limit.

    The text is empty if none is above its limit.
    """
    shares = [(name, mean(drop_missing(finite_number(row.get(key)) for row in rows)) or 0.0, least)
              for name, (key, least) in _UNUSUAL.items()]  # fmt: skip
    return ", ".join(f"{name} {percent(share)}" for name, share, least in shares if share > least)


def format_evaluation(row: Mapping[str, Any]) -> str:
    """Format a row of ``eval.jsonl`` as one line: step, reward, completion length, number of prompts and seconds."""
    prefix = f"eval_{row['set']}" if row.get("set") else "eval"
    reward, length = (finite_number(row.get(f"{prefix}_{key}")) for key in ("reward", "completions/mean_length"))
    facts = [
        f"{prefix} at step {row['step']}",
        "" if reward is None else f"reward {_format_reward(reward)}",
        "" if length is None else f"length {length:.0f}",
        f"{row.get('prompts', '?')} prompts",
        _format_seconds(finite_number(row.get("seconds")) or 0.0),
    ]
    return "  ".join(filter(None, facts))


def format_best(facts: Mapping[str, Any]) -> str:
    """Format the best evaluation in ``facts``, from ``best.json``, as text; "" if there is none."""
    if not facts:
        return ""
    text = f"eval_reward {_format_reward(facts['best_eval_reward'])} at step {facts['best_step']}"
    if since := facts.get("evaluations_since_best"):
        text += f", then {plural(since, 'evaluation')} without improvement"
    return text


def format_sample(row: Mapping[str, Any], index: int) -> list[str]:
    """Format one sample of a row of ``samples.jsonl`` as lines: step, reward, shortened prompt and completion.

    ``index`` selects the sample, modulo the number of samples. Return no lines if the row has no samples.
    """
    samples = [sample for sample in row.get("samples") or () if isinstance(sample, dict)]
    if not samples:
        return []
    sample = samples[index % len(samples)]
    prompt, completion = (
        " ".join(strip_control_codes(str(sample.get(key))).split()) for key in ("prompt", "completion")
    )
    prompt = prompt if len(prompt) <= _PROMPT else f"… {prompt[-_PROMPT:]}"
    half = _COMPLETION // 2
    completion = completion if len(completion) <= _COMPLETION else f"{completion[:half]} … {completion[-half:]}"
    lines = [f"completion of step {row['step']}, reward {_format_reward(finite_number(sample.get('reward')))}:"]
    for mark, text in ((">", prompt), ("|", completion or "(empty)")):
        lines += [f"  {mark} {line}" for line in textwrap.wrap(text, WIDTH - 4)]
    return lines


def _format_reward(value: Any) -> str:
    """Return a number with three decimals, "none" for None, and other values as text."""
    return "none" if value is None else f"{value:.3f}" if isinstance(value, int | float) else str(value)


def _format_seconds(seconds: float) -> str:
    """Return seconds with three significant digits and the unit: "1.23 s", "12.3 s", "123 s"."""
    return f"{seconds:.{2 if seconds < 10 else 1 if seconds < 100 else 0}f} s"
