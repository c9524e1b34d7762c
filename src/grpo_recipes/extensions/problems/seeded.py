"""Problems generated from a seed, the same on every machine, for example ``dataset_name: seeded:arithmetic``.

* A generator in ``GENERATORS`` turns the random draws of a seed into a row. The draws only use ``random()`` of
  ``random.Random``, the only method with the same results in every version of Python. Graphs are drawn as in ModeBench.
* ``satisfies`` judges answers of ``seeded:sat``. Any assignment that satisfies the clauses is correct.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from operator import add, mul, sub
from typing import Any, NamedTuple

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.problems.modebench import countdown, dataset, graph_coloring

VERSION = "1"  # increase it with every change of this module that changes a row

SCHEME = "seeded:"
SEED_COLUMN = "problem_seed"
COLUMNS = ("problem", "answer", SEED_COLUMN)
_ANSWER = "Write your final answer inside <answer></answer>"
_SAT = (
    "Find a truth value for each of the variables {variables} so that every clause is true. A clause is true when at "
    f"least one of its parts is. The clauses are: {{clauses}}. {_ANSWER}, a value for every variable; of two variables "
    "it would be <answer>x1=true, x2=false</answer>."
)
_VARIABLES, _CLAUSES, _WIDTH = (6, 8), (8, 12), 3  # limits of variables and of clauses; variables in a clause
_PAIR = re.compile(r"(?<!\w)x_?(\d{1,3})\s*[=:]\s*(true|false|[tf10])(?!\w)", re.IGNORECASE)
_BETWEEN_PAIRS = re.compile(r"(?:[\s,;(){}\[\]]|and)*")
_LONGEST_ASSIGNMENT = 2000  # characters

Clauses = Sequence[Sequence[int]]  # 3 is the variable x3, -3 its negation


@dataclass(frozen=True)
class Settings:
    """The recipe keys of seeds, and the settings of ModeBench."""

    problem_seed_start: int
    problem_seeds: int
    eval_problem_seed_start: int
    eval_problem_seeds: int
    eval_problem_ids: Sequence[int] | None
    modebench: dataset.Settings

    @classmethod
    def read(cls, value: Callable[[str], Any]) -> Settings:
        """Create Settings from recipe keys; ``value`` returns the value of a key, e.g. ``recipe.__getitem__``."""
        seed_keys = [name for name in cls.__dataclass_fields__ if name != "modebench"]
        return cls(**{name: value(name) for name in seed_keys}, modebench=dataset.Settings.read(value))

    def seeds(self, split: str) -> Sequence[int]:
        """Return the seeds of the split "train" or "test": a range, or eval_problem_ids for "test" if it is set."""
        if split == "test" and self.eval_problem_ids:
            return self.eval_problem_ids
        if split == "test":
            return range(self.eval_problem_seed_start, self.eval_problem_seed_start + self.eval_problem_seeds)
        return range(self.problem_seed_start, self.problem_seed_start + self.problem_seeds)

    @property
    def shared(self) -> list[int]:
        """The seeds that are used both in training and in evaluations."""
        trained = self.seeds("train")
        return [seed for seed in self.seeds("test") if seed in trained]

    def fingerprint(self, name: str) -> str:
        """Return a short hash of everything that affects the rows of the generator ``name``: versions and settings."""
        inputs = (VERSION, dataset.VERSION, name, sorted(asdict(self).items(), key=str))
        return hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]


class Draws:
    """Random choices that depend only on the generator's name and a seed."""

    def __init__(self, name: str, seed: int):
        digest = hashlib.sha256(f"{name}/{seed}".encode()).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def below(self, count: int) -> int:
        """Return a random integer from 0 to ``count - 1``."""
        return int(self._random.random() * count)

    def between(self, least: int, most: int) -> int:
        """Return a random integer from ``least`` to ``most``, inclusive."""
        return least + self.below(most - least + 1)

    def sample(self, count: int, items: Sequence[int]) -> list[int]:
        """Draw ``count`` items without replacement; return them in the order of the draws."""
        remaining = list(items)
        return [remaining.pop(self.below(len(remaining))) for _ in range(count)]


class Generator(NamedTuple):
    """One kind of seeded problem: the function that makes a row, and facts about the rows."""

    make: Callable[[Draws, Settings], dict[str, str]]  # makes a row without its seed
    columns: tuple[str, ...] = COLUMNS  # columns of its rows
    task: str | None = None  # ModeBench task with the same keys and reward


def make_row(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Generate the row of a seed: ``problem``, ``answer``, other columns for its reward, and ``problem_seed``.

    ``name`` is a generator, e.g. seeded:sat. Raise ConfigError if the settings allow no problem.
    """
    return {**GENERATORS[name].make(Draws(name, seed), settings), SEED_COLUMN: seed}


def make_rows(name: str, split: str, settings: Settings) -> list[dict[str, Any]]:
    """Generate a row for each seed of the split "train" or "test", in the order of the seeds.

    Raise ConfigError if the settings allow no problem.
    """
    return [make_row(name, seed, settings) for seed in settings.seeds(split)]


def is_seeded(name: str | None) -> bool:
    """Return whether a dataset is generated from seeds: its name starts with ``seeded:``."""
    return (name or "").startswith(SCHEME)


# --- generators -------------------------------------------------------------------------------------------------------


def _make_arithmetic(draws: Draws, _: Settings) -> dict[str, str]:
    """Draw an exercise such as 12 + 34 * 5 with + - *; return its ``problem`` and ``answer``."""
    first, second, third = draws.between(10, 99), draws.between(10, 99), draws.between(2, 9)
    operator, next_operator = "+-*"[draws.below(3)], "+-*"[draws.below(3)]
    apply: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
    if next_operator == "*" and operator != "*":
        result = apply[operator](first, second * third)
    else:
        result = apply[next_operator](apply[operator](first, second), third)
    text = f"What is {first} {operator} {second} {next_operator} {third}? {_ANSWER}."
    return {"problem": text, "answer": str(result)}


def _make_sum(draws: Draws, _: Settings) -> dict[str, str]:
    """Draw a one-digit sum such as ``3+4=``, the format of the test model smoke:sums; return problem and answer."""
    first, second = draws.below(10), draws.below(10)
    return {"problem": f"{first}+{second}=", "answer": str(first + second)}


def _make_sat(draws: Draws, _: Settings) -> dict[str, str]:
    """Draw a satisfiability problem: clauses of three variables that a drawn assignment satisfies.

    Return ``problem``, ``answer`` (this assignment; others may also be correct) and ``clauses`` as JSON.
    """
    count = draws.between(*_VARIABLES)
    values = [bool(draws.below(2)) for _ in range(count)]
    clauses: list[list[int]] = []
    for _clause in range(draws.between(*_CLAUSES)):
        variables = sorted(draws.sample(_WIDTH, range(1, count + 1)))
        signs = [True] * _WIDTH
        while True:  # the assignment satisfies seven of eight choices of signs
            signs = [bool(draws.below(2)) for _ in variables]
            if any(values[variable - 1] == sign for variable, sign in zip(variables, signs, strict=True)):
                break
        clauses.append([variable if sign else -variable for variable, sign in zip(variables, signs, strict=True)])
    parts = [" or ".join(f"x{part}" if part > 0 else f"not x{-part}" for part in clause) for clause in clauses]
    text = _SAT.format(
        variables=", ".join(f"x{variable}" for variable in range(1, count + 1)),
        clauses="; ".join(f"({clause})" for clause in parts),
    )
    return {"problem": text, "answer": format_assignment(values), "clauses": json.dumps(clauses)}


def _draw_countdown(draws: Draws, settings: Settings) -> dict[str, str]:
    """Draw one of the countdown puzzles that the recipe's keys allow; return its problem and answer.

    Raise ConfigError if they allow none.
    """
    keys = settings.modebench
    pool = [puzzle for puzzle in countdown.list_puzzles(keys.numbers, keys.largest) if puzzle.modes in keys.modes]
    if not pool:
        raise _make_limits_error()
    problem, answer, _ = dataset.make_countdown_row(pool[draws.below(len(pool))])
    return {"problem": problem, "answer": answer}


def _draw_graph_coloring(draws: Draws, settings: Settings) -> dict[str, str]:
    """Draw a graph coloring puzzle; return its problem and answer.

    Raise ConfigError if no drawn graph has an allowed number of correct answers.
    """
    keys = settings.modebench
    puzzles = graph_coloring.draw_puzzles(keys.vertices, keys.hidden, keys.modes, 1, draws.below(2**53))
    if not puzzles:
        raise _make_limits_error()
    problem, answer, _ = dataset.make_graph_row(puzzles[0])
    return {"problem": problem, "answer": answer}


def _make_limits_error() -> ConfigError:
    """Return a ConfigError: no problem has between modebench_min_modes and modebench_max_modes correct answers."""
    problem = "no problem has a number of correct answers within these limits"
    return config_error("modebench_min_modes", problem, "widen modebench_min_modes to modebench_max_modes")


GENERATORS: dict[str, Generator] = {
    "seeded:arithmetic": Generator(_make_arithmetic),
    "seeded:sums": Generator(_make_sum),
    "seeded:sat": Generator(_make_sat, (*COLUMNS, "clauses")),
    "seeded:countdown": Generator(_draw_countdown, task="modebench:countdown"),
    "seeded:graph_coloring": Generator(_draw_graph_coloring, task="modebench:graph_coloring"),
}
SAT = "seeded:sat"


# --- satisfiability ---------------------------------------------------------------------------------------------------


def format_assignment(values: Sequence[bool]) -> str:
    """Return the values of the variables x1, x2, ... as an answer: ``x1=true, x2=false``."""
    return ", ".join(f"x{number}={'true' if value else 'false'}" for number, value in enumerate(values, start=1))


def parse_clauses(text: Any) -> Clauses:
    """Return the clauses in the JSON of a row's column ``clauses``, as lists of integers except 0.

    Raise ValueError if it is anything else, or empty.
    """
    try:
        clauses = json.loads(text)
        if clauses and all(clause and all(type(part) is int and part for part in clause) for clause in clauses):
            return [list(clause) for clause in clauses]
    except TypeError:
        pass
    raise ValueError("the column clauses has no clauses of a satisfiability problem")


def satisfies(answer: str, clauses: Clauses) -> bool:
    """Return whether an answer has a value for each variable of the clauses, has nothing else, and satisfies them.

    A value has the form ``x3=true`` or ``x3: 0``, in any order and case. The answer's length bounds the time.
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


def list_assignments(clauses: Clauses) -> Iterator[tuple[str, bool]]:
    """Yield every assignment of true and false to the variables, as an answer text, and whether it is correct."""
    count = max(abs(part) for clause in clauses for part in clause)
    for values in product((False, True), repeat=count):
        answer = format_assignment(values)
        yield answer, satisfies(answer, clauses)
