"""One child process of rewards, in two: a keeper of our code alone, and the worker below it that calls rewards.

    python -P -m grpo_recipes.rewards.children.worker PID-OF-THE-PARENT

The keeper ends everything the worker left, whatever session it is in, when the worker ends, when the parent dies, and
when the parent asks for it by SIGTERM. Requests come on what was stdin, replies go to what was stdout; what rewards
print goes to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from grpo_recipes.process.tree import become_subreaper, die_with_parent
from grpo_recipes.recipe.registry import make_reward
from grpo_recipes.recipe.user_code import load_object
from grpo_recipes.rewards.children.limits import end_family, limit_this_process, reap_all
from grpo_recipes.rewards.children.score import WrongShape, described, entries, number
from grpo_recipes.rewards.children.wire import next_request

_TRACEBACKS = 3  # printed by one worker; a reward that is wrong is wrong for every completion


def main() -> NoReturn:
    """Fork the worker, and keep it."""
    parent = int(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    become_subreaper()
    requests, replies = _take_over_pipes()
    worker = os.fork()
    if worker == 0:
        _work(requests, replies)
    os.close(requests)
    _keep(worker, replies)


def _take_over_pipes() -> tuple[int, int]:
    """The pipes under numbers of their own; 0 and 1 become what a reward may read and print to."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies


def _keep(worker: int, replies: int) -> NoReturn:
    while True:
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            end_family()
            os._exit(0)
        status = reap_all().get(worker)
        if status is not None:
            break
    end_family()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone: nobody is left to tell
        _say(replies, {"died": _death(os.waitstatus_to_exitcode(status))})
    os._exit(0)


def _death(code: int) -> str:
    if code >= 0:
        return f"exit of its process (code {code})"
    name = signal.Signals(-code).name
    return f"death of its process ({name}{', perhaps out of memory' if name == 'SIGKILL' else ''})"


def _say(replies: int, message: dict[str, Any]) -> None:
    os.write(replies, json.dumps(message).encode() + b"\n")


# --- the worker ------------------------------------------------------------------------------------------------------


def _work(requests: int, replies: int) -> NoReturn:
    die_with_parent(os.getppid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable()
    with os.fdopen(requests, "rb") as stream:
        setup = next_request(stream)
        if setup is not None:
            limit_this_process(setup["memory"])
            rewards = _load(setup, replies)
            while (request := next_request(stream)) is not None:
                _answer(rewards[request["reward"]], request, replies)
    os._exit(0)


def _load(setup: dict[str, Any], replies: int) -> list[Callable[..., Any]]:
    """Every reward of the setup, ours first: a user's folder must not come before theirs on the path."""
    rewards = []
    for wanted in setup["rewards"]:
        try:
            rewards.append(_function(wanted, setup["copies"]))
        except BaseException as error:
            traceback.print_exc()
            _say(replies, {"failed": wanted["spec"], "reason": described(error)})
            os._exit(1)
    _say(replies, {"ready": [_parameters(reward) for reward in rewards]})
    return rewards


def _function(wanted: dict[str, Any], copies: Path | None) -> Callable[..., Any]:
    if ":" not in wanted["spec"]:
        return make_reward(wanted["spec"], SimpleNamespace(**wanted["keys"]), None)
    function: Callable[..., Any] = load_object(wanted["place"], copies)
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    taken = _parameters(function)
    if taken is not None and "completions" not in taken:
        raise TypeError(f"it takes no argument 'completions'; write def {function.__name__}(completions, **columns)")
    return function


def _parameters(function: Callable[..., Any]) -> list[str] | None:
    """Names of the columns a reward takes, None for all."""
    kinds = inspect.signature(function).parameters.values()
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in kinds):
        return None
    return [parameter.name for parameter in kinds]


def _answer(reward: Callable[..., Any], request: dict[str, Any], replies: int) -> None:
    """Call the reward on each row, and reply as each ends."""
    own = os.getpid()
    for row, columns in request["rows"]:
        began = time.monotonic()
        value, reason, out_of_memory = _call(reward, columns)
        if os.getpid() != own:
            os._exit(0)  # the reward forked, and its child came back here
        seconds = time.monotonic() - began
        reply = {"row": row, "value": value, "reason": reason, "seconds": seconds, "out_of_memory": out_of_memory}
        _say(replies, reply)
        if out_of_memory:
            os._exit(0)  # what is left of its memory may be full


def _call(reward: Callable[..., Any], columns: dict[str, Any]) -> tuple[float | None, str | None, bool]:
    global _TRACEBACKS
    try:
        result = reward(**{name: [value] for name, value in columns.items()})
        if inspect.isawaitable(result):
            import asyncio

            result = asyncio.run(_awaited(result))
        return *number(entries(result, 1)[0]), False
    except MemoryError:
        return None, "memory limit", True
    except WrongShape as error:
        return None, str(error), False
    except BaseException as error:  # SystemExit too: a reward may call anything
        if _TRACEBACKS > 0:
            _TRACEBACKS -= 1
            traceback.print_exc()
        return None, described(error), False


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main()
