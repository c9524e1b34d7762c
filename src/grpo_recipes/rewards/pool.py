"""Child processes that call rewards within limits: one that hangs, dies or fills the memory costs one score.

from grpo_recipes.rewards.pool import RewardPool

with RewardPool("math_verify", workers=2, timeout=5, memory_gib=4) as pool:
    scores = pool.score("math_verify", completions, {"answer": answers})
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.process.tree import descendants, kill_descendants
from grpo_recipes.rewards.child import MOST_PROCESSES
from grpo_recipes.rewards.score import GIVEN_UP, RewardFailed, Score, taken
from grpo_recipes.secrets import secret_name, secret_value

START_SECONDS = 300.0  # imports over a network disk, while every rank does the same
_FAILED_STARTS = 3  # in a row
_TICK_SECONDS = 0.25  # between looks at what a row that takes longer than this uses
_END_SECONDS = 5.0  # a keeper that is asked to end needs milliseconds
_FIRST_CALL_SECONDS = 10.0
_CHUNK_SECONDS, _CHUNK_ROWS = 0.05, 64  # work handed out at once
_TIME_LIMIT = "time limit"

# Rank, port and token variables would let a reward into the training's process group, or the vLLM server.
_KEPT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "JAVA_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "NLTK_DATA", "GRPO_HOME",
    "GRPO_CODE",
)  # fmt: skip
_KEPT_PREFIXES = ("PYTHON", "LC_")
_ADDED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the GPUs are full
}


@dataclass(frozen=True)
class PoolReward:
    """A reward as a child process finds it."""

    spec: str  # name of ours, or the user's ``module:function`` or ``file.py:function``
    keys: Mapping[str, Any] = field(default_factory=dict)  # recipe keys that one of ours takes
    place: str | None = None  # loaded instead of ``spec``: the same function in a copy of the file


def default_workers() -> int:
    """Return one per two cores of this process's share of the machine, at most 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2 // ranks))


class RewardPool:
    """A pool of child processes that call rewards on one completion at a time, within limits.

    A child that is over a limit is killed with everything it started, and another takes its place while the rest go
    on. After the first death one more child than ``workers`` stands by. Use it from the thread that started it: the
    children end with that thread.

    Args:
        rewards: names of ours, ``module:function``, ``file.py:function``, or ``PoolReward``.
        workers: completions scored at a time; ``default_workers()`` by default.
        timeout: seconds for one completion. The first call of a child, which may import, has longer by twice what
            first calls were seen to take, 10 s until one is known.
        memory_gib: memory of one child and of what it starts.
        copies: folder with copies of the user's files (``recipe.user_code.copy_source``), loaded in their place.
    """

    def __init__(
        self,
        *rewards: str | PoolReward,
        workers: int | None = None,
        timeout: float = 5.0,
        memory_gib: float = 4.0,
        copies: Path | None = None,
    ):
        self.workers = workers or default_workers()
        self.timeout = timeout
        self.memory_gib = memory_gib
        self._memory = int(memory_gib * 2**30)
        wanted = [reward if isinstance(reward, PoolReward) else PoolReward(reward) for reward in rewards]
        self._specs = [one.spec for one in wanted]
        places = [{"spec": one.spec, "keys": dict(one.keys), "place": one.place or one.spec} for one in wanted]
        self._setup = {"memory": self._memory, "copies": copies, "rewards": places}
        self._timings = [_Timing(timeout) for _ in wanted]
        self._takes: list[list[str] | None] = []
        self._children: list[_Child] = []  # those that work, or load
        self._wanted = self.workers  # children; one more stands by after the first was replaced
        self._ending: list[_Child] = []
        self._failed_starts = 0
        self._numbers = itertools.count()

    def __enter__(self) -> RewardPool:
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
            self._fill()
            while not any(child.ready for child in self._children):
                self._listen(None)
                self._enforce(None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every child and all it started, and return when nothing of them is left."""
        atexit.unregister(self.close)
        for child in list(self._children):
            self._dismiss(child)
        while self._ending:
            self._ending = [child for child in self._ending if not child.ended()]
            time.sleep(0.005)

    def takes(self, reward: str) -> list[str] | None:
        """Return the names of the columns a reward takes, None for all; known after ``start``."""
        return self._takes[self._specs.index(reward)]

    def score(
        self,
        reward: str,
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
        give_up_after: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Score]:
        """Call a reward on each completion, and return (B,) scores in order.

        Args:
            reward: as it was named to the pool.
            completions: (B,) texts or lists of chat messages.
            columns: other arguments of the reward, (B,) each: ``prompts``, ``answer``, any column.
            give_up_after: with more unscored completions than this the rest is not called.
            stopped: whether to leave the rest out, asked a few times a second.

        Raises:
            RewardFailed: the reward cannot be loaded, or a column cannot be sent to another process.
        """
        index = self._specs.index(reward)
        rows = self._rows(index, {**(columns or {}), "completions": completions}, len(completions))
        batch = _Batch(index, rows, self._timings[index])
        self._listen(None, at_most=0.0)  # what happened since the last call
        try:
            while not batch.done:
                if stopped() or (give_up_after is not None and batch.unscored > give_up_after):
                    batch.give_up()
                    break
                busy = sum(bool(child.rows) for child in self._children)
                idle = [child for child in self._children if child.ready and not child.rows]
                for child in idle[: self.workers - busy]:
                    batch.hand_to(child, self.workers)
                self._listen(batch)
                self._enforce(batch)
        finally:
            for child in [child for child in self._children if child.rows]:
                self._replace(child, None)
        return batch.scores()

    def _rows(self, index: int, columns: dict[str, Sequence[Any]], count: int) -> dict[int, dict[str, Any]]:
        kept = taken(columns, self._takes[index])
        for name, values in kept.items():
            try:
                pickle.dumps(values)
            except Exception as error:
                what = f"reward '{self._specs[index]}': column '{name}' cannot be sent to a child process"
                raise RewardFailed(f"{what} ({error}); set reward_isolation: none") from error
        return {next(self._numbers): {name: values[row] for name, values in kept.items()} for row in range(count)}

    # --- replies -------------------------------------------------------------------------------------------------

    def _listen(self, batch: _Batch | None, at_most: float = _TICK_SECONDS) -> None:
        """Act on the next replies; wait for them no longer than until a limit is to be looked at."""
        now = time.monotonic()
        left = [batch.deadline(child) - now for child in self._children if batch and child.rows]
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.stdout, selectors.EVENT_READ, child)
                if child.unsent:
                    selector.register(child.stdin, selectors.EVENT_WRITE, child)
            ready = {key.data: None for key, _ in selector.select(max(0.0, min([at_most, *left])))}
        for child in ready:
            if child.unsent:
                child.push()
            for reply in child.replies():
                if child in self._children:  # not replaced because of an earlier reply
                    self._take(child, reply, batch)

    def _take(self, child: _Child, reply: dict[str, Any], batch: _Batch | None) -> None:
        if "ready" in reply:
            child.ready, self._takes, self._failed_starts = True, reply["ready"], 0
        elif "failed" in reply:
            self._not_loaded(f"reward '{reply['failed']}' cannot be loaded: {reply['reason']}")
            self._replace(child, batch)
        elif "died" not in reply:
            assert batch is not None, "a child is given rows of a batch only"
            full = reply["out_of_memory"]
            batch.enter(child, Score(reply["value"], reply["reason"], reply["seconds"], by_limit=full))
            if full:
                self._replace(child, batch)
        elif batch is not None and child.rows:
            self._stop(child, reply["died"], batch)
        else:
            if not child.ready:
                self._not_loaded(f"{reply['died']} while it loaded the rewards {', '.join(self._specs)}")
            self._replace(child, batch)

    def _not_loaded(self, what: str) -> None:
        """Raise, unless it worked before: then a child that cannot load its rewards may be bad luck."""
        self._failed_starts += 1
        if not self._takes or self._failed_starts >= _FAILED_STARTS:
            raise RewardFailed(what)

    # --- limits --------------------------------------------------------------------------------------------------

    def _enforce(self, batch: _Batch | None) -> None:
        now = time.monotonic()
        for child in list(self._children):
            if batch and child.rows and now > batch.deadline(child):
                self._stop(child, _TIME_LIMIT, batch)
            elif not child.ready and now - child.since > START_SECONDS:
                names = ", ".join(self._specs)
                raise RewardFailed(f"the rewards {names} were not loaded within {START_SECONDS:.0f} s")
        slow = [child for child in self._children if child.rows and now - child.since > _TICK_SECONDS]
        if batch and slow:
            self._look_at(min(slow, key=lambda child: child.looked_at), batch)
        self._ending = [child for child in self._ending if not child.ended()]

    def _look_at(self, child: _Child, batch: _Batch) -> None:
        """Compare what one slow child and all it started use with the limits."""
        child.looked_at = time.monotonic()
        family = descendants(child.pid)
        if len(family) > MOST_PROCESSES:
            self._stop(child, f"process limit ({MOST_PROCESSES})", batch)
        elif sum(map(_memory, family)) > self._memory:
            self._stop(child, "memory limit", batch)

    def _stop(self, child: _Child, reason: str, batch: _Batch) -> None:
        batch.enter(child, Score(None, reason, time.monotonic() - child.since, by_limit=True))
        self._replace(child, batch)

    def _fill(self) -> None:
        """Start the children that are missing; they load while others work."""
        while len(self._children) < self._wanted:
            self._children.append(_Child(self._setup))

    def _replace(self, child: _Child, batch: _Batch | None) -> None:
        """End a child, put the rows it did not come to back in the batch, and start another."""
        if batch is not None:
            batch.take_back(child)
        self._dismiss(child)
        self._wanted = self.workers + 1
        self._fill()

    def _dismiss(self, child: _Child) -> None:
        self._children.remove(child)
        child.end()
        self._ending.append(child)


class _Child:
    """The parent's end of one child process. Nothing here blocks."""

    def __init__(self, setup: dict[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_recipes.rewards.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_child_environment(os.environ),
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self.pid = self._process.pid  # of the keeper, below which everything else of this child is
        self.ready = False  # its rewards are loaded
        self.rows: list[int] = []  # numbers of the rows it has not answered, the one it is at first
        self.called: set[int] = set()  # rewards, by number, that it has called at least once
        self.looked_at = 0.0  # when its memory and processes were last looked at; as `since`
        self.unsent = bytearray()  # waits while the pipe is full
        self._unread = b""
        self._ends: float | None = None
        self.send(setup)

    def send(self, request: dict[str, Any]) -> None:
        """Send a request, as far as the pipe takes it."""
        self.unsent += pickle.dumps(request)
        self.push()

    def push(self) -> None:
        """Send what the pipe takes of ``unsent``."""
        try:
            while self.unsent and (sent := self.stdin.write(self.unsent)):
                del self.unsent[:sent]
        except BrokenPipeError:
            self.unsent.clear()  # it died, as the end of its replies will say
        self.since = time.monotonic()  # when it began with its row, or to start

    def replies(self) -> list[dict[str, Any]]:
        """Return its replies since the last call; ``{"died": how}`` is the last of all."""
        while part := self.stdout.read(1 << 16):
            self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        try:
            replies = [json.loads(line) for line in lines]
        except ValueError:
            return [{"died": "garbled replies of its process"}]
        # At the end of the pipe `read` returns b"", while nothing has come yet None.
        return replies if part is None else [*replies, {"died": "death of its process"}]

    def end(self) -> None:
        """Ask its keeper to kill everything of it."""
        if self._ends is None:
            self._ends = time.monotonic() + _END_SECONDS
            self._process.terminate()

    def ended(self) -> bool:
        """Return whether nothing of it is left; a keeper that does not obey is killed with its descendants."""
        assert self._ends is not None
        if self._process.poll() is None and time.monotonic() > self._ends:
            kill_descendants(self.pid)
            self._process.kill()
            self._process.wait()
        if self._process.poll() is None:
            return False
        self.stdin.close()
        self.stdout.close()
        return True


def _child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the few variables a reward's process gets: those that programs need, none that names or holds a secret."""
    kept = {
        name: value
        for name, value in environment.items()
        if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and not (secret_name(name) or secret_value(value))
    }
    return {**kept, **_ADDED}


def _memory(process: psutil.Process) -> int:
    """Return the bytes a process holds, a page that several share counted once among them."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # ended meanwhile, or changed its user
        return 0


class _Timing:
    """What calls of one reward were seen to take, and so how long one may take and how many to hand out at once."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._row_seconds: float | None = None
        self._slowest_first = 0.0
        self._first_call = _FIRST_CALL_SECONDS

    def add(self, score: Score, first: bool) -> None:
        """Learn from a call; the first one of a process may import what the reward needs."""
        if not first:
            before = self._row_seconds
            self._row_seconds = score.seconds if before is None else 0.8 * before + 0.2 * score.seconds
        elif score.reason == _TIME_LIMIT:
            self._first_call /= 2  # probably no import
        else:
            self._slowest_first = max(self._slowest_first, score.seconds)
            self._first_call = min(_FIRST_CALL_SECONDS, 2 * self._slowest_first)

    def limit(self, first: bool) -> float:
        """Return the seconds a call may take."""
        return self._timeout + (self._first_call if first else 0.0)

    def rows(self, first: bool) -> int:
        """Return how many rows to hand out at once."""
        if first or self._row_seconds is None:
            return 1
        return max(1, min(_CHUNK_ROWS, int(_CHUNK_SECONDS / max(self._row_seconds, 1e-6))))


class _Batch:
    """The rows of one call of ``RewardPool.score``, number -> columns in rising order, and their scores so far."""

    def __init__(self, reward: int, rows: dict[int, dict[str, Any]], timing: _Timing):
        self._reward = reward
        self._rows = rows
        self._timing = timing
        self._todo = deque(rows)
        self._scores: dict[int, Score] = {}
        self.unscored = 0

    @property
    def done(self) -> bool:
        """Whether every row has its score."""
        return len(self._scores) == len(self._rows)

    def hand_to(self, child: _Child, workers: int) -> None:
        """Give a child the next rows: fewer towards the end, so that all end together."""
        share = -(-len(self._todo) // workers)
        child.rows = [self._todo.popleft() for _ in range(min(share, self._timing.rows(self._first(child))))]
        if child.rows:
            child.send({"reward": self._reward, "rows": [(number, self._rows[number]) for number in child.rows]})

    def take_back(self, child: _Child) -> None:
        """Take the rows that a child was given and did not come to."""
        self._todo.extendleft(reversed(child.rows))
        child.rows = []

    def deadline(self, child: _Child) -> float:
        """Return when a child must have answered the row it is at; ``time.monotonic()``."""
        return child.since + self._timing.limit(self._first(child))

    def enter(self, child: _Child, score: Score) -> None:
        """Enter the score of the row that a child was at."""
        self._scores[child.rows.pop(0)] = score
        self.unscored += score.unscored
        self._timing.add(score, self._first(child))
        child.called.add(self._reward)
        child.since = time.monotonic()

    def _first(self, child: _Child) -> bool:
        return self._reward not in child.called

    def give_up(self) -> None:
        """Leave the rest unscored."""
        for number in self._rows:
            self._scores.setdefault(number, Score(None, GIVEN_UP))

    def scores(self) -> list[Score]:
        """Return the scores in the order of the rows."""
        return [self._scores[number] for number in self._rows]
