"""Child processes that call rewards within limits: one that hangs, dies or fills the memory costs one score.

from grpo_recipes.rewards.pool import RewardPool

with RewardPool("math_verify", workers=2, timeout=5, memory_gib=4) as pool:
    scores = pool.score("math_verify", completions, {"answer": answers})
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.process.tree import descendants, kill_descendants
from grpo_recipes.rewards.child import MOST_PROCESSES
from grpo_recipes.rewards.score import GIVEN_UP, PoolReward, RewardFailed, Score, taken
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
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the GPUs are full
}


def default_workers() -> int:
    """Return one per two cores of this process's share of the machine, at most 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2 // ranks))


class RewardPool:
    """A pool of child processes that call rewards on one completion at a time, within limits.

    A child that is over a limit is killed with everything it started, and another takes its place while the rest go
    on. After the first death one more child than ``workers`` is kept ready. Use it from the thread that started it: the
    children end with that thread. The first call of a child, which may import, has longer than ``timeout`` by twice
    what first calls were seen to take, 10 s until one is known.
    """

    def __init__(
        self,
        *rewards: str | PoolReward,  # names of ours, ``module:function`` or ``file.py:function``
        workers: int | None = None,  # completions scored at a time; ``default_workers()`` by default
        timeout: float = 5.0,  # seconds for one completion
        memory_gib: float = 4.0,  # of one child and of what it starts
        copies: Path | None = None,  # folder with copies of the user's files, loaded in their place
    ):
        self.workers, self.timeout, self.memory_gib = workers or default_workers(), timeout, memory_gib
        wanted = [reward if isinstance(reward, PoolReward) else PoolReward(reward) for reward in rewards]
        self._specs = [one.spec for one in wanted]
        self._memory = int(memory_gib * 2**30)
        self._setup = (self._memory, copies, wanted)
        self._timings = [_Timing(timeout) for _ in wanted]
        self._takes: list[list[str] | None] = []
        self._children: list[_Child] = []  # those that work, or load
        self._wanted = self.workers  # children; one more is kept ready after the first was replaced
        self._ending: list[_Child] = []
        self._failed_starts = 0
        self._batch = _Batch(0, [], _Timing(timeout))  # the one being scored

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the children, and wait until one has loaded its rewards; RewardFailed where one cannot be loaded."""
        atexit.register(self.close)
        try:
            self._fill()
            while not any(child.ready for child in self._children):
                self._listen(_TICK_SECONDS)
                self._enforce()
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

        ``completions`` are (B,) texts or lists of chat messages, ``columns`` the other arguments of the reward, (B,)
        each. With more unscored completions than ``give_up_after``, or once ``stopped``, which is asked a few times a
        second, the rest is not called. RewardFailed where the reward cannot be loaded, or a column cannot be sent to
        another process.
        """
        index = self._specs.index(reward)
        kept = taken({**(columns or {}), "completions": completions}, self._takes[index])
        for name, values in kept.items():
            try:
                pickle.dumps(values)
            except Exception as error:
                what = f"reward '{reward}': column '{name}' cannot be sent to a child process ({error})"
                raise RewardFailed(f"{what}; set reward_isolation: none") from error
        rows = [{name: values[row] for name, values in kept.items()} for row in range(len(completions))]
        batch = self._batch = _Batch(index, rows, self._timings[index])
        self._listen(0.0)  # to what happened since the last call
        try:
            while batch.left and not stopped() and (give_up_after is None or batch.unscored <= give_up_after):
                busy = sum(bool(child.rows) for child in self._children)
                idle = [child for child in self._children if child.ready and not child.rows]
                for child in idle[: self.workers - busy]:
                    batch.hand_to(child, self.workers)
                self._listen(_TICK_SECONDS)
                self._enforce()
        finally:
            for child in [child for child in self._children if child.rows]:
                self._replace(child)
        return [score or Score(None, GIVEN_UP) for score in batch.scores]

    def _listen(self, at_most: float) -> None:
        """Act on the next replies; wait for them no longer than until a limit is to be looked at."""
        now = time.monotonic()
        left = [self._batch.deadline(child) - now for child in self._children if child.rows]
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
                    self._take(child, reply)

    def _take(self, child: _Child, reply: dict[str, Any]) -> None:
        if "ready" in reply:
            child.ready, self._takes, self._failed_starts = True, reply["ready"], 0
        elif "failed" in reply:
            self._not_loaded(f"reward '{reply['failed']}' cannot be loaded: {reply['reason']}")
            self._replace(child)
        elif "died" not in reply:
            full = reply["out_of_memory"]
            self._batch.enter(child, Score(reply["value"], reply["reason"], reply["seconds"], by_limit=full))
            if full:
                self._replace(child)
        elif child.rows:
            self._stop(child, reply["died"])
        else:
            if not child.ready:
                self._not_loaded(f"{reply['died']} while it loaded the rewards {', '.join(self._specs)}")
            self._replace(child)

    def _not_loaded(self, what: str) -> None:
        """Raise, unless it worked before: then a child that cannot load its rewards may be bad luck."""
        self._failed_starts += 1
        if not self._takes or self._failed_starts >= _FAILED_STARTS:
            raise RewardFailed(what)

    def _enforce(self) -> None:
        """Stop what is over a limit; of the slow children look at one, since to add up its memory takes a while."""
        now = time.monotonic()
        for child in list(self._children):
            if child.rows and now > self._batch.deadline(child):
                self._stop(child, _TIME_LIMIT)
            elif not child.ready and now - child.since > START_SECONDS:
                names = ", ".join(self._specs)
                raise RewardFailed(f"the rewards {names} were not loaded within {START_SECONDS:.0f} s")
        slow = [child for child in self._children if child.rows and now - child.since > _TICK_SECONDS]
        if slow:
            child = min(slow, key=lambda child: child.looked_at)
            child.looked_at = time.monotonic()
            family = descendants(child.pid)
            if len(family) > MOST_PROCESSES:
                self._stop(child, f"process limit ({MOST_PROCESSES})")
            elif sum(map(_memory, family)) > self._memory:
                self._stop(child, "memory limit")
        self._ending = [child for child in self._ending if not child.ended()]

    def _stop(self, child: _Child, reason: str) -> None:
        self._batch.enter(child, Score(None, reason, time.monotonic() - child.since, by_limit=True))
        self._replace(child)

    def _replace(self, child: _Child) -> None:
        """End a child, put the rows it did not come to back in the batch, and start another."""
        self._batch.todo.extendleft(reversed(child.rows))
        child.rows = []
        self._dismiss(child)
        self._wanted = self.workers + 1
        self._fill()

    def _fill(self) -> None:
        """Start the children that are missing; they load while others work."""
        while len(self._children) < self._wanted:
            self._children.append(_Child(self._setup))

    def _dismiss(self, child: _Child) -> None:
        """Ask a child's keeper to kill everything of it."""
        self._children.remove(child)
        self._ending.append(child)
        child.ends = time.monotonic() + _END_SECONDS
        child.process.terminate()


class _Child:
    """The parent's end of one child process. Nothing here blocks."""

    def __init__(self, setup: object):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_recipes.rewards.child", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=_child_environment(os.environ),
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self.pid = self.process.pid  # of the keeper, below which everything else of this child is
        self.ready = False  # its rewards are loaded
        self.rows: list[int] = []  # of the batch, which it has not answered; the one it is at first
        self.called: set[int] = set()  # rewards, by number, that it has called at least once
        self.ends = 0.0  # when its keeper, asked to end, is killed; as `since`
        self.looked_at = 0.0  # when its memory and processes were last looked at; as `since`
        self.unsent = bytearray()  # waits while the pipe is full
        self._unread = b""
        self.send(setup)

    def send(self, request: object) -> None:
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

    def ended(self) -> bool:
        """Return whether nothing of it is left; a keeper that does not obey is killed with its descendants."""
        if self.process.poll() is None:
            if time.monotonic() <= self.ends:
                return False
            kill_descendants(self.pid)
            self.process.kill()
            self.process.wait()
        self.stdin.close()
        self.stdout.close()
        return True


def _child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the few variables a reward's process gets: those that programs need, without any that has a secret."""
    kept = {name: value for name, value in environment.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    return {name: value for name, value in kept.items() if not (secret_name(name) or secret_value(value))} | _ADDED


def _memory(process: psutil.Process) -> int:
    """Return the bytes a process holds, a page that several share counted once among them."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # ended meanwhile, or changed its user
        return 0


class _Timing:
    """How long calls of one reward took so far, and so how long one may take and how many to hand out at once."""

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
    """The rows of one call of ``RewardPool.score``, and their scores so far."""

    def __init__(self, reward: int, rows: list[dict[str, Any]], timing: _Timing):
        self._reward, self._rows, self._timing = reward, rows, timing
        self.todo = deque(range(len(rows)))
        self.scores: list[Score | None] = [None] * len(rows)
        self.left, self.unscored = len(rows), 0

    def hand_to(self, child: _Child, workers: int) -> None:
        """Give a child the next rows: fewer towards the end, so that all end together."""
        share = -(-len(self.todo) // workers)
        child.rows = [self.todo.popleft() for _ in range(min(share, self._timing.rows(self._first(child))))]
        if child.rows:
            child.send((self._reward, [self._rows[row] for row in child.rows]))

    def deadline(self, child: _Child) -> float:
        """Return when a child must have answered the row it is at; ``time.monotonic()``."""
        return child.since + self._timing.limit(self._first(child))

    def enter(self, child: _Child, score: Score) -> None:
        """Enter the score of the row that a child was at."""
        self.scores[child.rows.pop(0)] = score
        self.left -= 1
        self.unscored += score.unscored
        self._timing.add(score, self._first(child))
        child.called.add(self._reward)
        child.since = time.monotonic()

    def _first(self, child: _Child) -> bool:
        return self._reward not in child.called
