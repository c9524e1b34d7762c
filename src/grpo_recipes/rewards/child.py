"""One child process of rewards, in two: a keeper of our code alone, and the worker below it that calls rewards.

    python -P -m grpo_recipes.rewards.child PID-OF-THE-PARENT

The keeper ends everything the worker left, whatever session it is in, when the worker ends, when the parent dies, and
when the parent asks for it by SIGTERM. Requests are pickles on what was stdin: first the setup, then a reward's name
and the columns of a row. Replies are lines of JSON on what was stdout, since a child is not trusted; what rewards print
goes to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from grpo_recipes.process.tree import OWN_CHILDREN, become_subreaper, die_with_parent, kill_descendants, reap
from grpo_recipes.rewards.score import Score, call_reward, described, is_own, load_own, make_reward, parameters

MOST_PROCESSES = 64  # of one child process, itself included
_tracebacks_left = 3  # to print in this worker; a reward that is wrong is wrong for every completion


def main() -> NoReturn:
    """Fork the worker, wait for its end, and kill everything it left."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]))
    become_subreaper()
    # The pipes get numbers of their own; 0 and 1 become what a reward may read and print to.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    worker = os.fork()
    if worker == 0:
        _work(requests, replies)
    os.close(requests)
    OWN_CHILDREN.add(worker)
    ended = 0
    while ended == 0:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            kill_descendants()
            os._exit(0)
        ended, status = os.waitpid(worker, os.WNOHANG)
        reap()
    kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    died = f"exit of its process (code {code})"
    if code < 0:
        name = signal.Signals(-code).name
        died = f"death of its process ({name}{', perhaps out of memory' if name == 'SIGKILL' else ''})"
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: nobody is left to hear it
        _reply(replies, {"died": died})
    os._exit(0)


def _reply(replies: int, message: dict[str, Any]) -> None:
    os.write(replies, json.dumps(message).encode() + b"\n")


def _work(requests: int, replies: int) -> NoReturn:
    """Load the rewards within limits, and answer requests until the parent closes the pipe."""
    die_with_parent(os.getppid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    with os.fdopen(requests, "rb") as stream, contextlib.suppress(EOFError):
        memory_bytes, copies, specs = pickle.load(stream)
        _limit_this_process(memory_bytes)
        rewards = {spec: _load(spec, copies, replies) for spec in specs}
        _reply(replies, {"ready": {spec: parameters(reward) for spec, reward in rewards.items()}})
        while True:
            spec, columns = pickle.load(stream)
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


def _load(spec: str, copies: Path | None, replies: int) -> Callable[..., Any]:
    try:
        return load_own(spec, copies) if is_own(spec) else make_reward(spec)
    except BaseException as error:
        traceback.print_exc()
        _reply(replies, {"failed": spec, "reason": described(error)})
        os._exit(1)


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
    _reply(replies, {"score": asdict(replace(score, seconds=time.monotonic() - began))})
    if score.by_limit:
        os._exit(0)  # what is left of its memory may be full


if __name__ == "__main__":
    main()
