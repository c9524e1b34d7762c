"""A few completions of every generation, with their scores, for a person to read: ``samples.jsonl``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from grpo_recipes.secrets import masked

LONGEST_TEXT = 4000  # characters


class SampledTexts:
    """Mixin before ``MetricsRows``: after each generation rank 0 adds a row to ``samples.jsonl``.

    A row holds ``step`` (the optimizer step the completions are for), ``rewards`` (the total of every completion of
    the generation, over all ranks; null where no reward gave a verdict) and ``samples``: ``report_samples`` completions
    of two groups, each with prompt, completion, answer, reward, rewards by name and advantage.
    """

    def __init__(self, *, run_dir: Path, **kwargs: Any):
        self._samples_file = run_dir / "samples.jsonl"
        super().__init__(run_dir=run_dir, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training and self.accelerator.is_main_process and self.args.report_samples > 0:
            self._write_samples([row.get("answer") for row in inputs])
        return output

    def _write_samples(self, answers: list[Any]) -> None:
        """Write what TRL just logged; ``answers`` are rank 0's, whose completions TRL logs first."""
        per_name = {name: list(values) for name, values in self._logs["rewards"].items()}
        totals = total_rewards(per_name, dict(zip(self.reward_func_names, self.reward_weights.tolist(), strict=True)))
        rows = chosen_rows(totals, self.num_generations, len(answers), self.args.report_samples)
        prompts, completions = list(self._logs["prompt"]), list(self._logs["completion"])
        advantages = list(self._logs["advantages"])
        samples = [
            {
                "prompt": _cut(_prompt_text(prompts[row])),
                "completion": _cut(_completion_text(completions[row])),
                "answer": _answer_text(answers[row - row % self.num_generations]),
                "reward": totals[row],
                "rewards": {name: _rounded(values[row]) for name, values in per_name.items()},
                "advantage": _rounded(advantages[row]),
            }
            for row in rows
        ]
        with self._samples_file.open("a") as file:
            file.write(json.dumps({"step": self.state.global_step + 1, "rewards": totals, "samples": samples}) + "\n")


def total_rewards(per_name: dict[str, list[float]], weights: dict[str, float]) -> list[float | None]:
    """The weighted sum of each completion's rewards, as TRL logs its mean: NaN is no verdict and counts nothing.

    Returns:
        (B,) rounded to 4 digits, None where no reward gave a verdict.
    """
    totals: list[float | None] = []
    for row in zip(*per_name.values(), strict=True):
        known = [weights[name] * value for name, value in zip(per_name, row, strict=True) if not math.isnan(value)]
        totals.append(_rounded(sum(known)) if known else None)
    return totals


def chosen_rows(totals: list[float | None], group: int, own: int, count: int) -> list[int]:
    """Rows worth reading: of the first group, and of another whose rewards differ most; best and worst first.

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
    """``rows`` as best, worst, second best, second worst and so on; those without a verdict count as worst."""
    ranked = sorted(rows, key=lambda row: -math.inf if totals[row] is None else totals[row], reverse=True)
    order = []
    while ranked:
        order.append(ranked.pop(0))
        if ranked:
            order.append(ranked.pop())
    return order


def _prompt_text(prompt: Any) -> str:
    """A prompt as text; chat messages one after another, each under its role."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"[{message['role']}]\n{_content(message)}" for message in prompt)


def _completion_text(completion: Any) -> str:
    """A completion as text; more than one message (tools) each under its role."""
    if isinstance(completion, str):
        return completion
    return _content(completion[0]) if len(completion) == 1 else _prompt_text(completion)


def _answer_text(answer: Any) -> str | None:
    return None if answer is None else _cut(str(answer))


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
