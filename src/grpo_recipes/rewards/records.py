"""Verdicts that a limit decided, kept so that a resumed run gives them again instead of asking again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.rewards.children import Verdict


class LimitRecords:
    """The verdicts of one rank that a time limit, a memory limit or a death decided.

    A record counts from the generation it was made in: what was called before it in the run is called again when the
    run is redone from a checkpoint, and what was not called after it is not called then.

    Args:
        file: where they are kept; None keeps them for this process alone.
    """

    def __init__(self, file: Path | None):
        self._file = file
        self._records: dict[str, tuple[int, str]] = {}
        if file is not None and file.exists():
            for line in file.read_text().split("\n")[:-1]:  # what follows the last newline was cut off by a kill
                record = json.loads(line)
                self._records.setdefault(record["key"], (record["generation"], record["reason"]))

    def known(self, key: str | None, generation: int) -> Verdict | None:
        """The recorded verdict on these arguments, or None."""
        made, reason = self._records.get(key or "", (generation + 1, ""))
        return Verdict(None, reason, by_limit=True, replayed=True) if made <= generation else None

    def add(self, key: str | None, generation: int, verdict: Verdict) -> None:
        """Keep a verdict, on disk before the update that it leads to."""
        if key is None or not verdict.by_limit or verdict.reason is None:
            return
        self._records[key] = (generation, verdict.reason)
        if self._file is not None:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps({"key": key, "generation": generation, "reason": verdict.reason}) + "\n")


def key_of(reward: Sequence[Any], arguments: dict[str, Any]) -> str | None:
    """What a reward is called with, as a hash; None where an argument is no plain data and so has no stable one.

    Args:
        reward: what else a verdict hangs on: which reward, and its limits.
        arguments: of the call.
    """
    try:
        text = json.dumps([*reward, arguments], sort_keys=True)
    except (TypeError, ValueError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:32]
