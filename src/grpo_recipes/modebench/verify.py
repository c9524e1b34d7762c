r"""Whether a completion answers a ModeBench problem, with which right answer (its mode), and the scores of many.

The answer is the last ``\boxed{...}`` whose braces match; without one, a completion that is a single short line.
Nothing of a completion is executed, and judging one takes time bounded by its length.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice, product
from typing import Any

from grpo_recipes.modebench import countdown, graph_coloring
from grpo_recipes.stats import mean_with_interval

Scores = dict[str, Any]
_BOX = r"\boxed{"
_LONGEST_LINE = 160  # characters
_BEFORE_ANSWER = re.compile(r"\A(?:(?:the )?(?:final )?answer(?: is)?)? ?[:=]? ?", re.IGNORECASE)
_WRITTEN_OTHERWISE = {
    r"\times": "*", "\N{MULTIPLICATION SIGN}": "*", r"\cdot": "*", "\N{MIDDLE DOT}": "*",
    r"\div": "/", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-",
}  # fmt: skip


def mode_of(text: str, answer: str) -> str | None:
    """Return the mode that a completion answers with, None where it is wrong; ``answer`` is the problem as JSON.

    Raise ValueError where ``answer`` is not a problem of ModeBench.
    """
    problem, given = problem_of(answer), answer_in(text)
    if given is None:
        return None
    if problem["task"] == "graph_coloring":
        return graph_coloring.mode(problem["edges"], problem["partial"], given)
    for written, plain in _WRITTEN_OTHERWISE.items():
        given = given.replace(written, plain)
    # The answer may be an equation, either way round; several attempts in one do not count.
    sides = [part.strip() for part in given.split("=")]
    if len(sides) == 2 and str(problem["target"]) in sides:
        sides.remove(str(problem["target"]))
    with contextlib.suppress(countdown.NotAnExpression):
        found = countdown.parsed("=".join(sides))
        right = found.numbers == tuple(sorted(problem["numbers"])) and found.value == problem["target"]
        return found.key if right else None
    return None


@lru_cache(maxsize=4096)
def problem_of(answer: str) -> dict[str, Any]:
    """Return the problem in a row's answer; raise ValueError where there is none."""
    wanted = {"countdown": ("numbers", "target"), "graph_coloring": ("edges", "partial")}
    with contextlib.suppress(ValueError, TypeError, LookupError):
        problem = dict(json.loads(answer))
        if all(key in problem for key in (*wanted[problem["task"]], "modes")):
            return problem
    raise ValueError("the reference solution is not a problem of ModeBench")


def is_problem(answer: str) -> bool:
    """Return whether a reference solution is a problem of ModeBench."""
    with contextlib.suppress(ValueError):
        return bool(problem_of(answer))
    return False


def right_answers(answer: str) -> list[str]:
    """Return an answer for each mode of a problem, as a completion writes it in the box."""
    problem = problem_of(answer)
    if problem["task"] == "countdown":
        return list(countdown.ways(tuple(problem["numbers"]), problem["target"]))
    return graph_coloring.completions(problem["edges"], problem["partial"])


def wrong_answers(answer: str) -> list[str]:
    """Return wrong answers near the right ones: other numbers, one missing, two ends of an edge alike."""
    problem, right = problem_of(answer), right_answers(answer)
    if problem["task"] == "countdown":
        other = max(problem["numbers"]) + 1
        return [f"{right[0]}+{other}-{other}", f"{right[0]}+{other}", str(problem["target"]), ""]
    hidden = problem["partial"].count(graph_coloring.HIDDEN)
    every = map("".join, product(graph_coloring.COLORS, repeat=hidden))
    taken = set(right)
    return [*islice((colors for colors in every if colors not in taken), 2), "4" * hidden, ""]


def answer_in(text: str) -> str | None:
    """Return the answer in a completion, None where there is none."""
    boxed, line = _last_box(text), text.strip()
    if boxed is not None:
        return boxed.strip()
    if len(line) > _LONGEST_LINE or set(line) & set("<>\n\r"):
        return None
    return _BEFORE_ANSWER.sub("", line, count=1).strip()


def _last_box(text: str) -> str | None:
    """Return the content of the box that begins last, of those whose braces match."""
    open_braces: list[int] = []
    begin = end = -1
    for place, character in enumerate(text):
        if character == "{":
            open_braces.append(place + 1)
        elif character == "}" and open_braces:
            inside = open_braces.pop()
            if inside > begin and text.endswith(_BOX, 0, inside):
                begin, end = inside, place
    return text[begin:end] if begin >= 0 else None


def mode_scores(modes: Sequence[Sequence[str | None]], totals: Sequence[int]) -> Scores:
    """Return the scores beside ``pass@k``, each with ``_ci``, the 95 % interval over problems.

    ``mean@k`` is the right share of the k completions of a problem, ``distinct@k`` the number of different modes among
    them, ``coverage@k`` that number over the modes there are, at most 1. ``modes`` (problems, k) holds the mode of each
    completion, None where it is wrong, and ``totals`` (problems,) how many modes each problem has.
    """
    samples = max(len(row) for row in modes)
    distinct = [float(len({mode for mode in row if mode is not None})) for row in modes]
    return summed_up({
        f"mean@{samples}": [sum(mode is not None for mode in row) / len(row) for row in modes],
        f"distinct@{samples}": distinct,
        f"coverage@{samples}": [min(1.0, count / total) for count, total in zip(distinct, totals, strict=True)],
    })  # fmt: skip


def summed_up(estimates: Mapping[str, Sequence[float]]) -> Scores:
    """Return mean over problems and 95 % interval of each score.

    ``estimates`` has (problems,) values for each name; those of ``distinct@k`` are counts up to k, the others shares.
    """
    scores: Scores = {}
    for name, values in estimates.items():
        kind, _, samples = name.partition("@")
        mean, interval = mean_with_interval(values, float(samples) if kind == "distinct" else 1.0)
        scores[name] = round(mean, 6)
        scores[f"{name}_ci"] = [round(limit, 6) for limit in interval]
    return scores
