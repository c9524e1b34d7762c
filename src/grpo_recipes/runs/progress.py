"""How far a run is: its phase, and a line for each step, evaluation and sampled completion as they are written."""

import contextlib
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.process.terminal import WIDTH, readable
from grpo_recipes.runs.health import LAST_STEPS, finite_number, mean, percent, without_gaps
from grpo_recipes.runs.rundir import SERVER_STATE, format_duration, json_mapping

PACE_ROWS = 20  # steps over which the time of one, and of each of its phases, is averaged
_MANY = 0.1  # share of completions or tokens from which a step's line names it
_MOST_NUMBERS = 12  # that an environment gives of its episodes, on one line
_PROMPT, _COMPLETION = 160, 400  # characters shown of a sample
_PHASES = {
    "start": "loading model and data", "connect": "joining server and trainers", "sample": "sampling",
    "score": "scoring", "sync": "sending weights", "update": "updating", "save": "saving", "evaluate": "evaluating",
    "end": "saving the model, then benchmarks",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Phase:
    """What a rank does, by ``processes/phase_<rank>.json``."""

    rank: int
    name: str  # start, connect, sample, score, sync, update, save, evaluate or end
    step: int  # optimizer steps done
    since: float  # by the rank's clock; only compared with itself, since clocks jump and differ


def read_phases(run_dir: Path) -> list[Phase]:
    """Return the phase of every rank that has written one, by rank."""
    phases = []
    for path in (run_dir / "processes").glob("phase_*.json"):
        rank, record = path.stem.removeprefix("phase_"), json_mapping(path) or {}
        step, since = finite_number(record.get("step")), finite_number(record.get("since"))
        if rank.isdecimal() and step is not None and since is not None:
            phases.append(Phase(int(rank), str(record.get("phase")), int(step), since))
    return sorted(phases)


def has_trained(run_dir: Path) -> bool:
    """Return whether all ranks have taken their last step."""
    phases = read_phases(run_dir)
    return bool(phases) and all(phase.name == "end" for phase in phases)


def current_activity(run_dir: Path) -> tuple[str, float]:
    """Return what the processes do that are furthest behind, and since when (``time.time()``); 0 if that is unknown."""
    phases, state = read_phases(run_dir), run_dir / SERVER_STATE
    starting = (json_mapping(state) or {}).get("state") == "starting"
    last = min(phases, key=lambda phase: (phase.step, phase.since), default=None)
    if last and not (starting and last.name == "start"):  # in which a trainer waits for the server
        return _PHASES.get(last.name, last.name), last.since
    if starting:
        with contextlib.suppress(OSError):
            return "starting the server", state.stat().st_mtime
    begun = 0.0
    for path in (run_dir / "processes").glob("*.json"):
        with contextlib.suppress(OSError):
            begun = max(begun, path.stat().st_mtime)
    return "importing packages", begun


def seconds_since(since: float) -> str:
    """Return the seconds from a moment by another clock until now, as text."""
    return f"{max(0.0, time.time() - since):.0f} s" if since else "?"


class RowReader:
    """Follow a JSONL file of a run from its present end, or from the rows in the ``last_bytes`` before it."""

    def __init__(self, path: Path, last_bytes: int = 0):
        self._path = path
        self._offset = max(0, path.stat().st_size - last_bytes) if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """Return the rows written since the last call."""
        content = b""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            self._offset = min(self._offset, file.seek(0, os.SEEK_END))  # shorter where a resume moved rows aside
            file.seek(self._offset)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        self._offset += whole
        found = map(json_mapping, content[:whole].splitlines())
        return [row for row in found if row and isinstance(row.get("step"), int)]


class Progress:
    """The steps of a run, and the line of each."""

    def __init__(self, run_dir: Path):
        self.rows = RowReader(run_dir / "metrics.jsonl")
        self._start: tuple[float, int] | None = None

    def line(self, row: Mapping[str, Any], width: int = WIDTH) -> str:
        """Return the line on the terminal for a row that was written just now; a narrow one leaves out what it must."""
        now, step, last = time.monotonic(), row["step"], row.get("max_steps", row["step"])
        seconds = finite_number(row.get("seconds/step")) or 0.0
        self._start = began, first = self._start or (now - seconds, step - 1)
        length, kl, entropy = (finite_number(row.get(key)) for key in ("completions/mean_length", "kl", "entropy"))
        parts = {
            "step": f"step {step}/{last}",
            # A step that uses the completions of an earlier generation has no reward.
            "reward": f"reward {_reward(row['reward'])}" if "reward" in row else "",
            "won": won_text(row),
            "length": "" if length is None else f"length {length:.0f}",
            "kl": f"kl {kl:.3f}" if kl is not None else f"entropy {entropy:.2f}" if entropy is not None else "",
            "seconds": _seconds(seconds),
            "unusual": "  ".join(unusual_shares(row)),
            "left": f"left {format_duration((now - began) / max(1, step - first) * (last - step))}",
        }
        for too_much in ("kl", "length", "seconds", "won"):
            if len("  ".join(filter(None, parts.values()))) > width:
                parts[too_much] = ""
        return "  ".join(filter(None, parts.values()))


def run_position(rows: Sequence[Mapping[str, Any]], over: bool) -> tuple[str, str, str]:
    """Return step, reward, and the time the remaining steps take at the pace of the last, each empty if unknown."""
    if not rows:
        return "", "", ""
    last, seconds = rows[-1], without_gaps(finite_number(row.get("seconds/step")) for row in rows[-PACE_ROWS:])
    reward = mean(without_gaps(finite_number(row.get("reward")) for row in rows[-LAST_STEPS:]))
    left = ""
    if seconds and "max_steps" in last and not over:
        left = format_duration(sum(seconds) / len(seconds) * (last["max_steps"] - last["step"]))
    return f"{last['step']}/{last.get('max_steps', '?')}", "" if reward is None else f"{reward:.3f}", left


# What is not as it should be in a step, by the share from which it is named.
_UNUSUAL = {
    "unscored": ("rewards/no_verdict", 0.0),
    "unfinished": ("episodes/unfinished", _MANY),
    "cut off": ("completions/clipped_ratio", _MANY),
    "clipped": ("clip_ratio/region_mean", _MANY),
}


def unusual_shares(row: Mapping[str, Any]) -> list[str]:
    """Return shares that are not trivial: completions unscored or cut off at their longest, tokens clipped."""
    shares = [(name, finite_number(row.get(key)) or 0.0, least) for name, (key, least) in _UNUSUAL.items()]
    return [f"{name} {max(1, round(100 * share))}%" for name, share, least in shares if share > least]


def won_text(row: Mapping[str, Any]) -> str:
    """Return the share of a step's episodes that were won, empty where the environment does not say so."""
    share = finite_number(row.get("episodes/won"))
    return "" if share is None else f"won {100 * share:.0f}%" if 0 <= share <= 1 else f"won {share:.3g}"


def episodes_line(row: Mapping[str, Any]) -> str:
    """Return what a row says of its episodes, as ``turns 2  legal 0.97``; empty without an environment."""
    values = {name: finite_number(one) for name, one in row.items() if name.startswith("episodes/")}
    found = [f"{name.removeprefix('episodes/')} {one:.3g}" for name, one in values.items() if one is not None]
    more = [f"and {len(found) - _MOST_NUMBERS} more"] if len(found) > _MOST_NUMBERS else []
    return "  ".join(" ".join(readable(one).split()) for one in [*found[:_MOST_NUMBERS], *more])


def unusual_totals(rows: list[dict[str, Any]]) -> str:
    """Return what was not trivial over all steps, or an empty text."""
    shares = [(name, mean(without_gaps(finite_number(row.get(key)) for row in rows)) or 0.0, least)
              for name, (key, least) in _UNUSUAL.items()]  # fmt: skip
    return ", ".join(f"{name} {percent(share)}" for name, share, least in shares if share > least)


def evaluation_line(row: Mapping[str, Any]) -> str:
    """Return the line of a row of ``eval.jsonl``."""
    which = f"eval_{row['set']}" if row.get("set") else "eval"
    reward, length = (finite_number(row.get(f"{which}_{key}")) for key in ("reward", "completions/mean_length"))
    facts = [
        f"{which} at step {row['step']}",
        "" if reward is None else f"reward {_reward(reward)}",
        "" if length is None else f"length {length:.0f}",
        f"{row.get('prompts', '?')} prompts",
        _seconds(finite_number(row.get("seconds")) or 0.0),
    ]
    return "  ".join(filter(None, facts))


def sample_lines(row: Mapping[str, Any], place: int) -> list[str]:
    """Return a sampled completion of a row of ``samples.jsonl``, the ``place``-th in turn, in lines of 80 columns."""
    samples = [one for one in row.get("samples") or () if isinstance(one, dict)]
    if not samples:
        return []
    one = samples[place % len(samples)]
    prompt, completion = (" ".join(readable(str(one.get(key))).split()) for key in ("prompt", "completion"))
    prompt = prompt if len(prompt) <= _PROMPT else f"… {prompt[-_PROMPT:]}"
    half = _COMPLETION // 2
    completion = completion if len(completion) <= _COMPLETION else f"{completion[:half]} … {completion[-half:]}"
    lines = [f"completion of step {row['step']}, reward {_reward(finite_number(one.get('reward')))}:"]
    for mark, text in ((">", prompt), ("|", completion or "(empty)")):
        lines += [f"  {mark} {line}" for line in textwrap.wrap(text, WIDTH - 4)]
    return lines


def _reward(value: Any) -> str:
    return "none" if value is None else f"{value:.3f}" if isinstance(value, int | float) else str(value)


def _seconds(seconds: float) -> str:
    return f"{seconds:.{2 if seconds < 10 else 1 if seconds < 100 else 0}f} s"
