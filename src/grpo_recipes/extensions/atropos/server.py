"""An Atropos server class for released vLLM versions: ``/v1/completions`` with token ids and log-probs.

atroposlib's own class for vLLM uses ``/generate``, which no released vLLM has. ``RunServer`` differs in three ways:

* It reads the run's token again for each request, because a restarted server has another token.
* It sends every sampling parameter, because vLLM fills in missing ones from the model's ``generation_config.json``.
* It repeats requests while the server is lost, for as long as a restart may take.
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx2
import openai
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ReasoningConfig
from openai.types.chat.chat_completion import ChatCompletion
from openai.types.completion import Completion
from pydantic import Field
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    RetryError,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
    wait_random,
)  # fmt: skip
from transformers import AutoTokenizer

from grpo_recipes.errors import translate_errors
from grpo_recipes.process.async_sessions import bounded_client
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.rules import NEUTRAL_SAMPLING
from grpo_recipes.runs.rundir import SERVER_STATE
from grpo_recipes.runs.server_state import server_listener
from grpo_recipes.server.middleware import POLICY_HEADER

# Defaults of requests: they sample from the model's own distribution.
NEUTRAL = {"temperature": 1.0, **NEUTRAL_SAMPLING}
_DISTRIBUTION_PARAMETERS = (*NEUTRAL, "presence_penalty", "frequency_penalty")
LOWEST = -9999.0  # replaces a log-prob of minus infinity, which JSON does not have; vLLM uses the same number
_HEALTH_SECONDS = 1.0  # time between two health checks
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0  # seconds before a request is repeated
# Statuses of a server that is starting (with another token already), has no adapter yet, or has a dead engine.
_TEMPORARY_STATUSES = (401, 404, 409, 429)
_PARAMETER_NAMES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}

_NO_RETRY: dict[str, Any] = {"stop": stop_after_attempt(1), "reraise": True}


class ServerGone(RuntimeError):
    """The vLLM server gave no usable answer for longer than its restart may take."""


class PromptTooLong(ValueError):
    """A prompt leaves no room for a completion."""


class _Unusable(Exception):
    """An answer that can't be trained on; a repeated request may succeed."""


class RunServerConfig(APIServerConfig):
    """The address of a run's vLLM server, and the settings of requests to it."""

    base_url: str = "http://localhost:9001/v1"
    health_check: bool = False  # requests wait for the server by themselves
    longest: int | None = Field(None, description="Most tokens of a prompt with its completion.")
    longest_completion: int | None = Field(None, description="Most tokens of a completion.")
    sampling: dict[str, Any] = Field({}, description="Sampling parameters of requests that do not give them.")
    patience: float = Field(1800.0, description="Seconds to repeat requests to a lost server.")


@dataclass(frozen=True)
class SamplingRequest:
    """A request for completions that are trained on."""

    policy_version: int | None  # optimizer step of the server's weights when it received the request; None: unknown
    sampling: dict[str, Any]  # parameters that change the distribution


_RECORDED: ContextVar[list[SamplingRequest] | None] = ContextVar("grpo_sampling_requests", default=None)


@contextlib.contextmanager
def record_requests() -> Iterator[list[SamplingRequest]]:
    """Yield a list; RunServer appends each sampling request of the ``with`` block, also of tasks that start inside."""
    requests: list[SamplingRequest] = []
    token = _RECORDED.set(requests)
    try:
        yield requests
    finally:
        _RECORDED.reset(token)


def build_generation_params(requests: Sequence[SamplingRequest]) -> dict[str, Any]:
    """Return a group's ``generation_params``: the sampling parameters of its requests, and the oldest policy version.

    A parameter that differs between requests is the list of its values. Then it counts as not neutral, and a list of
    temperatures makes the trainer reject the group, unless its trajectories have their own. ``policy_version`` is left
    out if the version of any request is unknown.
    """
    values = {
        name: list(dict.fromkeys(request.sampling.get(name) for request in requests))
        for name in dict.fromkeys(name for request in requests for name in request.sampling)
    }
    params = {name: different[0] if len(different) == 1 else different for name, different in values.items()}
    versions = [request.policy_version for request in requests if request.policy_version is not None]
    return params | ({"policy_version": min(versions)} if versions and len(versions) == len(requests) else {})


class RunServer(APIServer):
    """Client of the run's vLLM server, or of any other vLLM server; the ``server_cls`` of an environment."""

    config: RunServerConfig
    # ``_request`` decides about retries. atroposlib would also repeat rejected requests, and hide the reason.
    _tokens_and_logprobs_comp = APIServer._tokens_and_logprobs_comp.retry_with(**_NO_RETRY)
    _tokens_and_logprobs_comp_eval = APIServer._tokens_and_logprobs_comp_eval.retry_with(**_NO_RETRY)
    _comp = APIServer._comp.retry_with(**_NO_RETRY)
    _comp_eval = APIServer._comp_eval.retry_with(**_NO_RETRY)
    _chat_comp = APIServer._chat_comp.retry_with(**_NO_RETRY)
    _chat_eval = APIServer._chat_eval.retry_with(**_NO_RETRY)
    chat_completion = APIServer.chat_completion.retry_with(**_NO_RETRY)

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None):
        """Create a client of ``config.base_url``, in a launch only of the launch's own server; send no request."""
        if not isinstance(config, RunServerConfig):
            config = RunServerConfig(**config.model_dump())
        super().__init__(config, reasoning_config=reasoning_config)
        # Requests to the run's own server use no proxy, and none is sent to another process on its port.
        folder = os.environ.get("GRPO_RUN_DIR")  # set if a launch started this process
        listener = server_listener(Path(folder) / SERVER_STATE, config.base_url) if folder else None
        self._http = bounded_client(config.timeout, listener)
        self._openai = openai.AsyncOpenAI(
            base_url=config.base_url, api_key=config.api_key or "none", timeout=config.timeout, max_retries=0,
            http_client=self._http,
        )  # fmt: skip
        self._lost_since: float | None = None  # time.monotonic() of the first failure, or None
        self._recovered_at = 0.0  # time.monotonic() of the first answer after the last failure
        self._sends_version = False  # whether the last answer had a policy version
        self._printed_limit = False  # whether a request for too many tokens was printed

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for callers with a text instead of token ids."""
        name = self.config.tokenizer_name
        return AutoTokenizer.from_pretrained(self.config.model_name if name == "none" else name)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Request ``/health`` every second, forever, and set ``server_healthy`` by its answer.

        This task of atroposlib runs if the configuration has ``health_check``.
        """
        while True:
            self.server_healthy = False
            with contextlib.suppress(httpx2.HTTPError, OSError):
                url = f"{self.config.base_url.removesuffix('/').removesuffix('/v1')}/health"
                response = await self._http.get(url, headers=self._read_authorization(), timeout=self.config.timeout)
                self.server_healthy = response.is_success
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        """Send a chat request with retries; return OpenAI's answer, without token ids, so it can't be trained on."""
        messages, body = kwargs.pop("messages"), self._build_body(kwargs)
        create = partial(self._openai.chat.completions.with_raw_response.create, messages=messages)
        answer: ChatCompletion = (await self._request(create, body, lambda response: response.parse()))[0]
        return answer

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        """Send a text request with retries; return OpenAI's answer, without token ids, so it can't be trained on."""
        prompt, body = kwargs.pop("prompt"), self._build_body(kwargs)
        create = partial(self._openai.completions.with_raw_response.create, prompt=prompt)
        answer: Completion = (await self._request(create, body, lambda response: response.parse()))[0]
        return answer

    async def _tokens_and_logprobs_completion_wrapper(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Sample completions; return the prompt's token ids, and lists of token ids, log-probs and finish reasons.

        ``max_tokens`` is at most the number of tokens that ``longest`` allows after the prompt, also if the request
        does not set it. Raise PromptTooLong if ``longest`` allows no token. Raise ValueError if neither the request nor
        the configuration limits the tokens. The request is added to the list of ``record_requests``.
        """
        text, input_ids = kwargs.pop("prompt", None), kwargs.pop("input_ids", None)
        prompt = list(input_ids) if input_ids is not None else self.tokenizer.encode(text)
        if input_ids is not None and text is not None:  # ManagedServer adds a BOS token although the template has one
            bos = self.tokenizer.bos_token_id
            prompt = prompt[1:] if bos is not None and prompt[:2] == [bos, bos] else prompt
        body = self._build_body(kwargs)
        if self.config.longest is not None:
            room = self.config.longest - len(prompt)
            if room < 1:
                raise PromptTooLong(
                    f"the prompt has {len(prompt)} tokens, at most {self.config.longest - 1} are allowed"
                )
            body["max_tokens"] = min(body.get("max_tokens") or room, room)
        if not body.get("max_tokens"):
            raise ValueError("max_tokens is missing: vLLM would sample only 16 tokens")
        body |= {"logprobs": 0, "return_token_ids": True}
        create = partial(self._openai.completions.with_raw_response.create, prompt=prompt)
        completions, version = await self._request(create, body, partial(_read_completions, count=body.get("n") or 1))
        if (requests := _RECORDED.get()) is not None:
            sampling = {name: body[name] for name in _DISTRIBUTION_PARAMETERS if name in body}
            requests.append(SamplingRequest(version, sampling))
        ids, logprobs, reasons = zip(*completions, strict=True)
        return prompt, list(ids), list(logprobs), list(reasons)

    def _build_body(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON body of a request: its parameters, and the run's or neutral values of missing parameters.

        ``extra_body`` is removed from ``parameters`` and its entries join the body. ``max_tokens`` is limited to
        ``longest_completion``. The first request beyond the limit prints a message.
        """
        extra = parameters.pop("extra_body", None) or {}
        explicit = {
            _PARAMETER_NAMES.get(name, name): value
            for name, value in {**parameters, **extra}.items()
            if value is not None
        }
        body = {**NEUTRAL, **self.config.sampling, **explicit, "model": self.config.model_name}
        limit, requested = self.config.longest_completion, body.get("max_tokens")
        if limit is not None and (requested is None or requested > limit):
            body["max_tokens"] = limit
            if requested is not None and not self._printed_limit:
                self._printed_limit = True
                say(f"a request for {requested} tokens exceeds max_completion_length; all such requests get {limit}")
        return body

    def _read_authorization(self) -> dict[str, str]:
        """Read the run's token from its file; return it as an HTTP header, or {} outside of a run."""
        file = os.environ.get("GRPO_TOKEN_FILE")
        return {"Authorization": f"Bearer {Path(file).read_text().strip()}"} if file else {}

    async def _request(
        self, create: Callable[..., Awaitable[Any]], body: dict[str, Any], read: Callable[[Any], Any]
    ) -> tuple[Any, int | None]:
        """Send a request with ``create`` until it succeeds; return ``read(response)`` and the server's policy version.

        The version is None if the server does not send one. ``model`` is removed from ``body``. Print once that the
        server does not answer, and that it answers again. Raise ServerGone if no usable answer comes within
        ``patience`` seconds, and openai's error if the server rejects the request.
        """
        patience, model = self.config.patience, body.pop("model")
        began = time.monotonic()  # of the last attempt
        where = f"the vLLM server at {self.config.base_url}"

        def record_loss(state: RetryCallState) -> None:
            """Record the time of the first failure, and print once that requests wait for the server."""
            if self._lost_since is None and began >= self._recovered_at:
                self._lost_since = time.monotonic()
                reason = _describe_error(state.outcome.exception() if state.outcome else None)
                say(f"{where} does not answer ({reason}); requests wait for it")

        attempts = AsyncRetrying(
            retry=retry_if_exception(_may_recover), stop=stop_after_delay(patience), before_sleep=record_loss,
            wait=wait_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE) + wait_random(0, _FIRST_PAUSE),
        )  # fmt: skip
        try:
            async for attempt in attempts:
                began = time.monotonic()
                with attempt:
                    response = await create(model=model, extra_body=body, extra_headers=self._read_authorization())
                    answer, version = read(response), response.headers.get(POLICY_HEADER)
                    if version is None and self._sends_version:
                        raise _Unusable("it was restarted and does not have the trainer's weights yet")
        except RetryError as error:
            reason = _describe_error(error.last_attempt.exception())
            raise ServerGone(f"{where} did not answer for {patience:g} s: {reason}") from error
        self._sends_version = version is not None
        # The outcome of an attempt that began before a loss or a recovery does not change it.
        if self._lost_since is not None and began >= self._lost_since:
            self._recovered_at = time.monotonic()
            say(f"{where} answers again after {self._recovered_at - self._lost_since:.0f} s")
            self._lost_since = None
        return answer, None if version is None else int(version)


def _may_recover(error: BaseException) -> bool:
    """Return whether a request that failed with this error may succeed later.

    This holds without a connection or a usable answer, for a status >= 500, and for 401, 404, 409 and 429.
    """
    if isinstance(error, openai.APIStatusError):
        return error.status_code >= 500 or error.status_code in _TEMPORARY_STATUSES
    return isinstance(error, openai.APIConnectionError | _Unusable)


def _describe_error(error: BaseException | None) -> str:
    """Return type and message of an error, or of the cause of openai's connection error, as one line; cut if long."""
    if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")


def _read_completions(response: Any, count: int) -> list[tuple[list[int], list[float], str]]:
    """Return token ids, log-probs and finish reason of each completion; raise _Unusable if any of them is missing.

    ``count`` completions are expected. A log-prob of NaN counts as missing, and minus infinity becomes -9999.
    """
    malformed = (AttributeError, LookupError, TypeError, ValueError)
    with translate_errors(malformed, lambda error: _Unusable(f"its answer has no token ids with log-probs ({error})")):
        completions = [
            (list(choice.token_ids), list(choice.logprobs.token_logprobs), str(choice.finish_reason))
            for choice in response.parse().choices
        ]
        if len(completions) != count:
            raise ValueError(f"expected {count} completions, got {len(completions)}")
        for ids, logprobs, _ in completions:
            if not ids or len(ids) != len(logprobs) or any(map(math.isnan, logprobs)):
                raise ValueError("expected a log-prob for each token")
        return [(ids, [max(logprob, LOWEST) for logprob in logprobs], reason) for ids, logprobs, reason in completions]
