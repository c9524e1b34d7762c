"""Bytes that a role of a run needs, part by part, and the bytes that are available for them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
Parts = dict[str, int]  # bytes


def in_gib(size: int) -> str:
    """Return bytes as a number of GiB, small ones to the MiB."""
    return f"{size / GIB:.1f}" if size >= GIB / 10 or not size else f"{size / GIB:.3f}"


@dataclass(frozen=True)
class Need:
    """The bytes of one role's peak on a GPU or in the machine's memory, or of all that a run writes to disk."""

    parts: Parts
    available: int | None  # None where that is not known
    fix: str = ""  # the key to change, with its value, where it does not fit

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.available is None or self.total <= self.available

    @property
    def size(self) -> str:
        """The total, and what there is for it."""
        return f"{in_gib(self.total)}{'' if self.available is None else f' of {in_gib(self.available)}'} GiB"

    def __str__(self) -> str:
        return f"{self.size}: " + ", ".join(f"{name} {in_gib(size)}" for name, size in self.parts.items())


@dataclass(frozen=True)
class Disk(Need):
    """What a run writes to disk."""

    checkpoints: int | None = None  # most at a time, None where nothing limits them

    @property
    def many(self) -> str:
        """The number of checkpoints that are counted, in words."""
        return f"{self.checkpoints or '2 of an unlimited number of'} checkpoint{'' if self.checkpoints == 1 else 's'}"

    def __str__(self) -> str:
        return super().__str__().replace("checkpoints", self.many)
