"""Sweeps that an extension translates from another tool.

The command `grpo sweep` belongs to an extension, and extensions do not import each other. An extension that reads the
sweeps of another tool uses the registered ``Sweeper`` instead:

    sweeper = need_sweeper("-m")(options)
    axes = sweeper.axes({"learning_rate": ["1e-6", "3e-6"]}, flags)
    return sweeper.start("recipe.yaml", axes, flags, flags_of)
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from grpo_recipes.errors import config_error
from grpo_recipes.plan.devices import Resources
from grpo_recipes.recipe.extensions import parts

FlagsOf = Callable[[Mapping[str, str]], list[str]]  # values of a trial by their axis -> its recipe flags


class Sweeper(ABC):
    """One sweep, made with the options of `grpo sweep`; wrong options are a ConfigError."""

    folder: ClassVar[str]  # under run_root: contains the sweep directories

    @abstractmethod
    def __init__(self, options: argparse.Namespace) -> None: ...

    @property
    @abstractmethod
    def is_submitted(self) -> bool:
        """Whether the trials are Slurm jobs."""

    @abstractmethod
    def resources(self, environment: Mapping[str, str]) -> Resources:
        """Return the devices of a trial."""

    @abstractmethod
    def axes(self, axes: Mapping[str, list[str]], flags: Sequence[str]) -> Mapping[str, list[str]]:
        """Return the values of each recipe key; in a search, a range becomes a list of its two ends.

        ``flags`` are the flags of all trials. A search needs this call before ``start``, because it stores the
        settings of the search. Raise ConfigError if they are wrong.
        """

    @abstractmethod
    def start(
        self,
        recipe: str,
        axes: Mapping[str, list[str]],
        flags: Sequence[str],
        flags_of: FlagsOf,
        elsewhere: Sequence[Path] = (),
    ) -> int:
        """Run or submit the trials and return the exit code.

        ``flags_of`` returns the recipe flags of a trial. All trials also get ``flags``. An unfinished sweep of the same
        trials continues, also if its run_root is one of the folders ``elsewhere``.
        """


def need_sweeper(option: str) -> type[Sweeper]:
    """Return the registered class; if there is none, raise a ConfigError for ``option``, which requests a sweep."""
    for sweeper in parts("sweeps"):
        kind: type[Sweeper] = sweeper
        return kind
    problem = "needs the command grpo sweep, but it is not installed"
    raise config_error(option, problem, f"remove {option}, and start a run for each value")
