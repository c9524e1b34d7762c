"""Child processes that call rewards within limits: one that hangs, dies or fills the memory costs one score.

from grpo_recipes.rewards.pool import RewardPool

with RewardPool("math_verify", workers=2, timeout=5, memory_gib=4) as pool:
    scores = pool.score("math_verify", completions, {"answer": answers})
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import translate
from grpo_recipes.paths import python_module
from grpo_recipes.process import tree
from grpo_recipes.rewards.child import (
    GARBLED,
    MOST_PROCESSES,
    TIME_LIMIT,
    child_environment,
    is_score,
    read_reply,
)  # fmt: skip
from grpo_recipes.rewards.memory import memory_of
from grpo_recipes.rewards.score import NOT_CALLED, RewardFailed, Score, select_columns

START_SECONDS = 300.0  # imports over a network disk, while every rank does the same
_FAILED_STARTS = 3  # in a row
_TICK_SECONDS = 0.25  # between two measurements of a child whose row takes longer than this
_MEASURE_SECONDS = 1.0  # between two measurements of a child with quick rows
_MOST_PRINTED = 16 << 20  # bytes that the rewards of a pool may print in its life; the rest is dropped
_END_SECONDS = 5.0  # a keeper that is asked to end needs milliseconds
_FIRST_CALL_SECONDS = 10.0
_CHUNK_SECONDS, _CHUNK_ROWS = 0.05, 64  # work handed out at once
_GRACE_SECONDS = 1.0  # in which a child ends a call of an async reward itself, and the others go on
_MOST_UNREAD = 1 << 20  # bytes of a child's replies, which are short
_FIX = "set reward_isolation: none"


def default_workers() -> int:
    """Return one per two cores of this process's share of the machine, at most 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2 // ranks))


class RewardPool:
    """A pool of child processes that call rewards on one completion at a time, within limits.

    A child that is over a limit is killed with everything it started, and another takes its place while the rest go
    on. After the first death one more child than ``workers`` is kept ready. Use it from one thread, which does not end
    before it: a child ends with the thread that started it. The first call of a child, which may import, has longer
    than ``timeout`` by twice what first calls were seen to take, 10 s until one is known, and half of that after each
    that hung.
    """

    def __init__(
        self,
        *rewards: str,  # names of ours that take no recipe keys, ``module:function`` or ``file.py:function``
        workers: int | None = None,  # completions scored at a time; ``default_workers()`` by default
        timeout: float = 5.0,  # seconds for one completion
        memory_gib: float = 4.0,  # of one child and of what it starts
        copies: Path | None = None,  # folder with copies of the user's files, loaded in their place
        environment: Collection[str] = (),  # names of variables that the children get beside what programs need
        concurrency: int = 32,  # calls of an async reward at a time in one child
        network: bool = True,  # whether the children may reach one
        valid: Callable[[Any], bool] = is_score,  # whether a function's value is one, for functions other than rewards
    ):
        self.workers, self.timeout, self.memory_gib = workers or default_workers(), timeout, memory_gib
        self.takes: dict[str, list[str] | None] = {}  # columns of each reward, None for all; known after ``start``
        self.together: frozenset[str] = frozenset()  # async rewards, which get many rows at once; as ``takes``
        self._memory, self._concurrency, self._environment = int(memory_gib * 2**30), concurrency, tuple(environment)
        self._setup = (self._memory, copies, rewards, concurrency, self._environment, frozenset(os.environ), network)
        self._rewards, self._names, self._valid = rewards, ", ".join(rewards), valid
        # By the names of rows: the child that has what was called before, and how many calls were answered.
        self._homes: dict[str, _Child] = {}
        self._calls: dict[str, int] = {}
        self._paces = {reward: _Pace(_FIRST_CALL_SECONDS) for reward in rewards}
        self._children: list[_Child] = []  # those that work, or load
        self._wanted = self.workers  # children; one more is kept ready after the first was replaced
        self._ending: list[_Child] = []
        self._failed_starts = 0
        self._print_left = _MOST_PRINTED
        # Of the call of ``score`` under way: its rows, those to hand out, those to hand out alone since a child died
        # with them and others, the scores by row, and how many of them have no value.
        self.asked = 0
        self._todo: deque[int] = deque()
        self._called_by: Sequence[str] = ()
        self._alone: set[int] = set()
        self.scores: dict[int, Score] = {}
        self._unscored = 0

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
                self._measure()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every child and all it started, and return when nothing of them is left."""
        atexit.unregister(self.close)
        for child in list(self._children):
            self._dismiss(child)
        while self._ending:
            for child in self._ending:
                self._print(child)
            self._ending = [child for child in self._ending if not child.ended()]
            time.sleep(0.005)

    def score(
        self,
        reward: str,
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
        give_up_after: int | None = None,
        stopped: Callable[[], bool] = lambda: False,
        names: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Score]:
        """Call a reward on each completion, and return (B,) scores in order.

        ``completions`` are (B,) texts or lists of chat messages, ``columns`` the other arguments of the reward, (B,)
        each. With more unscored completions than ``give_up_after``, or once ``stopped``, which is asked a few times a
        second, the rest is not called. A row is called where the one of its name in ``names`` was called before, while
        that child lives; another child, which has to repeat what the calls before did, gets their time too.
        ``seeds`` are the (B,) seeds of the calls' random numbers.
        RewardFailed where the reward cannot be loaded, or a column cannot be sent to another process.
        """
        kept = select_columns({**(columns or {}), "completions": completions}, self.takes[reward])
        for name, values in kept.items():
            what = f"reward '{reward}': column '{name}' cannot be sent to a child process"
            with translate(Exception, lambda error, what=what: RewardFailed(f"{what} ({error}); {_FIX}")):
                pickle.dumps(values)
        most = len(completions) if give_up_after is None else give_up_after
        self._called_by = names or []
        self._homes = {name: self._homes[name] for name in self._called_by if name in self._homes}
        self._calls = {name: self._calls.get(name, 0) for name in self._called_by}
        self.asked, self._todo, self._alone = len(completions), deque(range(len(completions))), set()
        self.scores, self._unscored = {}, 0
        self._listen(0.0)  # to what happened since the last call
        try:
            while len(self.scores) < len(completions) and self._unscored <= most and not stopped():
                for child in [child for child in self._children if child.ready and not child.rows]:
                    if len(self._busy()) < self.workers and (rows := self._next_rows(child, reward)):
                        columns = [{name: values[row] for name, values in kept.items()} for row in rows]
                        row_seeds = [seeds[row] if seeds else None for row in rows]
                        child.call(reward, rows, columns, row_seeds, self._limit(child, reward, rows[0]))
                        self._homes |= {self._called_by[row]: child for row in rows if self._called_by}
                self._measure()  # while they are busy: quick rows have been answered after each wait
                self._listen(_TICK_SECONDS)
                self._enforce()
        finally:
            for child in self._busy():
                self._replace(child)
        return [self.scores.get(row, Score(None, NOT_CALLED)) for row in range(len(completions))]

    def _next_rows(self, child: _Child, reward: str) -> list[int]:
        """Take rows for a child off those to hand out: fewer towards the end, so that all children end together."""
        at_once = 2 * self._concurrency if reward in self.together else self._paces[reward].rows
        if reward not in child.called:
            at_once = 1
        rows = list(itertools.islice(self._open_to(child), min(-(-len(self._todo) // self.workers), at_once)))
        rows = [row for row in rows if row in self._alone or self._to_repeat(child, row)][:1] or rows
        for row in rows:
            self._todo.remove(row)
        return rows

    def _limit(self, child: _Child, reward: str, row: int) -> float:
        """Return the seconds that a child has for a row."""
        more = 0.0 if reward in child.called else self._paces[reward].more_for_first
        return self.timeout * (1 + self._to_repeat(child, row)) + more

    def _to_repeat(self, child: _Child, row: int) -> int:
        """Return how many calls of a row's name this child does not have, and has to repeat."""
        name = self._called_by[row] if self._called_by else None
        return 0 if name is None or self._homes.get(name) is child else self._calls[name]

    def _open_to(self, child: _Child) -> Iterator[int]:
        """Yield the rows to hand out but for those that another child that lives has called by name before."""
        for row in self._todo:
            home = self._homes.get(self._called_by[row], child) if self._called_by else child
            if home is child or home not in self._children:
                yield row

    def _busy(self) -> list[_Child]:
        return [child for child in self._children if child.rows]

    def _listen(self, at_most: float) -> None:
        """Act on the next replies; wait for them no longer than until a limit is to be looked at."""
        left = [self._deadline(child) - time.monotonic() for child in self._busy()]
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.stdout, selectors.EVENT_READ, child)
                if not child.stderr.closed:
                    selector.register(child.stderr, selectors.EVENT_READ, child)
                if child.unsent:
                    selector.register(child.stdin, selectors.EVENT_WRITE, child)
            ready = {key.data: None for key, _ in selector.select(max(0.0, min([at_most, *left])))}
        for child in ready:
            child.push()
            replies = child.replies()
            self._print(child)  # before a reply that raises: it may be the traceback
            for reply in replies:
                if child in self._children:  # not replaced because of an earlier reply
                    self._take(child, reply)

    def _print(self, child: _Child) -> None:
        """Show what a child printed, within the pool's limit."""
        printed = child.printed()
        if printed and self._print_left > 0:
            shown, self._print_left = printed[: self._print_left], self._print_left - len(printed)
            with contextlib.suppress(OSError):  # the log is full or gone, which ends no run
                sys.stderr.flush()
                os.write(2, shown)
            if self._print_left <= 0:
                limit = f"{_MOST_PRINTED >> 20} MiB"
                print(f"\ngrpo: {self._names}: printed {limit}; later output is dropped", file=sys.stderr, flush=True)

    def _take(self, child: _Child, reply: dict[str, Any]) -> None:
        if child.ready == ("score" not in reply) or ("row" in reply and [reply["row"]] != child.rows[:1]):
            reply = reply if "died" in reply else GARBLED  # not the turn of such a reply
        if "ready" in reply:
            child.ready = True
            self.takes, self.together, self._failed_starts = reply["ready"], frozenset(reply["together"]), 0
        elif "failed" in reply:
            self._not_loaded(reply["failed"])
            self._replace(child)
        elif "score" in reply:
            self._enter(child, Score(*reply["score"]))
        elif child.rows:
            self._stop(child, reply["died"][:300])
        else:
            if not child.ready:
                self._not_loaded(f"{reply['died']} while it loaded the rewards {self._names}")
            self._replace(child)

    def _not_loaded(self, what: str) -> None:
        """Raise, unless it worked before: then a child that cannot load its rewards may be bad luck."""
        self._failed_starts += 1
        if not self.takes or self._failed_starts >= _FAILED_STARTS:
            raise RewardFailed(what)

    def _deadline(self, child: _Child) -> float:
        """Return when a child must have answered the row it is at; ``time.monotonic()``."""
        return child.since + child.limit + (_GRACE_SECONDS if child.reward in self.together else 0.0)

    def _enforce(self) -> None:
        """Stop the children that are over their time limit."""
        now = time.monotonic()
        for child in list(self._children):
            if child.rows and now > self._deadline(child):
                self._stop(child, TIME_LIMIT)
            elif not child.ready and now - child.since > START_SECONDS:
                raise RewardFailed(f"the rewards {self._names} were not loaded within {START_SECONDS:.0f} s")
        for child in self._ending:
            self._print(child)
        self._ending = [child for child in self._ending if not child.ended()]

    def _measure(self) -> None:
        """Stop a child over its limit of memory or processes; one child at a time, since adding up takes a while."""
        now = time.monotonic()
        due = [
            child for child in self._busy()
            if now - child.since > _TICK_SECONDS or now - child.looked_at > _MEASURE_SECONDS
        ]  # fmt: skip
        if not due:
            return
        child = min(due, key=lambda child: child.looked_at)
        child.looked_at = time.monotonic()
        family = tree.descendants(child.pid)
        if len(family) > MOST_PROCESSES:
            self._stop(child, f"process limit ({MOST_PROCESSES})")
        elif memory_of(family) > self._memory:
            self._stop(child, "memory limit")

    def _stop(self, child: _Child, reason: str) -> None:
        """Replace a child that died or is over a limit; its row is unscored, of several at once each is tried alone."""
        if child.reward in self.together and len(child.rows) > 1:
            self._alone.update(child.rows)
            self._replace(child)
        else:
            self._enter(child, Score(None, reason, time.monotonic() - child.since, by_limit=True), at_fault=True)

    def _enter(self, child: _Child, score: Score, at_fault: bool = False) -> None:
        """Enter the score of the row that a child was at; a child at a limit that it did not keep is replaced."""
        if child.rows:
            row = child.rows.pop(0)
            self.scores[row] = score
            if self._called_by:
                self._calls[self._called_by[row]] += 1
        self._unscored += score.unscored
        self._paces[child.reward].add(score, child.reward not in child.called)
        child.called.add(child.reward)
        child.since = time.monotonic()
        if at_fault or (score.by_limit and score.reason != TIME_LIMIT):
            self._replace(child)

    def _replace(self, child: _Child) -> None:
        """End a child, take back the rows it did not come to, and start another."""
        self._todo.extendleft(reversed(child.rows))
        child.rows = []
        self._dismiss(child)
        self._wanted = self.workers + 1
        self._fill()

    def _fill(self) -> None:
        """Start the children that are missing; they load while others work."""
        while len(self._children) < self._wanted:
            self._children.append(_Child(self._setup, self._rewards, child_environment(self._environment), self._valid))

    def _dismiss(self, child: _Child) -> None:
        """Ask a child's keeper to kill everything of it."""
        self._children.remove(child)
        self._ending.append(child)
        child.ends = time.monotonic() + _END_SECONDS
        child.process.terminate()
        child.process.send_signal(signal.SIGCONT)  # a keeper that a reward stopped obeys only then


@dataclass
class _Pace:
    """How long calls of a reward took, and so how long a first one may take, and how many rows go out at once."""

    more_for_first: float  # seconds beyond the time limit
    slowest_first: float = 0.0
    seconds: float | None = None  # of one call, a moving average
    rows: int = 1

    def add(self, score: Score, first: bool) -> None:
        """Learn from a call; the first one of a process may import what the reward needs."""
        if not first:
            self.seconds = score.seconds if self.seconds is None else 0.8 * self.seconds + 0.2 * score.seconds
            self.rows = max(1, min(_CHUNK_ROWS, int(_CHUNK_SECONDS / max(self.seconds, 1e-6))))
        elif score.reason == TIME_LIMIT:
            self.more_for_first /= 2  # probably not an import
        else:
            self.slowest_first = max(self.slowest_first, score.seconds)
            self.more_for_first = min(_FIRST_CALL_SECONDS, 2 * self.slowest_first)


class _Child:
    """The parent's end of one child process. Nothing here blocks."""

    def __init__(
        self, setup: object, rewards: Collection[str], environment: dict[str, str], valid: Callable[[Any], bool]
    ):
        self.process = subprocess.Popen(
            python_module("grpo_recipes.rewards.child", str(os.getpid())),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        self.pid = self.process.pid  # of the keeper, below which everything else of this child is
        self.rewards, self.valid = rewards, valid  # that it is to load; whether a value of theirs is one
        self.ready = False  # they are loaded
        self.reward = ""
        self.limit = 0.0  # seconds for the row it is at
        self.rows: list[int] = []  # that it has not answered; it is at the first
        self.called: set[str] = set()  # rewards that it has called at least once
        self.since = time.monotonic()  # when it began with its row, or to start
        self.ends = 0.0  # when its keeper, asked to end, is killed; as `since`
        self.looked_at = 0.0  # when its memory and processes were last looked at; as `since`
        self.unsent = bytearray(pickle.dumps(setup))  # waits while the pipe is full
        self._unread = b""
        self.push()

    def call(
        self, reward: str, rows: list[int], columns: list[dict[str, Any]], seeds: list[int | None], limit: float
    ) -> None:
        """Let it call a reward on each of some rows, ``limit`` seconds each; every score is a later reply, in order."""
        self.reward, self.rows, self.limit, self.since = reward, rows, limit, time.monotonic()
        self.unsent += pickle.dumps((reward, limit, list(zip(rows, columns, seeds, strict=True))))
        self.push()

    def push(self) -> None:
        """Send what the pipe takes of ``unsent``; time counts from when all is sent."""
        try:
            while self.unsent and (sent := self.stdin.write(self.unsent)):
                del self.unsent[:sent]
                self.since = time.monotonic()
        except BrokenPipeError:
            self.unsent.clear()  # it died, as the end of its replies will say

    def replies(self) -> list[dict[str, Any]]:
        """Return its replies since the last call; ``{"died": how}`` is the last, also for a line that is not valid."""
        part: bytes | None = b""
        while len(self._unread) < _MOST_UNREAD and (part := self.stdout.read(1 << 16)):
            self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        replies = [read_reply(line, self.rewards, self.valid) for line in lines]
        if len(self._unread) >= _MOST_UNREAD:
            return [*replies, GARBLED]
        # At the end of the pipe `read` returns b"", while nothing has come yet None.
        return [*replies, {"died": "its process died"}] if part == b"" else replies

    def printed(self) -> bytes:
        """Return what it printed since the last call, at most 1 MiB."""
        parts: list[bytes] = []
        part: bytes | None = None
        while not self.stderr.closed and len(parts) < 16 and (part := self.stderr.read(1 << 16)):
            parts.append(part)
        if part == b"":
            self.stderr.close()
        return b"".join(parts)

    def ended(self) -> bool:
        """Return whether nothing of it is left; a keeper that does not obey is killed with its descendants."""
        if self.process.poll() is None:
            if time.monotonic() <= self.ends:
                return False
            tree.kill_descendants(self.pid)
            self.process.kill()
            self.process.wait()
        self.stdin.close()
        self.stdout.close()
        self.stderr.close()
        return True
