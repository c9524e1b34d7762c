r"""Whether a reward tells right answers from wrong ones: it is shown both, and its scores are compared.

A right completion contains the reference solution in a format that the reward may read (``Reward.writings``). Wrong
completions contain it with a digit changed, with one digit more, another row's solution, or nothing. A problem with
several right answers has its own wrong answers, and a few of each are tried.
"""

import contextlib
import math
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_recipes.errors import ConfigError, Problem, collect, config_error
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import solution_names
from grpo_recipes.recipe.extensions import load
from grpo_recipes.recipe.registry import DEFAULT_ACCURACY, NO_ANSWER, rewards
from grpo_recipes.recipe.user_code import function_source, names_read_by
from grpo_recipes.rewards.answers import is_same_answer
from grpo_recipes.rewards.load import IsolatedReward, lent_rewards
from grpo_recipes.rewards.pool import TIME_LIMIT
from grpo_recipes.rewards.score import NOT_CALLED, Reward, RewardFailed, RewardWrapper, call_reward, is_user_reward

if TYPE_CHECKING:
    from grpo_recipes.data.problems import Counts

TAG, TAGGED_BOX, BOX = "<answer>%s</answer>", r"<answer>\boxed{%s}</answer>", r"\boxed{%s}"
# Formats of an answer that the user's own reward may read.
USER_FORMATS = [
    "%s", TAG, BOX, TAGGED_BOX, "#### %s", "Answer: %s", "<think>\nreasoning\n</think>\n<answer>\n%s\n</answer>"
]  # fmt: skip
_ROWS_IN_ALL_WRITINGS = 8  # later rows try one format each: the user's reward may be slow
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")
_UNFIT = ("not a number", "wrong type", "wrong length")  # reasons that no completion excuses
_SHOWN = 5
_MOST_RIGHT = 3  # right answers tried of a problem that has several
_MOST_FAILURES = 5  # time-outs or unanswered calls; more than the accepted share, and the rest is not called
_QUIET_SECONDS, _LINE_SECONDS = 2.0, 5.0  # before the first line of progress, and between two
_FIRST = 40  # completions after which a reward is known to be slow
_MOST_SECONDS = 10.0  # for one reward
_EXAMPLE = 60  # characters of a prompt or completion in a message
_LONG = 200  # characters; an answer that completions can repeat is shorter


@dataclass(frozen=True)
class ProbeCompletion:
    """One completion shown to a reward, and its score."""

    prompt: str
    answer: str  # the reference solution
    writing: str  # how the answer is written
    completion: str
    right: bool
    value: float | None = None
    reason: str | None = None  # why it is unscored


@dataclass
class ProbeResult:
    """The scores of a reward for the completions it was shown."""

    reward: str  # its name in the recipe
    right: int  # right completions shown
    wrong: int  # wrong completions shown
    # Means of what right and wrong ones got, None without any score. For a reward of the user's, both are of the way
    # of writing that it tells apart best.
    right_mean: float | None
    wrong_mean: float | None
    no_verdict: int  # unscored completions
    # Right ones that did not get 1, and wrong ones taken for right; None for a reward that need not go by the answer.
    missed: int | None = None
    taken: int | None = None
    faults: list[tuple[str, str]] = field(default_factory=list)  # what is wrong, a line each, with the fix
    failures: list[ProbeCompletion] = field(default_factory=list)  # the first completions it scored wrongly
    skipped: int = 0  # completions that were not tried, because the reward is slow
    unpaid: ProbeCompletion | None = None  # a right answer that the user's reward pays no better than wrong ones

    @property
    def tells_apart(self) -> bool:
        """Return whether right and wrong answers get different rewards on average."""
        means = (self.right_mean, self.wrong_mean)
        return None not in means and not math.isclose(*means, abs_tol=1e-9)


def sample_rows(recipe: Recipe, most: int, fetched: Any) -> tuple[list[dict[str, Any]], "Counts"]:
    """Return the first ``most`` rows a recipe trains on, before any shuffle; ``fetched`` looks up fetched datasets."""
    from datasets import disable_progress_bars

    from grpo_recipes.data.prompts import first_problems

    disable_progress_bars()
    return first_problems(_settings(recipe), most, fetched)


def _settings(recipe: Recipe) -> Any:
    """Return the keys as attributes, as TRL's configs have them."""
    return SimpleNamespace(**{key: entry.value for key, entry in recipe.values.items()})


def probe_rewards(
    recipe: Recipe, rows: list[dict[str, Any]], left_out: Mapping[str, str] = MappingProxyType({})
) -> list[ProbeResult]:
    """Show every reward of a recipe, loaded as a trainer loads it, right and wrong completions of these rows.

    ``left_out`` has the columns that rewards do not get, and why.
    """
    names = list(dict.fromkeys(recipe["reward_funcs"]))
    try:
        return _probe_together(recipe, names, rows, left_out)
    except ConfigError:
        if len(names) == 1:
            raise
    # One that cannot be loaded or called must not hide what is wrong with the others.
    found = collect(names, lambda name: _probe_together(recipe, [name], rows, left_out))
    return [result for results in found for result in results]


def _probe_together(
    recipe: Recipe, names: list[str], rows: list[dict[str, Any]], left_out: Mapping[str, str]
) -> list[ProbeResult]:
    settings = _settings(recipe)
    settings.reward_funcs = names
    strict, most_missing = recipe["answer_matching"] == "strict", recipe["reward_max_no_verdict"]
    handed = recipe["reward_environment"]
    with (
        reward_errors_as_config_errors(recipe),
        tempfile.TemporaryDirectory() as folder,
        lent_rewards(settings, Path(folder), left_out) as rewards,
    ):
        pairs = zip(names, rewards, strict=True)
        return [probe(name, reward, rows, strict, most_missing, handed) for name, reward in pairs]


@contextlib.contextmanager
def reward_errors_as_config_errors(recipe: Recipe) -> Iterator[None]:
    """Raise what a reward that cannot be loaded or called says as a ConfigError; show where its own code raised."""
    try:
        yield
    except RewardFailed as error:
        fix = "correct it, or name another in reward_funcs"
        if NO_ANSWER in str(error):
            fix = _server_fix(recipe["reward_environment"])
        elif not isinstance(error.__cause__, ConfigError | None):  # raised by the user's own code: show where
            traceback.print_exception(error.__cause__)
        raise config_error(recipe.location("reward_funcs"), str(error), fix) from error


def find_problems(recipe: Recipe, rows: list[dict[str, Any]], findings: list[ProbeResult]) -> list[Problem]:
    """Return what is wrong with the rewards, one line a fault, and with solutions that no completion can equal."""
    where = recipe.location("reward_funcs")
    faults = [(finding.reward, *fault) for finding in findings for fault in finding.faults]
    found = [Problem(where, f"reward '{reward}' {what}", fix) for reward, what, fix in faults]
    if len(findings) > 1:
        found += [_unpaid_problem(recipe, finding) for finding in findings if _reads_solution(recipe, finding)]
    if not found and findings and not any(finding.tells_apart for finding in findings):
        what = "no reward tells right answers from wrong ones: all get the same on average"
        if example := next(filter(None, map(describe_unpaid, findings)), ""):
            what += f", e.g. {example.rpartition(': ')[2]}"
        fix = f"add one that does, e.g. {DEFAULT_ACCURACY}, or correct your own"
        if any(is_user_reward(finding.reward) for finding in findings):
            formats = ", ".join(" ".join((writing % 42).split()) for writing in USER_FORMATS)
            fix += f", which must read one of these formats: {formats}"
        found.append(Problem(where, what, fix))
    known = rewards()
    entries = [known[name] for name in recipe["reward_funcs"] if name in known]
    if unread := [entry.name for entry in entries if entry.tagged]:
        asked = "\n".join([recipe["system_prompt"] or "", *(str(row["prompt"]) for row in rows[:_SHOWN])])
        if r"\boxed" in asked and "<answer>" not in asked:
            what = rf"the prompt asks for \boxed{{}}, reward '{unread[0]}' reads <answer>…</answer> alone"
            fix = r"write reward_funcs: [math_verify], which reads both, or ask for <answer>…</answer> in system_prompt"
            found.append(Problem(where, what, fix))
    # A solution with its reasoning equals itself, and no completion ever equals it.
    compared = any(entry.reads_answer for entry in entries)
    answers = [row["answer"] for row in rows if _listed_answers(row) is None]
    long = [answer for answer in answers if "\n" in answer or len(answer) > _LONG]
    if compared and len(long) * 2 > len(rows):
        example = " ".join(long[0].split())[:60]
        what = f"{len(long)} of {len(rows)} reference solutions are not short answers, e.g. '{example}…'"
        marker = "'####'" if "####" in long[0] else "the text before the answer"
        fix = f"add dataset_solution_marker: {marker}, or name the column of the final answer"
        found.append(Problem(recipe.location("dataset_solution_column"), what, fix))
    return found


def _reads_solution(recipe: Recipe, finding: ProbeResult) -> bool:
    """Return whether a reward of the user's takes the reference solution, and pays right answers like wrong ones."""
    if finding.unpaid is None or finding.faults:
        return False
    function = function_source(finding.reward)
    columns = [recipe["dataset_solution_column"], recipe["eval_dataset_solution_column"]]
    names = {"answer", *solution_names(columns, recipe["dataset_mixture"])}
    return function is not None and bool(names & names_read_by(function))


def _unpaid_problem(recipe: Recipe, finding: ProbeResult) -> Problem:
    fix = "correct it; it takes the reference solution and must read one of these formats: "
    fix += ", ".join(" ".join((writing % 42).split()) for writing in USER_FORMATS)
    return Problem(recipe.location("reward_funcs"), f"reward '{finding.reward}' {describe_unpaid(finding)}", fix)


def probe(
    name: str,
    reward: Reward,
    rows: Sequence[dict[str, Any]],
    strict: bool = False,
    most_missing: float = 0.5,
    handed: Collection[str] = (),
) -> ProbeResult:
    """Show a reward of ours, or of the user's as the recipe names it, right and wrong completions.

    ``rows`` have ``prompt`` (chat messages), ``answer`` and what other columns there are; answers are compared as text
    where ``strict``. Accept the share ``most_missing`` of unscored completions (``reward_max_no_verdict``); ``handed``
    are the variables of ``reward_environment``.
    """
    entry = rewards().get(name)
    ours = entry is not None
    writings = USER_FORMATS
    if entry is not None:
        writings = list(entry.writings) or [TAG, *(() if strict else [TAGGED_BOX])]
    shown = _tries(rows, writings, len(rows) if ours else _ROWS_IN_ALL_WRITINGS)
    tries = _scored(reward, shown, most_missing)
    missing = [one for one in tries if one.value is None]
    groups = [writings] if ours else [[writing] for writing in writings]
    _, *means = max((_means(tries, group) for group in groups), key=itemgetter(0))
    right = sum(one.right for one in tries)
    finding = ProbeResult(name, right, len(tries) - right, *means, len(missing), skipped=len(shown) - len(tries))
    finding.unpaid = _unpaid(tries) if not ours and not finding.tells_apart else None
    bad = _judge(finding, tries, entry.accuracy) if entry is not None and entry.reads_answer else []
    unfit = [one for one in missing if (one.reason or "").startswith(_UNFIT)]
    silent = [one.reason for one in missing if one.reason and one.reason.startswith(NO_ANSWER)]
    if len(silent) > most_missing * sum(one.reason != NOT_CALLED for one in tries):
        finding.faults.append((f"got {silent[0]}", _server_fix(handed)))
        return finding
    if isinstance(reward, IsolatedReward) and any(one.reason == NOT_CALLED for one in missing):
        done = list(reward.pool.scores.values())
        late = f"{sum(score.reason == TIME_LIMIT for score in done)} of {len(done)} completions"
        what = f"is over reward_timeout ({reward.timeout:g} s) on {late}; the rest was not tried"
        finding.faults.append((what, "make it faster, or raise reward_timeout"))
        finding.failures = [one for one in missing if one.reason != NOT_CALLED][:_SHOWN]
        return finding
    if unfit or len(missing) > most_missing * len(tries):
        reason = unscored_reason(name, (unfit or missing)[0].reason)
        what = f"leaves {len(missing)} of {len(tries)} completions unscored ({reason})"
        finding.faults.append((what, "look at the reference solutions" if ours else "correct it"))
    finding.failures = [*bad, *(one for one in missing if one.reason or finding.faults)][:_SHOWN]
    return finding


def _scored(
    reward: Reward, shown: Sequence[tuple[dict[str, Any], ProbeCompletion]], most_missing: float
) -> list[ProbeCompletion]:
    """Score completions, first a few: a slow reward is shown only as many more as it scores in ``_MOST_SECONDS``."""
    began = time.monotonic()
    first = _call(reward, shown[:_FIRST], most_missing)
    spent, more = time.monotonic() - began, len(shown) - len(first)
    if any(one.reason == NOT_CALLED for one in first):
        return first
    if first and more:  # the first call of all may import something, so its time is no measure
        longest = max((score.seconds for score in getattr(reward, "scores", ())), default=0.0)
        each = max(spent - longest, 1e-6) / len(first)
        more = min(more, max(_FIRST, int((_MOST_SECONDS - spent) / each)))
    return first + _call(reward, shown[len(first) : len(first) + more], most_missing)


def _call(
    reward: Reward, shown: Sequence[tuple[dict[str, Any], ProbeCompletion]], most_missing: float
) -> list[ProbeCompletion]:
    """Call a reward with the arguments that TRL gives. All completions count as one token long: their text decides."""
    if not shown:
        return []
    columns = {column: [row[column] for row, _ in shown] for column in shown[0][0]}
    columns |= {"prompts": columns.pop("prompt", []), "completion_ids": [[0]] * len(shown)}
    columns["completions"] = [[{"role": "assistant", "content": one.completion}] for _, one in shown]
    if isinstance(reward, RewardWrapper):
        if isinstance(reward, IsolatedReward):
            reward.watch = _watch(reward, most_missing)
        reward(**columns)
        scores = reward.scores
    else:
        scores = call_reward(reward, columns, len(shown))
    pairs = zip(shown, scores, strict=True)
    return [replace(one, value=score.value, reason=score.reason) for (_, one), score in pairs]


def _unpaid(tries: Sequence[ProbeCompletion]) -> ProbeCompletion | None:
    """Return the first right answer that gets no more than the best wrong one."""
    best = max((one.value for one in tries if not one.right and one.value is not None), default=None)
    paid = [one for one in tries if one.right and one.value is not None]
    return next((one for one in paid if best is not None and one.value is not None and one.value <= best), None)


def describe_unpaid(result: ProbeResult) -> str:
    """Return what a message says after the name of a reward that pays right answers like wrong ones, with an example.

    The text is empty for other rewards.
    """
    if result.unpaid is None:
        return ""
    example = " ".join(result.unpaid.completion.split())[:_EXAMPLE]
    prompt = " ".join(result.unpaid.prompt.split())[:_EXAMPLE]
    paid = f"gives right answers {result.right_mean:.3g}, like wrong ones"
    return f"{paid}: '{example}' to '{prompt}' gets {result.unpaid.value:.3g}"


def _server_fix(handed: Collection[str]) -> str:
    """Return what to do where a reward's server does not answer; its address is one of the variables ``handed``."""
    addresses = [name for name in handed if "://" in os.environ.get(name, "") and "proxy" not in name.lower()]
    where = f" in {', '.join(addresses)}" if addresses else ""
    return f"start the server that it asks, or correct its address{where}"


def _watch(reward: IsolatedReward, most_missing: float) -> Callable[[], bool]:
    """Return what prints how far a slow reward is, and whether too many of its calls failed alike to go on."""
    pool, began = reward.pool, time.monotonic()
    said = began + _QUIET_SECONDS - _LINE_SECONDS

    def look() -> bool:
        """Print a line if one is due; return whether to give up."""
        nonlocal said
        done, now = list(pool.scores.values()), time.monotonic()
        late = sum(score.reason == TIME_LIMIT for score in done)
        if now - said >= _LINE_SECONDS:
            said, far = now, f"{len(done)} of {pool.asked} completions in {now - began:.0f} s"
            over = f", {late} over reward_timeout" if late else ""
            print(f"grpo: {reward.spec}: {far}{over}", file=sys.stderr, flush=True)
        failed = max(late, sum((score.reason or "").startswith(NO_ANSWER) for score in done))
        return failed >= _MOST_FAILURES and failed > most_missing * len(done)

    return look


def unscored_reason(name: str, reason: str | None) -> str:
    """Return why a completion is unscored, for a person."""
    return reason or ("it returned None" if name not in rewards() else "it cannot read the reference solution")


def wrong_answers(answer: str, others: Sequence[str]) -> list[str]:
    """Return wrong answers near a reference solution; the first that differs of those of ``others`` is one."""
    number = _LAST_NUMBER.search(answer)
    wrong = [f"{answer}1"]
    if number:
        end = number.end()
        changed = str((int(answer[end - 1]) + 1) % 10)
        wrong = [answer[: end - 1] + changed + answer[end:], f"{answer[:end]}1{answer[end:]}"]
    wrong += [other for other in others if not is_same_answer(other, answer) and other != answer][:1]
    return [text for text in wrong if not is_same_answer(text, answer)] + [""]


def _tries(
    rows: Sequence[dict[str, Any]], writings: Sequence[str], rows_in_all: int
) -> list[tuple[dict[str, Any], ProbeCompletion]]:
    """Return the completions to show, each with its row: ``rows_in_all`` rows in all writings, later rows in one."""
    answers, shown = [row["answer"] for row in rows], []
    for place, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        prompt = str(row["prompt"][-1]["content"]) if row.get("prompt") else ""
        listed = _listed_answers(row)
        right, wrong = listed or ([answer], wrong_answers(answer, answers[place + 1 :] + answers[:place]))
        for writing in writings if place < rows_in_all else [writings[place % len(writings)]]:
            shown += [
                (row, ProbeCompletion(prompt, answer, writing, writing % text, True)) for text in right[:_MOST_RIGHT]
            ]
            shown += [(row, ProbeCompletion(prompt, answer, writing, writing % text, False)) for text in wrong]
    return shown


def _listed_answers(row: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """Return the right and the wrong answers of a problem with several right ones; None for other problems."""
    functions = (load(entry.answers) for entry in rewards().values() if entry.answers)
    return next((answers for function in functions if (answers := function(row)) is not None), None)


def _means(tries: list[ProbeCompletion], writings: Sequence[str]) -> tuple[float, float | None, float | None]:
    """Return how far the means of right and wrong ones in these writings are apart, and both."""
    known = [(one.right, one.value) for one in tries if one.writing in writings and one.value is not None]
    right, wrong = ([value for is_right, value in known if is_right is side] for side in (True, False))
    apart = abs(fmean(right) - fmean(wrong)) if right and wrong else -1.0
    return apart, fmean(right) if right else None, fmean(wrong) if wrong else None


def _judge(finding: ProbeResult, tries: list[ProbeCompletion], exact: bool) -> list[ProbeCompletion]:
    """Count wrong scores; a right answer must get 1 if ``exact``, otherwise more than every wrong one."""
    right = [(one, one.value) for one in tries if one.right and one.value is not None]
    due = 1.0 if exact else min((value for _, value in right), default=1.0)
    missed = [one for one, value in right if value != 1.0] if exact else []
    taken = [one for one in tries if not one.right and one.value is not None and one.value >= due]
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
