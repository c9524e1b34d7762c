"""A server class of Atropos for a stock vLLM: token ids in, token ids and log-probs out, by ``/v1/completions``.

atroposlib's own class for vLLM asks ``/generate``, which no released vLLM has. This one asks what the run's server
answers: with the token of the run, read anew for each request since a restarted server has another one; with every
sampling parameter, since vLLM takes what is missing from the model's ``generation_config.json``; and again and again
where the server is lost, for as long as its restart may take.
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

from grpo_recipes.errors import translate
from grpo_recipes.process.async_sessions import bounded_client
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.rules import NEUTRAL_SAMPLING
from grpo_recipes.runs.rundir import SERVER_STATE
from grpo_recipes.runs.server_state import server_listener
from grpo_recipes.server.middleware import POLICY_HEADER

# What is sampled from is the model's own distribution unless a request, or the configuration, says otherwise.
PLAIN = {"temperature": 1.0, **NEUTRAL_SAMPLING}
_CHANGES = (*PLAIN, "presence_penalty", "frequency_penalty")  # parameters that change the distribution
LOWEST = -9999.0  # in the place of a log-prob of minus infinity, which JSON has not; vLLM's own
_HEALTH_SECONDS = 1.0  # between two looks
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0  # seconds before a server is asked again
# The server is starting (its token is another already), has not got the adapter yet, or its engine is dead.
_AGAIN = (401, 404, 409, 429)
_NAMES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}

_ONCE: dict[str, Any] = {"stop": stop_after_attempt(1), "reraise": True}


class ServerGone(RuntimeError):
    """The vLLM server did not answer for longer than its restart may take."""


class PromptTooLong(ValueError):
    """A prompt leaves no room for a completion."""


class _Unusable(Exception):
    """An answer that cannot be trained on; asked again the server may do better."""


class RunServerConfig(APIServerConfig):
    """Where a run's vLLM server is, and how it is asked."""

    base_url: str = "http://localhost:9001/v1"
    health_check: bool = False  # requests wait for the server by themselves
    longest: int | None = Field(None, description="Most tokens of a prompt with its completion.")
    longest_completion: int | None = Field(None, description="Most tokens of a completion.")
    sampling: dict[str, Any] = Field({}, description="Sampling parameters of requests that do not give them.")
    patience: float = Field(1800.0, description="Seconds for which a server that is lost is asked again.")


@dataclass(frozen=True)
class Asked:
    """A request for completions that are trained on."""

    policy_version: int | None  # optimizer step of the server's weights when it took the request; None: unknown
    sampling: dict[str, Any]  # parameters that change the distribution


_NOTES: ContextVar[list[Asked] | None] = ContextVar("grpo_asked", default=None)


@contextlib.contextmanager
def noting() -> Iterator[list[Asked]]:
    """Collect the requests that are made inside, in tasks that begin inside too."""
    notes: list[Asked] = []
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def generation_params(asked: Sequence[Asked]) -> dict[str, Any]:
    """Return what a group says of its requests: the parameters that all have alike, and the oldest weights.

    Without a ``policy_version`` where that of one of them is unknown.
    """
    first = asked[0].sampling if asked else {}
    found = {name: value for name, value in first.items() if all(one.sampling.get(name) == value for one in asked)}
    versions = [one.policy_version for one in asked if one.policy_version is not None]
    return found | ({"policy_version": min(versions)} if versions and len(versions) == len(asked) else {})


class RunServer(APIServer):
    """The run's vLLM server, or another stock one; ``server_cls`` of an environment."""

    config: RunServerConfig
    # What is repeated is decided here: atroposlib would also repeat what the server refuses, and then hide why.
    _tokens_and_logprobs_comp = APIServer._tokens_and_logprobs_comp.retry_with(**_ONCE)
    _tokens_and_logprobs_comp_eval = APIServer._tokens_and_logprobs_comp_eval.retry_with(**_ONCE)
    _comp = APIServer._comp.retry_with(**_ONCE)
    _comp_eval = APIServer._comp_eval.retry_with(**_ONCE)
    _chat_comp = APIServer._chat_comp.retry_with(**_ONCE)
    _chat_eval = APIServer._chat_eval.retry_with(**_ONCE)
    chat_completion = APIServer.chat_completion.retry_with(**_ONCE)

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None):
        own = config if isinstance(config, RunServerConfig) else RunServerConfig(**config.model_dump())
        super().__init__(own, reasoning_config=reasoning_config)
        # The run's own server is asked without a proxy, and nothing is sent to another process on its port.
        self._http = bounded_client(own.timeout, _owner(own.base_url))
        self._openai = openai.AsyncOpenAI(
            base_url=own.base_url, api_key=own.api_key or "none", timeout=own.timeout, max_retries=0,
            http_client=self._http,
        )  # fmt: skip
        self._lost_since: float | None = None  # time.monotonic
        self._synced = False  # whether an answer named the policy it is of
        self._lowers = False  # whether a request for too many tokens was printed

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for callers that have a text and no token ids."""
        own = self.config.tokenizer_name
        return AutoTokenizer.from_pretrained(self.config.model_name if own == "none" else own)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Look every second whether the server is well; only where the configuration asks for a ``health_check``."""
        while True:
            self.server_healthy = False
            with contextlib.suppress(httpx2.HTTPError, OSError):
                url = f"{self.config.base_url.removesuffix('/').removesuffix('/v1')}/health"
                answer = await self._http.get(url, headers=self._authorization(), timeout=self.config.timeout)
                self.server_healthy = answer.is_success
            await asyncio.sleep(_HEALTH_SECONDS)

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        """Return chat completions, whose tokens are not for training."""
        messages, body = kwargs.pop("messages"), self._body(kwargs)
        create = partial(self._openai.chat.completions.with_raw_response.create, messages=messages)
        return (await self._ask(create, body, lambda raw: raw.parse()))[0]

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        """Return completions, whose tokens are not for training."""
        prompt, body = kwargs.pop("prompt"), self._body(kwargs)
        create = partial(self._openai.completions.with_raw_response.create, prompt=prompt)
        return (await self._ask(create, body, lambda raw: raw.parse()))[0]

    async def _tokens_and_logprobs_completion_wrapper(
        self, **kwargs: Any
    ) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Return the prompt's token ids, and of each completion its ids, their log-probs and why it ended."""
        text, given = kwargs.pop("prompt", None), kwargs.pop("input_ids", None)
        prompt = list(given) if given is not None else self.tokenizer.encode(text)
        if given is not None and text is not None:  # rendered by ManagedServer, which adds what the template has
            begin = self.tokenizer.bos_token_id
            prompt = prompt[1:] if begin is not None and prompt[:2] == [begin, begin] else prompt
        body = self._body(kwargs)
        if self.config.longest is not None:
            room = self.config.longest - len(prompt)
            if room < 1:
                raise PromptTooLong(f"a prompt of {len(prompt)} tokens, where it may have {self.config.longest - 1}")
            body["max_tokens"] = min(body.get("max_tokens") or room, room)
        if not body.get("max_tokens"):
            raise ValueError("a request without max_tokens, for which vLLM would take 16")
        body |= {"logprobs": 0, "return_token_ids": True}
        create = partial(self._openai.completions.with_raw_response.create, prompt=prompt)
        sampled, version = await self._ask(create, body, partial(_sampled, count=body.get("n") or 1))
        if (notes := _NOTES.get()) is not None:
            notes.append(Asked(version, {name: body[name] for name in _CHANGES if name in body}))
        ids, logprobs, reasons = zip(*sampled, strict=True)
        return prompt, list(ids), list(logprobs), list(reasons)

    def _body(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON of a request with all sampling parameters; those that were given win.

        ``max_tokens`` is at most ``longest_completion``; the first request that asks for more is printed.
        """
        extra = given.pop("extra_body", None) or {}
        named = {_NAMES.get(name, name): value for name, value in {**given, **extra}.items() if value is not None}
        body = {**PLAIN, **self.config.sampling, **named, "model": self.config.model_name}
        most, asked = self.config.longest_completion, body.get("max_tokens")
        if most is not None and (asked is None or asked > most):
            body["max_tokens"] = most
            if asked is not None and not self._lowers:
                self._lowers = True
                say(f"requests for more tokens than max_completion_length, the first for {asked}, get {most}")
        return body

    def _authorization(self) -> dict[str, str]:
        file = os.environ.get("GRPO_TOKEN_FILE")
        return {"Authorization": f"Bearer {Path(file).read_text().strip()}"} if file else {}

    async def _ask(
        self, create: Callable[..., Awaitable[Any]], body: dict[str, Any], read: Callable[[Any], Any]
    ) -> tuple[Any, int | None]:
        """Return what ``read`` makes of an answer, and the policy that it is of; ask until there is one.

        ServerGone where none comes within ``patience`` seconds; openai's error where the server refuses the request.
        """
        patience, model = self.config.patience, body.pop("model")
        where = f"the vLLM server at {self.config.base_url}"

        def gone(error: RetryError) -> ServerGone:
            return ServerGone(f"{where} did not answer for {patience:g} s: {_said(error.last_attempt.exception())}")

        def lost(state: RetryCallState) -> None:
            if self._lost_since is None:
                self._lost_since = time.monotonic()
                why = _said(state.outcome.exception() if state.outcome else None)
                say(f"{where} does not answer ({why}); requests wait for it")

        attempts = AsyncRetrying(
            retry=retry_if_exception(_may_recover), stop=stop_after_delay(patience), before_sleep=lost,
            wait=wait_exponential(multiplier=_FIRST_PAUSE, max=_LONGEST_PAUSE) + wait_random(0, _FIRST_PAUSE),
        )  # fmt: skip
        with translate(RetryError, gone):
            async for attempt in attempts:
                with attempt:
                    raw = await create(model=model, extra_body=body, extra_headers=self._authorization())
                    answer, version = read(raw), raw.headers.get(POLICY_HEADER)
                    if version is None and self._synced:
                        raise _Unusable("it was started again and has not got the trainer's weights yet")
        self._synced = version is not None
        if self._lost_since is not None:
            say(f"{where} answers again after {time.monotonic() - self._lost_since:.0f} s")
            self._lost_since = None
        return answer, None if version is None else int(version)


def _owner(url: str) -> OwnListener | None:
    """Return the listener of the run's server, if the launcher of a run started this process."""
    folder = os.environ.get("GRPO_RUN_DIR")
    return server_listener(Path(folder) / SERVER_STATE, url) if folder else None


def _may_recover(error: BaseException) -> bool:
    """Return whether the same request may be answered later."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code >= 500 or error.status_code in _AGAIN
    return isinstance(error, openai.APIConnectionError | _Unusable)


def _said(error: BaseException | None) -> str:
    """Return an error in a line."""
    if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")


def _sampled(raw: Any, count: int) -> list[tuple[list[int], list[float], str]]:
    """Return token ids, log-probs and the reason of the end of each completion; _Unusable unless all are there."""
    kinds = (AttributeError, LookupError, TypeError, ValueError)
    with translate(kinds, lambda error: _Unusable(f"its answer has no token ids with log-probs ({error})")):
        choices = raw.parse().choices
        found = [(list(one.token_ids), list(one.logprobs.token_logprobs), str(one.finish_reason)) for one in choices]
        if len(found) != count:
            raise ValueError(f"{len(found)} completions where {count} were asked for")
        for ids, logprobs, _ in found:
            if not ids or len(ids) != len(logprobs) or any(math.isnan(one) for one in logprobs):
                raise ValueError("not one log-prob for each token")
        return [(ids, [max(one, LOWEST) for one in logprobs], reason) for ids, logprobs, reason in found]
