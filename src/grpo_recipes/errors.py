"""Config errors: each problem has a place, a fault and a fix, and is printed as ``WHERE: WHAT IS WRONG. Fix: FIX``.

The fix is one imperative sentence with a value. All problems of an input are reported at once.

    raise config_error("recipe.yaml:12", "max_steps: expected an integer, got 'many'", "set max_steps: 100")
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from grpo_recipes.secrets import mask_secrets

Item = TypeVar("Item")
Result = TypeVar("Result")

# Exit codes of `grpo`. All others come from the first failed rank, or are 128+n for a signal.
EXIT_CONFIG_ERROR = 2  # recipe, flag, environment or checkpoint is wrong; no training started
EXIT_STOPPED = 75  # stopped on request, state saved


@dataclass(frozen=True)
class Problem:
    """A fault in the user's input, printed as one line."""

    where: str  # file and line, flag, or variable, e.g. recipe.yaml:12
    what: str  # the fault
    fix: str  # the edit that removes the fault

    def __post_init__(self) -> None:
        """Mask secrets and escape control characters in all three texts."""
        for name in ("where", "what", "fix"):
            object.__setattr__(self, name, mask_and_escape(getattr(self, name)))

    def __str__(self) -> str:
        """Return place, problem and fix in one line."""
        return f"{self.where}: {self.what}. Fix: {self.fix}"


def mask_and_escape(text: str) -> str:
    """Return a text with secrets masked and control characters escaped, e.g. a line end as ``\\n``.

    A message may quote any input, and must stay on one line.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in mask_secrets(text))


class ConfigError(Exception):
    """Invalid input. `grpo` prints one line per problem and exits with code 2; no training started."""

    def __init__(self, *problems: Problem):
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


def config_error(where: str, what: str, fix: str) -> ConfigError:
    """Return a ConfigError with a single problem."""
    return ConfigError(Problem(where, what, fix))


def rename_places(error: ConfigError, names: Mapping[str, str]) -> ConfigError:
    """Return the error with other places: ``names`` maps places of its problems to flags of the user's command."""
    return ConfigError(*(replace(problem, where=names.get(problem.where, problem.where)) for problem in error.problems))


@contextlib.contextmanager
def translate_errors(
    kinds: type[BaseException] | tuple[type[BaseException], ...], into: Callable[[Any], BaseException]
) -> Iterator[None]:
    """Raise ``into(error)`` instead of an error of these kinds in the ``with`` block, with that error as its cause."""
    try:
        yield
    except kinds as error:
        raise into(error) from error


def collect_results(items: Iterable[Item], work: Callable[[Item], Result]) -> list[Result]:
    """Return ``work(item)`` for each item; if some raise a ConfigError, raise one with all problems at the end."""
    results: list[Result] = []
    problems: list[Problem] = []
    for item in items:
        try:
            results.append(work(item))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return results
