"""Rows that a training writes: ``metrics.jsonl`` per optimizer step, and completions to read in ``samples.jsonl``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_recipes.process.reports import PhaseFile
from grpo_recipes.secrets import masked

PHASES = ("sample", "score", "sync", "save", "evaluate")
LONGEST_TEXT = 4000  # characters


class MetricsRows:
    """Time the phases of a training, report them to the launcher, and write what TRL logs.

    A row holds TRL's metrics of the step under TRL's names, ``step``, ``max_steps``, ``tokens_per_second`` and
    ``seconds/<phase>``: sample, score, sync, save and evaluate (after the step before), update (all the rest), step
    (their sum).
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
        """Time a phase; the sync inside a sample counts as sync alone."""
        start, synced = time.perf_counter(), self._seconds["sync"]
        try:
            with self.reported(name):
                yield
        finally:
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

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time counts as a phase."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return call(*args, **kwargs)

        return timed

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


def write_samples(file: Path, trainer: Any, answers: list[Any]) -> None:
    """Add a row of a few completions, with their scores, of the generation that TRL just logged. For rank 0.

    A row holds ``step`` (the optimizer step the completions are for), ``rewards`` (the total of every completion of
    the generation, over all ranks; null where no reward scored it) and ``samples``: ``report_samples`` completions
    of two groups, each with prompt, completion, answer, reward, rewards by name and advantage. ``answers`` are those of
    rank 0's completions, which TRL logs first.
    """
    logs, group = trainer._logs, trainer.num_generations
    per_name = {name: list(values) for name, values in logs["rewards"].items()}
    weights = dict(zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True))
    totals = total_rewards(per_name, weights)
    prompts, completions, advantages = (list(logs[name]) for name in ("prompt", "completion", "advantages"))
    samples = []
    for row in chosen_rows(totals, group, len(answers), trainer.args.report_samples):
        answer = answers[row - row % group]
        samples.append(
            {
                "prompt": _cut(_prompt_text(prompts[row])),
                "completion": _cut(_completion_text(completions[row])),
                "answer": None if answer is None else _cut(str(answer)),
                "reward": totals[row],
                "rewards": {name: _rounded(values[row]) for name, values in per_name.items()},
                "advantage": _rounded(advantages[row]),
            }
        )
    append_json(file, {"step": trainer.state.global_step + 1, "rewards": totals, "samples": samples})


def total_rewards(per_name: dict[str, list[float]], weights: dict[str, float]) -> list[float | None]:
    """Return the weighted sum of each completion's rewards, as TRL logs its mean: NaN is unscored and counts nothing.

    (B,), rounded to 4 digits; None where no reward scored the completion.
    """
    totals: list[float | None] = []
    for row in zip(*per_name.values(), strict=True):
        known = [weights[name] * value for name, value in zip(per_name, row, strict=True) if not math.isnan(value)]
        totals.append(_rounded(sum(known)) if known else None)
    return totals


def chosen_rows(totals: list[float | None], group: int, own: int, count: int) -> list[int]:
    """Choose rows worth reading: of the first group, and of another whose rewards differ most; best and worst first.

    Args:
        totals: (B,) rewards of the generation, a group's completions side by side.
        group: completions of one prompt.
        own: rows of rank 0; only groups that begin there are looked at, since their answers are known here.
        count: rows wanted.
    """
    starts = list(range(0, min(own, len(totals)), group))
    widest = max(starts[1:], key=lambda start: _spread(totals[start : start + group]), default=0)
    shares = {0: count - count // 2, widest: count // 2} if widest else {0: count}
    return [
        row
        for start, share in shares.items()
        for row in _extremes(list(range(start, min(start + group, len(totals)))), totals)[:share]
    ]


def _spread(totals: list[float | None]) -> float:
    known = [total for total in totals if total is not None]
    return max(known) - min(known) if known else -1.0


def _extremes(rows: list[int], totals: list[float | None]) -> list[int]:
    """Return ``rows`` as best, worst, second best, second worst and so on; unscored ones count as worst."""
    ranked = sorted(rows, key=lambda row: -math.inf if totals[row] is None else totals[row], reverse=True)
    return [ranked.pop(-(place % 2)) for place in range(len(rows))]


def _prompt_text(prompt: Any) -> str:
    """Return a prompt as text; chat messages one after another, each under its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"[{message['role']}]\n{_content(message)}" for message in prompt)


def _completion_text(completion: Any) -> str:
    """Return a completion as text; more than one message (tools) each under its role."""
    if isinstance(completion, str):
        return completion
    return _content(completion[0]) if len(completion) == 1 else _prompt_text(completion)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _cut(text: str) -> str:
    text = masked(text)
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} […{len(text) - LONGEST_TEXT:,} more characters]"


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
