"""A child process of the pool: the few variables it gets, its replies, and what it does.

A child is two processes: a keeper of our code alone, and the worker below it that calls rewards. The keeper ends
everything the worker left, whatever session it is in, when the worker ends, when the parent dies, and when the parent
asks for it by SIGTERM. Requests are pickles: first the setup, then a reward's name and rows of columns. Replies are
lines of JSON, one a row, each of which is validated, since a child is not trusted; what rewards print goes to stderr.
An ``async`` reward is called on many rows at once, in one event loop of the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import inspect
import json
import os
import pickle
import re
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from grpo_recipes.errors import ConfigError
from grpo_recipes.numbers import reward_problem
from grpo_recipes.process import tree
from grpo_recipes.recipe.registry import NO_ANSWER
from grpo_recipes.rewards.chance import seed_later_imports, seed_libraries
from grpo_recipes.rewards.memory import mount_own_shared_memory
from grpo_recipes.rewards.score import (
    Reward,
    Score,
    accepted_columns,
    call_reward,
    describe_error,
    event_loop,
    load_reward,
    read_scores,
)
from grpo_recipes.secrets import MASK, secret_name, secret_value

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
MOST_PROCESSES = 64  # of one child process, itself included
TIME_LIMIT = "time limit"
GARBLED = {"died": "its process sent garbled replies"}
_LONGEST_REASON = 2000  # characters of a reply; ours are far shorter
_tracebacks_left = 3  # to print in a worker; a reward that is wrong is wrong for every completion
# In a worker: the names of variables that the trainer has and this process does not, and values of those handed to it.
_stripped: frozenset[str] = frozenset()
_secrets: list[str] = []

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
    "PYTHONHASHSEED": "0",  # the order of sets, from which some environments draw
}


def child_environment(handed: Collection[str] = ()) -> dict[str, str]:
    """Return the few variables that programs need, without any that has a secret, and those of the names ``handed``."""
    kept = {name: text for name, text in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    kept = {name: text for name, text in kept.items() if not (secret_name(name) or secret_value(text))}
    return {**kept, **_ADDED, **{name: os.environ[name] for name in handed if name in os.environ}}


def is_score(value: Any) -> bool:
    """Return whether a child sent a number that can be a reward."""
    return _is_number(value) and reward_problem(value) is None


def read_reply(line: bytes, rewards: Collection[str], valid: Callable[[Any], bool] = is_score) -> dict[str, Any]:
    """Return a reply of a child that loads ``rewards``, ``GARBLED`` for all else: a reward can write to the pipe."""
    reply: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(line)
    match reply:
        case {"score": [value, reason, seconds, bool()], "row": row} if len(reply) == 2 and type(row) is int:
            fits = value is None or (reason is None and valid(value))
            short = reason is None or (isinstance(reason, str) and len(reason) <= _LONGEST_REASON)
            right = fits and short and _is_number(seconds) and 0 <= seconds < 1e9
        case {"ready": dict(takes), "together": list(together)} if len(reply) == 2:
            columns = [names for names in takes.values() if names is not None]
            texts = [names for names in columns if isinstance(names, list) and "completions" in names]
            right = (
                set(takes) == set(rewards) and texts == columns and all(name in takes for name in map(str, together))
            )
        case {"failed": str()} | {"died": str()}:
            right = len(reply) == 1
        case _:
            right = False
    return reply if right else GARBLED


def _is_number(entry: Any) -> bool:
    return isinstance(entry, int | float) and not isinstance(entry, bool)


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
    died = f"its process exited (code {code})"
    if code < 0:
        hint = ", perhaps out of memory" if code == -signal.SIGKILL else ""
        died = f"its process died ({signal.Signals(-code).name}{hint})"
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: nobody is left to hear it
        _reply(replies, {"died": died})
    os._exit(0)


def _reply(replies: int, message: dict[str, Any]) -> None:
    os.write(replies, json.dumps(message).encode() + b"\n")


def _work(requests: int, replies: int) -> NoReturn:
    """Load the rewards within limits, and answer requests until the parent closes the pipe."""
    global _stripped
    tree.die_with_parent(os.getppid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    with os.fdopen(requests, "rb") as stream, contextlib.suppress(EOFError):
        memory_bytes, copies, specs, concurrency, handed, everywhere, network = pickle.load(stream)
        seed_later_imports()
        seed_libraries(0)  # for draws while the rewards are loaded
        _stripped = everywhere - set(os.environ)
        _secrets.extend(os.environ[name] for name in handed if secret_name(name) and os.environ.get(name))
        mount_own_shared_memory(memory_bytes)
        _limit_this_process(memory_bytes)
        if not network:
            _leave_network()
        rewards = {}
        for spec in specs:
            try:
                rewards[spec] = load_reward(spec, copies)
            except BaseException as error:
                if not isinstance(error.__cause__, ConfigError):  # where it comes from in the user's own code
                    _print_traceback()
                _reply(replies, {"failed": _explained(str(error))})
                os._exit(1)
        together = [spec for spec, reward in rewards.items() if inspect.iscoroutinefunction(reward)]
        takes = {spec: accepted_columns(reward) for spec, reward in rewards.items()}
        _reply(replies, {"ready": takes, "together": together})
        while True:
            spec, limit, rows = pickle.load(stream)
            if spec in together:
                event_loop().run(_answer_together(rewards[spec], rows, replies, limit, concurrency))
            else:
                for row, columns, seed in rows:
                    _answer(rewards[spec], row, columns, seed, replies)
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


def _leave_network() -> None:
    """Leave every network interface behind where the system allows it, and refuse connections made in Python."""
    own_user = 0 if os.geteuid() == 0 else _CLONE_NEWUSER
    ctypes.CDLL(None).unshare(_CLONE_NEWNET | own_user)  # not allowed in some containers: then the hook alone

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        local = event == "socket.connect" and arguments[0].family == socket.AF_UNIX
        if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo") and not local:
            raise PermissionError("this process has no network; write environment_network: true where it needs one")

    sys.addaudithook(refuse)


def _answer(reward: Reward, row: int, columns: dict[str, Any], seed: int | None, replies: int) -> None:
    """Call the reward on one row, and reply."""
    own, began = os.getpid(), time.monotonic()
    try:
        if seed is not None:
            seed_libraries(seed)
        (score,) = call_reward(reward, {name: [entry] for name, entry in columns.items()}, 1)
    except BaseException as error:  # SystemExit too: a reward may call anything
        score = _score_of(error)
    _send(replies, row, score, time.monotonic() - began, own)


async def _answer_together(
    reward: Callable[..., Any], rows: list[tuple[int, dict[str, Any], int | None]], replies: int, limit: float,
    concurrency: int,
) -> None:  # fmt: skip
    """Call an async reward on each row, ``concurrency`` at a time and each for ``limit`` seconds, and reply in order.

    Random numbers are reproducible until the first ``await`` that waits: later draws mix with other calls.
    """
    import asyncio

    own, turns = os.getpid(), asyncio.Semaphore(concurrency)

    async def called(columns: dict[str, Any], seed: int | None) -> tuple[Score, float]:
        """Return the score of one row and its seconds."""
        async with turns:
            began = time.monotonic()
            try:
                if seed is not None:
                    seed_libraries(seed)
                async with asyncio.timeout(limit) as time_left:
                    (score,) = read_scores(await reward(**{name: [entry] for name, entry in columns.items()}), 1)
            except BaseException as error:
                score = Score(None, TIME_LIMIT, by_limit=True) if time_left.expired() else _score_of(error)
            return score, time.monotonic() - began

    tasks = [asyncio.create_task(called(columns, seed)) for _, columns, seed in rows]
    for (row, *_), task in zip(rows, tasks, strict=True):
        score, seconds = await task
        _send(replies, row, score, seconds, own)


def _score_of(error: BaseException) -> Score:
    """Return the score of a call that raised; the traceback of the first ones is printed."""
    global _tracebacks_left
    if isinstance(error, MemoryError):
        return Score(None, "memory limit", by_limit=True)
    what = describe_error(error)
    if isinstance(error, ConfigError):  # it says itself what to do
        what = f"{what}; {error.problems[0].fix}"
    elif _tracebacks_left > 0 and not what.startswith(NO_ANSWER):
        _tracebacks_left -= 1
        _print_traceback()
    return Score(None, _explained(what))


def _send(replies: int, row: int, score: Score, seconds: float, own: int) -> None:
    if os.getpid() != own:
        os._exit(0)  # the reward forked, and its child came back here
    _reply(replies, {"score": (score.value, score.reason, seconds, score.by_limit), "row": row})
    if score.by_limit and score.reason != TIME_LIMIT:
        os._exit(0)  # what is left of its memory may be full


def _explained(what: str) -> str:
    """Return what went wrong without the values of secrets, and with why a variable that it names is not there."""
    missing = next((name for name in re.findall(r"[A-Za-z]\w{2,}", what) if name in _stripped), None)
    isolated = "; it runs isolated, without this variable: write reward_environment: "
    return f"{_hidden(what)}{f'{isolated}[{missing}]' if missing else ''}"


def _hidden(text: str) -> str:
    for secret in _secrets:
        text = text.replace(secret, MASK)
    return text


def _print_traceback() -> None:
    sys.stderr.write(_hidden(traceback.format_exc()))


if __name__ == "__main__":
    _keep()
