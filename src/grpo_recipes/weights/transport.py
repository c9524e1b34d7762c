"""One request to the server: its limits, what is repeated, what counts as lost, which answers are whole."""

import contextlib
import math
from http.client import RemoteDisconnected
from typing import Any
from urllib.parse import urljoin

import numpy as np
import requests
from urllib3.exceptions import ProtocolError

from grpo_recipes.errors import translate
from grpo_recipes.process.sessions import BoundedAdapter, RejectedResponse
from grpo_recipes.server.wire import Completions

# Steps of a weight transfer meet the trainer in a collective: a second one would find nobody there.
NOT_REPEATED = {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
ADAPTER = "grpo-adapter"  # name of the adapter that is trained, at the server: the model of a request
QUICK_SECONDS = 5.0  # for an answer that a healthy server gives at once


class ServerError(RuntimeError):
    """The vLLM server did not answer, or answered with an error."""


class ServerLost(ServerError):
    """The server died, hangs or lost its engine; the request may be repeated to the next one."""


class ServerLate(ServerLost):
    """The server did not answer within the time limit of the request."""


class BadAnswer(ServerError):
    """A living server answered with an error, with nonsense, or not at all; asked again it may do better."""


class ServerAdapter(BoundedAdapter):
    """Requests to a vLLM server: which of their failures are a lost server, and which a bad answer.

    TRL's calls have no time limit, and retry for a minute on a dead server.
    """

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        """Send the request and read the whole answer.

        Without one, or from a server whose engine is dead, raise ServerLost, at the deadline ServerLate. If a living
        server closed the connection, or its answer is too large or a redirect, raise BadAnswer.
        """
        limit, path = self.limit_of(kwargs.get("timeout")), request.path_url

        def lost(error: BaseException) -> ServerError:
            connected = not isinstance(error, requests.ConnectTimeout)
            while cause := error.__cause__ or error.__context__:  # the operating system's own error comes last
                error = cause
            if isinstance(error, TimeoutError) and connected:
                return ServerLate(f"the vLLM server did not answer {path} within {limit:g} s")
            kind = BadAnswer if self._healthy(request) else ServerLost
            return kind(f"lost the connection to the vLLM server in {path} ({error})")

        broken = (requests.ReadTimeout, requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
        unwanted = translate(RejectedResponse, lambda error: BadAnswer(f"the vLLM server {error} (in {path})"))
        with translate(broken, lost), unwanted:
            response = self._send(request, kwargs)
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
            if request.path_url in NOT_REPEATED or not unanswered:
                raise
        # The server may close a kept connection at the very moment it is used again. A new adapter: others in the pool
        # may be as old.
        return self._fresh().send(request, **kwargs)

    def _healthy(self, request: requests.PreparedRequest) -> bool:
        headers = {name: value for name, value in request.headers.items() if name == "Authorization"}
        question = requests.Request("GET", urljoin(str(request.url), "/health"), headers=headers)
        with contextlib.suppress(requests.RequestException):
            return self._fresh().send(question.prepare(), timeout=QUICK_SECONDS).ok
        return False

    def _fresh(self) -> BoundedAdapter:
        return BoundedAdapter(self._timeout, self._max_bytes, self.owner)


def check_completions(found: Completions, count: int, longest: int, vocabulary: int | None, scored: Any) -> None:
    """Raise ValueError unless there are ``count`` completions of known tokens.

    With ``scored``, the ``logprobs`` that were asked for or None, each token must have a finite log-prob.
    """
    lengths, ids, logprobs = found
    if len(lengths) != count:
        raise ValueError(f"{len(lengths)} completions where {count} were asked for")
    if len(wrong := lengths[(lengths <= 0) | (lengths > longest)]):
        raise ValueError(f"a completion of {wrong[0]} tokens where at most {longest} were asked for")
    if len(strange := ids[(ids < 0) | (ids >= (math.inf if vocabulary is None else vocabulary))]):
        raise ValueError(f"token {strange[0]}, and the model has {vocabulary}")
    if scored is None:
        return
    if logprobs is None or len(logprobs) != len(ids):
        raise ValueError("not one log-prob for each token")
    if broken := int((~np.isfinite(logprobs)).sum()):
        raise ValueError(f"{broken} log-probs that are not finite")
