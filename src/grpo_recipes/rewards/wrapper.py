"""The two ways a reward is called so that a completion without a verdict is known, and why."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from grpo_recipes.rewards.children import ChildRewards, RewardFailed, Verdict
from grpo_recipes.rewards.children.batch import GIVEN_UP
from grpo_recipes.rewards.children.score import WrongShape, described, entries, number
from grpo_recipes.rewards.records import LimitRecords, key_of
from grpo_recipes.runs.stop_request import CutShort, StopRequest

# What TRL hands a reward beside the columns: live objects of the trainer.
_NOT_SENT = ("trainer_state", "log_extra", "log_metric", "environments")


class WatchedReward:
    """A reward as TRL calls it, which remembers its verdicts.

    Attributes:
        spec: as the recipe names it.
        verdicts: (B,) of the last call.
        timeout: seconds it may take for one completion, None without a limit.
        generation: number of the generation being scored.
        give_up_after: completions without a verdict after which the rest of a call is left out, None for all.
        stop: the request to stop at which the rest of a call is left out; None outside a training.
    """

    timeout: float | None = None

    def __init__(self, spec: str, name: str):
        self.spec = spec
        self.__name__ = name  # TRL's name for its metrics
        self.verdicts: list[Verdict] = []
        self.generation = 0
        self.give_up_after: int | None = None
        self.stop: StopRequest | None = None

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """The reward of each completion, (B,); None without a verdict."""
        self.verdicts = self._judge(completions, columns)
        return [verdict.value for verdict in self.verdicts]

    def _judge(self, completions: Sequence[Any], columns: dict[str, Any]) -> list[Verdict]:
        raise NotImplementedError


class IsolatedReward(WatchedReward):
    """Calls a reward in child processes, once for equal arguments, and not again where a limit decided before.

    Args:
        pool: has the reward.
        spec: as the recipe, and the pool, name it.
        name: of its metrics.
        records: verdicts that limits decided.
        code: hash of the user's code, since other code may end otherwise.
    """

    def __init__(self, pool: ChildRewards, spec: str, name: str, records: LimitRecords, code: str = ""):
        super().__init__(spec, name)
        self._pool = pool
        self._records = records
        self._identity = (spec, code, pool.timeout, pool.memory_gib)
        self.timeout = pool.timeout

    def _judge(self, completions: Sequence[Any], columns: dict[str, Any]) -> list[Verdict]:
        takes = self._pool.takes(self.spec)
        everything = {**columns, "completions": completions}
        kept = {
            name: values
            for name, values in everything.items()
            if name not in _NOT_SENT and (takes is None or name in takes)
        }
        calls = _Calls()
        for row in range(len(completions)):
            key = key_of(self._identity, {name: values[row] for name, values in kept.items()})
            calls.add(key, row, self._records.known(key, self.generation))
        rows = [row for _, row in calls.to_make]
        asked = {name: [values[row] for row in rows] for name, values in kept.items()}
        stopped = self.stop.cuts if self.stop else lambda: False
        verdicts = self._pool.score(self.spec, asked.pop("completions"), asked, self.give_up_after, stopped)
        for (key, row), verdict in zip(calls.to_make, verdicts, strict=True):
            calls.verdicts[row] = verdict
            self._records.add(key, self.generation, verdict)
        return [calls.verdicts[calls.same_as[row]] for row in range(len(completions))]


@dataclass
class _Calls:
    """Which rows are to be called, and which share the verdict of another or of an earlier call."""

    to_make: list[tuple[str | None, int]] = field(default_factory=list)
    same_as: dict[int, int] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    _first: dict[str, int] = field(default_factory=dict)

    def add(self, key: str | None, row: int, known: Verdict | None) -> None:
        self.same_as[row] = row if key is None else self._first.setdefault(key, row)
        if self.same_as[row] != row:
            return
        if known is None:
            self.to_make.append((key, row))
        else:
            self.verdicts[row] = known


class BatchReward(WatchedReward):
    """Calls the user's reward on the whole batch, in this process and without limits.

    Args:
        function: the user's.
        spec: as the recipe names it.
        name: of its metrics.
    """

    def __init__(self, function: Callable[..., Any], spec: str, name: str):
        super().__init__(spec, name)
        self._function = function
        parameters = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
        self._takes = None if takes_all else {parameter.name for parameter in parameters}

    def _judge(self, completions: Sequence[Any], columns: dict[str, Any]) -> list[Verdict]:
        """The verdicts.

        Raises:
            RewardFailed: the reward raised, or did not return a number or None for each completion.
        """
        everything = {**columns, "completions": completions}
        kept = {name: values for name, values in everything.items() if self._takes is None or name in self._takes}
        try:
            with self.stop.interrupting() if self.stop else nullcontext():
                result = self._function(**kept)
                if inspect.isawaitable(result):
                    result = asyncio.run(_awaited(result))
            found = [number(entry) for entry in entries(result, len(completions))]
        except CutShort:
            return [Verdict(None, GIVEN_UP)] * len(completions)
        except WrongShape as error:
            raise RewardFailed(f"reward '{self.spec}': {error}") from None
        except Exception as error:
            raise RewardFailed(f"reward '{self.spec}' raised {described(error)}") from error
        for _, reason in found:
            if reason is not None and not reason.startswith("not a number"):
                raise RewardFailed(f"reward '{self.spec}': {reason}")
        return [Verdict(value, reason) for value, reason in found]


async def _awaited(result: Any) -> Any:
    return await result
