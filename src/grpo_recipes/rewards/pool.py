"""Child processes that call rewards within limits: one that hangs, dies or fills the memory costs one score.

from grpo_recipes.rewards.pool import RewardPool

with RewardPool("math_verify", workers=2, timeout=5, memory_gib=4) as pool:
    scores = pool.score("math_verify", completions, {"answer": answers})
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.errors import translate
from grpo_recipes.process.tree import descendants, kill_descendants
from grpo_recipes.rewards.child import MOST_PROCESSES
from grpo_recipes.rewards.score import GIVEN_UP, RewardFailed, Score, taken
from grpo_recipes.secrets import secret_name, secret_value

START_SECONDS = 300.0  # imports over a network disk, while every rank does the same
_FAILED_STARTS = 3  # in a row
_TICK_SECONDS = 0.25  # between looks at what a row that takes longer than this uses
_END_SECONDS = 5.0  # a keeper that is asked to end needs milliseconds
_FIRST_CALL_SECONDS = 10.0
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
        *rewards: str,  # names of ours that take no recipe keys, ``module:function`` or ``file.py:function``
        workers: int | None = None,  # completions scored at a time; ``default_workers()`` by default
        timeout: float = 5.0,  # seconds for one completion
        memory_gib: float = 4.0,  # of one child and of what it starts
        copies: Path | None = None,  # folder with copies of the user's files, loaded in their place
    ):
        self.workers, self.timeout, self.memory_gib = workers or default_workers(), timeout, memory_gib
        self.takes: dict[str, list[str] | None] = {}  # columns of each reward, None for all; known after ``start``
        self._memory = int(memory_gib * 2**30)
        self._setup = (self._memory, copies, rewards)
        self._names = ", ".join(rewards)
        self._first_calls = {reward: _FirstCalls() for reward in rewards}
        self._children: list[_Child] = []  # those that work, or load
        self._wanted = self.workers  # children; one more is kept ready after the first was replaced
        self._ending: list[_Child] = []
        self._failed_starts = 0
        # Of the call of ``score`` under way: the scores so far by row, and how many of them have no value.
        self._scores: dict[int, Score] = {}
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
        kept = taken({**(columns or {}), "completions": completions}, self.takes[reward])
        for name, values in kept.items():
            what = f"reward '{reward}': column '{name}' cannot be sent to a child process"
            with translate(Exception, lambda error: RewardFailed(f"{what} ({error}); set reward_isolation: none")):  # noqa: B023
                pickle.dumps(values)
        most = len(completions) if give_up_after is None else give_up_after
        rows, self._scores, self._unscored = iter(range(len(completions))), {}, 0
        self._listen(0.0)  # to what happened since the last call
        try:
            while len(self._scores) < len(completions) and self._unscored <= most and not stopped():
                idle = [child for child in self._children if child.ready and child.row is None]
                for child, row in zip(idle[: self.workers - len(self._busy())], rows, strict=False):
                    child.call(reward, row, {name: values[row] for name, values in kept.items()})
                self._listen(_TICK_SECONDS)
                self._enforce()
        finally:
            for child in self._busy():
                self._replace(child)
        return [self._scores.get(row, Score(None, GIVEN_UP)) for row in range(len(completions))]

    def _busy(self) -> list[_Child]:
        return [child for child in self._children if child.row is not None]

    def _listen(self, at_most: float) -> None:
        """Act on the next replies; wait for them no longer than until a limit is to be looked at."""
        left = [self._deadline(child) - time.monotonic() for child in self._busy()]
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.stdout, selectors.EVENT_READ, child)
                if child.unsent:
                    selector.register(child.stdin, selectors.EVENT_WRITE, child)
            ready = {key.data: None for key, _ in selector.select(max(0.0, min([at_most, *left])))}
        for child in ready:
            child.push()
            for reply in child.replies():
                if child in self._children:  # not replaced because of an earlier reply
                    self._take(child, reply)

    def _take(self, child: _Child, reply: dict[str, Any]) -> None:
        if "ready" in reply:
            child.ready = True
            self.takes, self._failed_starts = reply["ready"], 0
        elif "failed" in reply:
            self._not_loaded(f"reward '{reply['failed']}' cannot be loaded: {reply['reason']}")
            self._replace(child)
        elif "score" in reply:
            self._enter(child, Score(**reply["score"]))
        elif child.row is not None:
            self._stop(child, reply["died"])
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
        first = 0.0 if child.reward in child.called else self._first_calls[child.reward].more_seconds
        return child.since + self.timeout + first

    def _enforce(self) -> None:
        """Stop what is over a limit; of the slow children look at one, since to add up its memory takes a while."""
        now = time.monotonic()
        for child in list(self._children):
            if child.row is not None and now > self._deadline(child):
                self._stop(child, _TIME_LIMIT)
            elif not child.ready and now - child.since > START_SECONDS:
                raise RewardFailed(f"the rewards {self._names} were not loaded within {START_SECONDS:.0f} s")
        slow = [child for child in self._busy() if now - child.since > _TICK_SECONDS]
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
        self._enter(child, Score(None, reason, time.monotonic() - child.since, by_limit=True))

    def _enter(self, child: _Child, score: Score) -> None:
        """Enter the score of the row that a child was at; a child at a limit is replaced."""
        if child.row is not None:
            self._scores[child.row] = score
        child.row = None
        self._unscored += score.unscored
        if child.reward not in child.called:
            self._first_calls[child.reward].learn(score)
        child.called.add(child.reward)
        if score.by_limit:
            self._replace(child)

    def _replace(self, child: _Child) -> None:
        """End a child, and start another."""
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


@dataclass
class _FirstCalls:
    """How long the first calls of a reward took so far, and so how much longer than others one may take."""

    slowest: float = 0.0
    more_seconds: float = _FIRST_CALL_SECONDS

    def learn(self, score: Score) -> None:
        if score.reason == _TIME_LIMIT:
            self.more_seconds /= 2  # probably no import
        else:
            self.slowest = max(self.slowest, score.seconds)
            self.more_seconds = min(_FIRST_CALL_SECONDS, 2 * self.slowest)


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
        self.reward, self.row = "", None  # that it is called with
        self.called: set[str] = set()  # rewards that it has called at least once
        self.since = time.monotonic()  # when it began with its row, or to start
        self.ends = 0.0  # when its keeper, asked to end, is killed; as `since`
        self.looked_at = 0.0  # when its memory and processes were last looked at; as `since`
        self.unsent = bytearray(pickle.dumps(setup))  # waits while the pipe is full
        self._unread = b""
        self.push()

    def call(self, reward: str, row: int, columns: dict[str, Any]) -> None:
        """Let it call a reward on a row, whose score is a later reply."""
        self.reward, self.row = reward, row
        self.unsent += pickle.dumps((reward, columns))
        self.push()

    def push(self) -> None:
        """Send what the pipe takes of ``unsent``; time counts from when all is sent."""
        if not self.unsent:
            return
        try:
            while self.unsent and (sent := self.stdin.write(self.unsent)):
                del self.unsent[:sent]
        except BrokenPipeError:
            self.unsent.clear()  # it died, as the end of its replies will say
        self.since = time.monotonic()

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
    with contextlib.suppress(psutil.Error):  # ended meanwhile, or changed its user
        return int(process.memory_full_info().pss)
    return 0
