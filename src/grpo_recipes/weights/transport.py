"""Requests to the run's vLLM server: time limits, the one repetition, and a lost server."""

from __future__ import annotations

from contextlib import suppress
from http.client import RemoteDisconnected
from typing import Any
from urllib.parse import urljoin

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ProtocolError

from grpo_recipes.errors import translate

# Steps of a weight transfer meet the trainer in a collective: a second one would find nobody there.
_NOT_REPEATED = {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
_CONNECT_SECONDS = 10.0
_HEALTH_SECONDS = 5.0


class ServerError(RuntimeError):
    """The vLLM server did not answer, or answered with an error."""


class ServerLost(ServerError):
    """The server died, hangs or lost its engine; the request may be repeated to the next one."""


class GenerationAborted(Exception):
    """A generation was given up because the run stops."""


class ServerAdapter(HTTPAdapter):
    """Limit the wait for every answer, which TRL's calls do not, and do not retry for a minute on a dead server."""

    def __init__(self, timeout: float, connections: int = 1):
        self._timeout = timeout
        super().__init__(pool_maxsize=connections, max_retries=0)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        """Send the request and read the whole answer; ServerLost without one, or from a server whose engine is dead."""
        limit = min(self._timeout, kwargs.get("timeout") or self._timeout)
        kwargs["timeout"] = (min(limit, _CONNECT_SECONDS), limit)
        path = request.path_url

        def lost(error: BaseException) -> ServerLost:
            if isinstance(error, requests.ReadTimeout):
                return ServerLost(f"the vLLM server did not answer {path} within {limit:g} s")
            while cause := error.__cause__ or error.__context__:  # the operating system's own error comes last
                error = cause
            return ServerLost(f"lost the connection to the vLLM server in {path} ({error})")

        broken = (requests.ReadTimeout, requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
        with translate(broken, lost):
            response = self._send(request, kwargs)
            response.content  # noqa: B018  read here, where a broken connection can be distinguished from a bad answer
        if response.status_code >= 500 and not self._healthy(request):
            raise ServerLost(f"the engine of the vLLM server is dead: {response.status_code} in {path}")
        return response

    def _send(self, request: requests.PreparedRequest, kwargs: dict[str, Any]) -> requests.Response:
        try:
            return super().send(request, **kwargs)
        except requests.ConnectionError as error:
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
        with suppress(requests.RequestException):
            return HTTPAdapter(max_retries=0).send(question.prepare(), timeout=_HEALTH_SECONDS).ok
        return False
