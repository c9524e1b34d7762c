r"""The rows of ``modebench:countdown`` and ``modebench:graph_coloring``: made from their keys, the same everywhere.

Problems are sorted, then drawn by ``random.Random(seed)``, so that no row depends on the version of Python.
The test split comes first: it stays the same whatever ``modebench_prompts`` is, and shares no problem with training.

It also judges whether a completion answers a problem and with which right answer (its mode), and scores many. The
answer is the last ``\boxed{...}`` whose braces match; without one, a completion that is a single short line. Nothing of
a completion is executed, and judging one takes time bounded by its length.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.extensions.problems.modebench import countdown, graph_coloring
from grpo_recipes.stats import mean_with_interval

VERSION = "1"  # raise it whenever anything of this package changes a row

SCHEME = "modebench:"
TASKS = ("modebench:countdown", "modebench:graph_coloring")
SPLITS = ("train", "test")
COLUMNS = ("problem", "answer", "modes")
# Recipe keys that one task alone reads.
TASK_KEYS = {
    "modebench:countdown": ("modebench_numbers", "modebench_largest_number"),
    "modebench:graph_coloring": ("modebench_vertices", "modebench_hidden"),
}
_COUNTDOWN = (
    "Using the numbers {numbers}, create an arithmetic expression that equals {target}. Use each given number exactly "
    "once. You may use +, -, *, /, and parentheses. Return exactly one final answer and no explanation: the expression "
    r"inside \boxed{{}}."
)
_GRAPH = (
    "Color this graph with vertices 1 through {vertices}. The undirected edges are: {edges}. Assign each vertex one "
    "color from {{1, 2, 3}} so that no edge has the same color on both endpoints. A partial coloring is {partial}, "
    "where ? means uncolored. Keep every shown digit fixed. There are exactly {hidden} question marks. Return exactly "
    "one final answer and no explanation: exactly {hidden} digits, each one 1, 2, or 3, for the missing positions from "
    r"left to right, inside \boxed{{}}."
)
_BOX = r"\boxed{"
_LONGEST_LINE = 160  # characters
_BEFORE_ANSWER = re.compile(r"\A(?:(?:the )?(?:final )?answer(?: is)?)? ?[:=]? ?", re.IGNORECASE)
_WRITTEN_OTHERWISE = {
    r"\times": "*", "\N{MULTIPLICATION SIGN}": "*", r"\cdot": "*", "\N{MIDDLE DOT}": "*",
    r"\div": "/", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The recipe keys ``modebench_*``, by their names."""

    prompts: int
    test_prompts: int
    seed: int
    min_modes: int
    max_modes: int
    numbers: int
    largest_number: int | None
    vertices: int
    hidden: int

    @classmethod
    def read(cls, value: Callable[[str], Any]) -> Settings:
        """Return the settings from the value of each key; ``value`` may be ``recipe.__getitem__``."""
        return cls(**{name: value(f"modebench_{name}") for name in cls.__dataclass_fields__})

    @property
    def largest(self) -> int:
        """Return the largest number of a countdown; by default both splits take at most 3 in 4 of its problems."""
        return self.largest_number or {3: 24, 4: 12}[self.numbers]

    def fingerprint(self, name: str) -> str:
        """Return a short hash of what decides the rows of a task: both splits are the same where it is."""
        return hashlib.sha256(repr((VERSION, name, self)).encode()).hexdigest()[:16]

    @property
    def modes(self) -> range:
        """Return how many right answers a problem may have."""
        return range(self.min_modes, self.max_modes + 1)


def rows(name: str, split: str, settings: Settings) -> list[dict[str, Any]]:
    """Return the rows of ``train`` or ``test`` of one of ``TASKS``; raise ConfigError where both splits need more.

    A row has ``problem`` (the prompt), ``answer`` (the problem as JSON, for ``mode_of``) and ``modes`` (how many right
    answers there are).
    """
    made = _problems(name, settings)
    chosen = made[: settings.test_prompts] if split == "test" else made[settings.test_prompts :]
    return [{"problem": prompt, "answer": answer, "modes": modes} for prompt, answer, modes in chosen]


@lru_cache(maxsize=8)
def _problems(name: str, settings: Settings) -> list[tuple[str, str, int]]:
    """Return prompt, answer and modes of the test split, then of the training split."""
    wanted = settings.test_prompts + settings.prompts
    if name == "modebench:countdown":
        every = countdown.puzzles(settings.numbers, settings.largest)
        pool = [puzzle for puzzle in every if puzzle.modes in settings.modes]
        random.Random(settings.seed).shuffle(pool)
        made = [countdown_row(puzzle) for puzzle in pool]
    else:  # drawn one by one, since nobody can list them all
        shape = (settings.vertices, settings.hidden, settings.modes)
        made = [graph_row(puzzle) for puzzle in graph_coloring.puzzles(*shape, wanted, settings.seed)]
    found = len(made)
    if found >= wanted:
        return made[:wanted]
    what = f"modebench_prompts and modebench_test_prompts ask for {wanted} problems, but only {found} exist"
    if (left := found - settings.test_prompts) > 0:
        fix = f"write modebench_prompts: {left} or less, or ask for easier ones"
        raise config_error("modebench_prompts", what, fix)
    fix = f"write modebench_test_prompts: {found // 4} and modebench_prompts: {found - found // 4}"
    fix = fix if found > 1 else "widen modebench_min_modes to modebench_max_modes"
    raise config_error("modebench_test_prompts", what, fix)


def countdown_row(puzzle: countdown.CountdownPuzzle) -> tuple[str, str, int]:
    """Return prompt, answer and modes of a puzzle."""
    numbers = list(puzzle.numbers)
    answer = {"task": "countdown", "numbers": numbers, "target": puzzle.target, "modes": puzzle.modes}
    return _COUNTDOWN.format(numbers=numbers, target=puzzle.target), json.dumps(answer), puzzle.modes


def graph_row(puzzle: graph_coloring.ColoringPuzzle) -> tuple[str, str, int]:
    """Return prompt, answer and modes of a puzzle."""
    answer = {"task": "graph_coloring", "edges": puzzle.edges, "partial": puzzle.partial, "modes": puzzle.modes}
    edges = ", ".join(f"({one},{other})" for one, other in puzzle.edges)
    hidden = puzzle.partial.count(graph_coloring.HIDDEN)
    prompt = _GRAPH.format(vertices=puzzle.vertices, edges=edges, partial=puzzle.partial, hidden=hidden)
    return prompt, json.dumps(answer), puzzle.modes


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
    open_braces: list[int] = []
    begin = end = -1
    for place, character in enumerate(text):  # the box that begins last, of those whose braces match
        if character == "{":
            open_braces.append(place + 1)
        elif character == "}" and open_braces:
            inside = open_braces.pop()
            if inside > begin and text.endswith(_BOX, 0, inside):
                begin, end = inside, place
    line = text.strip()
    if begin >= 0:
        return text[begin:end].strip()
    if len(line) > _LONGEST_LINE or set(line) & set("<>\n\r"):
        return None
    return _BEFORE_ANSWER.sub("", line, count=1).strip()


def mode_scores(modes: Sequence[Sequence[str | None]], totals: Sequence[int]) -> dict[str, Any]:
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


def summed_up(estimates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return mean over problems and 95 % interval of each score.

    ``estimates`` has (problems,) values for each name; those of ``distinct@k`` are counts up to k, the others shares.
    """
    scores: dict[str, Any] = {}
    for name, values in estimates.items():
        kind, _, samples = name.partition("@")
        mean, interval = mean_with_interval(values, float(samples) if kind == "distinct" else 1.0)
        scores[name] = round(mean, 6)
        scores[f"{name}_ci"] = [round(limit, 6) for limit in interval]
    return scores
