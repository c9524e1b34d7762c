"""Send one HTTP request to the vLLM server, and classify its failures: lost server, late, or bad answer.

``ServerAdapter`` raises ServerLost, ServerLate or BadAnswer. ``check_completions`` validates the completions of an
answer. The adapter is used in a session of requests, with a time limit of 600 seconds here::

    from grpo_recipes.process.sessions import secure_session
    from grpo_recipes.runs.server_state import server_listener

    adapter = ServerAdapter(600.0, owner=server_listener(state_file, url))
    session = secure_session(requests.Session(), adapter, token)
"""

import contextlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from http.client import RemoteDisconnected
from typing import Any, TypeVar
from urllib.parse import urljoin

import numpy as np
import requests
from urllib3.exceptions import ProtocolError

from grpo_recipes.errors import translate_errors
from grpo_recipes.process.sessions import BoundedAdapter, RejectedResponse
from grpo_recipes.server.wire import Completions

# Steps of a weight transfer meet the trainer in a collective: a repeated request would wait without a partner.
NOT_REPEATED = {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"}
QUICK_SECONDS = 5.0  # limit for an answer that a healthy server gives immediately
Answer = TypeVar("Answer")


class ServerError(RuntimeError):
    """The vLLM server did not answer, or answered with an error."""


class ServerLost(ServerError):
    """The server died, hangs or lost its engine; the request may be repeated to the next server."""


class ServerLate(ServerLost):
    """The server did not answer within the time limit of the request."""


class BadAnswer(ServerError):
    """A running server gave an error, an invalid answer, or no answer; a repeated request may succeed."""


class GenerationAborted(Exception):
    """A generation was given up because the run stops."""


class ServerAdapter(BoundedAdapter):
    """Send requests to a vLLM server, and distinguish a lost server from a bad answer.

    TRL's own calls have no time limit, and retry for a minute if the server is dead.
    """

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        """Send the request and read the whole answer.

        Raise ServerLost if no answer comes or the engine is dead, and ServerLate at the deadline. Raise BadAnswer if a
        running server closes the connection, redirects, or sends an answer that is too large.
        """
        limit, path = self.compute_time_limit(kwargs.get("timeout")), request.path_url

        def failure(error: BaseException) -> ServerError:
            """Return a ServerLate after the deadline, a BadAnswer if the server is healthy, else a ServerLost."""
            connected = not isinstance(error, requests.ConnectTimeout)
            while cause := error.__cause__ or error.__context__:  # the last cause is the operating system's error
                error = cause
            if isinstance(error, TimeoutError) and connected:
                return ServerLate(f"the vLLM server did not answer {path} within {limit:g} s")
            kind = BadAnswer if self._is_healthy(request) else ServerLost
            return kind(f"lost the connection to the vLLM server in {path} ({error})")

        connection_errors = (requests.ReadTimeout, requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
        unwanted = translate_errors(RejectedResponse, lambda error: BadAnswer(f"the vLLM server {error} (in {path})"))
        with translate_errors(connection_errors, failure), unwanted:
            response = self._send(request, kwargs)
        if response.status_code >= 500 and not self._is_healthy(request):
            raise ServerLost(f"the engine of the vLLM server is dead: {response.status_code} in {path}")
        return response

    def _send(self, request: requests.PreparedRequest, kwargs: dict[str, Any]) -> requests.Response:
        """Send the request; repeat it once on a new connection if the server had closed an idle connection.

        Steps of a weight transfer are not repeated.
        """
        try:
            return super().send(request, **kwargs)
        except requests.ConnectionError as error:
            cause = error.args[0] if error.args else None
            closed = (RemoteDisconnected, ConnectionResetError, BrokenPipeError)
            unanswered = isinstance(cause, ProtocolError) and isinstance(cause.args[-1], closed)
            if request.path_url in NOT_REPEATED or not unanswered:
                raise
        # The server may close an idle connection when it is reused. Other connections of the pool may be as old, so
        # the retry uses a new adapter.
        return self._make_adapter().send(request, **kwargs)

    def _is_healthy(self, request: requests.PreparedRequest) -> bool:
        """Return whether the server answers /health with success within 5 seconds."""
        headers = {name: value for name, value in request.headers.items() if name == "Authorization"}
        health = requests.Request("GET", urljoin(str(request.url), "/health"), headers=headers)
        with contextlib.suppress(requests.RequestException):
            return self._make_adapter().send(health.prepare(), timeout=QUICK_SECONDS).ok
        return False

    def _make_adapter(self) -> BoundedAdapter:
        """Return a new adapter with the same limits and no open connection. It does not classify failures."""
        return BoundedAdapter(self._timeout, self._max_bytes, self.owner)


def check_completions(
    completions: Completions, count: int, max_tokens: int, vocabulary: int | None, requested_logprobs: int | None
) -> None:
    """Raise ValueError unless there are ``count`` completions of 1 to ``max_tokens`` known tokens.

    ``vocabulary`` is the number of token ids, or None if it is unknown. Unless ``requested_logprobs`` is None, each
    token must have a finite log-prob.
    """
    lengths, ids, logprobs = completions
    if len(lengths) != count:
        raise ValueError(f"expected {count} completions, got {len(lengths)}")
    if len(wrong_lengths := lengths[(lengths <= 0) | (lengths > max_tokens)]):
        raise ValueError(f"expected 1 to {max_tokens} tokens in a completion, got {wrong_lengths[0]}")
    if len(unknown_ids := ids[(ids < 0) | (ids >= (math.inf if vocabulary is None else vocabulary))]):
        raise ValueError(f"token {unknown_ids[0]}, and the model has {vocabulary}")
    if requested_logprobs is None:
        return
    if logprobs is None or len(logprobs) != len(ids):
        raise ValueError("not one log-prob for each token")
    if infinite := int((~np.isfinite(logprobs)).sum()):
        raise ValueError(f"{infinite} log-probs that are not finite")


def run_in_thread(work: Callable[[], Answer]) -> Future[Answer]:
    """Run a function in a daemon thread, and return a Future of its result or exception.

    An executor's threads would delay the exit of the interpreter.
    """
    future: Future[Answer] = Future()

    def run() -> None:
        """Call ``work``, and store its result or exception in the Future."""
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
