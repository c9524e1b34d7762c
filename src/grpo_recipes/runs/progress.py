"""One line a step for the person who watches, read from ``metrics.jsonl``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_PHASES = ("sample", "score", "update", "sync")


class Progress:
    """Follows a run's ``metrics.jsonl`` from where it stands now."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / "metrics.jsonl"
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        self._start: tuple[float, int] | None = None

    def new_rows(self) -> list[dict[str, Any]]:
        """Return the rows written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open() as file:
            file.seek(self._offset)
            text = file.read()
        whole = text.rfind("\n") + 1
        self._offset += len(text[:whole].encode())
        return [json.loads(row) for row in text[:whole].splitlines()]

    def line(self, row: dict[str, Any]) -> str:
        """Return what is said of a row that was written just now."""
        now = time.monotonic()
        step, last = row["step"], row["max_steps"]
        if self._start is None:
            self._start = (now - row["seconds/step"], step - 1)
        began, first = self._start
        left = (now - began) / (step - first) * (last - step)
        reward = row.get("reward")
        reward = f"{reward:.3f}" if isinstance(reward, int | float) else str(reward).lower()
        phases = " ".join(f"{phase} {row[f'seconds/{phase}']:.2f}s" for phase in _PHASES)
        return (
            f"step {step}/{last}  reward {reward}  {row['tokens_per_second']:.0f} tokens/s  {phases}  "
            f"left {clock(left)}"
        )


def clock(seconds: float) -> str:
    """Seconds as hours:minutes:seconds."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
