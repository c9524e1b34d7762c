"""What is wrong, where, and the edit that fixes it: the one shape of every config error, and the ways to raise one."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_recipes.secrets import masked

Item = TypeVar("Item")
Made = TypeVar("Made")

# Exit codes of `grpo`: everything else is the first failed rank's own, or 128+n for a signal.
EXIT_CONFIG_ERROR = 2  # recipe, flag or environment is wrong; nothing was started
EXIT_STOPPED = 75  # stopped on request, state saved


@dataclass(frozen=True)
class Problem:
    """One fault in what the user gave, as one line."""

    where: str  # file and line, flag, or variable, e.g. recipe.yaml:12
    what: str
    fix: str  # the edit that removes the fault

    def __post_init__(self) -> None:
        for name in ("where", "what", "fix"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. Fix: {self.fix}"


def printable(text: str) -> str:
    """Return one line without secrets: a message may hold whatever the user wrote."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in masked(text))


class ConfigError(Exception):
    """Bad input: reported one line a problem, exit code 2, nothing started."""

    def __init__(self, *problems: Problem):
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


def config_error(where: str, what: str, fix: str) -> ConfigError:
    """Return the error of a single problem."""
    return ConfigError(Problem(where, what, fix))


@contextlib.contextmanager
def translate(
    kinds: type[Exception] | tuple[type[Exception], ...], into: Callable[[Any], BaseException]
) -> Iterator[None]:
    """Raise ``into(error)`` instead of an error of these kinds that the block raises, with the error as its cause."""
    try:
        yield
    except kinds as error:
        raise into(error) from error


def collect(items: Iterable[Item], work: Callable[[Item], Made]) -> list[Made]:
    """Return what ``work`` makes of each item; where it raises a ConfigError for some, raise one with all problems."""
    done: list[Made] = []
    problems: list[Problem] = []
    for item in items:
        try:
            done.append(work(item))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return done
