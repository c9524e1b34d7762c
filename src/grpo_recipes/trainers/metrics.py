"""Rows that a training writes: ``metrics.jsonl`` per optimizer step, and completions to read in ``samples.jsonl``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_recipes.process.reports import PhaseFile
from grpo_recipes.secrets import masked

PHASES = ("sample", "score", "sync", "save", "evaluate")
LONGEST_TEXT = 4000  # characters


class MetricsRows:
    """Time the phases of a training, report them to the launcher, and write what TRL logs.

    A row holds TRL's metrics of the step under TRL's names, ``step``, ``max_steps``, ``tokens_per_second`` and
    ``seconds/<phase>``: those of ``PHASES`` (``evaluate`` counts the evaluation after the previous step), update (the
    rest) and step (the sum).
    """

    def __init__(self, trainer: Any, run_dir: Path, rank: int):
        self._trainer = trainer
        self._file = run_dir / "metrics.jsonl"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._row_began: float | None = None
        self._tokens_before = 0
        self._phase_file = PhaseFile(run_dir, rank)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; a sync inside a sample counts as sync alone."""
        start, synced = time.perf_counter(), self._seconds["sync"]
        with self.reported(name):
            yield
        self._seconds[name] += time.perf_counter() - start
        if name == "sample":
            self._seconds["sample"] -= self._seconds["sync"] - synced

    @contextmanager
    def reported(self, phase: str) -> Iterator[None]:
        """Report a phase inside another to the launcher."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, phase: str) -> str:
        """Report that a phase begins; return the one before."""
        return self._phase_file.enter(phase, self._trainer.state.global_step)

    def begin_update(self) -> None:
        """Note that a micro-step begins; the first row begins with the first of them."""
        self.enter("update")
        if self._row_began is None:
            self._row_began = time.perf_counter()
            self._tokens_before = self._trainer.state.num_input_tokens_seen

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count everything inside as ``evaluate``, whatever is sampled and scored there."""
        began, seconds = time.perf_counter(), self._seconds
        self._seconds = dict(seconds)
        try:
            yield
        finally:
            if self._row_began is not None:  # not before the first step: its row does not cover that time
                seconds["evaluate"] += time.perf_counter() - began
            self._seconds = seconds

    def write(self, logs: dict[str, float]) -> None:
        """Add the row of an optimizer step; the next one begins."""
        now, state = time.perf_counter(), self._trainer.state
        step_seconds = now - (self._row_began or now)
        tokens = state.num_input_tokens_seen - self._tokens_before
        row = {
            "step": state.global_step,
            "max_steps": state.max_steps,
            **{key: json_number(value) for key, value in logs.items()},
            "tokens_per_second": tokens / trained if (trained := step_seconds - self._seconds["evaluate"]) > 0 else 0.0,
            **{f"seconds/{name}": seconds for name, seconds in self._seconds.items()},
            "seconds/update": step_seconds - sum(self._seconds.values()),
            "seconds/step": step_seconds,
        }
        append_json(self._file, row)
        self._row_began, self._tokens_before = now, state.num_input_tokens_seen
        self._seconds = dict.fromkeys(PHASES, 0.0)


def json_number(value: Any) -> Any:
    """Return an infinite or undefined number, which JSON does not have, as the text inf, -inf or nan."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def append_json(file: Path, *rows: dict[str, Any]) -> None:
    """Add rows to a JSONL file."""
    with file.open("a") as lines:
        lines.write("".join(json.dumps(row) + "\n" for row in rows))


def weighted_rewards(rewards_BR: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each completion's rewards as TRL does, (B,); NaN where no reward scored it."""
    sums_B = (rewards_BR * weights_R.to(rewards_BR.device)).nansum(dim=1)
    return sums_B.masked_fill(rewards_BR.isnan().all(dim=1), torch.nan)


def write_samples(file: Path, trainer: Any, answers: list[Any]) -> None:
    """Add a row with all rewards, null where unscored, and a few completions of the generation that TRL just logged.

    For rank 0. ``step`` is the optimizer step they are for; ``answers`` are those of rank 0's rows, which come first.
    """
    logs, group, names = trainer._logs, trainer.num_generations, trainer.reward_func_names
    prompts, completions, advantages = (list(logs[name]) for name in ("prompt", "completion", "advantages"))
    rewards_BR = trainer.rewards_BR[-len(prompts) :]
    totals = [_rounded(total) for total in weighted_rewards(rewards_BR, trainer.reward_weights).tolist()]
    samples = []
    for row in chosen_rows(totals, group, len(answers), trainer.args.report_samples):
        answer = answers[row - row % group]
        rewards = map(_rounded, rewards_BR[row].tolist())
        samples.append(
            {
                "prompt": _text(prompts[row], roles=True),
                "completion": _text(completions[row], roles=len(completions[row]) > 1),
                "answer": None if answer is None else _text(str(answer)),
                "reward": totals[row],
                "rewards": dict(zip(names, rewards, strict=True)),
                "advantage": _rounded(advantages[row]),
            }
        )
    append_json(file, {"step": trainer.state.global_step + 1, "rewards": totals, "samples": samples})


def chosen_rows(totals: list[float | None], group: int, own: int, count: int) -> list[int]:
    """Choose ``count`` rows worth reading: of the first group, and of another whose rewards differ most.

    ``totals`` are the rewards of a generation, (B,); only groups that begin in the first ``own`` rows are considered:
    rank 0 knows their answers. Of a group come the best, the worst, the second best and so on; unscored is worst.
    """

    def spread(start: int) -> float:
        known = [total for total in totals[start : start + group] if total is not None]
        return max(known) - min(known) if known else -1.0

    def extremes(start: int, share: int) -> list[int]:
        rows = range(start, min(start + group, len(totals)))
        ranked = sorted(rows, key=lambda row: -math.inf if totals[row] is None else totals[row], reverse=True)
        return [ranked.pop(-(place % 2)) for place in range(len(rows))][:share]

    widest = max(range(group, min(own, len(totals)), group), key=spread, default=0)
    return extremes(0, count - count // 2) + extremes(widest, count // 2) if widest else extremes(0, count)


def _text(content: Any, roles: bool = False) -> str:
    """Return a text, or chat messages one after another and under their ``roles``, masked and of bounded length."""
    if not isinstance(content, str):
        texts = [one if isinstance(one := message.get("content"), str) else json.dumps(one) for message in content]
        heads = [f"[{message['role']}]\n" if roles else "" for message in content]
        content = "\n\n".join(head + text for head, text in zip(heads, texts, strict=True))
    text = masked(content)
    more = len(text) - LONGEST_TEXT
    return text if more <= 0 else f"{text[:LONGEST_TEXT]} […{more:,} more characters]"


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
