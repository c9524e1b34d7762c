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
from typing import Any

from grpo_recipes.modebench.verify import is_problem, right_answers, wrong_answers
from grpo_recipes.recipe.registry import ACCURACY, REWARDS
from grpo_recipes.rewards.answers import same
from grpo_recipes.rewards.children import Verdict

TAG, TAGGED_BOX, BOX = "<answer>%s</answer>", r"<answer>\boxed{%s}</answer>", r"\boxed{%s}"
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")
_UNFIT = ("not a number", "wrong type", "wrong length")  # reasons that no completion excuses
_SUSPECTS = {True: "the reference solutions", False: "the cosine_* keys"}
_SHOWN = 5
_MODES = 3  # right answers tried of a problem that has several

Score = Callable[[list[Any], dict[str, list[Any]]], list[Verdict]]


@dataclass(frozen=True)
class Try:
    """One completion shown to a reward: the row whose answer it gives, how it is written, whether it is right."""

    row: int
    writing: str
    text: str
    right: bool


@dataclass(frozen=True)
class Failure:
    """A completion that a reward should have judged otherwise."""

    prompt: str
    answer: str
    completion: str
    right: bool
    value: float | None
    reason: str | None


@dataclass
class Finding:
    """What a reward gave.

    Attributes:
        reward: its name in the recipe.
        right: right completions shown.
        wrong: wrong completions shown.
        right_mean: mean of what it gave right ones, None without any verdict. For a reward of the user's, both means
            are of the way of writing that it tells apart best.
        wrong_mean: of what it gave wrong ones.
        missed: right ones that did not get their due; None where nothing is due by the answer.
        taken: wrong ones that it took for right; None as well.
        no_verdict: completions without one.
        faults: what is wrong, a line each, with the fix.
        failures: the first completions it misjudged.
    """

    reward: str
    right: int
    wrong: int
    right_mean: float | None = None
    wrong_mean: float | None = None
    missed: int | None = None
    taken: int | None = None
    no_verdict: int = 0
    faults: list[tuple[str, str]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def tells_apart(self) -> bool:
        """Whether right and wrong answers get different rewards on average."""
        means = (self.right_mean, self.wrong_mean)
        return None not in means and not math.isclose(*means, abs_tol=1e-9)


def probe(
    name: str, score: Score, rows: Sequence[dict[str, Any]], strict: bool = False, most_missing: float = 0.5
) -> Finding:
    """Show a reward right and wrong completions.

    Args:
        name: one of ours, or how the recipe names the user's.
        score: the reward: ``score(completions, columns)``, one verdict a completion.
        rows: with ``prompt`` (chat messages), ``answer`` and what other columns there are.
        strict: whether answers are compared as text.
        most_missing: share of completions without a verdict that is still taken (``reward_max_no_verdict``).
    """
    tries = _tries([row["answer"] for row in rows], _writings(name, strict))
    verdicts = score(*_arguments(tries, rows))
    finding = Finding(name, sum(one.right for one in tries), sum(not one.right for one in tries))
    _take_means(finding, tries, verdicts, _writings(name, strict))
    bad = _judge(finding, tries, verdicts) if name in ACCURACY or name == "cosine_length" else []
    missing = [index for index, verdict in enumerate(verdicts) if verdict.value is None]
    finding.no_verdict = len(missing)
    unfit = [index for index in missing if (verdicts[index].reason or "").startswith(_UNFIT)]
    if unfit or len(missing) > most_missing * len(tries):
        first = unfit[0] if unfit else missing[0]
        what = f"gives no verdict on {len(missing)} of {len(tries)} completions ({why(name, verdicts[first].reason)})"
        finding.faults.append((what, "mend it" if name not in REWARDS else "look at the reference solutions"))
    unsaid = [index for index in missing if verdicts[index].missing or finding.faults]
    wanted = list(dict.fromkeys([*bad, *unsaid]))[:_SHOWN]
    finding.failures = [_failure(tries[index], verdicts[index], rows) for index in wanted]
    return finding


def why(name: str, reason: str | None) -> str:
    """Why a reward gave no verdict, for a person."""
    return reason or ("it returned None" if name not in REWARDS else "it cannot read the reference solution")


def corruptions(answer: str, others: Sequence[str]) -> list[str]:
    """Wrong answers near a right one.

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
        right, wrong = _answers(answer, answers[row + 1 :] + answers[:row])
        for writing in writings:
            tries += [Try(row, writing, writing % text, True) for text in right]
            tries += [Try(row, writing, writing % text, False) for text in wrong]
    return tries


def _answers(answer: str, others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Right and wrong answers of a row."""
    if is_problem(answer):
        return right_answers(answer)[:_MODES], wrong_answers(answer)
    return [answer], corruptions(answer, others)


def _arguments(tries: list[Try], rows: Sequence[dict[str, Any]]) -> tuple[list[Any], dict[str, list[Any]]]:
    """What TRL gives a reward. All completions count as one token long: what they say decides."""
    columns = {name: [rows[one.row][name] for one in tries] for name in rows[0]} if rows else {}
    prompts = columns.pop("prompt", [])
    completions = [[{"role": "assistant", "content": one.text}] for one in tries]
    return completions, {"prompts": prompts, "completion_ids": [[0]] * len(tries), **columns}


def _take_means(finding: Finding, tries: list[Try], verdicts: list[Verdict], writings: list[str]) -> None:
    """Of all writings together for a reward of ours, of the one that is told apart best for the user's."""
    groups = [writings] if finding.reward in REWARDS else [[writing] for writing in writings]
    pairs = [
        [
            _mean(
                [v.value for one, v in zip(tries, verdicts, strict=True) if one.writing in group and one.right == right]
            )
            for right in (True, False)
        ]
        for group in groups
    ]
    finding.right_mean, finding.wrong_mean = max(
        pairs, key=lambda pair: -1.0 if None in pair else abs(pair[0] - pair[1])
    )


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _judge(finding: Finding, tries: list[Try], verdicts: list[Verdict]) -> list[int]:
    """Count what is misjudged; a right answer must get 1, with ``cosine_length`` more than every wrong one."""
    exact = finding.reward in ACCURACY
    missed, taken = [], []
    due = 1.0
    for index, (one, verdict) in enumerate(zip(tries, verdicts, strict=True)):
        value = verdict.value
        if one.right:
            due = 1.0 if exact or value is None else value
            if exact and value not in (1.0, None):
                missed.append(index)
        elif value is not None and value >= due:
            taken.append(index)
    finding.missed, finding.taken = len(missed), len(taken)
    if missed:
        what = f"does not give 1 to {len(missed)} of {finding.right} right answers"
        finding.faults.append(
            (what, "look at dataset_solution_column and dataset_solution_marker (grpo check-rewards shows the rows)")
        )
    if taken:
        what = f"takes {len(taken)} of {finding.wrong} wrong answers for right"
        finding.faults.append((what, f"look at {_SUSPECTS[exact]} (grpo check-rewards shows the rows)"))
    return [*missed, *taken]


def _failure(one: Try, verdict: Verdict, rows: Sequence[dict[str, Any]]) -> Failure:
    prompt = rows[one.row].get("prompt", [])
    text = str(prompt[-1]["content"]) if prompt else ""
    return Failure(text, rows[one.row]["answer"], one.text, one.right, verdict.value, verdict.reason)
