"""Problems made from a seed, the same on every machine: ``dataset_name: seeded:arithmetic`` and the like. Pure.

A generator of ``GENERATORS`` turns the draws of a seed into a row. The draws come from ``random.Random`` of a hash of
the generator's name and the seed, by ``random()`` alone: the one method whose numbers no version of Python changes.
Graphs are then drawn as ModeBench draws them.

It also judges whether an assignment satisfies the clauses of a ``seeded:sat`` problem: any that does is right.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.problems.modebench import countdown, dataset, graph_coloring

VERSION = "1"  # raise it whenever anything here changes a row

SCHEME = "seeded:"
SEED_COLUMN = "problem_seed"
COLUMNS = ("problem", "answer", SEED_COLUMN)
_ANSWER = "Write your final answer inside <answer></answer>"
_SAT = (
    "Find a truth value for each of the variables {variables} so that every clause is true. A clause is true when at "
    f"least one of its parts is. The clauses are: {{clauses}}. {_ANSWER}, a value for every variable; of two variables "
    "it would be <answer>x1=true, x2=false</answer>."
)
_VARIABLES, _CLAUSES, _WIDTH = (6, 8), (8, 12), 3  # least and most of a problem; variables of a clause
_PAIR = re.compile(r"(?<!\w)x_?(\d{1,3})\s*[=:]\s*(true|false|[tf10])(?!\w)", re.IGNORECASE)
_BETWEEN_PAIRS = re.compile(r"(?:[\s,;(){}\[\]]|and)*")
_LONGEST_ASSIGNMENT = 2000  # characters

Clauses = Sequence[Sequence[int]]  # 3 is the variable x3, -3 its negation


@dataclass(frozen=True)
class Settings:
    """The recipe keys of seeds, by their names, and those of ModeBench."""

    problem_seed_start: int
    problem_seeds: int
    eval_problem_seed_start: int
    eval_problem_seeds: int
    eval_problem_ids: Sequence[int] | None
    modebench: dataset.Settings

    @classmethod
    def read(cls, value: Callable[[str], Any]) -> Settings:
        """Return the settings from the value of each key; ``value`` may be ``recipe.__getitem__``."""
        own = [name for name in cls.__dataclass_fields__ if name != "modebench"]
        return cls(**{name: value(name) for name in own}, modebench=dataset.Settings.read(value))

    def seeds(self, split: str) -> Sequence[int]:
        """Return the seeds of ``train`` or ``test``."""
        if split == "test" and self.eval_problem_ids:
            return self.eval_problem_ids
        if split == "test":
            return range(self.eval_problem_seed_start, self.eval_problem_seed_start + self.eval_problem_seeds)
        return range(self.problem_seed_start, self.problem_seed_start + self.problem_seeds)

    @property
    def shared(self) -> list[int]:
        """Return the seeds that are both to train on and to evaluate on."""
        trained = self.seeds("train")
        return [seed for seed in self.seeds("test") if seed in trained]

    def fingerprint(self, name: str) -> str:
        """Return a short hash of what decides the rows of a generator: both splits are the same where it is."""
        decided = (VERSION, dataset.VERSION, name, sorted(asdict(self).items(), key=str))
        return hashlib.sha256(repr(decided).encode()).hexdigest()[:16]


class Draws:
    """Random choices of a seed."""

    def __init__(self, name: str, seed: int):
        digest = hashlib.sha256(f"{name}/{seed}".encode()).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def below(self, count: int) -> int:
        """Return a whole number from 0 to below ``count``."""
        return int(self._random.random() * count)

    def between(self, least: int, most: int) -> int:
        """Return a whole number between two, both included."""
        return least + self.below(most - least + 1)

    def some(self, count: int, of: Sequence[int]) -> list[int]:
        """Return ``count`` different ones, in the order drawn."""
        left = list(of)
        return [left.pop(self.below(len(left))) for _ in range(count)]


class Generator(NamedTuple):
    """One kind of problem."""

    make: Callable[[Draws, Settings], dict[str, str]]  # a row without its seed
    columns: tuple[str, ...] = COLUMNS
    task: str | None = None  # of ModeBench, whose keys and reward it has


def row(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Return the problem of a seed: ``problem``, ``answer``, what else its reward needs, and ``problem_seed``."""
    return {**GENERATORS[name].make(Draws(name, seed), settings), SEED_COLUMN: seed}


def rows(name: str, split: str, settings: Settings) -> list[dict[str, Any]]:
    """Return the problems of ``train`` or ``test``, in the order of their seeds."""
    return [row(name, seed, settings) for seed in settings.seeds(split)]


def is_seeded(name: str | None) -> bool:
    """Return whether a dataset's name is that of a generator."""
    return (name or "").startswith(SCHEME)


# --- generators -------------------------------------------------------------------------------------------------------


def _arithmetic(draws: Draws, _: Settings) -> dict[str, str]:
    """Return two operations on numbers of two digits, two digits and one; multiplication comes first."""
    first, second, third = draws.between(10, 99), draws.between(10, 99), draws.between(2, 9)
    one, other = "+-*"[draws.below(3)], "+-*"[draws.below(3)]
    apply: dict[str, Callable[[int, int], int]] = {
        "+": lambda left, right: left + right,
        "-": lambda left, right: left - right,
        "*": lambda left, right: left * right,
    }
    if other == "*" and one != "*":
        result = apply[one](first, second * third)
    else:
        result = apply[other](apply[one](first, second), third)
    text = f"What is {first} {one} {second} {other} {third}? {_ANSWER}."
    return {"problem": text, "answer": str(result)}


def _sums(draws: Draws, _: Settings) -> dict[str, str]:
    """Return a one-digit sum as the model ``smoke:sums`` has learned to read it; there are a hundred."""
    first, second = draws.below(10), draws.below(10)
    return {"problem": f"{first}+{second}=", "answer": str(first + second)}


def _sat(draws: Draws, _: Settings) -> dict[str, str]:
    """Return clauses that a drawn assignment, which is the answer, satisfies."""
    count = draws.between(*_VARIABLES)
    values = [bool(draws.below(2)) for _ in range(count)]
    clauses: list[list[int]] = []
    for _clause in range(draws.between(*_CLAUSES)):
        variables = sorted(draws.some(_WIDTH, range(1, count + 1)))
        signs = [True] * _WIDTH
        while True:  # the drawn assignment satisfies seven of eight choices of signs
            signs = [bool(draws.below(2)) for _ in variables]
            if any(values[variable - 1] == sign for variable, sign in zip(variables, signs, strict=True)):
                break
        clauses.append([variable if sign else -variable for variable, sign in zip(variables, signs, strict=True)])
    parts = [" or ".join(f"x{part}" if part > 0 else f"not x{-part}" for part in clause) for clause in clauses]
    text = _SAT.format(
        variables=", ".join(f"x{variable}" for variable in range(1, count + 1)),
        clauses="; ".join(f"({clause})" for clause in parts),
    )
    return {"problem": text, "answer": written(values), "clauses": json.dumps(clauses)}


def _countdown(draws: Draws, settings: Settings) -> dict[str, str]:
    """Return one of all puzzles of ModeBench that the recipe's keys allow."""
    keys = settings.modebench
    pool = [puzzle for puzzle in countdown.puzzles(keys.numbers, keys.largest) if puzzle.modes in keys.modes]
    if not pool:
        raise _none()
    return _of_modebench(dataset.countdown_row(pool[draws.below(len(pool))]))


def _graph_coloring(draws: Draws, settings: Settings) -> dict[str, str]:
    """Return a puzzle of ModeBench, drawn as there."""
    keys = settings.modebench
    found = graph_coloring.puzzles(keys.vertices, keys.hidden, keys.modes, 1, draws.below(2**53))
    if not found:
        raise _none()
    return _of_modebench(dataset.graph_row(found[0]))


def _of_modebench(made: tuple[str, str, int]) -> dict[str, str]:
    problem, answer, _ = made
    return {"problem": problem, "answer": answer}


def _none() -> ConfigError:
    what = "no problem has as many right answers as these keys ask for"
    return config_error("modebench_min_modes", what, "widen modebench_min_modes to modebench_max_modes")


GENERATORS: dict[str, Generator] = {
    "seeded:arithmetic": Generator(_arithmetic),
    "seeded:sums": Generator(_sums),
    "seeded:sat": Generator(_sat, (*COLUMNS, "clauses")),
    "seeded:countdown": Generator(_countdown, task="modebench:countdown"),
    "seeded:graph_coloring": Generator(_graph_coloring, task="modebench:graph_coloring"),
}
SAT = "seeded:sat"


# --- satisfiability ---------------------------------------------------------------------------------------------------


def written(values: Sequence[bool]) -> str:
    """Return an assignment of the variables x1, x2, ... as an answer holds it."""
    return ", ".join(f"x{place}={'true' if value else 'false'}" for place, value in enumerate(values, start=1))


def clauses_of(text: Any) -> Clauses:
    """Return the clauses in a row's column; raise ValueError where there are none."""
    try:
        clauses = json.loads(text)
        if clauses and all(clause and all(type(part) is int and part for part in clause) for clause in clauses):
            return [list(clause) for clause in clauses]
    except TypeError:
        pass
    raise ValueError("the column clauses does not hold the clauses of a satisfiability problem")


def satisfies(answer: str, clauses: Clauses) -> bool:
    """Return whether an answer gives each variable of the clauses one value, says nothing else, and satisfies them.

    A value is ``x3=true`` or ``x3: 0``, in whatever order and case; the work is bounded by the answer's length.
    """
    if len(answer) > _LONGEST_ASSIGNMENT or not _BETWEEN_PAIRS.fullmatch(_PAIR.sub(" ", answer)):
        return False
    values: dict[int, bool] = {}
    for variable, value in _PAIR.findall(answer):
        truth = value.lower() in ("true", "t", "1")
        if values.setdefault(int(variable), truth) != truth:
            return False  # both true and false
    if not {abs(part) for clause in clauses for part in clause} <= set(values):
        return False
    return all(any(values[abs(part)] == (part > 0) for part in clause) for clause in clauses)


def assignments(clauses: Clauses) -> Iterator[tuple[str, bool]]:
    """Yield every assignment of the variables up to the greatest, and whether it satisfies the clauses."""
    count = max(abs(part) for clause in clauses for part in clause)
    for values in product((False, True), repeat=count):
        yield written(values), satisfies(written(values), clauses)
