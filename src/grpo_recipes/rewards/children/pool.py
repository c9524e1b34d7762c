"""Child processes that call rewards, and what becomes of a completion on which one hangs, dies, or takes too much."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_recipes.rewards.children.batch import TIME_LIMIT, Batch, Pace
from grpo_recipes.rewards.children.child import Child
from grpo_recipes.rewards.children.limits import MOST_PROCESSES
from grpo_recipes.rewards.children.score import Verdict
from grpo_recipes.rewards.children.workers import Crew

START_SECONDS = 300.0  # imports over a network disk, while every rank does the same
_FAILED_STARTS = 3  # in a row
_TICK_SECONDS = 0.25  # between looks at what a row that takes longer than this uses


class RewardFailed(Exception):
    """A reward cannot be called at all: its code, not a completion, is at fault."""


@dataclass(frozen=True)
class ChildReward:
    """A reward as a child process finds it.

    Attributes:
        spec: name of ours, or the user's ``module:function`` or ``file.py:function``.
        keys: recipe keys that one of ours takes.
        place: what is loaded instead of ``spec``: the same function in a copy of the file.
    """

    spec: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = None


def default_workers() -> int:
    """One per two cores of this process's share of the machine, at most 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2 // ranks))


class ChildRewards:
    """A pool of child processes that call rewards on one completion at a time, within limits.

        with ChildRewards("math_verify", "my_reward.py:score", workers=2, timeout=5) as pool:
            verdicts = pool.score("my_reward.py:score", completions, {"answer": answers})

    A child that is over a limit is killed with everything it started, and another takes its place while the rest go
    on. After the first death one more child than ``workers`` stands by. To be used from the thread that started it:
    the children end with that thread.

    Args:
        rewards: names of ours, ``module:function``, ``file.py:function``, or ``ChildReward``.
        workers: completions judged at a time; ``default_workers()`` by default.
        timeout: seconds for one completion. The first call of a child, which may import, has longer by twice what
            first calls were seen to take, 10 s until one is known.
        memory_gib: memory of one child and of what it starts.
        copies: folder with copies of the user's files (``user_code.copy_source``) that are loaded in their place.
    """

    def __init__(
        self,
        *rewards: str | ChildReward,
        workers: int | None = None,
        timeout: float = 5.0,
        memory_gib: float = 4.0,
        copies: Path | None = None,
    ):
        self._rewards = [reward if isinstance(reward, ChildReward) else ChildReward(reward) for reward in rewards]
        self.workers = workers or default_workers()
        self.timeout = timeout
        self.memory_gib = memory_gib
        self._memory = int(memory_gib * 2**30)
        wanted = [{"spec": one.spec, "keys": dict(one.keys), "place": one.place or one.spec} for one in self._rewards]
        self._crew = Crew(self.workers, {"memory": self._memory, "copies": copies, "rewards": wanted})
        self._names = ", ".join(one.spec for one in self._rewards)
        self._failed_starts = 0
        self._numbers = itertools.count()
        self._takes: list[list[str] | None] = []
        self._paces = [Pace(timeout) for _ in self._rewards]

    def __enter__(self) -> ChildRewards:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the children, and wait until one has loaded its rewards.

        Raises:
            RewardFailed: a reward cannot be loaded.
        """
        atexit.register(self.close)
        try:
            self._crew.fill()
            while not any(child.ready for child in self._crew.members):
                self._listen(None)
                self._enforce(None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every child and all it started."""
        atexit.unregister(self.close)
        self._crew.close()

    def takes(self, reward: str) -> list[str] | None:
        """Names of the columns a reward takes, None for all; known after ``start``."""
        return self._takes[self._index(reward)]

    def score(
        self,
        reward: str,
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
        give_up_after: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Verdict]:
        """Call a reward on each completion.

        Args:
            reward: as it was named to the pool.
            completions: (B,) texts or lists of chat messages.
            columns: other arguments of the reward, (B,) each: ``prompts``, ``answer``, any column.
            give_up_after: with more completions than this without a verdict the rest is not called.
            stopped: whether to leave the rest out, asked a few times a second.

        Returns:
            (B,) verdicts, in order.

        Raises:
            RewardFailed: the reward cannot be loaded, or a column cannot be sent to another process.
        """
        index = self._index(reward)
        rows = self._rows(index, {**(columns or {}), "completions": completions}, len(completions))
        batch = Batch(index, rows, self._paces[index], self.workers)
        self._listen(None, at_most=0.0)  # what happened since the last call
        try:
            while not batch.done:
                if stopped() or (give_up_after is not None and batch.missing > give_up_after):
                    batch.give_up()
                    break
                for child in self._crew.idle():
                    batch.hand_to(child)
                self._listen(batch)
                self._enforce(batch)
        finally:
            for child in [child for child in self._crew.members if child.rows]:
                self._crew.replace(child)
        return batch.verdicts()

    def _index(self, reward: str) -> int:
        return [one.spec for one in self._rewards].index(reward)

    def _rows(self, index: int, columns: dict[str, Sequence[Any]], count: int) -> list[tuple[int, dict[str, Any]]]:
        takes = self._takes[index]
        kept = {name: values for name, values in columns.items() if takes is None or name in takes}
        for name, values in kept.items():
            try:
                pickle.dumps(values)
            except Exception as error:
                what = f"reward '{self._rewards[index].spec}': column '{name}' cannot be sent to a child process"
                raise RewardFailed(f"{what} ({error}); set reward_isolation: none") from error
        return [(next(self._numbers), {name: values[row] for name, values in kept.items()}) for row in range(count)]

    # --- what children say ---------------------------------------------------------------------------------------

    def _listen(self, batch: Batch | None, at_most: float = _TICK_SECONDS) -> None:
        """Act on replies; wait for them until a limit is to be looked at."""
        now = time.monotonic()
        left = [batch.deadline(child) - now for child in self._crew.members if batch and child.rows]
        for child, reply in self._crew.listen(max(0.0, min([at_most, *left]))):
            self._take(child, reply, batch)

    def _take(self, child: Child, reply: dict[str, Any], batch: Batch | None) -> None:
        if "ready" in reply:
            child.ready, self._takes, self._failed_starts = True, reply["ready"], 0
        elif "failed" in reply:
            self._not_loaded(f"reward '{reply['failed']}' cannot be loaded: {reply['reason']}")
            self._replace(child, batch)
        elif "died" in reply:
            self._died(child, reply["died"], batch)
        else:
            assert batch is not None, "a child is given rows of a batch only"
            full = reply["out_of_memory"]
            batch.settle(child, Verdict(reply["value"], reply["reason"], reply["seconds"], by_limit=full))
            if full:
                self._replace(child, batch)

    def _died(self, child: Child, how: str, batch: Batch | None) -> None:
        if batch is not None and child.rows:
            self._stop(child, how, batch)
            return
        if not child.ready:
            self._not_loaded(f"{how} while it loaded the rewards {self._names}")
        self._replace(child, batch)

    def _not_loaded(self, what: str) -> None:
        """Once it worked, a child that cannot load its rewards may be bad luck."""
        self._failed_starts += 1
        if not self._takes or self._failed_starts >= _FAILED_STARTS:
            raise RewardFailed(what)

    # --- limits --------------------------------------------------------------------------------------------------

    def _enforce(self, batch: Batch | None) -> None:
        now = time.monotonic()
        for child in list(self._crew.members):
            if batch and child.rows and now > batch.deadline(child):
                self._stop(child, TIME_LIMIT, batch)
            elif not child.ready and now - child.since > START_SECONDS:
                raise RewardFailed(f"the rewards {self._names} were not loaded within {START_SECONDS:.0f} s")
        slow = [child for child in self._crew.members if child.rows and now - child.since > _TICK_SECONDS]
        if batch and slow:
            self._look_at(min(slow, key=lambda child: child.looked_at), batch)
        self._crew.sweep()

    def _look_at(self, child: Child, batch: Batch) -> None:
        """Compare what one slow child and all it started use with the limits."""
        child.looked_at = time.monotonic()
        processes, memory = child.use()
        if processes > MOST_PROCESSES:
            self._stop(child, f"process limit ({MOST_PROCESSES})", batch)
        elif memory > self._memory:
            self._stop(child, "memory limit", batch)

    def _stop(self, child: Child, reason: str, batch: Batch) -> None:
        batch.settle(child, Verdict(None, reason, time.monotonic() - child.since, by_limit=True))
        self._replace(child, batch)

    def _replace(self, child: Child, batch: Batch | None) -> None:
        if batch is not None:
            batch.take_back(child)
        self._crew.replace(child)
