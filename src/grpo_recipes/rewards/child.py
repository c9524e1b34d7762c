"""A child process of the reward pool: its environment, its limits, and the protocol with the pool.

A child consists of two processes: a keeper that runs only our code, and below it a worker that calls rewards. When the
worker ends, when the parent dies, or on SIGTERM, the keeper kills everything that the worker started, in any session.
Requests are pickles: first the setup, then a reward's name and rows of columns. Replies are lines of JSON, one per row.
The pool validates each line, since a child is not trusted. The output of rewards goes to stderr. An ``async`` reward is
called on many rows at the same time, in one event loop.
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
from grpo_recipes.numbers import find_reward_problem
from grpo_recipes.process import tree
from grpo_recipes.recipe.registry import NO_ANSWER
from grpo_recipes.rewards.chance import seed_later_imports, seed_libraries
from grpo_recipes.rewards.memory import mount_own_shared_memory
from grpo_recipes.rewards.score import (
    Reward,
    Score,
    call_reward,
    describe_error,
    get_async_runner,
    list_accepted_columns,
    load_reward,
    read_scores,
)
from grpo_recipes.secrets import MASK, contains_secret, is_secret_name

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
MOST_PROCESSES = 64  # limit for a child with its descendants
TIME_LIMIT = "time limit"
GARBLED = {"died": "its process sent garbled replies"}
_LONGEST_REASON = 2000  # characters accepted from a child; genuine reasons are far shorter
_tracebacks_left = 3  # tracebacks a worker may still print; a faulty reward fails for every completion
# In a worker: names of variables that only the trainer has, and values of secrets that were passed to this process.
_stripped: frozenset[str] = frozenset()
_secrets: list[str] = []

# Other variables (ranks, ports, tokens) would give a reward access to the training's process group or to vLLM.
_COPIED_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "JAVA_HOME",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "NLTK_DATA", "GRPO_HOME",
    "GRPO_CODE",
)  # fmt: skip
_COPIED_PREFIXES = ("PYTHON", "LC_")
_ADDED_VARIABLES = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the GPUs are full
    "PYTHONHASHSEED": "0",  # fixes the order of sets, since some environments sample from sets
}


def make_child_environment(requested: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of a child: variables that programs need, without secrets, plus the ``requested`` ones.

    Requested variables may be secrets. They are left out if they are not set. GPUs are hidden, and libraries are
    limited to one thread.
    """
    variables = {
        name: text
        for name, text in os.environ.items()
        if (name in _COPIED_VARIABLES or name.startswith(_COPIED_PREFIXES))
        and not (is_secret_name(name) or contains_secret(text))
    }
    return {**variables, **_ADDED_VARIABLES, **{name: os.environ[name] for name in requested if name in os.environ}}


def is_score(value: Any) -> bool:
    """Return whether a value from a child can be a reward: a finite number that is not too large."""
    return _is_number(value) and find_reward_problem(value) is None


def read_reply(line: bytes, rewards: Collection[str], valid: Callable[[Any], bool] = is_score) -> dict[str, Any]:
    """Parse and validate a line of JSON that a child has sent: a reply ``score``, ``ready``, ``failed`` or ``died``.

    Return ``GARBLED``, a reply with the key ``died``, if it is not a valid reply. ``rewards`` are the rewards that the
    child loads. ``valid`` checks the value of a score.
    """
    reply: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        reply = json.loads(line)
    match reply:
        case {"score": [value, reason, seconds, bool()], "row": row} if len(reply) == 2 and type(row) is int:
            value_is_valid = value is None or (reason is None and valid(value))
            reason_is_valid = reason is None or (isinstance(reason, str) and len(reason) <= _LONGEST_REASON)
            is_valid = value_is_valid and reason_is_valid and _is_number(seconds) and 0 <= seconds < 1e9
        case {"ready": dict(takes), "together": list(together)} if len(reply) == 2:
            is_valid = (
                set(takes) == set(rewards)
                and all(
                    isinstance(names, list) and "completions" in names for names in takes.values() if names is not None
                )
                and all(name in takes for name in map(str, together))
            )
        case {"failed": str()} | {"died": str()}:
            is_valid = len(reply) == 1
        case _:
            is_valid = False
    return reply if is_valid else GARBLED


def _is_number(entry: Any) -> bool:
    """Return whether a value is an int or a float, but not a boolean."""
    return isinstance(entry, int | float) and not isinstance(entry, bool)


def _run_keeper() -> NoReturn:
    """Fork the worker, watch it until it ends or SIGTERM arrives, and then end this process.

    The worker runs ``_run_worker`` and never returns here. After its end, kill all of its remaining descendants, and
    send the pool the reply ``died`` with the exit code or signal. After SIGTERM, which also arrives when the parent
    dies, kill all descendants without a reply.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tree.die_with_parent(int(sys.argv[1]))
    tree.become_subreaper()
    # The pipes move to other file descriptors; a reward reads nothing from 0 and prints with 1 to stderr.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    worker = os.fork()
    if worker == 0:
        _run_worker(requests, replies)
    os.close(requests)
    tree.OWN_CHILDREN.add(worker)
    ended_pid = 0
    while ended_pid == 0:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            tree.kill_descendants()
            os._exit(0)
        ended_pid, status = os.waitpid(worker, os.WNOHANG)
        tree.reap()
    tree.kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    died = f"its process exited (code {code})"
    if code < 0:
        hint = ", perhaps out of memory" if code == -signal.SIGKILL else ""
        died = f"its process died ({signal.Signals(-code).name}{hint})"
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        _send_reply(replies, {"died": died})
    os._exit(0)


def _send_reply(replies: int, message: dict[str, Any]) -> None:
    """Write a message to the pool as a line of JSON, in one write. ``replies`` is a file descriptor."""
    os.write(replies, json.dumps(message).encode() + b"\n")


def _run_worker(requests: int, replies: int) -> NoReturn:
    """Limit this process, load the rewards, and answer requests until the parent closes the pipe; then end the process.

    ``requests`` and ``replies`` are file descriptors of pipes. If a reward can't be loaded, reply ``failed`` with the
    reason and end with exit code 1.
    """
    global _stripped
    tree.die_with_parent(os.getppid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    with os.fdopen(requests, "rb") as stream, contextlib.suppress(EOFError):
        memory_bytes, copies_text, specs, concurrency, requested, trainer_variables, network = pickle.load(stream)
        copies = Path(copies_text) if copies_text else None
        seed_later_imports()
        seed_libraries(0)  # for random numbers during the loading of the rewards
        _stripped = trainer_variables - set(os.environ)
        _secrets.extend(os.environ[name] for name in requested if is_secret_name(name) and os.environ.get(name))
        mount_own_shared_memory(memory_bytes)
        _limit_this_process(memory_bytes)
        if not network:
            _disable_network()
        rewards = {}
        for spec, bound_keys in specs.items():
            try:
                rewards[spec] = load_reward(spec, copies, bound_keys)
            except BaseException as error:
                if not isinstance(error.__cause__, ConfigError):  # show the line of the user's code
                    _print_traceback()
                _send_reply(replies, {"failed": _explain_error(str(error))})
                os._exit(1)
        async_specs = [spec for spec, reward in rewards.items() if inspect.iscoroutinefunction(reward)]
        columns_by_spec = {spec: list_accepted_columns(reward) for spec, reward in rewards.items()}
        _send_reply(replies, {"ready": columns_by_spec, "together": async_specs})
        while True:
            spec, limit, rows = pickle.load(stream)
            if spec in async_specs:
                get_async_runner().run(_answer_concurrently(rewards[spec], rows, replies, limit, concurrency))
            else:
                for row, columns, seed in rows:
                    _answer_row(rewards[spec], row, columns, seed, replies)
    os._exit(0)


def _limit_this_process(memory_bytes: int) -> None:
    """Limit the private memory of this process and of each descendant in bytes, and their number; disable core files.

    RLIMIT_DATA counts only private writable memory, while RLIMIT_AS also counts libraries and unused reservations.
    RLIMIT_NPROC does not limit root, so the pool counts processes too. The OOM killer chooses this process first.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # NPROC counts all tasks of the user on the machine, so the limit is above the current number of all tasks.
    machine_tasks = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = machine_tasks + 4 * MOST_PROCESSES
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
    oom_score = Path("/proc/self/oom_score_adj")
    oom_score.write_text(str(max(800, int(oom_score.read_text()))))


def _disable_network() -> None:
    """Move this process to a namespace without network if the system allows it.

    Also install an audit hook that raises PermissionError at connections from Python, except to unix sockets.
    """
    own_user = 0 if os.geteuid() == 0 else _CLONE_NEWUSER
    ctypes.CDLL(None).unshare(_CLONE_NEWNET | own_user)  # some containers do not allow it, and then only the hook works

    def reject_connections(event: str, arguments: tuple[Any, ...]) -> None:
        """Raise PermissionError for events that connect, except to a unix socket, send a datagram or look up a host."""
        is_local = event == "socket.connect" and arguments[0].family == socket.AF_UNIX
        if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo") and not is_local:
            raise PermissionError("this process has no network; set environment_network: true if it needs one")

    sys.addaudithook(reject_connections)


def _answer_row(reward: Reward, row: int, columns: dict[str, Any], seed: int | None, replies: int) -> None:
    """Call a reward on one row, and write its score or the reason of its failure to the pipe ``replies``.

    ``replies`` is a file descriptor that the pool reads. ``columns`` maps each argument to its value for this row. If
    ``seed`` is not None, seed the random numbers first.
    """
    pid, start = os.getpid(), time.monotonic()
    try:
        if seed is not None:
            seed_libraries(seed)
        (score,) = call_reward(reward, {name: [entry] for name, entry in columns.items()}, 1)
    except BaseException as error:  # also SystemExit, since a reward may call anything
        score = _make_unscored(error)
    _send_score(replies, row, score, time.monotonic() - start, pid)


async def _answer_concurrently(
    reward: Callable[..., Any], rows: list[tuple[int, dict[str, Any], int | None]], replies: int, limit: float,
    concurrency: int,
) -> None:  # fmt: skip
    """Call an async reward on each row, ``concurrency`` at a time, and send the scores to the pool in order.

    A row is (index, columns, seed or None). A call that takes longer than ``limit`` seconds is unscored.

    Random numbers are reproducible until the first ``await`` that waits. After that, calls share the generators.
    """
    import asyncio

    pid, slots = os.getpid(), asyncio.Semaphore(concurrency)

    async def score_row(columns: dict[str, Any], seed: int | None) -> tuple[Score, float]:
        """Call the reward on one row; return its score and the duration in seconds."""
        async with slots:
            start = time.monotonic()
            try:
                if seed is not None:
                    seed_libraries(seed)
                async with asyncio.timeout(limit) as time_left:
                    (score,) = read_scores(await reward(**{name: [entry] for name, entry in columns.items()}), 1)
            except BaseException as error:
                score = Score(None, TIME_LIMIT, by_limit=True) if time_left.expired() else _make_unscored(error)
            return score, time.monotonic() - start

    tasks = [asyncio.create_task(score_row(columns, seed)) for _, columns, seed in rows]
    for (row, *_), task in zip(rows, tasks, strict=True):
        score, seconds = await task
        _send_score(replies, row, score, seconds, pid)


def _make_unscored(error: BaseException) -> Score:
    """Return a score without value for a call that raised ``error``, with the error as its reason.

    Print the traceback of the first three errors, except of ConfigErrors, memory errors and failed connections.
    """
    global _tracebacks_left
    if isinstance(error, MemoryError):
        return Score(None, "memory limit", by_limit=True)
    text = describe_error(error, _hide_secrets)
    if isinstance(error, ConfigError):
        text = f"{text}; {error.problems[0].fix}"
    elif _tracebacks_left > 0 and not text.startswith(NO_ANSWER):
        _tracebacks_left -= 1
        _print_traceback()
    return Score(None, _explain_error(text))


def _send_score(replies: int, row: int, score: Score, seconds: float, pid: int) -> None:
    """Send a score to the pool, and end this process if it reached its memory limit.

    ``pid`` is the worker's id. If this is another process, which the reward forked, end it without sending.
    """
    if os.getpid() != pid:
        os._exit(0)  # the reward forked, and its child process returned to this code
    _send_reply(replies, {"score": (score.value, score.reason, seconds, score.by_limit), "row": row})
    if score.by_limit and score.reason != TIME_LIMIT:
        os._exit(0)  # its memory may still be full


def _explain_error(text: str) -> str:
    """Return an error text with secrets masked, and with advice if it names a variable that only the trainer has."""
    missing = next((name for name in re.findall(r"[A-Za-z]\w{2,}", text) if name in _stripped), None)
    fix = f"; it runs isolated, without this variable: set reward_environment: [{missing}]" if missing else ""
    return _hide_secrets(text) + fix


def _hide_secrets(text: str) -> str:
    """Return the text with the values of this process's secret variables masked."""
    for secret in _secrets:
        text = text.replace(secret, MASK)
    return text


def _print_traceback() -> None:
    """Print the traceback of the current exception to stderr, with secrets masked."""
    sys.stderr.write(_hide_secrets(traceback.format_exc()))


if __name__ == "__main__":
    _run_keeper()
