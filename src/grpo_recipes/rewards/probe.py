r"""Whether a reward tells right answers from wrong ones: it is shown both, and what it gives is compared. No torch.

Every reference solution is written as ``<answer>…</answer>``, with ``\boxed{…}`` inside and without the tag, and then
again with a digit changed, with a digit more, with another row's answer in its place, and empty. A ModeBench problem
has several right answers, of which a few are written, and wrong ones of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from grpo_recipes.modebench.verify import is_problem, right_answers, wrong_answers
from grpo_recipes.recipe.registry import ACCURACY, REWARDS
from grpo_recipes.rewards.answers import same
from grpo_recipes.rewards.score import Score

TAG, TAGGED_BOX, BOX = "<answer>%s</answer>", r"<answer>\boxed{%s}</answer>", r"\boxed{%s}"
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")
_UNFIT = ("not a number", "wrong type", "wrong length")  # reasons that no completion excuses
_SHOWN = 5
_MODES = 3  # right answers tried of a problem that has several

ScoreFunction = Callable[[list[Any], dict[str, list[Any]]], list[Score]]


@dataclass(frozen=True)
class Try:
    """One completion shown to a reward."""

    row: int  # whose answer it gives
    writing: str  # how the answer is written
    text: str
    right: bool


@dataclass(frozen=True)
class Failure:
    """A completion that a reward should have scored otherwise."""

    prompt: str
    answer: str
    completion: str
    right: bool
    value: float | None
    reason: str | None


@dataclass
class ProbeResult:
    """What a reward gave the completions it was shown."""

    reward: str  # its name in the recipe
    right: int  # right completions shown
    wrong: int  # wrong completions shown
    # Means of what right and wrong ones got, None without any score. For a reward of the user's, both are of the way
    # of writing that it tells apart best.
    right_mean: float | None = None
    wrong_mean: float | None = None
    # Right ones that did not get 1, and wrong ones taken for right; None for a reward that need not go by the answer.
    missed: int | None = None
    taken: int | None = None
    no_verdict: int = 0  # unscored completions
    faults: list[tuple[str, str]] = field(default_factory=list)  # what is wrong, a line each, with the fix
    failures: list[Failure] = field(default_factory=list)  # the first completions it scored wrongly

    @property
    def tells_apart(self) -> bool:
        """Return whether right and wrong answers get different rewards on average."""
        means = (self.right_mean, self.wrong_mean)
        return None not in means and not math.isclose(*means, abs_tol=1e-9)


def probe(
    name: str, score: ScoreFunction, rows: Sequence[dict[str, Any]], strict: bool = False, most_missing: float = 0.5
) -> ProbeResult:
    """Show a reward right and wrong completions.

    Args:
        name: one of ours, or how the recipe names the user's.
        score: the reward: ``score(completions, columns)``, a score for each completion.
        rows: with ``prompt`` (chat messages), ``answer`` and what other columns there are.
        strict: whether answers are compared as text.
        most_missing: share of unscored completions that is still accepted (``reward_max_no_verdict``).
    """
    writings = _writings(name, strict)
    tries = _tries([row["answer"] for row in rows], writings)
    scores = score(*_arguments(tries, rows))
    finding = ProbeResult(name, sum(one.right for one in tries), sum(not one.right for one in tries))
    _take_means(finding, tries, scores, writings)
    bad = _judge(finding, tries, scores) if name in ACCURACY or name == "cosine_length" else []
    missing = [index for index, one in enumerate(scores) if one.value is None]
    finding.no_verdict = len(missing)
    unfit = [index for index in missing if (scores[index].reason or "").startswith(_UNFIT)]
    if unfit or len(missing) > most_missing * len(tries):
        reason = why(name, scores[(unfit or missing)[0]].reason)
        what = f"gives no verdict on {len(missing)} of {len(tries)} completions ({reason})"
        finding.faults.append((what, "mend it" if name not in REWARDS else "look at the reference solutions"))
    unsaid = [index for index in missing if scores[index].unscored or finding.faults]
    for index in list(dict.fromkeys([*bad, *unsaid]))[:_SHOWN]:
        one, row = tries[index], rows[tries[index].row]
        prompt = str(row["prompt"][-1]["content"]) if row.get("prompt") else ""
        got = scores[index]
        finding.failures.append(Failure(prompt, row["answer"], one.text, one.right, got.value, got.reason))
    return finding


def why(name: str, reason: str | None) -> str:
    """Return why a completion is unscored, for a person."""
    return reason or ("it returned None" if name not in REWARDS else "it cannot read the reference solution")


def corruptions(answer: str, others: Sequence[str]) -> list[str]:
    """Return wrong answers near a right one.

    Args:
        answer: the reference solution.
        others: those of other rows; the first that differs is one.
    """
    number = _LAST_NUMBER.search(answer)
    wrong = [f"{answer}1"]
    if number:
        end = number.end()
        changed = str((int(answer[end - 1]) + 1) % 10)
        wrong = [answer[: end - 1] + changed + answer[end:], f"{answer[:end]}1{answer[end:]}"]
    wrong += [other for other in others if not same(other, answer) and other != answer][:1]
    return [text for text in wrong if not same(text, answer)] + [""]


def _writings(name: str, strict: bool) -> list[str]:
    if name == "modebench":
        return [BOX]
    if name == "math_verify" or name not in REWARDS:
        return [TAG, TAGGED_BOX, BOX]
    return [TAG] if strict else [TAG, TAGGED_BOX]


def _tries(answers: list[str], writings: list[str]) -> list[Try]:
    tries = []
    for row, answer in enumerate(answers):
        if is_problem(answer):
            right, wrong = right_answers(answer)[:_MODES], wrong_answers(answer)
        else:
            right, wrong = [answer], corruptions(answer, answers[row + 1 :] + answers[:row])
        for writing in writings:
            tries += [Try(row, writing, writing % text, True) for text in right]
            tries += [Try(row, writing, writing % text, False) for text in wrong]
    return tries


def _arguments(tries: list[Try], rows: Sequence[dict[str, Any]]) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return what TRL gives a reward. All completions count as one token long: what they say decides."""
    columns = {name: [rows[one.row][name] for one in tries] for name in rows[0]} if rows else {}
    prompts = columns.pop("prompt", [])
    completions = [[{"role": "assistant", "content": one.text}] for one in tries]
    return completions, {"prompts": prompts, "completion_ids": [[0]] * len(tries), **columns}


def _take_means(finding: ProbeResult, tries: list[Try], scores: list[Score], writings: list[str]) -> None:
    """Take the means of all writings of a reward of ours, of the writing that the user's tells apart best."""
    best = -2.0
    for group in [writings] if finding.reward in REWARDS else [[writing] for writing in writings]:
        values: dict[bool, list[float]] = {True: [], False: []}
        for one, score in zip(tries, scores, strict=True):
            if one.writing in group and score.value is not None:
                values[one.right].append(score.value)
        right, wrong = (fmean(known) if known else None for known in (values[True], values[False]))
        apart = -1.0 if right is None or wrong is None else abs(right - wrong)
        if apart > best:
            best, finding.right_mean, finding.wrong_mean = apart, right, wrong


def _judge(finding: ProbeResult, tries: list[Try], scores: list[Score]) -> list[int]:
    """Count wrong scores; a right answer must get 1, with ``cosine_length`` more than every wrong one."""
    exact = finding.reward in ACCURACY
    missed, taken = [], []
    due = 1.0
    for index, (one, score) in enumerate(zip(tries, scores, strict=True)):
        value = score.value
        if one.right:
            due = 1.0 if exact or value is None else value
            if exact and value not in (1.0, None):
                missed.append(index)
        elif value is not None and value >= due:
            taken.append(index)
    finding.missed, finding.taken = len(missed), len(taken)
    rows = "(grpo check-rewards shows the rows)"
    if missed:
        what = f"does not give 1 to {len(missed)} of {finding.right} right answers"
        finding.faults.append((what, f"look at dataset_solution_column and dataset_solution_marker {rows}"))
    if taken:
        what = f"takes {len(taken)} of {finding.wrong} wrong answers for right"
        suspects = "the reference solutions" if exact else "the cosine_* keys"
        finding.faults.append((what, f"look at {suspects} {rows}"))
    return [*missed, *taken]
