"""Requests to the run's vLLM server: time limits, the one repetition, a lost server, and the wait for its successor."""

from __future__ import annotations

import json
import threading
import time
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ProtocolError

# Steps of a weight transfer meet the trainer in a collective: a second one would find nobody there.
_NOT_REPEATED = frozenset(
    {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
)
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
    """A generation was given up because ``BridgeClient.abort`` was called."""


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
            response.content  # noqa: B018  read here, where a connection that breaks is still told from a bad answer
        except requests.exceptions.ReadTimeout as error:
            raise ServerLost(f"the vLLM server did not answer {path} within {limit:g} s") from error
        except (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
            raise ServerLost(f"lost the connection to the vLLM server in {path} ({_root(error)})") from error
        if response.status_code >= 500 and not self._healthy(request):
            raise ServerLost(f"the engine of the vLLM server is dead: {response.status_code} in {path}")
        return response

    def _send(self, request: requests.PreparedRequest, kwargs: dict[str, Any]) -> requests.Response:
        try:
            return super().send(request, **kwargs)
        except requests.exceptions.ConnectionError as error:
            if request.path_url in _NOT_REPEATED or not _closed_before_an_answer(error):
                raise
        # The server may close a kept connection at the very moment it is used again. A new adapter: others in the pool
        # may be as old.
        return HTTPAdapter(max_retries=0).send(request, **kwargs)

    def _healthy(self, request: requests.PreparedRequest) -> bool:
        question = requests.Request("GET", urljoin(str(request.url), "/health"), headers=_token(request))
        try:
            return HTTPAdapter(max_retries=0).send(question.prepare(), timeout=_HEALTH_SECONDS).ok
        except requests.exceptions.RequestException:
            return False


def _token(request: requests.PreparedRequest) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name == "Authorization"}


def _closed_before_an_answer(error: requests.exceptions.ConnectionError) -> bool:
    cause = error.args[0] if error.args else None
    closed = (RemoteDisconnected, ConnectionResetError, BrokenPipeError)
    return isinstance(cause, ProtocolError) and isinstance(cause.args[-1], closed)


def _root(error: BaseException) -> BaseException:
    """Return the operating system's own error, which comes last in a chain."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return error


class ServerRestarts:
    """Follow ``processes/server_state.json``: the launcher restarts a dead server at its old address.

    Without the file nobody restarts servers. ``aborted`` ends every wait, with GenerationAborted.
    """

    def __init__(self, state_file: Path, start_seconds: float, aborted: threading.Event):
        self._file = state_file
        self._start_seconds = start_seconds
        self._aborted = aborted
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
        while True:
            epoch, state = self._read()
            if state == "gone":
                raise ServerError("the vLLM server is gone and is not started again")
            if state == "ready":
                self._epoch = epoch
                return
            if time.monotonic() > deadline:
                raise ServerError(f"the vLLM server was not ready again after {limit:g} s")
            self._pause()

    def _pause(self) -> None:
        if self._aborted.wait(_LOOK_SECONDS):
            raise GenerationAborted

    def _read(self) -> tuple[int, str]:
        try:
            content = json.loads(self._file.read_text())
        except FileNotFoundError:
            return 1, "ready"
        return int(content["epoch"]), str(content["state"])
