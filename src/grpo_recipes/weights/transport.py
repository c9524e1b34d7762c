"""Requests to the run's vLLM server: time limits, the one repetition, a lost server, and the wait for its successor."""

from __future__ import annotations

import time
from collections.abc import Callable
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ProtocolError

from grpo_recipes.runs.rundir import read_json

# Steps of a weight transfer meet the trainer in a collective: a second one would find nobody there.
_NOT_REPEATED = {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
_CONNECT_SECONDS = 10.0
_HEALTH_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_NOTICE_SECONDS = 90.0  # for the launcher to see that its server is gone, and us to see that through an NFS cache
_MARGIN_SECONDS = 60.0  # beyond the server's own start: the launcher ends the old one and writes its state first


class ServerError(RuntimeError):
    """The vLLM server did not answer, or answered with an error."""


class ServerLost(ServerError):
    """The server died, hangs or lost its engine; the request may be repeated to the next one."""


class GenerationAborted(Exception):
    """A generation was given up because the run stops."""


class ServerAdapter(HTTPAdapter):
    """Limit the wait for every answer, which TRL's calls do not, and do not retry for a minute on a dead server.

    ``timeout`` is in seconds; a request may set a shorter one. ``connections`` are kept for further requests.
    """

    def __init__(self, timeout: float, connections: int = 1):
        self._timeout = timeout
        super().__init__(pool_maxsize=connections, max_retries=0)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        """Send the request and read the whole answer; ServerLost without one, or from a server whose engine is dead."""
        limit = min(self._timeout, kwargs.get("timeout") or self._timeout)
        kwargs["timeout"] = (min(limit, _CONNECT_SECONDS), limit)
        path = request.path_url
        try:
            response = self._send(request, kwargs)
            response.content  # noqa: B018  read here, where a broken connection can be distinguished from a bad answer
        except requests.exceptions.ReadTimeout as error:
            raise ServerLost(f"the vLLM server did not answer {path} within {limit:g} s") from error
        except (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            cause: BaseException = error
            while cause.__cause__ or cause.__context__:  # the operating system's own error comes last
                cause = cause.__cause__ or cause.__context__ or cause
            raise ServerLost(f"lost the connection to the vLLM server in {path} ({cause})") from error
        if response.status_code >= 500 and not self._healthy(request):
            raise ServerLost(f"the engine of the vLLM server is dead: {response.status_code} in {path}")
        return response

    def _send(self, request: requests.PreparedRequest, kwargs: dict[str, Any]) -> requests.Response:
        try:
            return super().send(request, **kwargs)
        except requests.exceptions.ConnectionError as error:
            cause = error.args[0] if error.args else None
            closed = (RemoteDisconnected, ConnectionResetError, BrokenPipeError)
            unanswered = isinstance(cause, ProtocolError) and isinstance(cause.args[-1], closed)
            if request.path_url in _NOT_REPEATED or not unanswered:
                raise
        # The server may close a kept connection at the very moment it is used again. A new adapter: others in the pool
        # may be as old.
        return HTTPAdapter(max_retries=0).send(request, **kwargs)

    def _healthy(self, request: requests.PreparedRequest) -> bool:
        headers = {name: value for name, value in request.headers.items() if name == "Authorization"}
        question = requests.Request("GET", urljoin(str(request.url), "/health"), headers=headers)
        try:
            return HTTPAdapter(max_retries=0).send(question.prepare(), timeout=_HEALTH_SECONDS).ok
        except requests.exceptions.RequestException:
            return False


class ServerRestarts:
    """Follow ``processes/server_state.json``: the launcher restarts a dead server at its old address.

    Without the file nobody restarts servers. When the run ``stops``, every wait ends with GenerationAborted.
    """

    def __init__(self, state_file: Path, start_seconds: float, stops: Callable[[], bool]):
        self._file = state_file
        self._start_seconds = start_seconds
        self._stops = stops
        self._epoch = self._read()[0]

    @property
    def changed(self) -> bool:
        """Whether another server than the one last waited for is there, or soon will be."""
        return self._read() != (self._epoch, "ready")

    def wait_until_noticed(self, lost: ServerLost) -> None:
        """Wait for the launcher to see that the server is lost; raise ``lost`` when it changes nothing."""
        deadline = time.monotonic() + _NOTICE_SECONDS
        while not self.changed:
            if time.monotonic() > deadline or not self._file.exists():
                raise lost
            self._pause()

    def wait_until_ready(self) -> None:
        """Wait for the next server; ServerError when there will be none, or it takes too long."""
        limit = self._start_seconds + _MARGIN_SECONDS
        deadline = time.monotonic() + limit
        while (found := self._read())[1] != "ready":
            if found[1] == "gone":
                raise ServerError("the vLLM server is gone and is not started again")
            if time.monotonic() > deadline:
                raise ServerError(f"the vLLM server was not ready again after {limit:g} s")
            self._pause()
        self._epoch = found[0]

    def _pause(self) -> None:
        if self._stops():
            raise GenerationAborted
        time.sleep(_LOOK_SECONDS)

    def _read(self) -> tuple[int, str]:
        content = read_json(self._file) or {"epoch": 1, "state": "ready"}
        return int(content["epoch"]), str(content["state"])
