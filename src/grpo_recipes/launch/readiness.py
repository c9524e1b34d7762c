"""Wait until the processes of a run answer, and read the activity of its vLLM server.

Requests with the run's token go only to listeners that are descendants of this process (``OwnListener``).

    seconds = wait_until_ready(child.alive, child.pid, host, port, plan.served_name, token, timeout)
"""

import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from grpo_recipes.plan.ports import LOOPBACK, find_listener
from grpo_recipes.process.answers import get
from grpo_recipes.process.listeners import ForeignListener, OwnListener
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.server.middleware import ACTIVITY_PATH


class NotReady(Exception):
    """The server, or a process of an extension, did not become ready. The message gives the reason."""


class PortTaken(NotReady):
    """Another process listens on the port."""


def wait_until_ready(
    alive: Callable[[], bool], root_pid: int, host: str, port: int, name: str, token: str, timeout: float
) -> float:
    """Wait for the run's vLLM server and return the seconds waited.

    The server is ready once a descendant of ``root_pid`` listens on the port and serves the model ``name``. Raise
    NotReady if it dies, rejects the token or is not ready after ``timeout`` seconds, and PortTaken if another
    process has the port. Other processes get no request.
    """
    owner = OwnListener(host, port, lambda: root_pid)
    return _wait_for_listener(
        alive, owner, port, lambda: name in _list_served_models(host, port, token, owner), "the vLLM server", timeout,
        " s (vllm_server_timeout)",
    )  # fmt: skip


def wait_until_answering(alive: Callable[[], bool], root_pid: int, url: str, who: str, timeout: float) -> float:
    """Wait until a process answers a GET of ``url`` with status 200, and return the seconds waited.

    A listener only gets the request if it is a descendant of ``root_pid``. ``who`` is the process's name in messages.
    The errors are the same as in ``wait_until_ready``.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or LOOPBACK, parts.port or 80
    owner = OwnListener(host, port, lambda: root_pid)

    def answers() -> bool:
        """Return whether a GET of the URL is answered with status 200."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return get(host, port, parts.path or "/", {}, owner)[0] == 200
        return False

    return _wait_for_listener(alive, owner, port, answers, who, timeout)


def _wait_for_listener(
    alive: Callable[[], bool], owner: OwnListener, port: int, ready: Callable[[], bool], who: str, timeout: float,
    unit: str = " s",
) -> float:  # fmt: skip
    """Wait until the run's own process listens on ``port`` and ``ready()`` is true, and return the seconds waited.

    Raise NotReady if ``alive()`` becomes false or ``timeout`` seconds pass, and PortTaken if another process listens on
    the port. ``unit`` is the text after the number of seconds in the message.
    """
    start = time.monotonic()
    # Consecutive inspections: if our own process starts to listen during an inspection, it looks foreign once.
    foreign_listeners = 0

    def is_ready() -> bool:
        """Return whether the run's own process listens and is ready.

        Raise PortTaken if another process listens at two checks in a row, and NotReady if the run's process has died.
        """
        nonlocal foreign_listeners
        is_alive = alive()
        with contextlib.suppress(ConnectionRefusedError):
            try:
                owner.find_own_sockets()
                foreign_listeners = 0
                if is_alive and ready():
                    return True
            except ForeignListener:
                foreign_listeners += 1
        if foreign_listeners > 1 or (foreign_listeners and not is_alive):
            pid = find_listener(port) or "?"
            raise PortTaken(f"port {port} was taken by another process (pid {pid}) while {who} started")
        if not is_alive:
            raise NotReady(f"{who} died before it was ready")
        return False

    if not wait_until(is_ready, timeout, pause=0.25):
        raise NotReady(f"{who} was not ready after {timeout:.0f}{unit}")
    return time.monotonic() - start


def _list_served_models(host: str, port: int, token: str, owner: OwnListener) -> list[str]:
    """Return the model names that a vLLM server reports at /v1/models; [] without a valid answer.

    Raise NotReady if it rejects the token.
    """
    try:
        status, body = get(host, port, "/v1/models", _make_authorization(token), owner)
        if status == 401:
            raise NotReady("the vLLM server rejects the run's token")
        return [model["id"] for model in json.loads(body)["data"]] if status == 200 else []
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return []


def _make_authorization(token: str) -> dict[str, str]:
    """Return the HTTP header with the server's token."""
    return {"Authorization": f"Bearer {token}"}


@dataclass(frozen=True)
class Activity:
    """The tokens that a vLLM server has sampled, and the requests that it has not answered yet."""

    tokens: float  # tokens sampled since its start, as reported by the engine
    requests: int  # unanswered requests: generations, weight loads, pauses


def read_activity(host: str, port: int, token: str, owner: OwnListener | None = None) -> Activity | None:
    """Read a server's activity; return None if it does not answer within 10 seconds or rejects the request.

    The server counts requests on arrival, so the count includes requests that a hung engine never started. With
    ``owner``, other processes get no request, and the result is None.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        answers = [get(host, port, path, _make_authorization(token), owner) for path in ("/metrics", ACTIVITY_PATH)]
        if any(status != 200 for status, _ in answers):
            return None
        (_, metrics), (_, activity) = answers
        counters = re.findall(rb"^vllm:generation_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
        return Activity(sum(map(float, counters)), json.loads(activity)["requests"])
    return None
