"""Compare the bytes that a process or the disk of a run needs, part by part, with the available bytes.

Need({"weights": 2 * GIB, "optimizer": 8 * GIB}, available=16 * GIB).fits  # True
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
Parts = dict[str, int]  # bytes


def format_gib(size: int) -> str:
    """Format bytes as a number of GiB without a unit, with three decimals below 0.1 GiB, otherwise one."""
    return f"{size / GIB:.1f}" if size >= GIB / 10 or not size else f"{size / GIB:.3f}"


@dataclass(frozen=True)
class Need:
    """The bytes at a role's peak on a GPU or in the machine's memory, or the bytes a run writes to disk."""

    parts: Parts  # bytes by the name of the part, for example "weights"
    available: int | None  # None if unknown
    fix: str = ""  # if it does not fit: the key to change, with its value

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the total is available; True if that is unknown."""
        return self.available is None or self.total <= self.available

    @property
    def size(self) -> str:
        """The total and the available size as text, for example "3.1 of 8.0 GiB"."""
        return f"{format_gib(self.total)}{'' if self.available is None else f' of {format_gib(self.available)}'} GiB"

    def __str__(self) -> str:
        """Return the size and its parts in GiB, in one line."""
        return f"{self.size}: " + ", ".join(f"{name} {format_gib(size)}" for name, size in self.parts.items())


@dataclass(frozen=True)
class Disk(Need):
    """The bytes that a run writes to disk."""

    checkpoints: int | None = None  # most checkpoints at the same time, None without a limit

    @property
    def checkpoints_text(self) -> str:
        """The counted checkpoints as text, for example "3 checkpoints"."""
        return f"{self.checkpoints or '2 of an unlimited number of'} checkpoint{'' if self.checkpoints == 1 else 's'}"

    def __str__(self) -> str:
        """Return the size and its parts in GiB, with the number of checkpoints."""
        return super().__str__().replace("checkpoints", self.checkpoints_text)
