"""The two ways in which a reward is called so that an unscored completion is known, and why it is unscored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import (
    GIVEN_UP,
    RewardFailed,
    Score,
    WrongShape,
    call_reward,
    described,
    parameters,
    taken,
)
from grpo_recipes.runs.stop_request import CutShort, StopRequest

# What TRL hands a reward beside the columns: live objects of the trainer.
_NOT_SENT = ("trainer_state", "log_extra", "log_metric", "environments")


class RewardWrapper:
    """A reward as TRL calls it, which remembers the scores of the last call."""

    timeout: float | None = None  # seconds it may take for one completion, None without a limit

    def __init__(self, spec: str, name: str):
        self.spec = spec  # as the recipe names it
        self.__name__ = name  # TRL's name for its metrics
        self.scores: list[Score] = []  # (B,) of the last call
        self.generation = 0  # number of the generation being scored
        self.give_up_after: int | None = None  # unscored completions after which the rest is left out, None for all
        self.stop: StopRequest | None = None  # leaves out the rest of a call; None outside a training

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return the reward of each completion, (B,); None where it is unscored."""
        self.scores = self._score(len(completions), {**columns, "completions": completions})
        return [score.value for score in self.scores]

    def close(self) -> None:
        """End the processes it is called in, if any."""

    def _score(self, rows: int, columns: dict[str, Any]) -> list[Score]:
        raise NotImplementedError


class IsolatedReward(RewardWrapper):
    """Calls a reward in child processes, once for equal arguments, and not again where a limit decided before.

    Args:
        pool: has the reward.
        spec: as the recipe, and the pool, name it.
        name: of its metrics.
        records: scores that limits decided.
        code: hash of the user's code, since other code may end otherwise.
    """

    def __init__(self, pool: RewardPool, spec: str, name: str, records: LimitRecords, code: str = ""):
        super().__init__(spec, name)
        self._pool = pool
        self._records = records
        self._identity = (spec, code, pool.timeout, pool.memory_gib)
        self.timeout = pool.timeout
        self.close = pool.close

    def _score(self, rows: int, columns: dict[str, Any]) -> list[Score]:
        sent = {name: values for name, values in columns.items() if name not in _NOT_SENT}
        sent = taken(sent, self._pool.takes(self.spec))
        keys = [key_of(self._identity, {name: values[row] for name, values in sent.items()}) for row in range(rows)]
        first: dict[str, int] = {}
        same_as = [row if key is None else first.setdefault(key, row) for row, key in enumerate(keys)]
        found = {row: self._records.known(keys[row], self.generation) for row in same_as}
        called = [row for row, known in found.items() if known is None]
        asked = {name: [values[row] for row in called] for name, values in sent.items()}
        stopped = self.stop.cuts if self.stop else lambda: False
        scores = self._pool.score(self.spec, asked.pop("completions"), asked, self.give_up_after, stopped)
        for row, score in zip(called, scores, strict=True):
            found[row] = score
            self._records.add(keys[row], self.generation, score)
        return [found[row] for row in same_as]


class BatchReward(RewardWrapper):
    """Calls the user's reward on the whole batch, in this process and without limits."""

    def __init__(self, function: Callable[..., Any], spec: str, name: str):
        super().__init__(spec, name)
        self._function = function
        self._takes = parameters(function)

    def _score(self, rows: int, columns: dict[str, Any]) -> list[Score]:
        """Return the scores.

        Raises:
            RewardFailed: the reward raised, or did not return a number or None for each completion.
        """
        try:
            with self.stop.interrupting() if self.stop else nullcontext():
                scores = call_reward(self._function, taken(columns, self._takes), rows)
        except CutShort:
            return [Score(None, GIVEN_UP)] * rows
        except WrongShape as error:
            raise RewardFailed(f"reward '{self.spec}': {error}") from None
        except Exception as error:
            raise RewardFailed(f"reward '{self.spec}' raised {described(error)}") from error
        for score in scores:
            if score.reason is not None and not score.reason.startswith("not a number"):
                raise RewardFailed(f"reward '{self.spec}': {score.reason}")
        return scores


class LimitRecords:
    """The scores of one rank that a time limit, a memory limit or a death decided, so that a resumed run repeats them.

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

    def known(self, key: str | None, generation: int) -> Score | None:
        """Return the recorded score for these arguments, or None."""
        made, reason = self._records.get(key or "", (generation + 1, ""))
        return Score(None, reason, by_limit=True, replayed=True) if made <= generation else None

    def add(self, key: str | None, generation: int, score: Score) -> None:
        """Keep a score, on disk before the update that it leads to."""
        if key is None or not score.by_limit or score.reason is None:
            return
        self._records[key] = (generation, score.reason)
        if self._file is not None:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps({"key": key, "generation": generation, "reason": score.reason}) + "\n")


def key_of(reward: Sequence[Any], arguments: dict[str, Any]) -> str | None:
    """Return a hash of what a reward is called with; None where an argument is not plain data and so has no stable one.

    Args:
        reward: what else a score depends on: which reward, and its limits.
        arguments: of the call.
    """
    try:
        text = json.dumps([*reward, arguments], sort_keys=True)
    except (TypeError, ValueError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:32]
