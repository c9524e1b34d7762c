"""Find and read the folders of several runs that one command started, for example the trials of a sweep.

The commands `status`, `logs` and `stop` accept such a folder as well as a single run. An extension that makes folders
of this kind registers a subclass of ``RunGroup`` as its part ``folders``.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import sort_newest_first
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.runs.rundir import read_json

GONE = "gone"  # status of a trial without a run directory
COMPLETED = "completed"


@dataclass(frozen=True)
class RunGroup(ABC):
    """A folder of several runs, called trials."""

    folder: Path  # absolute
    record: dict[str, Any]  # the content of the record file; ``jobs`` lists Slurm jobs
    kind: ClassVar[str]  # its name in texts, e.g. sweep
    parent: ClassVar[str]  # folder under run_root that contains the folders of this kind
    record_file: ClassVar[str]  # name of the record file, which only folders of this kind have

    @classmethod
    @abstractmethod
    def read(cls, folder: Path) -> Self:
        """Read the record of a folder; raise ConfigError if it is not such a folder, or its record is damaged."""

    @classmethod
    def list_all(cls, root: Path) -> list[Self]:
        """Read the folders of this kind directly in ``root``, the newest first. Damaged folders are skipped."""
        groups = []
        for path in sort_newest_first(root.glob(f"*/{cls.record_file}")):
            with contextlib.suppress(ConfigError):  # a damaged folder hides no other
                groups.append(cls.read(path.parent))
        return groups

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The names of the trials, in the order of their index."""

    @property
    @abstractmethod
    def trial_count(self) -> int:
        """The number of trials, including those that do not exist yet."""

    @abstractmethod
    def trial_dir(self, index: int) -> Path:
        """Return the run directory of the trial ``index``; it may not exist yet."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether no trial is left to run."""

    @abstractmethod
    def resume_command(self) -> str:
        """Return the shell command that continues the unfinished trials."""

    def status(self, index: int) -> str:
        """Return the status in ``summary.json`` of the trial ``index``.

        The status is ``GONE`` if the trial has no summary, and ``unknown`` if the summary has no status.
        """
        summary = read_json(self.trial_dir(index) / "summary.json")
        return str(summary.get("status", "unknown")) if summary else GONE


def group_kinds() -> tuple[type[RunGroup], ...]:
    """Return the subclasses of ``RunGroup`` that installed extensions register."""
    return tuple(parts("folders"))


def find_group(root: Path, name: str) -> RunGroup | None:
    """Read and return the group of runs at the path ``name``, or with this name below ``root``; None if there is none.

    Raise ConfigError if its record is damaged.
    """
    for kind in group_kinds():
        for folder in (Path(name), root / kind.parent / name):
            if name and os.path.isfile(folder / kind.record_file):
                return kind.read(folder)
    return None


def list_groups(root: Path) -> list[RunGroup]:
    """Return the groups of every kind below ``root``, sorted by kind, and the newest first within a kind."""
    return [group for kind in group_kinds() for group in kind.list_all(root / kind.parent)]
