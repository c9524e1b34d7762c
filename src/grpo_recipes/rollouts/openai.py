"""Ask a vLLM or SGLang server for completions of token ids or chats: token ids with log-probs, and their text.

    client = CompletionClient("http://localhost:8000", model="Qwen/Qwen2.5-0.5B-Instruct", batch_size=8)
    client.ready()
    completions = client.sample([[1, 2, 3]], n=4, sampling=SamplingParameters(max_tokens=64, seed=0))

Completions are never decoded and tokenized again: that would lose their end token and could split words differently. A
missing completion is a ``Failed``, never an empty text. Each completion is a separate request with its seed. So
with a seed, it depends neither on the order of the requests nor on their number. SGLang uses seeds only if it was
started with ``--enable-deterministic-inference``. With SGLang, ``sample`` raises ValueError for a chat.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import openai

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.numbers import is_logprob
from grpo_recipes.process.async_sessions import bounded_client
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.recipe.registry import SERVER_BACKENDS
from grpo_recipes.rollouts.turns import derive_seed
from grpo_recipes.secrets import mask_secrets

VLLM, SGLANG = SERVER_BACKENDS
Message = dict[str, str]
Prompt = Sequence[int] | Sequence[Message]  # token ids, or a chat
_MODELS_SECONDS = 10.0  # limit for the list of served models
_POLL_SECONDS = 0.5  # pause between two requests to a server that starts
_FINISH_REASONS = ("stop", "length", "tool_calls")  # with others ("abort", "error") the completion is incomplete


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """Sampling parameters. All of them are sent, since a server would read defaults from the model's files."""

    max_tokens: int | None
    """None leaves the limit to the server."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 allows all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """Seed of a call. The seed of each completion derives from it."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""


@dataclass(frozen=True)
class Sample:
    """A completion."""

    ids: list[int]
    """Token ids, including the end token."""
    logprobs: list[float]
    """Log-prob of each token."""
    text: str
    finish_reason: str
    """``stop`` or ``length``."""


@dataclass(frozen=True)
class PlayedSample(Sample):
    """A completion of several turns. ``text`` shows all of them."""

    messages: list[Message]
    """The turns of the model and the messages between them."""
    tokens: int
    """Number of ``ids`` that the model sampled."""
    columns: dict[str, Any] | None
    """Columns of its own for rewards, as JSON."""


@dataclass(frozen=True)
class Failed:
    """A missing completion. ``lost`` is also True after an error 5xx."""

    reason: str
    lost: bool = False
    """Whether the server did not answer in time."""


class NoCompletion(RuntimeError):
    """The server gave no reply, or an incomplete one."""


class _Job(NamedTuple):
    """A completion to sample."""

    prompt_index: int
    number: int
    """Number among the completions of the prompt."""
    prompt: Prompt
    seed: int | None


@dataclass
class CompletionClient:
    """Request completions from a vLLM or SGLang server.

    ``ready`` checks the served model. ``sample`` calls it on its first use.
    """

    base_url: str
    """Address, with or without /v1."""
    backend: str = VLLM
    model: str | None = None
    """The model that must be served. With None, ``ready`` sets the served model."""
    token: str | None = None
    """The server's API key."""
    batch_size: int = 32
    """Largest number of requests at the same time."""
    timeout: float = 600.0
    """Seconds for a request."""
    attempts: int = 4
    """Attempts for each completion, with pauses of 0.5 s to 8 s that double. Errors 4xx except 408, 409 and 429 are
    final."""
    say: Callable[[str], None] = print
    """Receives a line if the client has to wait for the server."""
    aliases: Sequence[str] = ()
    """Other names of the model."""
    owner: OwnListener | None = None
    """The process of the run's server. Nothing is sent to another process on its port."""
    _ready: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Set ``root``; raise ConfigError for a wrong address or backend, or a number of 0 or less."""
        self.root = self.base_url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.root)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise config_error("base_url", f"'{self.base_url}' is not an address", "write http://HOST:PORT")
        if self.backend not in SERVER_BACKENDS:
            raise config_error(
                "backend",
                f"expected one of {', '.join(SERVER_BACKENDS)}, got '{self.backend}'",
                f"write {' or '.join(SERVER_BACKENDS)}",
            )
        for name in ("batch_size", "attempts", "timeout"):
            if getattr(self, name) <= 0:
                raise config_error(name, f"is {getattr(self, name)}", "write 1 or more")

    def ready(self, wait: float = 60.0) -> str:
        """Wait at most ``wait`` seconds for the server; store and return its name of the required model.

        The model may be given by its name at the server, or by the loaded folder or hub id. Raise ConfigError if the
        server does not answer, rejects the token, or serves another model.
        """
        served = self._request_served_models(wait)
        accepted = {self.model, *self.aliases}
        for name, origin in served.items():
            is_same_folder = (
                origin
                and self.model
                and os.path.isdir(origin)
                and os.path.realpath(origin) == os.path.realpath(self.model)
            )
            if None in accepted or accepted & {name, origin} or is_same_folder:
                self.model, self._ready = name, True
                return name
        names = " and ".join(f"'{served_name}'" for served_name in served) or "no model"
        fix = f"start it with {self.model}, or name the model that is served"
        raise config_error("base_url", f"{self.root} serves {names}, not '{self.model}'", fix)

    def _request_served_models(self, wait: float) -> dict[str, str | None]:
        """Return the names of the served models, each with the path or id that it was loaded from, or None.

        Wait at most ``wait`` seconds for an answer. Raise ConfigError without one, or if the token is rejected.
        """
        errors: list[openai.APIError] = []

        def request_models() -> tuple[dict[str, str | None]] | None:
            """Return the served models in a tuple, which is true even if there are none, or None without an answer."""
            try:
                return (asyncio.run(self._request_models_once()),)
            except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
                fix = "export OPENAI_API_KEY with the key that the server was started with"
                raise config_error("base_url", f"{self.root} refuses us ({_describe(error)})", fix) from error
            except openai.APIError as error:
                if not errors and wait > 0:
                    self.say(f"waiting for the server at {self.root}")
                errors.append(error)
                return None

        if models := wait_until(request_models, wait, _POLL_SECONDS):
            return models[0]
        problem = f"no server answers at {self.root}/v1/models within {wait:g} s ({_describe(errors[-1])})"
        raise config_error("base_url", problem, "start the server, or write its address") from errors[-1]

    async def _request_models_once(self) -> dict[str, str | None]:
        """Request the served models once, without retries; return name -> loaded path or id, or None."""
        async with self._make_client(min(self.timeout, _MODELS_SECONDS), retries=0) as client:
            return {model.id: getattr(model, "root", None) for model in (await client.models.list()).data}

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParameters, seeds: Sequence[int] | None = None
    ) -> list[list[Sample | Failed]]:
        """Return ``n`` completions of each prompt, (prompts, n); a missing one is a ``Failed``.

        For seeds see ``iterate_completed``.
        """
        groups = dict(self.iterate_completed(prompts, n, sampling, seeds))
        return [groups[index] for index in range(len(prompts))]

    def iterate_completed(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParameters, seeds: Sequence[int] | None = None
    ) -> Iterator[tuple[int, list[Sample | Failed]]]:
        """Yield the index of each prompt with its ``n`` completions, as soon as all of them have arrived.

        A missing completion is a ``Failed``. ``seeds`` contains a seed for each prompt. By default they derive from
        ``sampling.seed`` and the prompt's index. SGLang only uses seeds if it was started with
        ``--enable-deterministic-inference``. Raise ValueError for a chat and SGLang.
        """
        if self.backend == SGLANG and any(_is_chat(prompt) for prompt in prompts):
            raise ValueError("SGLang answers a chat without token ids: render it, and send token ids")
        if not self._ready:
            self.ready()
        if seeds is None and sampling.seed is not None:
            seeds = [derive_seed(sampling.seed, index) for index in range(len(prompts))]
        jobs = (
            _Job(index, number, prompt, None if seeds is None else derive_seed(seeds[index], number) >> 1)  # 31 bits
            for index, prompt in enumerate(prompts)
            for number in range(n)
        )
        outcomes: dict[int, dict[int, Sample | Failed]] = {}
        with asyncio.Runner() as runner:
            done: asyncio.Queue[tuple[_Job, Sample | Failed] | Exception] = asyncio.Queue()
            client = self._make_client(self.timeout, self.attempts - 1)
            workers = [
                self._sample_jobs(client, jobs, sampling, done) for _ in range(min(self.batch_size, len(prompts) * n))
            ]
            tasks = [runner.get_loop().create_task(worker) for worker in workers]
            try:
                for _ in range(len(prompts) * n):
                    result = runner.run(done.get())
                    if isinstance(result, Exception):
                        raise result
                    (index, number, *_), outcome = result
                    outcomes.setdefault(index, {})[number] = outcome
                    if len(outcomes[index]) == n:
                        group = outcomes.pop(index)
                        yield index, [group[number] for number in range(n)]
            finally:
                for task in tasks:
                    task.cancel()
                runner.run(client.close())

    async def _sample_jobs(
        self, client: openai.AsyncOpenAI, jobs: Iterator[_Job], sampling: SamplingParameters, done: asyncio.Queue[Any]
    ) -> None:
        """Sample jobs until none is left, and put each outcome, or an unexpected error, into the queue ``done``.

        Several workers share the iterator ``jobs``.
        """
        try:
            for job in jobs:
                done.put_nowait((job, await self._sample_job(client, job, sampling)))
        except Exception as error:  # the reader of the queue would wait forever for this completion
            done.put_nowait(error)

    async def _sample_job(self, client: openai.AsyncOpenAI, job: _Job, sampling: SamplingParameters) -> Sample | Failed:
        """Request a completion. Return Failed instead of raising if there is none or the answer is unusable."""
        path, body, parse = self._build_request(job, sampling)
        kinds = (AttributeError, LookupError, TypeError, ValueError)
        try:
            with translate_errors(
                kinds, lambda error: NoCompletion(f"an answer without token ids and log-probs ({error!r})")
            ):
                return _validate_sample(*parse(await client.post(path, cast_to=object, body=body)))
        except NoCompletion as error:
            return Failed(str(error))
        except openai.APIError as error:
            lost = isinstance(error, openai.APIConnectionError | openai.InternalServerError)
            return Failed(_describe(error), lost)

    def _build_request(
        self, job: _Job, sampling: SamplingParameters
    ) -> tuple[str, dict[str, Any], Callable[[Any], tuple[Any, Any, Any, Any]]]:
        """Return the path of the request for a job, its JSON body, and a function that parses its answer.

        The function returns token ids, log-probs, text and finish reason, not validated.
        """
        if self.backend == SGLANG:
            # SGLang's /v1/completions accepts token ids but returns none, and it ignores seeds.
            names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}  # of fields that /generate renames
            fields = {
                names.get(name, name): value for name, value in _format_parameters(sampling, job.seed, SGLANG).items()
            }
            native = {"input_ids": list(job.prompt), "sampling_params": fields, "return_logprob": True}
            return f"{self.root}/generate", native, _parse_sglang
        body = {"model": self.model, "return_token_ids": True, **_format_parameters(sampling, job.seed, self.backend)}
        if _is_chat(job.prompt):
            return "/chat/completions", {**body, "messages": list(job.prompt), "logprobs": True}, _parse_chat
        return "/completions", {**body, "prompt": list(job.prompt), "logprobs": 0}, _parse_completions

    def stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingParameters,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[str, None, None]:
        """Yield the reply to a chat in pieces while the server samples it. Raise NoCompletion if it is incomplete.

        ``template_kwargs`` are arguments of the chat template. Closing the iterator stops the server too.
        """
        if not self._ready:
            self.ready()
        body = _format_parameters(sampling, sampling.seed, self.backend)
        if template_kwargs:
            body["chat_template_kwargs"] = dict(template_kwargs)
        arguments: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        finish_reason, deadline = None, time.monotonic() + self.timeout
        failures = (openai.APIError, httpx2.HTTPError)  # inside a stream, openai does not convert errors of httpx2
        with translate_errors(failures, lambda error: NoCompletion(_describe(error))), asyncio.Runner() as runner:
            client = self._make_client(self.timeout, self.attempts - 1)
            try:
                chunks = runner.run(client.chat.completions.create(**arguments, stream=True, extra_body=body))
                while (chunk := runner.run(_get_next_chunk(chunks))) is not None:
                    if time.monotonic() > deadline:
                        raise NoCompletion(f"the reply is incomplete after {self.timeout:g} s")
                    for choice in chunk.choices:
                        finish_reason = choice.finish_reason or finish_reason
                        if choice.delta.content:
                            yield choice.delta.content
            finally:
                runner.run(client.close())  # the server stops too
        if finish_reason not in _FINISH_REASONS:
            problem = f"the reply ended by '{finish_reason}'" if finish_reason else "the server broke the reply off"
            raise NoCompletion(problem)

    def _make_client(self, timeout: float, retries: int) -> openai.AsyncOpenAI:
        """Return an OpenAI client of the server with these seconds per request and number of retries."""
        return openai.AsyncOpenAI(
            http_client=bounded_client(timeout, self.owner),
            base_url=f"{self.root}/v1",
            api_key=self.token or "none",
            timeout=timeout,
            max_retries=retries,
        )


async def _get_next_chunk(chunks: Any) -> Any:
    """Return the next chunk of a stream, or None at its end."""
    return await anext(chunks, None)


def _is_chat(prompt: Prompt) -> bool:
    """Return whether a prompt is a list of messages, not token ids."""
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _format_parameters(sampling: SamplingParameters, seed: int | None, backend: str) -> dict[str, Any]:
    """Return sampling parameters as JSON fields of an OpenAI-compatible request. SGLang has them only for chats.

    A ``seed`` of None and an empty ``stop`` are left out. ``top_k`` 0 becomes the server's number for all tokens.
    """
    all_tokens = 0 if backend == VLLM else -1
    return {
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "top_k": sampling.top_k or all_tokens, "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        **({"stop": list(sampling.stop)} if sampling.stop else {}), **({} if seed is None else {"seed": seed}),
    }  # fmt: skip


def _parse_completions(answer: Any) -> tuple[Any, Any, Any, Any]:
    """Return token ids, log-probs, text and finish reason in an answer of /v1/completions."""
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"], choice["finish_reason"]


def _parse_chat(answer: Any) -> tuple[Any, Any, Any, Any]:
    """Return token ids, log-probs, text and finish reason in an answer of /v1/chat/completions."""
    (choice,) = answer["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, choice["message"]["content"] or "", choice["finish_reason"]


def _parse_sglang(answer: Any) -> tuple[Any, Any, Any, Any]:
    """Return token ids, log-probs, text and finish reason in an answer of SGLang's /generate."""
    # Not ``output_ids``: in some versions of SGLang they start with tokens of the prompt.
    meta = answer["meta_info"]
    tokens = meta["output_token_logprobs"]
    reason = meta["finish_reason"]
    return [token[1] for token in tokens], [token[0] for token in tokens], answer["text"], reason and reason["type"]


def _validate_sample(ids: Any, logprobs: Any, text: Any, reason: Any) -> Sample:
    """Validate the parts of an answer, and return them as a Sample.

    Raise NoCompletion if the completion is incomplete, ValueError if a token has no valid log-prob.
    """
    if reason not in _FINISH_REASONS:
        raise NoCompletion(f"the completion ended by '{reason}'")
    ids, logprobs = [int(token) for token in ids], [float(logprob) for logprob in logprobs]
    if not ids or len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs")
    if wrong := [logprob for logprob in logprobs if not is_logprob(logprob)]:
        raise ValueError(f"{wrong[0]:g} is not the log-prob of a sampled token")
    return Sample(ids, logprobs, str(text), str(reason))


def _describe(error: Exception) -> str:
    """Return an error's type and message, or the cause of a failed connection, as one line without secrets."""
    if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None:
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return mask_secrets(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": "))
