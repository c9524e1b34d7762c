r"""The rows of ``modebench:countdown`` and ``modebench:graph_coloring``: made from their keys, the same everywhere.

Problems are sorted, then drawn by ``random.Random(seed)``, so that no row depends on the version of Python.
The test split comes first: it stays the same whatever ``modebench_prompts`` is, and shares no problem with training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.modebench import countdown, graph_coloring

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

    A row has ``problem`` (the prompt), ``answer`` (the problem as JSON, for ``verify``) and ``modes`` (how many right
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
        made = [_countdown_row(puzzle) for puzzle in pool]
    else:  # drawn one by one, since nobody can list them all
        shape = (settings.vertices, settings.hidden, settings.modes)
        made = [_graph_row(puzzle) for puzzle in graph_coloring.puzzles(*shape, wanted, settings.seed)]
    found = len(made)
    if found >= wanted:
        return made[:wanted]
    what = f"{wanted} problems are asked for (modebench_prompts and modebench_test_prompts), there are {found}"
    if (left := found - settings.test_prompts) > 0:
        fix = f"write modebench_prompts: {left} or less, or ask for easier ones"
        raise config_error("modebench_prompts", what, fix)
    fix = f"write modebench_test_prompts: {found // 4} and modebench_prompts: {found - found // 4}"
    fix = fix if found > 1 else "widen modebench_min_modes to modebench_max_modes"
    raise config_error("modebench_test_prompts", what, fix)


def _countdown_row(puzzle: countdown.CountdownPuzzle) -> tuple[str, str, int]:
    numbers = list(puzzle.numbers)
    answer = {"task": "countdown", "numbers": numbers, "target": puzzle.target, "modes": puzzle.modes}
    return _COUNTDOWN.format(numbers=numbers, target=puzzle.target), json.dumps(answer), puzzle.modes


def _graph_row(puzzle: graph_coloring.ColoringPuzzle) -> tuple[str, str, int]:
    answer = {"task": "graph_coloring", "edges": puzzle.edges, "partial": puzzle.partial, "modes": puzzle.modes}
    edges = ", ".join(f"({one},{other})" for one, other in puzzle.edges)
    hidden = puzzle.partial.count(graph_coloring.HIDDEN)
    prompt = _GRAPH.format(vertices=puzzle.vertices, edges=edges, partial=puzzle.partial, hidden=hidden)
    return prompt, json.dumps(answer), puzzle.modes
