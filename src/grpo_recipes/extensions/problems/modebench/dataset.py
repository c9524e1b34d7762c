r"""Rows of ``modebench:countdown`` and ``modebench:graph_coloring``, and scores of completions.

* **Rows** depend only on the recipe keys, not on the machine or the version of Python: problems are sorted, then drawn
  by ``random.Random(seed)``. The test split comes first. It does not depend on ``modebench_prompts`` and shares no
  problem with the training split.
* **Judging** finds the correct answer that a completion gives (its mode). The answer is the last ``\boxed{...}`` with
  matching braces, or else a completion of a single short line. Nothing is executed, and the time is bounded by the
  length.
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

VERSION = "1"  # increase it with every change of this package that changes a row

SCHEME = "modebench:"
TASKS = ("modebench:countdown", "modebench:graph_coloring")
SPLITS = ("train", "test")
COLUMNS = ("problem", "answer", "modes")
# Recipe keys that only one task reads.
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
_OPERATOR_SYMBOLS = {
    r"\times": "*", "\N{MULTIPLICATION SIGN}": "*", r"\cdot": "*", "\N{MIDDLE DOT}": "*",
    r"\div": "/", "\N{DIVISION SIGN}": "/", "\N{MINUS SIGN}": "-",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The recipe keys ``modebench_*``, without the prefix."""

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
        """Create Settings from recipe keys; ``value`` returns the value of a key, e.g. ``recipe.__getitem__``."""
        return cls(**{name: value(f"modebench_{name}") for name in cls.__dataclass_fields__})

    @property
    def largest(self) -> int:
        """The largest number in countdown; with the default, both splits use at most 3/4 of all problems."""
        return self.largest_number or {3: 24, 4: 12}[self.numbers]

    def fingerprint(self, name: str) -> str:
        """Return a short hash of everything that affects the rows of the task ``name``: version and settings."""
        return hashlib.sha256(repr((VERSION, name, self)).encode()).hexdigest()[:16]

    @property
    def modes(self) -> range:
        """The allowed numbers of correct answers of a problem."""
        return range(self.min_modes, self.max_modes + 1)


def make_rows(name: str, split: str, settings: Settings) -> list[dict[str, Any]]:
    """Return the rows of ``train`` or ``test`` for one of ``TASKS``; raise ConfigError if too few problems exist.

    A row has ``problem`` (the prompt), ``answer`` (the problem as JSON, for ``find_mode``) and ``modes`` (the number of
    correct answers).
    """
    problems = _draw_problems(name, settings)
    split_problems = problems[: settings.test_prompts] if split == "test" else problems[settings.test_prompts :]
    return [{"problem": prompt, "answer": answer, "modes": modes} for prompt, answer, modes in split_problems]


@lru_cache(maxsize=8)
def _draw_problems(name: str, settings: Settings) -> list[tuple[str, str, int]]:
    """Draw the test problems, then the training problems; return prompt, answer and number of modes of each; cached.

    Raise ConfigError if fewer problems exist than the keys request.
    """
    requested = settings.test_prompts + settings.prompts
    if name == "modebench:countdown":
        puzzles = countdown.list_puzzles(settings.numbers, settings.largest)
        pool = [puzzle for puzzle in puzzles if puzzle.modes in settings.modes]
        random.Random(settings.seed).shuffle(pool)
        problems = [make_countdown_row(puzzle) for puzzle in pool]
    else:  # drawn one by one, because there are too many to list
        shape = (settings.vertices, settings.hidden, settings.modes)
        problems = [make_graph_row(puzzle) for puzzle in graph_coloring.draw_puzzles(*shape, requested, settings.seed)]
    count = len(problems)
    if count >= requested:
        return problems[:requested]
    problem = f"modebench_prompts and modebench_test_prompts request {requested} problems, but only {count} exist"
    if (remaining := count - settings.test_prompts) > 0:
        fix = f"set modebench_prompts: {remaining} or less, or change modebench_min_modes or modebench_max_modes"
        raise config_error("modebench_prompts", problem, fix)
    fix = f"set modebench_test_prompts: {count // 4} and modebench_prompts: {count - count // 4}"
    fix = fix if count > 1 else "widen modebench_min_modes to modebench_max_modes"
    raise config_error("modebench_test_prompts", problem, fix)


def make_countdown_row(puzzle: countdown.CountdownPuzzle) -> tuple[str, str, int]:
    """Return the prompt of a countdown puzzle, the puzzle as JSON (its answer column), and its number of modes."""
    numbers = list(puzzle.numbers)
    answer = {"task": "countdown", "numbers": numbers, "target": puzzle.target, "modes": puzzle.modes}
    return _COUNTDOWN.format(numbers=numbers, target=puzzle.target), json.dumps(answer), puzzle.modes


def make_graph_row(puzzle: graph_coloring.ColoringPuzzle) -> tuple[str, str, int]:
    """Return the prompt of a coloring puzzle, the puzzle as JSON (its answer column), and its number of modes."""
    answer = {"task": "graph_coloring", "edges": puzzle.edges, "partial": puzzle.partial, "modes": puzzle.modes}
    edges = ", ".join(f"({start},{end})" for start, end in puzzle.edges)
    hidden = puzzle.partial.count(graph_coloring.HIDDEN)
    prompt = _GRAPH.format(vertices=puzzle.vertices, edges=edges, partial=puzzle.partial, hidden=hidden)
    return prompt, json.dumps(answer), puzzle.modes


def find_mode(text: str, answer: str) -> str | None:
    """Return which correct answer (mode) a completion gives, None if it is wrong; ``answer`` is the problem as JSON.

    Raise ValueError if ``answer`` is not a ModeBench problem.
    """
    problem, reply = parse_problem(answer), extract_answer(text)
    if reply is None:
        return None
    if problem["task"] == "graph_coloring":
        return graph_coloring.complete_coloring(problem["edges"], problem["partial"], reply)
    for symbol, operator in _OPERATOR_SYMBOLS.items():
        reply = reply.replace(symbol, operator)
    # The answer may be an equation with the target on either side. Several attempts in one answer do not count.
    sides = [part.strip() for part in reply.split("=")]
    if len(sides) == 2 and str(problem["target"]) in sides:
        sides.remove(str(problem["target"]))
    with contextlib.suppress(countdown.NotAnExpression):
        expression = countdown.parse_expression("=".join(sides))
        is_right = expression.numbers == tuple(sorted(problem["numbers"])) and expression.value == problem["target"]
        return expression.key if is_right else None
    return None


@lru_cache(maxsize=4096)
def parse_problem(answer: str) -> dict[str, Any]:
    """Parse the JSON in a row's column ``answer``; raise ValueError if it is not a ModeBench problem.

    The result is cached and shared. Do not change it.
    """
    keys_of_task = {"countdown": ("numbers", "target"), "graph_coloring": ("edges", "partial")}
    with contextlib.suppress(ValueError, TypeError, LookupError):
        problem = dict(json.loads(answer))
        if all(key in problem for key in (*keys_of_task[problem["task"]], "modes")):
            return problem
    raise ValueError("the reference solution is not a problem of ModeBench")


def is_problem(answer: str) -> bool:
    """Return whether a reference solution is a ModeBench problem."""
    with contextlib.suppress(ValueError):
        return bool(parse_problem(answer))
    return False


def list_right_answers(answer: str) -> list[str]:
    """Return a correct answer for each mode of a problem, as a completion would write it inside the box.

    ``answer`` is the problem as JSON; raise ValueError if it is not a ModeBench problem.
    """
    problem = parse_problem(answer)
    if problem["task"] == "countdown":
        return list(countdown.count_modes(tuple(problem["numbers"]), problem["target"]))
    return graph_coloring.list_colorings(problem["edges"], problem["partial"])


def list_wrong_answers(answer: str) -> list[str]:
    """Return typical incorrect answers to the problem that ``answer`` contains as JSON.

    For countdown they are two expressions with an additional number, only the target, and an empty text. For graph
    coloring they are up to two colorings with an edge of equal colors, a coloring with a color that does not exist, and
    an empty text. Raise ValueError if ``answer`` is not a ModeBench problem.
    """
    problem, right = parse_problem(answer), list_right_answers(answer)
    if problem["task"] == "countdown":
        other = max(problem["numbers"]) + 1
        return [f"{right[0]}+{other}-{other}", f"{right[0]}+{other}", str(problem["target"]), ""]
    hidden = problem["partial"].count(graph_coloring.HIDDEN)
    colorings = map("".join, product(graph_coloring.COLORS, repeat=hidden))
    proper = set(right)
    return [*islice((colors for colors in colorings if colors not in proper), 2), "4" * hidden, ""]


def extract_answer(text: str) -> str | None:
    """Return the content of the last ``\\boxed{...}`` of a text, or else the text if it is a single short line.

    The content of an empty box is "". A box without a closing brace does not count. An introduction such as "The answer
    is" is removed from the line. Return None for other texts, and for lines with < or > or above 160 characters.
    """
    open_braces: list[int] = []
    begin = end = -1
    for index, character in enumerate(text):  # find the last box with matching braces
        if character == "{":
            open_braces.append(index + 1)
        elif character == "}" and open_braces:
            inside = open_braces.pop()
            if inside > begin and text.endswith(_BOX, 0, inside):
                begin, end = inside, index
    line = text.strip()
    if begin >= 0:
        return text[begin:end].strip()
    if len(line) > _LONGEST_LINE or set(line) & set("<>\n\r"):
        return None
    return _BEFORE_ANSWER.sub("", line, count=1).strip()


def compute_mode_scores(modes: Sequence[Sequence[str | None]], totals: Sequence[int]) -> dict[str, Any]:
    """Return the scores mean@k, distinct@k and coverage@k, each with ``_ci``, its 95 % interval over problems.

    ``mean@k`` is the correct fraction of a problem's k completions. ``distinct@k`` is the number of different modes in
    them. ``coverage@k`` is that number divided by the problem's number of modes, at most 1.

    ``modes`` (problems, k) has the mode of each completion, None if it is incorrect, and ``totals`` (problems,) the
    number of modes of each problem.
    """
    samples = max(len(row) for row in modes)
    distinct = [float(len({mode for mode in row if mode is not None})) for row in modes]
    return summarize({
        f"mean@{samples}": [sum(mode is not None for mode in row) / len(row) for row in modes],
        f"distinct@{samples}": distinct,
        f"coverage@{samples}": [min(1.0, count / total) for count, total in zip(distinct, totals, strict=True)],
    })  # fmt: skip


def summarize(estimates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the mean over problems of each score, and as ``NAME_ci`` its 95 % interval.

    ``estimates`` has (problems,) values for each name: counts up to k for ``distinct@k``, fractions for other scores.
    """
    scores: dict[str, Any] = {}
    for name, values in estimates.items():
        kind, _, samples = name.partition("@")
        mean, interval = mean_with_interval(values, float(samples) if kind == "distinct" else 1.0)
        scores[name] = round(mean, 6)
        scores[f"{name}_ci"] = [round(limit, 6) for limit in interval]
    return scores
