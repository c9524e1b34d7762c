"""Call rewards in child processes with limits: a call that hangs, dies or fills the memory costs a single score.

A child that exceeds a limit is replaced. The pool is created with all its rewards, and ``score`` calls one of them:

    from grpo_recipes.rewards.pool import RewardPool

    with RewardPool("math_verify", workers=2, timeout=5, memory_gib=4) as pool:
        scores = pool.score("math_verify", completions, {"answer": answers})
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_recipes.paths import module_command
from grpo_recipes.process import tree
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.rewards import other_python
from grpo_recipes.rewards.child import GARBLED, MOST_PROCESSES, TIME_LIMIT, is_score, make_child_environment, read_reply
from grpo_recipes.rewards.memory import measure_memory
from grpo_recipes.rewards.pace import Pace
from grpo_recipes.rewards.score import NOT_CALLED, RewardFailed, Score, select_columns
from grpo_recipes.runs.trace import Trace

START_SECONDS = 300.0  # limit for loading the rewards; all ranks may import from a network disk at the same time
_FAILED_STARTS = 3  # consecutive failures that end the run
_TICK_SECONDS = 0.25  # between two measurements of a child with a slow row
_MEASURE_SECONDS = 1.0  # between two measurements of a child with quick rows
_MOST_PRINTED = 16 << 20  # bytes that a pool's rewards may print in total; later output is dropped
_END_SECONDS = 5.0  # limit for the end of a keeper, which needs milliseconds
_GRACE_SECONDS = 1.0  # a child has this long to end a late async call itself, without harm to its other calls
_MOST_UNREAD = 1 << 20  # bytes of a child's reply; valid replies are short
_FIX = "set reward_isolation: none"


def count_default_workers() -> int:
    """Return the default number of children: half of the usable cores divided by the ranks on this node, 1 to 8."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2 // ranks))


class RewardPool:
    """A pool of child processes that call rewards on one completion at a time, with limits.

    A child that exceeds a limit is killed with all its descendants and replaced, while the other children continue.
    After the first death, one child more than ``workers`` is kept ready. Use a pool from one thread that outlives it,
    because a child ends with the thread that started it.

    The first call of a child may import modules, so it gets more time than ``timeout``: at first 10 s (or the time of
    ``allow_imports``), then twice the duration of the slowest first call. Each first call that hangs halves this time.
    """

    def __init__(
        self,
        *rewards: str,  # built-in rewards, ``module:function`` or ``file.py:function``
        workers: int | None = None,  # completions scored at the same time; default: ``count_default_workers()``
        timeout: float = 5.0,  # seconds per completion
        memory_gib: float = 4.0,  # per child, with its descendants
        copies: Path | None = None,  # folder with copies of the user's files, loaded instead of the originals
        environment: Collection[str] = (),  # names of additional environment variables for the children
        concurrency: int = 32,  # simultaneous calls of an async reward in a child
        network: bool = True,  # whether the children may use the network
        keys: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),  # built-in reward -> values of its recipe keys
        valid: Callable[[Any], bool] = is_score,  # accepts a function's value; for functions that are not rewards
        trace: Trace | None = None,  # gets the times of the children
        python: Path | None = None,  # interpreter of another environment, which runs the children; default: ours
    ):
        """Store the settings; no child is started before ``start``."""
        self.workers, self.timeout, self.memory_gib = workers or count_default_workers(), timeout, memory_gib
        # Set by ``start``: the columns that each reward accepts (None for all), and the async rewards.
        self.accepted: dict[str, list[str] | None] = {}
        self.async_rewards: frozenset[str] = frozenset()
        self._memory, self._concurrency, self._environment = int(memory_gib * 2**30), concurrency, tuple(environment)
        specs = {spec: dict(keys.get(spec, {})) for spec in rewards}
        copies_text = None if copies is None else str(copies)  # a pickled Path needs the same version of Python
        self._setup = (self._memory, copies_text, specs, concurrency, self._environment, frozenset(os.environ), network)
        self._rewards, self._names, self._valid = rewards, ", ".join(rewards), valid
        self._trace, self._python = trace, python
        # By the name of a row: the child that made the previous calls, and the number of answered calls.
        self._homes: dict[str, _Child] = {}
        self._calls: dict[str, int] = {}
        self._paces = {reward: Pace() for reward in rewards}
        self._children: list[_Child] = []  # children that work or load
        self._target_count = self.workers  # number of children; one more after the first replacement
        self._ending: list[_Child] = []
        self._failed_starts = 0
        self._print_left = _MOST_PRINTED
        # State of the current call of ``score``.
        self.row_count = 0
        self._open_rows: deque[int] = deque()  # rows that no child has yet
        self._row_names: Sequence[str] = ()
        self._single_rows: set[int] = set()  # rows to send one by one, since a child died with several of them
        self.scores: dict[int, Score] = {}  # by row
        self._unscored = 0

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the children, and wait until the first child has loaded its rewards.

        Raise RewardFailed if a reward cannot be loaded. All children have then ended.
        """
        atexit.register(self.close)
        try:
            self._start_children()
            while not any(child.ready for child in self._children):
                self._handle_replies(_TICK_SECONDS)
                self._enforce_time_limits()
                self._enforce_memory_limit()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all children with their descendants, and wait until all of them have ended."""
        atexit.unregister(self.close)
        for child in list(self._children):
            self._end_child(child)
        wait_until(self._reap_ended, math.inf, 0.005)

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
        """Call a reward on each completion in the child processes, and return (B,) scores in order.

        ``completions`` are (B,) texts or lists of chat messages. ``columns`` maps names of the reward's other arguments
        to (B,) values. ``seeds`` are (B,) seeds for random numbers. After more than ``give_up_after`` unscored
        completions, or once ``stopped`` returns True, no further row is called: the remaining rows are unscored.
        ``stopped`` is called a few times per second.

        Rows with the same name in ``names`` go to the same child while it lives. A replacement must repeat the earlier
        calls of that name, so its time limit includes the time for them.

        Raise RewardFailed if the reward cannot be loaded, or a column cannot be sent to another process.
        """
        selected = select_columns({**(columns or {}), "completions": completions}, self.accepted[reward])
        for name, values in selected.items():
            try:
                pickle.dumps(values)
            except Exception as error:
                fault = f"reward '{reward}': column '{name}' cannot be sent to a child process"
                raise RewardFailed(f"{fault} ({error}); {_FIX}") from error
        most_unscored = len(completions) if give_up_after is None else give_up_after
        self._row_names, self.scores, self._unscored = names or [], {}, 0
        if self._row_names and self._homes.keys().isdisjoint(self._row_names):  # rows of another batch
            self._homes, self._calls = {}, {}
        self._calls = dict.fromkeys(self._row_names, 0) | self._calls
        self.row_count, self._open_rows, self._single_rows = len(completions), deque(range(len(completions))), set()
        self._handle_replies(0.0)  # handle replies since the last call
        try:
            while len(self.scores) < len(completions) and self._unscored <= most_unscored and not stopped():
                for child in [child for child in self._children if child.ready and not child.rows]:
                    if len(self._list_busy_children()) < self.workers and (rows := self._take_next_rows(child, reward)):
                        row_columns = [{name: values[row] for name, values in selected.items()} for row in rows]
                        row_seeds = [seeds[row] if seeds else None for row in rows]
                        extra = 0.0 if reward in child.called else self._paces[reward].extra_for_first
                        limit = self.timeout * (1 + self._count_calls_to_repeat(child, rows[0])) + extra
                        child.call(reward, rows, row_columns, row_seeds, limit)
                        self._homes |= {self._row_names[row]: child for row in rows if self._row_names}
                self._enforce_memory_limit()  # before the wait, since quick rows are answered after it
                self._handle_replies(_TICK_SECONDS)
                self._enforce_time_limits()
        finally:
            for child in self._list_busy_children():
                self._replace_child(child)
        return [self.scores.get(row, Score(None, NOT_CALLED)) for row in range(len(completions))]

    def allow_imports(self, reward: str, seconds: float) -> None:
        """Let the first call of each child exceed the time limit by this time: its imports are known to be slow."""
        self._paces[reward].allow_imports(seconds)

    def _take_next_rows(self, child: _Child, reward: str) -> list[int]:
        """Choose the next rows for a child, remove them from the open rows, and return them; [] if all are for others.

        The number of rows depends on the speed of the reward. It is 1 for a first call, and for a row that may be at
        fault or has calls to repeat. It falls near the end, so that all children end at about the same time.
        """
        most_rows = 2 * self._concurrency if reward in self.async_rewards else self._paces[reward].rows
        if reward not in child.called:
            most_rows = 1
        rows = list(
            itertools.islice(self._iterate_rows_for(child), min(-(-len(self._open_rows) // self.workers), most_rows))
        )
        rows = [row for row in rows if row in self._single_rows or self._count_calls_to_repeat(child, row)][:1] or rows
        for row in rows:
            self._open_rows.remove(row)
        return rows

    def _count_calls_to_repeat(self, child: _Child, row: int) -> int:
        """Return how many earlier calls of a row's name this child must repeat, since another child made them."""
        name = self._row_names[row] if self._row_names else None
        return 0 if name is None or self._homes.get(name) is child else self._calls[name]

    def _iterate_rows_for(self, child: _Child) -> Iterator[int]:
        """Yield the rows that no child has yet, except rows with a name that another living child has played before."""
        for row in self._open_rows:
            home = self._homes.get(self._row_names[row], child) if self._row_names else child
            if home is child or home not in self._children:
                yield row

    def _list_busy_children(self) -> list[_Child]:
        """Return the children that have rows to answer."""
        return [child for child in self._children if child.rows]

    def _handle_replies(self, at_most: float) -> None:
        """Wait for output of children, then handle their replies, print the output of rewards, and send requests.

        Wait at most ``at_most`` seconds, and not longer than the next deadline of a row.
        """
        seconds_left = [self._compute_deadline(child) - time.monotonic() for child in self._list_busy_children()]
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.stdout, selectors.EVENT_READ, child)
                if not child.stderr.closed:
                    selector.register(child.stderr, selectors.EVENT_READ, child)
                if child.unsent:
                    selector.register(child.stdin, selectors.EVENT_WRITE, child)
            ready = {key.data: None for key, _ in selector.select(max(0.0, min([at_most, *seconds_left])))}
        for child in ready:
            child.send_unsent()
            replies = child.read_replies()
            self._print_output(child)  # first, since it may be the traceback of a reply that raises below
            for reply in replies:
                if child in self._children:  # an earlier reply may have replaced it
                    self._handle_reply(child, reply)

    def _print_output(self, child: _Child) -> None:
        """Print a child's new output to stderr. Drop output above the pool's total limit, with a note."""
        output = child.read_output()
        if output and self._print_left > 0:
            allowed, self._print_left = output[: self._print_left], self._print_left - len(output)
            with contextlib.suppress(OSError):  # a log that is full or gone does not end the run
                sys.stderr.flush()
                os.write(2, allowed)
            if self._print_left <= 0:
                limit = f"{_MOST_PRINTED >> 20} MiB"
                print(f"\ngrpo: {self._names}: printed {limit}; later output is dropped", file=sys.stderr, flush=True)

    def _handle_reply(self, child: _Child, reply: dict[str, Any]) -> None:
        """Act on a reply of a child: store a score, or replace a child that died or could not load its rewards.

        A reply that does not fit the child's state counts as garbled. Raise RewardFailed if the rewards can't be
        loaded.
        """
        if child.ready == ("score" not in reply) or ("row" in reply and [reply["row"]] != child.rows[:1]):
            reply = reply if "died" in reply else GARBLED
        if "ready" in reply:
            child.ready = True
            self._add_span(child, "load rewards")
            self.accepted, self.async_rewards, self._failed_starts = reply["ready"], frozenset(reply["together"]), 0
        elif "failed" in reply:
            self._count_failed_start(reply["failed"])
            self._replace_child(child)
        elif "score" in reply:
            self._add_score(child, Score(*reply["score"]))
        elif child.rows:
            self._stop_child(child, reply["died"][:300])
        else:
            if not child.ready:
                self._count_failed_start(f"{reply['died']} while it loaded the rewards {self._names}")
            self._replace_child(child)

    def _count_failed_start(self, fault: str) -> None:
        """Count a child that could not load the rewards for the reason ``fault``.

        Raise RewardFailed if no child has loaded them so far, or after three consecutive failures.
        """
        self._failed_starts += 1
        if not self.accepted or self._failed_starts >= _FAILED_STARTS:
            raise RewardFailed(fault)

    def _compute_deadline(self, child: _Child) -> float:
        """Return the time, as of ``time.monotonic()``, by which a child must answer its current row."""
        return child.since + child.limit + (_GRACE_SECONDS if child.reward in self.async_rewards else 0.0)

    def _enforce_time_limits(self) -> None:
        """Stop the children that exceed their time limit for a row, and clean up after ended children.

        Raise RewardFailed if a child takes longer than ``START_SECONDS`` to load the rewards.
        """
        now = time.monotonic()
        for child in list(self._children):
            if child.rows and now > self._compute_deadline(child):
                self._stop_child(child, TIME_LIMIT)
            elif not child.ready and now - child.since > START_SECONDS:
                raise RewardFailed(f"the rewards {self._names} were not loaded within {START_SECONDS:.0f} s")
        self._reap_ended()

    def _reap_ended(self) -> bool:
        """Print the output of the children that were told to end, and drop those that have ended.

        Return whether all of them have ended.
        """
        for child in self._ending:
            self._print_output(child)
        self._ending = [child for child in self._ending if not child.has_ended()]
        return not self._ending

    def _enforce_memory_limit(self) -> None:
        """Measure memory and processes of the child that was not measured for longest; stop it above a limit.

        Only children that are busy with a slow row, or were not measured for a second, are candidates, since a
        measurement is slow.
        """
        now = time.monotonic()
        due = [
            child for child in self._list_busy_children()
            if now - child.since > _TICK_SECONDS or now - child.measured > _MEASURE_SECONDS
        ]  # fmt: skip
        if not due:
            return
        child = min(due, key=lambda child: child.measured)
        child.measured = time.monotonic()
        family = tree.descendants(child.pid)
        if len(family) > MOST_PROCESSES:
            self._stop_child(child, f"process limit ({MOST_PROCESSES})")
        elif measure_memory(family) > self._memory:
            self._stop_child(child, "memory limit")

    def _stop_child(self, child: _Child, reason: str) -> None:
        """Replace a child that died or exceeded a limit, and leave its current row unscored with ``reason``.

        Its other rows are sent again. If it called an async reward with several rows at once, the row at fault is not
        known: then no row is unscored yet, and all of them are sent again one by one.
        """
        if child.reward in self.async_rewards and len(child.rows) > 1:
            self._single_rows.update(child.rows)
            self._replace_child(child)
        else:
            self._add_score(child, Score(None, reason, time.monotonic() - child.since, by_limit=True), at_fault=True)

    def _add_score(self, child: _Child, score: Score, at_fault: bool = False) -> None:
        """Store the score of a child's current row, and update the durations of its reward.

        Replace a child that is ``at_fault`` or exceeded a limit, except an async call that exceeded its time limit.
        """
        if child.rows:
            row = child.rows.pop(0)
            self.scores[row] = score
            if self._row_names:
                self._calls[self._row_names[row]] += 1
        self._unscored += score.unscored
        self._paces[child.reward].add(score, child.reward not in child.called)
        child.called.add(child.reward)
        child.since = time.monotonic()
        if not child.rows:
            self._add_span(child, child.reward)
        if at_fault or (score.by_limit and score.reason != TIME_LIMIT):
            self._replace_child(child)

    def _replace_child(self, child: _Child) -> None:
        """End a child, put its unscored rows back at the front of the open rows, and start another child.

        The first replacement starts two children, one of them as a spare. Score a row at fault before this call, or it
        is sent again.
        """
        if child.rows:
            self._add_span(child, child.reward)
        self._open_rows.extendleft(reversed(child.rows))
        child.rows = []
        self._end_child(child)
        self._target_count = self.workers + 1
        self._start_children()

    def _start_children(self) -> None:
        """Start children until there are ``_target_count``, without waiting until they have loaded their rewards."""
        while len(self._children) < self._target_count:
            numbers = {child.number for child in self._children}
            number = next(number for number in itertools.count(1) if number not in numbers)
            environment = make_child_environment(self._environment)
            self._children.append(_Child(number, self._setup, self._rewards, environment, self._valid, self._python))

    def _add_span(self, child: _Child, name: str) -> None:
        """Add the time since a child's work (its load, or a chunk of rows) began to the trace, if there is a trace."""
        if self._trace is not None:
            track = f"reward child {child.number}"
            self._trace.add(name, child.work_began, time.monotonic(), track, rows=child.row_count)

    def _end_child(self, child: _Child) -> None:
        """Send SIGTERM to a child's keeper, which then kills the child with its descendants; do not wait for it."""
        self._children.remove(child)
        self._ending.append(child)
        child.terminate()


class _Child:
    """A child process as its parent sees it: starts it, and exchanges messages through pipes without blocking."""

    def __init__(
        self, number: int, setup: object, rewards: Collection[str], environment: dict[str, str],
        valid: Callable[[Any], bool], python: Path | None,
    ):  # fmt: skip
        """Start the child process with the variables in ``environment``, and send it the ``setup`` without waiting.

        ``rewards`` are the rewards that it loads, and ``valid`` checks the values that it sends. ``python`` is the
        interpreter of another environment that runs it, or None.
        """
        own_command = module_command("grpo_recipes.rewards.child", str(os.getpid()))
        self.process = subprocess.Popen(
            other_python.make_command(python) if python else own_command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=environment,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout, self.stderr = self.process.stdin, self.process.stdout, self.process.stderr
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe.fileno(), False)
        self.pid = self.process.pid  # the keeper, the ancestor of all other processes of this child
        self.number = number  # unique among the living children of the pool
        self.rewards, self.valid = rewards, valid  # the rewards to load, and the validation of their values
        self.ready = False  # the rewards are loaded
        self.reward = ""  # the current reward
        self.limit = 0.0  # seconds for the current row
        self.rows: list[int] = []  # unanswered rows; the first is the current row
        self.called: set[str] = set()  # rewards that it has called at least once
        self.row_count = 0  # rows of the current chunk
        # Times of ``time.monotonic()``:
        self.work_began = time.monotonic()  # start of the process, or of the current chunk of rows
        self.since = time.monotonic()  # start of the current row, or of the process
        self.kill_time = 0.0  # after ``terminate``: when the keeper is killed
        self.measured = 0.0  # last measurement of memory and processes
        self.unsent = bytearray(pickle.dumps(setup))  # data that waits for space in the pipe
        self._unread = b""
        self.send_unsent()

    def call(
        self, reward: str, rows: list[int], columns: list[dict[str, Any]], seeds: list[int | None], limit: float
    ) -> None:
        """Send rows to the child without waiting, to score each with ``reward`` within ``limit`` seconds.

        The scores arrive as replies in the same order.
        """
        self.reward, self.rows, self.limit, self.row_count = reward, rows, limit, len(rows)
        self.since = self.work_began = time.monotonic()
        self.unsent += pickle.dumps((reward, limit, list(zip(rows, columns, seeds, strict=True))))
        self.send_unsent()

    def send_unsent(self) -> None:
        """Write as much of ``unsent`` as fits into the child's stdin; each write restarts the current row's time."""
        try:
            while self.unsent and (sent := self.stdin.write(self.unsent)):
                del self.unsent[:sent]
                self.since = time.monotonic()
        except BrokenPipeError:
            self.unsent.clear()  # it died, which the end of its replies will show

    def read_replies(self) -> list[dict[str, Any]]:
        """Read and return the child's new replies without waiting. An invalid or too long reply becomes ``GARBLED``.

        After the death of the child, the last reply has only the key ``died``.
        """
        part: bytes | None = b""
        while len(self._unread) < _MOST_UNREAD and (part := self.stdout.read(1 << 16)):
            self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        replies = [read_reply(line, self.rewards, self.valid) for line in lines]
        if len(self._unread) >= _MOST_UNREAD:
            return [*replies, GARBLED]
        # `read` returns b"" at the end of the pipe, and None if there is no data yet.
        return [*replies, {"died": "its process died"}] if part == b"" else replies

    def read_output(self) -> bytes:
        """Return the new output of the child on stderr, without waiting: at most 1 MiB, b"" if there is none."""
        parts: list[bytes] = []
        part: bytes | None = None
        while not self.stderr.closed and len(parts) < 16 and (part := self.stderr.read(1 << 16)):
            parts.append(part)
        if part == b"":
            self.stderr.close()
        return b"".join(parts)

    def terminate(self) -> None:
        """Send SIGTERM to the keeper, which then kills all descendants. ``has_ended`` kills it after 5 seconds."""
        self.kill_time = time.monotonic() + _END_SECONDS
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)  # a reward may have stopped its keeper

    def has_ended(self) -> bool:
        """Return whether all processes of this child have ended, and close its pipes if they have.

        A keeper that is late after ``terminate`` is killed with its descendants.
        """
        if self.process.poll() is None:
            if time.monotonic() <= self.kill_time:
                return False
            tree.kill_descendants(self.pid)
            self.process.kill()
            self.process.wait()
        self.stdin.close()
        self.stdout.close()
        self.stderr.close()
        return True
