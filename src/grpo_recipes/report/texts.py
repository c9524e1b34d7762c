"""Sampled completions with their scores, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from grpo_recipes.report.markup import Html, element, model_text
from grpo_recipes.report.read import RunRecord, Scored, number, read_samples
from grpo_recipes.report.units import short, signed

MOST_STEPS = 24
LONGEST_TEXT = 2500  # characters of one text in the page
MOST_MARKUP = 700_000  # characters of all samples in the page


def sampled_completions(run: RunRecord) -> Html | None:
    """Steps spread over the run, the first and the last among them; fewer where the texts are long."""
    for most in (MOST_STEPS, 12, 6, 3, 1):
        chosen = _spread(run.scored, most)
        steps = [part for part in (_step(run, row, row is chosen[-1]) for row in chosen) if part is not None]
        if sum(len(step) for step in steps) <= MOST_MARKUP:
            break
    if not steps:
        return None
    note = (
        f"{len(steps)} of {len(run.scored):,} steps, spread over the run; all are in samples.jsonl. Of each step: the "
        "best and the worst of its first group, and of the group whose rewards differ most."
    )
    return element("div", element("p", note, class_="note"), *steps, class_="steps")


def _spread(scored: list[Scored], most: int) -> list[Scored]:
    if most == 1 or len(scored) <= most:
        return scored[-most:]
    places = sorted({round(index * (len(scored) - 1) / (most - 1)) for index in range(most)})
    return [scored[place] for place in places]


def _step(run: RunRecord, row: Scored, unfolded: bool) -> Html | None:
    samples = read_samples(run.folder / "samples.jsonl", row)
    if not samples:
        return None
    mean = f"mean reward {short(sum(row.rewards) / len(row.rewards))}" if row.rewards else "no verdict"
    groups = [list(group) for _, group in groupby(samples, key=lambda sample: sample.get("prompt"))]
    return element(
        "details",
        element("summary", element("b", f"Step {row.step:,}"), f" {mean} over {len(row.rewards)} completions"),
        *[_group(group) for group in groups],
        class_="step",
        data_step=row.step,
        open=unfolded,
    )


def _group(samples: list[dict[str, Any]]) -> Html:
    prompt, answer = samples[0].get("prompt"), samples[0].get("answer")
    return element(
        "div",
        element("h4", "Prompt"),
        _text(prompt, "prompt"),
        element("p", "Reference answer ", _inline(answer), class_="answer") if answer is not None else None,
        element("div", *[_completion(sample) for sample in samples], class_="completions"),
        class_="group",
    )


def _completion(sample: Mapping[str, Any]) -> Html:
    advantage = number(sample.get("advantage"))
    side = "" if not advantage else " up-side" if advantage > 0 else " down-side"
    rewards = sample.get("rewards")
    named = rewards if isinstance(rewards, dict) else {}
    scores = [_score("reward", _verdict(sample.get("reward")))] if "reward" in sample else []
    scores.append(_score("advantage", signed(advantage)))
    if len(named) > 1 or "reward" not in sample:
        scores += [_score(str(name), _verdict(value)) for name, value in named.items()]
    return element("article", element("dl", *scores), _text(sample.get("completion"), "said"),
                   class_=f"completion{side}")  # fmt: skip


def _score(name: str, value: str) -> Html:
    return element("div", element("dt", name), element("dd", value))


def _verdict(value: Any) -> str:
    known = number(value)
    return "no verdict" if known is None else short(known)


def _text(text: Any, kind: str) -> Html:
    shown, more = _cut("" if text is None else str(text))
    tail = element("i", more, class_="ctl") if more else None
    return element("pre", model_text(shown), tail, class_=kind, dir="auto", tabindex="0")


def _inline(text: Any) -> Html:
    shown, more = _cut(str(text))
    return element("code", model_text(shown), more, dir="auto")


def _cut(text: str) -> tuple[str, str]:
    return (text, "") if len(text) <= LONGEST_TEXT else (text[:LONGEST_TEXT], f"… {len(text) - LONGEST_TEXT:,} more")
