"""One request to Atropos' run-api: how long it may take, what is repeated and after which pauses, what was sent."""

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

from grpo_recipes.errors import translate
from grpo_recipes.process.sessions import BoundedAdapter

QUICK_SECONDS = 5.0  # for an answer that a healthy run-api gives at once
_MOST_BYTES = 1 << 30  # of an answer: a batch of long groups, as text
_GROWTH, _LONGEST_PAUSE, _JITTER = 1.5, 2.0, 0.1  # of the pauses between requests; seconds; most part added at random
_LOOK_SECONDS = 0.2  # between two looks at whether the run stops
_MOST_TEXT = 300  # characters of an answer in a message
_AT_HOME = ("127.0.0.1", "localhost", "::1")
_RANDOM = random.SystemRandom()  # apart from the training's random numbers, which a resumed run draws again


class AtroposError(RuntimeError):
    """run-api cannot be reached, refuses, is not this run's, or has no groups to train on within the deadline."""


class WaitAborted(Exception):
    """A wait for run-api was given up because the run stops."""


class RequestFailed(Exception):
    """A request without a whole answer; unless ``sent``, run-api has not seen it."""

    def __init__(self, reason: str, sent: bool):
        self.sent = sent
        super().__init__(reason)


class Connection:
    """Requests to the run-api at ``url``.

    Attributes:
        seconds: of the last request to each path.
    """

    def __init__(
        self, url: str, *, timeout: float, attempts: int, delay: float, stopped: Callable[[], bool],
        compressed: bool | None,
    ):  # fmt: skip
        """As AtroposClient."""
        self.url = url.rstrip("/")
        self.timeout, self.attempts, self._delay, self._stopped = timeout, attempts, delay, stopped
        self.seconds: dict[str, float] = {}
        self._session = requests.Session()
        self._session.trust_env = False  # an http_proxy must not see, or swallow, requests to the run's own run-api
        away = urlsplit(self.url).hostname not in _AT_HOME
        encoding = "gzip" if compressed or (compressed is None and away) else "identity"
        # No connection is used twice: whether run-api closed one before or after it took a batch from its queue for us
        # could not be known.
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, BoundedAdapter(math.inf, _MOST_BYTES))
        self._session.headers.update({"Connection": "close", "Accept-Encoding": encoding})

    def once(self, method: str, path: str, body: Any = None, limit: float | None = None) -> requests.Response:
        """Send a request; return the answer, read to its end within ``limit`` seconds; RequestFailed without one."""
        limit = limit or self.timeout
        started = time.monotonic()

        def failed(error: Exception) -> RequestFailed:
            reason = getattr(error.args[0] if error.args else None, "reason", None)
            sent = not isinstance(reason, NewConnectionError | ConnectTimeoutError)
            cause: BaseException = error
            while earlier := cause.__cause__ or cause.__context__:  # the operating system's own error comes last
                cause = earlier
            late = f"did not answer within {limit:g} s"
            return RequestFailed(late if isinstance(cause, TimeoutError) else f"gave no answer ({cause})", sent)

        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        with translate((requests.RequestException, HTTPError, TimeoutError), failed):
            answer = self._session.request(method, self.url + path, data=data, headers=headers, timeout=limit)
        self.seconds[path] = time.monotonic() - started
        return answer

    def ask(self, method: str, path: str, body: Any = None, repeat: bool = True) -> Any:
        """Return the JSON of an answer; repeat what failed, but with ``repeat`` false nothing that was sent."""
        failure = ""
        for attempt, pause in zip(range(1, self.attempts + 1), self.pauses(), strict=False):
            try:
                answer = self.once(method, path, body)
            except RequestFailed as error:
                failure = str(error)
                if error.sent and not repeat:
                    what = f"run-api at {self.url} {failure} ({path}), and may have taken what was sent"
                    raise AtroposError(what) from error
            else:
                if answer.status_code < 500:
                    return self.content(answer)
                failure = f"answered {shown(answer)}"
            if attempt < self.attempts:
                self.sleep(pause)
        raise AtroposError(f"Atropos API not reachable at {self.url}: it {failure} ({path}, {self.attempts} times)")

    def content(self, answer: requests.Response) -> Any:
        """Return the JSON of an answer; AtroposError where it is refused or is none."""
        if answer.status_code != 200:
            raise AtroposError(f"run-api refused {answer.url}: {shown(answer)}")
        with translate(ValueError, lambda _: AtroposError(f"no run-api answers at {answer.url}: {shown(answer)}")):
            return json.loads(answer.content)

    def look(self, path: str, body: Any = None) -> tuple[dict[str, Any], str]:
        """Return what a quick GET answers, or {} and why there is no such answer."""
        try:
            answer = self.once("GET", path, body, limit=min(self.timeout, QUICK_SECONDS))
        except RequestFailed as error:
            return {}, str(error)
        try:
            found = json.loads(answer.content) if answer.status_code == 200 else None
        except ValueError:
            found = None
        return (found, "") if isinstance(found, dict) else ({}, f"answered {shown(answer)}")

    def pauses(self) -> Iterator[float]:
        """Yield seconds to wait before a request is repeated: the delay, then half as long again each time."""
        pause = self._delay
        while True:
            pause = min(pause, _LONGEST_PAUSE)
            yield pause * (1 + _JITTER * _RANDOM.random())
            pause *= _GROWTH

    def sleep(self, seconds: float) -> None:
        """Sleep; raise WaitAborted as soon as the run stops."""
        until = time.monotonic() + seconds
        while True:
            self.need_going_on()
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(left, _LOOK_SECONDS))

    def need_going_on(self) -> None:
        """Raise WaitAborted where the run stops."""
        if self._stopped():
            raise WaitAborted


def shown(answer: requests.Response) -> str:
    """Return status and text of an answer as a line."""
    text = " ".join(answer.content[: 4 * _MOST_TEXT].decode(errors="replace").split())[:_MOST_TEXT]
    return f"{answer.status_code}: {text or 'nothing'}"
