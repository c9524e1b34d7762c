"""Send requests to Atropos' run-api, each with a deadline, and repeat failed requests after growing pauses.

run-api hands out each batch once. So ``RequestFailed.sent`` distinguishes a request that never reached run-api, and is
safe to repeat, from a request with a lost answer.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

from grpo_recipes.errors import translate_errors
from grpo_recipes.process.sessions import BoundedAdapter
from grpo_recipes.process.waiting import wait_until

QUICK_SECONDS = 5.0  # limit for an answer that a healthy run-api gives at once
_MAX_ANSWER_BYTES = 1 << 30  # enough for a batch of long groups as text
_PAUSE_GROWTH = 1.5
_MAX_PAUSE_SECONDS = 2.0
_PAUSE_JITTER = 0.1  # largest fraction of a pause that is added at random
_STOP_CHECK_SECONDS = 0.2  # time between two checks whether the run stops
_MAX_SHOWN_CHARACTERS = 300  # shown of an answer in a message
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_RANDOM = random.SystemRandom()  # separate from the training's random numbers, which a resumed run must draw again


class AtroposError(RuntimeError):
    """run-api cannot be reached, rejects a request, belongs to another run, or had no usable groups in time."""


class WaitAborted(Exception):
    """A wait for run-api ended early because the run stops."""


class RequestFailed(Exception):
    """A request without a complete answer, or with a server error; unless ``sent``, run-api has not received it."""

    def __init__(self, reason: str, sent: bool):
        self.sent = sent
        super().__init__(reason)


class Connection:
    """An HTTP connection to the run-api at ``url`` that limits, times and repeats requests.

    Attributes:
        seconds: duration of the last request to each path.
    """

    def __init__(
        self, url: str, *, timeout: float, attempts: int, delay: float, stopped: Callable[[], bool],
        compressed: bool | None,
    ):  # fmt: skip
        """Create a session without sending a request; ``AtroposClient`` documents the arguments."""
        self.url = url.rstrip("/")
        self.timeout, self.attempts, self._delay, self._stopped = timeout, attempts, delay, stopped
        self.seconds: dict[str, float] = {}
        self._session = requests.Session()
        self._session.trust_env = False  # requests to the run's own run-api must not go through an http_proxy
        is_remote = urlsplit(self.url).hostname not in _LOOPBACK_HOSTS
        encoding = "gzip" if compressed or (compressed is None and is_remote) else "identity"
        # No connection is used twice. If run-api closed a reused connection, we could not tell whether it had already
        # taken a batch from its queue for us.
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, BoundedAdapter(math.inf, _MAX_ANSWER_BYTES))
        self._session.headers.update({"Connection": "close", "Accept-Encoding": encoding})

    def send(self, method: str, path: str, body: Any = None, limit: float | None = None) -> requests.Response:
        """Send one request and return the complete response, with any status; store its seconds in ``seconds[path]``.

        Raise RequestFailed if there is no answer, or not within ``limit`` seconds (by default, ``timeout``).
        """
        limit = limit or self.timeout
        started = time.monotonic()
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            response = self._session.request(method, self.url + path, data=data, headers=headers, timeout=limit)
        except (requests.RequestException, HTTPError, TimeoutError) as error:
            reason = getattr(error.args[0] if error.args else None, "reason", None)
            sent = not isinstance(reason, NewConnectionError | ConnectTimeoutError)
            cause: BaseException = error
            while earlier := cause.__cause__ or cause.__context__:  # the operating system's own error comes last
                cause = earlier
            timed_out = f"did not answer within {limit:g} s"
            failure = timed_out if isinstance(cause, TimeoutError) else f"gave no answer ({cause})"
            raise RequestFailed(failure, sent) from error
        self.seconds[path] = time.monotonic() - started
        return response

    def request(self, method: str, path: str, body: Any = None, repeat: bool = True) -> Any:
        """Send a request and return the JSON of its response; repeat it without an answer or with a status >= 500.

        If ``repeat`` is false, a request that run-api may have received is only sent again after a status >= 500;
        without an answer, AtroposError is raised. Raise AtroposError also if ``attempts`` requests fail, or for another
        status than 200. Raise WaitAborted if the run stops during a pause.
        """
        failure = ""
        for attempt, pause in zip(range(1, self.attempts + 1), self.pauses(), strict=False):
            try:
                response = self.send(method, path, body)
            except RequestFailed as error:
                failure = str(error)
                if error.sent and not repeat:
                    problem = f"run-api at {self.url} {failure} ({path}), but may have received the request"
                    raise AtroposError(problem) from error
            else:
                if response.status_code < 500:
                    return self.read_json(response)
                failure = f"answered {describe_response(response)}"
            if attempt < self.attempts:
                self.sleep(pause)
        raise AtroposError(f"Atropos API not reachable at {self.url}: it {failure} ({path}, {self.attempts} times)")

    def read_json(self, response: requests.Response) -> Any:
        """Return the parsed JSON of a response; raise AtroposError if the status is not 200 or the body is not JSON."""
        shown = describe_response(response)
        if response.status_code != 200:
            raise AtroposError(f"run-api rejected {response.url}: {shown}")
        with translate_errors(
            ValueError, lambda _: AtroposError(f"the server at {response.url} is not a run-api: {shown}")
        ):
            return json.loads(response.content)

    def try_get(self, path: str, body: Any = None) -> tuple[dict[str, Any], str]:
        """Send one GET, limited to 5 s; return its JSON object and "", or {} and the reason of the failure.

        Raise nothing: a missing answer, a status other than 200 and other content are reasons.
        """
        try:
            response = self.send("GET", path, body, limit=min(self.timeout, QUICK_SECONDS))
        except RequestFailed as error:
            return {}, str(error)
        try:
            content = json.loads(response.content) if response.status_code == 200 else None
        except ValueError:
            content = None
        return (content, "") if isinstance(content, dict) else ({}, f"answered {describe_response(response)}")

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each repeated request, forever: first ``delay``, then 1.5 times as long.

        A pause is at most 2 s, plus up to 10% at random.
        """
        pause = self._delay
        while True:
            pause = min(pause, _MAX_PAUSE_SECONDS)
            yield pause * (1 + _PAUSE_JITTER * _RANDOM.random())
            pause *= _PAUSE_GROWTH

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``; raise WaitAborted as soon as the run stops."""
        if wait_until(self._stopped, seconds, pause=_STOP_CHECK_SECONDS):
            raise WaitAborted

    def raise_if_stopped(self) -> None:
        """Raise WaitAborted if ``stopped`` returns that the run stops; otherwise do nothing."""
        if self._stopped():
            raise WaitAborted


def describe_response(response: requests.Response) -> str:
    """Return the status and the first 300 characters of a response in one line."""
    text = " ".join(response.content[: 4 * _MAX_SHOWN_CHARACTERS].decode(errors="replace").split())
    return f"{response.status_code}: {text[:_MAX_SHOWN_CHARACTERS] or 'empty'}"
