"""Child processes that call rewards within limits: one that hangs, dies or fills the memory costs one score.

from grpo_recipes.rewards.pool import RewardPool

with RewardPool("math_verify", workers=2, timeout=5, memory_gib=4) as pool:
    scores = pool.score("math_verify", completions, {"answer": answers})

A child is two processes: a keeper of our code alone, and the worker below it that calls rewards. The keeper ends
everything the worker left, whatever session it is in, when the worker ends, when the parent dies, and when the parent
asks for it by SIGTERM. Requests are pickles: first the setup, then a reward's name and rows of columns. Replies are
lines of JSON, one a row, since a child is not trusted; what rewards print goes to stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import pickle
import resource
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from grpo_recipes.errors import ConfigError, translate
from grpo_recipes.process import tree
from grpo_recipes.rewards.score import (
    GIVEN_UP,
    RewardFailed,
    Score,
    call_reward,
    described,
    load_reward,
    parameters,
    taken,
)
from grpo_recipes.secrets import secret_name, secret_value

MOST_PROCESSES = 64  # of one child process, itself included
START_SECONDS = 300.0  # imports over a network disk, while every rank does the same
_FAILED_STARTS = 3  # in a row
_TICK_SECONDS = 0.25  # between looks at what a row that takes longer than this uses
_END_SECONDS = 5.0  # a keeper that is asked to end needs milliseconds
_FIRST_CALL_SECONDS = 10.0
_CHUNK_SECONDS, _CHUNK_ROWS = 0.05, 64  # work handed out at once
_TIME_LIMIT = "time limit"
_FIX = "set reward_isolation: none"
_tracebacks_left = 3  # to print in a worker; a reward that is wrong is wrong for every completion

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
    what first calls were seen to take, 10 s until one is known, and half of that after each that hung.
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
        self._paces = {reward: _Pace(_FIRST_CALL_SECONDS) for reward in rewards}
        self._children: list[_Child] = []  # those that work, or load
        self._wanted = self.workers  # children; one more is kept ready after the first was replaced
        self._ending: list[_Child] = []
        self._failed_starts = 0
        # Of the call of ``score`` under way: rows to hand out, the scores by row, and how many of them have no value.
        self._todo: deque[int] = deque()
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
            with translate(Exception, lambda error, what=what: RewardFailed(f"{what} ({error}); {_FIX}")):
                pickle.dumps(values)
        most = len(completions) if give_up_after is None else give_up_after
        self._todo, self._scores, self._unscored = deque(range(len(completions))), {}, 0
        self._listen(0.0)  # to what happened since the last call
        try:
            while len(self._scores) < len(completions) and self._unscored <= most and not stopped():
                idle = [child for child in self._children if child.ready and not child.rows]
                for child in idle[: self.workers - len(self._busy())]:
                    at_once = self._paces[reward].rows if reward in child.called else 1
                    share = -(-len(self._todo) // self.workers)  # fewer towards the end, so that all end together
                    rows = [self._todo.popleft() for _ in range(min(share, at_once))]
                    if rows:
                        child.call(reward, rows, [{name: values[row] for name, values in kept.items()} for row in rows])
                self._listen(_TICK_SECONDS)
                self._enforce()
        finally:
            for child in self._busy():
                self._replace(child)
        return [self._scores.get(row, Score(None, GIVEN_UP)) for row in range(len(completions))]

    def _busy(self) -> list[_Child]:
        return [child for child in self._children if child.rows]

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
            self._not_loaded(reply["failed"])
            self._replace(child)
        elif "score" in reply:
            self._enter(child, Score(*reply["score"]))
        elif child.rows:
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
        more = 0.0 if child.reward in child.called else self._paces[child.reward].more_for_first
        return child.since + self.timeout + more

    def _enforce(self) -> None:
        """Stop what is over a limit; of the slow children look at one, since to add up its memory takes a while."""
        now = time.monotonic()
        for child in list(self._children):
            if child.rows and now > self._deadline(child):
                self._stop(child, _TIME_LIMIT)
            elif not child.ready and now - child.since > START_SECONDS:
                raise RewardFailed(f"the rewards {self._names} were not loaded within {START_SECONDS:.0f} s")
        slow = [child for child in self._busy() if now - child.since > _TICK_SECONDS]
        if slow:
            child = min(slow, key=lambda child: child.looked_at)
            child.looked_at = time.monotonic()
            family = tree.descendants(child.pid)
            if len(family) > MOST_PROCESSES:
                self._stop(child, f"process limit ({MOST_PROCESSES})")
            elif sum(map(_memory, family)) > self._memory:
                self._stop(child, "memory limit")
        self._ending = [child for child in self._ending if not child.ended()]

    def _stop(self, child: _Child, reason: str) -> None:
        self._enter(child, Score(None, reason, time.monotonic() - child.since, by_limit=True))

    def _enter(self, child: _Child, score: Score) -> None:
        """Enter the score of the row that a child was at; a child at a limit is replaced."""
        if child.rows:
            self._scores[child.rows.pop(0)] = score
        self._unscored += score.unscored
        self._paces[child.reward].add(score, child.reward not in child.called)
        child.called.add(child.reward)
        child.since = time.monotonic()
        if score.by_limit:
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
            self._children.append(_Child(self._setup))

    def _dismiss(self, child: _Child) -> None:
        """Ask a child's keeper to kill everything of it."""
        self._children.remove(child)
        self._ending.append(child)
        child.ends = time.monotonic() + _END_SECONDS
        child.process.terminate()


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
        elif score.reason == _TIME_LIMIT:
            self.more_for_first /= 2  # probably not an import
        else:
            self.slowest_first = max(self.slowest_first, score.seconds)
            self.more_for_first = min(_FIRST_CALL_SECONDS, 2 * self.slowest_first)


class _Child:
    """The parent's end of one child process. Nothing here blocks."""

    def __init__(self, setup: object):
        # The few variables that programs need, without any that has a secret.
        kept = {name: text for name, text in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
        kept = {name: text for name, text in kept.items() if not (secret_name(name) or secret_value(text))}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_recipes.rewards.pool", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=kept | _ADDED,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self.pid = self.process.pid  # of the keeper, below which everything else of this child is
        self.ready = False  # its rewards are loaded
        self.reward = ""
        self.rows: list[int] = []  # that it has not answered; it is at the first
        self.called: set[str] = set()  # rewards that it has called at least once
        self.since = time.monotonic()  # when it began with its row, or to start
        self.ends = 0.0  # when its keeper, asked to end, is killed; as `since`
        self.looked_at = 0.0  # when its memory and processes were last looked at; as `since`
        self.unsent = bytearray(pickle.dumps(setup))  # waits while the pipe is full
        self._unread = b""
        self.push()

    def call(self, reward: str, rows: list[int], columns: list[dict[str, Any]]) -> None:
        """Let it call a reward on each of some rows; every score is a later reply."""
        self.reward, self.rows, self.since = reward, rows, time.monotonic()
        self.unsent += pickle.dumps((reward, columns))
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
            tree.kill_descendants(self.pid)
            self.process.kill()
            self.process.wait()
        self.stdin.close()
        self.stdout.close()
        return True


def _memory(process: psutil.Process) -> int:
    """Return the bytes a process holds, a page that several share counted once among them."""
    with contextlib.suppress(psutil.Error):  # ended meanwhile, or changed its user
        return int(process.memory_full_info().pss)
    return 0


# --- the child


def _keep() -> NoReturn:
    """Fork the worker, wait for its end, and kill everything it left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tree.die_with_parent(int(sys.argv[1]))
    tree.become_subreaper()
    # The pipes get numbers of their own; 0 and 1 become what a reward may read and print to.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    worker = os.fork()
    if worker == 0:
        _work(requests, replies)
    os.close(requests)
    tree.OWN_CHILDREN.add(worker)
    ended = 0
    while ended == 0:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            tree.kill_descendants()
            os._exit(0)
        ended, status = os.waitpid(worker, os.WNOHANG)
        tree.reap()
    tree.kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    died = f"exit of its process (code {code})"
    if code < 0:
        hint = ", perhaps out of memory" if code == -signal.SIGKILL else ""
        died = f"death of its process ({signal.Signals(-code).name}{hint})"
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: nobody is left to hear it
        _reply(replies, {"died": died})
    os._exit(0)


def _reply(replies: int, message: dict[str, Any]) -> None:
    os.write(replies, json.dumps(message).encode() + b"\n")


def _work(requests: int, replies: int) -> NoReturn:
    """Load the rewards within limits, and answer requests until the parent closes the pipe."""
    tree.die_with_parent(os.getppid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    with os.fdopen(requests, "rb") as stream, contextlib.suppress(EOFError):
        memory_bytes, copies, specs = pickle.load(stream)
        _limit_this_process(memory_bytes)
        rewards = {}
        for spec in specs:
            try:
                rewards[spec] = load_reward(spec, copies)
            except BaseException as error:
                if not isinstance(error.__cause__, ConfigError):  # where it comes from in the user's own code
                    traceback.print_exc()
                _reply(replies, {"failed": str(error)})
                os._exit(1)
        _reply(replies, {"ready": {spec: parameters(reward) for spec, reward in rewards.items()}})
        while True:
            spec, rows = pickle.load(stream)
            for columns in rows:
                _answer(rewards[spec], columns, replies)
    os._exit(0)


def _limit_this_process(memory_bytes: int) -> None:
    """Bound the memory that this process and those it starts may write to, each by itself, and their number.

    RLIMIT_DATA counts private writable memory alone: RLIMIT_AS would count libraries and reservations never touched.
    Root is not bound by RLIMIT_NPROC; the pool looks at the rest. The kernel's memory killer takes us first.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # NPROC counts all the user's tasks on the machine: room for ours above all there are, whosever they are.
    everyone = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    wanted = everyone + 4 * MOST_PROCESSES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    score = Path("/proc/self/oom_score_adj")
    score.write_text(str(max(800, int(score.read_text()))))


def _answer(reward: Callable[..., Any], columns: dict[str, Any], replies: int) -> None:
    """Call the reward on one row, and reply."""
    global _tracebacks_left
    own, began = os.getpid(), time.monotonic()
    try:
        (score,) = call_reward(reward, {name: [entry] for name, entry in columns.items()}, 1)
    except MemoryError:
        score = Score(None, "memory limit", by_limit=True)
    except BaseException as error:  # SystemExit too: a reward may call anything
        score = Score(None, described(error))
        if _tracebacks_left > 0:
            _tracebacks_left -= 1
            traceback.print_exc()
    if os.getpid() != own:
        os._exit(0)  # the reward forked, and its child came back here
    _reply(replies, {"score": (score.value, score.reason, time.monotonic() - began, score.by_limit)})
    if score.by_limit:
        os._exit(0)  # what is left of its memory may be full


if __name__ == "__main__":
    _keep()
