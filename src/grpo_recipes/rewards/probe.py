r"""Test whether a reward distinguishes right from wrong answers: score both and compare.

A right completion contains the reference solution in a format that the reward may read (``Reward.writings``). Wrong
completions contain the solution with a changed digit or an additional digit, the solution of another row, or nothing.
A problem with several right answers has its own wrong answers, and a few of each are tried.
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

from grpo_recipes.errors import ConfigError, Problem, collect_results, config_error
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import solution_names
from grpo_recipes.recipe.extensions import load
from grpo_recipes.recipe.registry import DEFAULT_ACCURACY, NO_ANSWER, list_reward_models, rewards
from grpo_recipes.recipe.user_code import function_source, names_read_by
from grpo_recipes.rewards.answers import is_same_answer
from grpo_recipes.rewards.child import TIME_LIMIT
from grpo_recipes.rewards.load import IsolatedReward, open_rewards
from grpo_recipes.rewards.score import NOT_CALLED, Reward, RewardFailed, RewardWrapper, call_reward, is_user_reward

if TYPE_CHECKING:
    from grpo_recipes.data.problems import Counts

TAG, TAGGED_BOX, BOX = "<answer>%s</answer>", r"<answer>\boxed{%s}</answer>", r"\boxed{%s}"
# Formats of an answer that the user's own reward may read.
USER_FORMATS = [
    "%s", TAG, BOX, TAGGED_BOX, "#### %s", "Answer: %s", "<think>\nreasoning\n</think>\n<answer>\n%s\n</answer>"
]  # fmt: skip
_ROWS_IN_ALL_FORMATS = 8  # later rows try a single format each, since the user's reward may be slow
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")
_INVALID = ("not a number", "wrong type", "wrong length")  # reasons that are always a fault of the reward
_MOST_SHOWN = 5
_MOST_RIGHT = 3  # right answers tried per problem with several
_MOST_FAILURES = 5  # timeouts or unanswered calls after which the test may end early
_QUIET_SECONDS, _LINE_SECONDS = 2.0, 5.0  # before the first progress line, and between two lines
_FIRST = 40  # completions that are scored to measure the reward's speed
_MOST_SECONDS = 10.0  # per reward
_EXAMPLE = 60  # characters of a prompt or completion in a message
_LONG = 200  # characters; a longer answer is unlikely to be repeated exactly by a completion


@dataclass(frozen=True)
class ProbeCompletion:
    """A completion made for the test of a reward, with the reward's score."""

    prompt: str
    answer: str  # the reference solution
    writing: str  # format of the answer
    completion: str
    right: bool
    value: float | None = None
    reason: str | None = None  # why it is unscored


@dataclass
class ProbeResult:
    """The result of testing a reward."""

    reward: str  # its name in the recipe
    right: int  # right completions scored
    wrong: int  # wrong completions scored
    # Mean rewards of right and wrong completions, None without scores. For a user reward, they come from the format
    # with the largest difference.
    right_mean: float | None
    wrong_mean: float | None
    no_verdict: int  # unscored completions
    # Right completions without the reward 1, and wrong completions accepted as right; None if answers are optional.
    missed: int | None = None
    taken: int | None = None
    faults: list[tuple[str, str]] = field(default_factory=list)  # each fault with its fix
    failures: list[ProbeCompletion] = field(default_factory=list)  # the first completions with a wrong score
    skipped: int = 0  # completions that were not scored, because the reward is slow
    unpaid: ProbeCompletion | None = None  # a right answer with no higher reward than wrong answers

    @property
    def distinguishes(self) -> bool:
        """Whether right and wrong answers get different rewards on average; False without scores of both."""
        if self.right_mean is None or self.wrong_mean is None:
            return False
        return not math.isclose(self.right_mean, self.wrong_mean, abs_tol=1e-9)


def read_first_rows(recipe: Recipe, most: int, fetched: Any) -> tuple[list[dict[str, Any]], "Counts"]:
    """Read the first ``most`` training problems of a recipe, without shuffling: rows with ``prompt`` and ``answer``.

    Return them, and the counts of rows that were read and dropped. ``fetched`` is a function that finds downloaded
    datasets. ``dataset_filter`` is not applied. Only a mixture is shuffled, as in training.
    """
    from datasets import disable_progress_bars

    from grpo_recipes.data.prompts import load_first_problems

    disable_progress_bars()
    return load_first_problems(_make_settings(recipe), most, fetched)


def _make_settings(recipe: Recipe) -> Any:
    """Create an object that has each recipe key as an attribute, like TRL's configs."""
    return SimpleNamespace(**{key: entry.value for key, entry in recipe.values.items()})


def probe_rewards(
    recipe: Recipe, rows: list[dict[str, Any]], left_out: Mapping[str, str] = MappingProxyType({})
) -> list[ProbeResult]:
    """Test each reward of a recipe, loaded as in a trainer, with right and wrong completions of these rows.

    Return a result for each different reward, except reward models, which are not tested. ``left_out`` has the
    columns that rewards do not get, with the reasons. Raise ConfigError if rewards can't be loaded or called, with
    the problems of all of them.
    """
    models = list_reward_models(recipe.rewards.funcs)
    names = [name for name in dict.fromkeys(recipe.rewards.funcs) if name not in models]
    try:
        return _probe_together(recipe, names, rows, left_out)
    except ConfigError:
        if len(names) == 1:
            raise
    # A reward that fails must not hide the faults of the others.
    results_by_reward = collect_results(names, lambda name: _probe_together(recipe, [name], rows, left_out))
    return [result for results in results_by_reward for result in results]


def _probe_together(
    recipe: Recipe, names: list[str], rows: list[dict[str, Any]], left_out: Mapping[str, str]
) -> list[ProbeResult]:
    """Load these rewards as in a trainer, test each of them, and return the results in order.

    Raise ConfigError if any of the rewards fails.
    """
    settings = _make_settings(recipe)
    settings.reward_funcs = names
    strict, most_missing = recipe.rewards.answer_matching == "strict", recipe.rewards.max_no_verdict
    variables = recipe.rewards.environment
    with (
        convert_reward_errors(recipe),
        tempfile.TemporaryDirectory() as folder,
        open_rewards(settings, Path(folder), left_out) as rewards,
    ):
        pairs = zip(names, rewards, strict=True)
        return [probe_reward(name, reward, rows, strict, most_missing, variables) for name, reward in pairs]


@contextlib.contextmanager
def convert_reward_errors(recipe: Recipe) -> Iterator[None]:
    """Turn a RewardFailed raised in the ``with`` block into a ConfigError at the recipe's key reward_funcs.

    Print the traceback first if the user's code raised the error.
    """
    try:
        yield
    except RewardFailed as error:
        fix = "correct it, or set another reward in reward_funcs"
        if NO_ANSWER in str(error):
            fix = _describe_server_fix(recipe.rewards.environment)
        elif not isinstance(error.__cause__, ConfigError | None):  # raised by the user's code
            traceback.print_exception(error.__cause__)
        raise config_error(recipe.location("reward_funcs"), str(error), fix) from error


def find_problems(recipe: Recipe, rows: list[dict[str, Any]], findings: list[ProbeResult]) -> list[Problem]:
    """Return the problems that ``probe_rewards`` found; ``findings`` are its results for these rows.

    There is a problem for each fault of a reward, if no reward distinguishes right from wrong answers, if the prompt
    requests another format than the rewards read, and if most reference solutions are too long for an answer.
    """
    where = recipe.location("reward_funcs")
    problems = [
        Problem(where, f"reward '{finding.reward}' {fault}", fix)
        for finding in findings
        for fault, fix in finding.faults
    ]
    if len(findings) > 1:
        problems += filter(None, (_find_unpaid_problem(recipe, finding) for finding in findings))
    if (
        not problems
        and any(finding.right for finding in findings)
        and not list_reward_models(recipe.rewards.funcs)
        and not any(finding.distinguishes for finding in findings)
    ):
        fault = "no reward distinguishes right from wrong answers: both get the same on average"
        if example := next(filter(None, map(describe_unpaid, findings)), ""):
            fault += f", e.g. {example.rpartition(': ')[2]}"
        fix = f"add a reward that does, e.g. {DEFAULT_ACCURACY}, or correct your own"
        if any(is_user_reward(finding.reward) for finding in findings):
            formats = ", ".join(" ".join((writing % 42).split()) for writing in USER_FORMATS)
            fix += f", which must read one of these formats: {formats}"
        problems.append(Problem(where, fault, fix))
    built_in = rewards()
    entries = [built_in[name] for name in recipe.rewards.funcs if name in built_in]
    if tag_rewards := [entry.name for entry in entries if entry.tagged]:
        prompt_text = "\n".join([recipe.model.system_prompt or "", *(str(row["prompt"]) for row in rows[:_MOST_SHOWN])])
        if r"\boxed" in prompt_text and "<answer>" not in prompt_text:
            fault = rf"the prompt asks for \boxed{{}}, but reward '{tag_rewards[0]}' reads only <answer>…</answer>"
            fix = r"set reward_funcs: [math_verify], which reads both, or ask for <answer>…</answer> in system_prompt"
            problems.append(Problem(where, fault, fix))
    # A solution that includes its reasoning equals itself, but no completion ever equals it.
    compared = any(entry.reads_answer for entry in entries)
    answers = [row.get("answer", "") for row in rows if _list_answers(row) is None]
    long = [answer for answer in answers if "\n" in answer or len(answer) > _LONG]
    if compared and len(long) * 2 > len(rows):
        example = " ".join(long[0].split())[:60]
        fault = f"{len(long)} of {len(rows)} reference solutions are not short answers, e.g. '{example}…'"
        marker = "'####'" if "####" in long[0] else "the text before the answer"
        fix = f"set dataset_solution_marker: {marker}, or set dataset_solution_column to the final answer's column"
        problems.append(Problem(recipe.location("dataset_solution_column"), fault, fix))
    return problems


def _find_unpaid_problem(recipe: Recipe, finding: ProbeResult) -> Problem | None:
    """Return a problem if a user reward gives a right answer no more than wrong answers, else None.

    Return None if the code of a user's reward does not use the reference solution, or if the reward already has faults.
    """
    if finding.unpaid is None or finding.faults:
        return None
    function = function_source(finding.reward)
    columns = [recipe.data.solution_column, recipe.evaluation.dataset_solution_column]
    names = {"answer", *solution_names(columns, recipe.data.mixture)}
    if function is None or not names & names_read_by(function):
        return None
    fix = "correct it: it uses the reference solution, so it must read one of these formats: "
    fix += ", ".join(" ".join((writing % 42).split()) for writing in USER_FORMATS)
    return Problem(recipe.location("reward_funcs"), f"reward '{finding.reward}' {describe_unpaid(finding)}", fix)


def probe_reward(
    name: str,
    reward: Reward,
    rows: Sequence[dict[str, Any]],
    strict: bool = False,
    most_missing: float = 0.5,
    variables: Collection[str] = (),
) -> ProbeResult:
    """Score right and wrong completions for ``rows`` with a reward, and return the means, wrong scores and faults.

    ``name`` is the reward's name in the recipe. ``rows`` have ``prompt`` (chat messages), ``answer`` and the other
    columns. With ``strict``, answers are compared as text. Up to a fraction of ``most_missing``, unscored completions
    are not a fault (``reward_max_no_verdict``). ``variables`` are the names in ``reward_environment``, for advice.
    """
    entry = rewards().get(name)
    is_built_in = entry is not None
    formats = USER_FORMATS
    if entry is not None:
        formats = list(entry.writings) or [TAG, *(() if strict else [TAGGED_BOX])]
    prepared = _prepare_completions(rows, formats, len(rows) if is_built_in else _ROWS_IN_ALL_FORMATS)
    tries = _score_completions(reward, prepared, most_missing)
    missing = [completion for completion in tries if completion.value is None]
    format_groups = [formats] if is_built_in else [[answer_format] for answer_format in formats]
    _, right_mean, wrong_mean = max((_compare_means(tries, group) for group in format_groups), key=itemgetter(0))
    right = sum(completion.right for completion in tries)
    result = ProbeResult(
        name, right, len(tries) - right, right_mean, wrong_mean, len(missing), skipped=len(prepared) - len(tries)
    )
    result.unpaid = _find_unpaid(tries) if not is_built_in and not result.distinguishes else None
    wrongly_scored = (
        _add_score_faults(result, tries, entry.accuracy) if entry is not None and entry.reads_answer else []
    )
    invalid = [completion for completion in missing if (completion.reason or "").startswith(_INVALID)]
    unanswered = [completion.reason for completion in missing if (completion.reason or "").startswith(NO_ANSWER)]
    if len(unanswered) > most_missing * sum(completion.reason != NOT_CALLED for completion in tries):
        result.faults.append((f"got {unanswered[0]}", _describe_server_fix(variables)))
        return result
    if isinstance(reward, IsolatedReward) and any(completion.reason == NOT_CALLED for completion in missing):
        scores = list(reward.pool.scores.values())
        late = f"{sum(score.reason == TIME_LIMIT for score in scores)} of {len(scores)} completions"
        fault = f"exceeds reward_timeout ({reward.timeout:g} s) on {late}; the others were not tried"
        result.faults.append((fault, "make it faster, or raise reward_timeout"))
        result.failures = [completion for completion in missing if completion.reason != NOT_CALLED][:_MOST_SHOWN]
        return result
    if invalid or len(missing) > most_missing * len(tries):
        reason = describe_unscored(name, (invalid or missing)[0].reason)
        fault = f"leaves {len(missing)} of {len(tries)} completions unscored ({reason})"
        result.faults.append((fault, "check the reference solutions" if is_built_in else "correct it"))
    unscored = [completion for completion in missing if completion.reason or result.faults]
    result.failures = [*wrongly_scored, *unscored][:_MOST_SHOWN]
    return result


def _score_completions(
    reward: Reward, prepared: Sequence[tuple[dict[str, Any], ProbeCompletion]], most_missing: float
) -> list[ProbeCompletion]:
    """Score 40 completions, then 40 more or as many as fit into 10 seconds in all; return the scored completions.

    If the reward gave up during the first 40, because more than the fraction ``most_missing`` of its calls failed, no
    more are scored.
    """
    start = time.monotonic()
    first = _call_on_completions(reward, prepared[:_FIRST], most_missing)
    elapsed, remaining = time.monotonic() - start, len(prepared) - len(first)
    if any(completion.reason == NOT_CALLED for completion in first):
        return first
    if first and remaining:  # the slowest call is not counted, since the first call may import modules
        slowest = max((score.seconds for score in getattr(reward, "scores", ())), default=0.0)
        seconds_per_call = max(elapsed - slowest, 1e-6) / len(first)
        remaining = min(remaining, max(_FIRST, int((_MOST_SECONDS - elapsed) / seconds_per_call)))
    return first + _call_on_completions(reward, prepared[len(first) : len(first) + remaining], most_missing)


def _call_on_completions(
    reward: Reward, prepared: Sequence[tuple[dict[str, Any], ProbeCompletion]], most_missing: float
) -> list[ProbeCompletion]:
    """Call a reward as TRL does, and return the completions with their scores.

    Without completions, return []. Each completion has a single token id, since only its text matters. For a slow
    reward in a child process, print the progress, and give up if more than the fraction ``most_missing`` of its calls
    fail: later calls stay unscored.
    """
    if not prepared:
        return []
    columns = {column: [row[column] for row, _ in prepared] for column in prepared[0][0]}
    columns |= {"prompts": columns.pop("prompt", []), "completion_ids": [[0]] * len(prepared)}
    columns["completions"] = [[{"role": "assistant", "content": completion.completion}] for _, completion in prepared]
    if isinstance(reward, RewardWrapper):
        if isinstance(reward, IsolatedReward):
            reward.watch_calls(_make_progress_watch(reward, most_missing))
        reward(**columns)
        scores = reward.scores
    else:
        scores = call_reward(reward, columns, len(prepared))
    pairs = zip(prepared, scores, strict=True)
    return [replace(completion, value=score.value, reason=score.reason) for (_, completion), score in pairs]


def _find_unpaid(tries: Sequence[ProbeCompletion]) -> ProbeCompletion | None:
    """Return the first right completion with at most the highest reward of the wrong completions, or None."""
    scored = [(completion, completion.value) for completion in tries if completion.value is not None]
    best_wrong = max((value for completion, value in scored if not completion.right), default=None)
    if best_wrong is None:
        return None
    return next((completion for completion, value in scored if completion.right and value <= best_wrong), None)


def describe_unpaid(result: ProbeResult) -> str:
    """Return a text about a user reward with the same mean for right and wrong answers, with an example.

    For example "gives right answers 0.5, like wrong answers: '18' to '9+9=' gets 0.5". The caller writes the name of
    the reward before it. Return "" for every other reward, including all built-in rewards.
    """
    if result.unpaid is None:
        return ""
    example = " ".join(result.unpaid.completion.split())[:_EXAMPLE]
    prompt = " ".join(result.unpaid.prompt.split())[:_EXAMPLE]
    fault = f"gives right answers {result.right_mean:.3g}, like wrong answers"
    return f"{fault}: '{example}' to '{prompt}' gets {result.unpaid.value:.3g}"


def _describe_server_fix(variables: Collection[str]) -> str:
    """Return the advice for a reward if its server does not answer.

    It lists the environment variables in ``variables`` that contain a URL, except proxies.
    """
    addresses = [name for name in variables if "://" in os.environ.get(name, "") and "proxy" not in name.lower()]
    where = f" in {', '.join(addresses)}" if addresses else ""
    return f"start the server that it calls, or correct its address{where}"


def _make_progress_watch(reward: IsolatedReward, most_missing: float) -> Callable[[], bool]:
    """Return a function for ``watch_calls`` that prints the progress of a slow reward every 5 seconds to stderr.

    The function returns True if at least 5 calls, and more than the fraction ``most_missing``, have failed. Then the
    test gives up.
    """
    pool, start = reward.pool, time.monotonic()
    last_line = start + _QUIET_SECONDS - _LINE_SECONDS

    def print_progress() -> bool:
        """Print a line if the last line is 5 seconds old; return whether too many calls have failed."""
        nonlocal last_line
        scores, now = list(pool.scores.values()), time.monotonic()
        late = sum(score.reason == TIME_LIMIT for score in scores)
        if now - last_line >= _LINE_SECONDS:
            last_line = now
            progress = f"{len(scores)} of {pool.row_count} completions in {now - start:.0f} s"
            late_text = f", {late} over reward_timeout" if late else ""
            print(f"grpo: {reward.spec}: {progress}{late_text}", file=sys.stderr, flush=True)
        failed = max(late, sum((score.reason or "").startswith(NO_ANSWER) for score in scores))
        return failed >= _MOST_FAILURES and failed > most_missing * len(scores)

    return print_progress


def describe_unscored(name: str, reason: str | None) -> str:
    """Return ``reason``, or if it is None, the likely reason why the reward ``name`` returned None."""
    return reason or ("it returned None" if name not in rewards() else "it cannot read the reference solution")


def make_wrong_answers(answer: str, all_answers: Sequence[str]) -> list[str]:
    """Return wrong answers for a reference solution: with a changed digit, an additional digit, another answer, and "".

    The other answer is the first in ``all_answers`` that differs. Only answers that are really wrong are returned.
    """
    number = _LAST_NUMBER.search(answer)
    wrong = [f"{answer}1"]
    if number:
        end = number.end()
        changed = str((int(answer[end - 1]) + 1) % 10)
        wrong = [answer[: end - 1] + changed + answer[end:], f"{answer[:end]}1{answer[end:]}"]
    wrong += [other for other in all_answers if not is_same_answer(other, answer) and other != answer][:1]
    return [text for text in wrong if not is_same_answer(text, answer)] + [""]


def _prepare_completions(
    rows: Sequence[dict[str, Any]], formats: Sequence[str], rows_in_all: int
) -> list[tuple[dict[str, Any], ProbeCompletion]]:
    """Write right and wrong completions for the rows, without scores; return pairs of row and completion.

    The first ``rows_in_all`` rows get completions in all ``formats``, later rows in one format each.
    """
    answers, prepared = [row.get("answer", "") for row in rows], []
    for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        prompt = str(row["prompt"][-1]["content"]) if row.get("prompt") else ""
        listed = _list_answers(row)
        right = [answer] if answer else []
        right, wrong = listed or (right, make_wrong_answers(answer, answers[index + 1 :] + answers[:index]))
        for writing in formats if index < rows_in_all else [formats[index % len(formats)]]:
            prepared += [
                (row, ProbeCompletion(prompt, answer, writing, writing % text, True)) for text in right[:_MOST_RIGHT]
            ]
            prepared += [(row, ProbeCompletion(prompt, answer, writing, writing % text, False)) for text in wrong]
    return prepared


def _list_answers(row: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """Return the right and the wrong answers of a problem with several right answers. None for other problems.

    A reward for such problems registers the function that lists them (``Reward.answers``).
    """
    functions = (load(entry.answers) for entry in rewards().values() if entry.answers)
    return next((answers for function in functions if (answers := function(row)) is not None), None)


def _compare_means(tries: list[ProbeCompletion], formats: Sequence[str]) -> tuple[float, float | None, float | None]:
    """Return (|right - wrong|, right, wrong), where right and wrong are the mean rewards of such completions.

    Only completions in these formats count. A mean without scores is None, and the difference is then -1.
    """
    scored = [
        (completion.right, completion.value)
        for completion in tries
        if completion.writing in formats and completion.value is not None
    ]
    right, wrong = ([value for is_right, value in scored if is_right is side] for side in (True, False))
    difference = abs(fmean(right) - fmean(wrong)) if right and wrong else -1.0
    return difference, fmean(right) if right else None, fmean(wrong) if wrong else None


def _add_score_faults(result: ProbeResult, tries: list[ProbeCompletion], exact: bool) -> list[ProbeCompletion]:
    """Count right completions with too low a score and wrong ones with too high a score; return these completions.

    The counts, and a fault for each kind that occurs, are stored in ``result``. Unscored completions do not count.

    With ``exact``, a right answer must get 1. Otherwise each right answer must get more than every wrong answer.
    """
    right = [
        (completion, completion.value) for completion in tries if completion.right and completion.value is not None
    ]
    threshold = 1.0 if exact else min((value for _, value in right), default=1.0)
    missed = [completion for completion, value in right if value != 1.0] if exact else []
    wrong = [completion for completion in tries if not completion.right]
    accepted = [completion for completion in wrong if completion.value is not None and completion.value >= threshold]
    result.missed, result.taken = len(missed), len(accepted)
    rows = "(grpo check-rewards shows the rows)"
    if missed:
        fault = f"does not give 1 to {len(missed)} of {result.right} right answers"
        result.faults.append((fault, f"check dataset_solution_column and dataset_solution_marker {rows}"))
    if accepted:
        fault = f"accepts {len(accepted)} of {result.wrong} wrong answers as right"
        suspects = "the reference solutions" if exact else "the cosine_* keys"
        result.faults.append((fault, f"check {suspects} {rows}"))
    return [*missed, *accepted]
