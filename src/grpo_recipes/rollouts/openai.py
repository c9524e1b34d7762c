"""Ask a vLLM or SGLang server for completions: token ids in, token ids with their log-probs out.

    client = CompletionClient("http://localhost:8000", model="Qwen/Qwen2.5-0.5B-Instruct", batch_size=8)
    client.ready()
    completions = client.sample([[1, 2, 3]], n=4, sampling=SamplingParameters(max_tokens=64, seed=0))

Nothing is decoded and tokenised again, which would lose the token that ends a completion and could split words in
another way than the model did. A completion that the server could not give is a ``Failed``, never an empty text. Each
completion is a request of its own with a seed of its own, so that it depends neither on the order of the requests nor
on how many completions are asked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import openai

from grpo_recipes.errors import config_error, translate
from grpo_recipes.numbers import is_logprob
from grpo_recipes.process.async_sessions import bounded_client
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.recipe.registry import SERVER_BACKENDS
from grpo_recipes.rollouts.turns import derived
from grpo_recipes.secrets import masked

VLLM, SGLANG = SERVER_BACKENDS
Message = dict[str, str]
Prompt = Sequence[int] | Sequence[Message]  # token ids, or a chat
_MODELS_SECONDS = 10.0  # for the list of the served models
_LOOK_SECONDS = 0.5  # between two looks at a server that starts
_ENDS = ("stop", "length", "tool_calls")  # other endings ("abort", "error") are no completion


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How completions are drawn. All of them are sent: a server would take others from the model's own files."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # of a call; each completion gets one that is derived from it
    stop: tuple[str, ...] = ()  # texts that end a completion


@dataclass(frozen=True)
class Sample:
    """A completion."""

    ids: list[int]  # with the token that ended it
    logprobs: list[float]  # of each token
    text: str
    finish_reason: str  # stop or length


@dataclass(frozen=True)
class Failed:
    """A completion that the server did not give."""

    reason: str
    lost: bool = False  # whether the server did not answer at all, or not in time


class NoCompletion(RuntimeError):
    """The server gave no reply, or broke it off."""


class _Job(NamedTuple):
    """One completion to be drawn."""

    index: int  # of its prompt
    number: int  # among those of the prompt
    prompt: Prompt
    seed: int | None


@dataclass
class CompletionClient:
    """A client of one server. ``ready`` finds out which model it serves; ``sample`` does so where nobody did before."""

    base_url: str  # with or without /v1
    backend: str = VLLM
    model: str | None = None  # the model that must be served; None takes the one that is, which ``ready`` enters here
    token: str | None = None  # that the server wants as its API key
    batch_size: int = 32  # completions in flight at most
    timeout: float = 600.0  # seconds for a request
    attempts: int = 4  # for each completion, with pauses of 0.5 s to 8 s that double; a 4xx but 408, 409, 429 has one
    say: Callable[[str], None] = print  # gets a line where the server has to be waited for
    aliases: Sequence[str] = ()  # other names of the model
    owner: OwnListener | None = None  # of our own server: nothing is sent to another process on its port
    _ready: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.root = self.base_url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.root)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise config_error("base_url", f"'{self.base_url}' is no address", "write http://HOST:PORT")
        if self.backend not in SERVER_BACKENDS:
            raise config_error(
                "backend", f"there is no backend '{self.backend}'", f"write {' or '.join(SERVER_BACKENDS)}"
            )
        for name in ("batch_size", "attempts", "timeout"):
            if getattr(self, name) <= 0:
                raise config_error(name, f"is {getattr(self, name)}", "write 1 or more")

    def ready(self, wait: float = 60.0) -> str:
        """Wait until the server answers, ``wait`` seconds at most; check that it serves the model, and return its name.

        A model may be named as the server calls it, or by the folder or hub id that it was loaded from. A ConfigError
        says that the server does not answer, refuses the token, or serves another model.
        """
        served = self._served(wait)
        known = {self.model, *self.aliases}
        fits = (one for one, origin in served.items() if None in known or known & {one, origin} or self._is_at(origin))
        name = next(fits, None)
        if name is None:
            names = " and ".join(f"'{one}'" for one in served) or "no model"
            fix = f"start it with {self.model}, or name the model that is served"
            raise config_error("base_url", f"{self.root} serves {names}, not '{self.model}'", fix)
        self.model, self._ready = name, True
        return name

    def _is_at(self, origin: str | None) -> bool:
        """Return whether the model that must be served is this folder, under another name."""
        return bool(
            origin and self.model and os.path.isdir(origin) and os.path.realpath(origin) == os.path.realpath(self.model)
        )

    def _served(self, wait: float) -> dict[str, str | None]:
        """Return the names of the models that the server serves, each with what it was loaded from."""
        deadline, told = time.monotonic() + wait, False
        while True:
            try:
                return asyncio.run(self._models())
            except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
                fix = "export OPENAI_API_KEY with the key that the server was started with"
                raise config_error("base_url", f"{self.root} refuses us ({_said(error)})", fix) from error
            except openai.APIError as error:
                if time.monotonic() >= deadline:
                    what = f"no server answers at {self.root}/v1/models within {wait:g} s ({_said(error)})"
                    raise config_error("base_url", what, "start the server, or write its address") from error
            if not told:
                self.say(f"waiting for the server at {self.root}")
                told = True
            time.sleep(_LOOK_SECONDS)

    async def _models(self) -> dict[str, str | None]:
        async with self._async(min(self.timeout, _MODELS_SECONDS), retries=0) as client:
            return {model.id: getattr(model, "root", None) for model in (await client.models.list()).data}

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParameters, seeds: Sequence[int] | None = None
    ) -> list[list[Sample | Failed]]:
        """Draw ``n`` completions of each prompt, ``(prompts, n)``; see ``completed``."""
        found = dict(self.completed(prompts, n, sampling, seeds))
        return [found[index] for index in range(len(prompts))]

    def completed(
        self, prompts: Sequence[Prompt], n: int, sampling: SamplingParameters, seeds: Sequence[int] | None = None
    ) -> Iterator[tuple[int, list[Sample | Failed]]]:
        """Yield the place of each prompt with its ``n`` completions, as soon as it has all of them.

        ``seeds`` has one for each prompt; without it they follow from ``sampling.seed`` and the prompt's place.
        SGLang heeds seeds where it was started with ``--enable-deterministic-inference``.
        """
        if self.backend == SGLANG and any(_is_chat(prompt) for prompt in prompts):
            raise ValueError("SGLang answers a chat without token ids: render it, and send token ids")
        if not self._ready:
            self.ready()
        if seeds is None and sampling.seed is not None:
            seeds = [derived(sampling.seed, index) for index in range(len(prompts))]
        jobs = (
            _Job(index, number, prompt, None if seeds is None else derived(seeds[index], number) >> 1)  # 31 bits
            for index, prompt in enumerate(prompts)
            for number in range(n)
        )
        drawn: dict[int, dict[int, Sample | Failed]] = {}
        with asyncio.Runner() as runner:
            done: asyncio.Queue[tuple[_Job, Sample | Failed] | Exception] = asyncio.Queue()
            client = self._async(self.timeout, self.attempts - 1)
            workers = [self._work(client, jobs, sampling, done) for _ in range(min(self.batch_size, len(prompts) * n))]
            tasks = [runner.get_loop().create_task(worker) for worker in workers]
            try:
                for _ in range(len(prompts) * n):
                    news = runner.run(done.get())
                    if isinstance(news, Exception):
                        raise news
                    (index, number, *_), outcome = news
                    drawn.setdefault(index, {})[number] = outcome
                    if len(drawn[index]) == n:
                        found = drawn.pop(index)
                        yield index, [found[number] for number in range(n)]
            finally:
                for task in tasks:
                    task.cancel()
                runner.run(client.close())

    async def _work(
        self, client: openai.AsyncOpenAI, jobs: Iterator[_Job], sampling: SamplingParameters, done: asyncio.Queue[Any]
    ) -> None:
        """Draw one completion after the other of those that no other worker has taken."""
        try:
            for job in jobs:
                done.put_nowait((job, await self._draw(client, job, sampling)))
        except Exception as error:  # whatever it is: who reads the queue would wait for this completion
            done.put_nowait(error)

    async def _draw(self, client: openai.AsyncOpenAI, job: _Job, sampling: SamplingParameters) -> Sample | Failed:
        path, body, read = self._request(job, sampling)
        kinds = (AttributeError, LookupError, TypeError, ValueError)
        try:
            with translate(kinds, lambda error: NoCompletion(f"an answer without token ids and log-probs ({error!r})")):
                return _whole(*read(await client.post(path, cast_to=object, body=body)))
        except NoCompletion as error:
            return Failed(str(error))
        except openai.APIError as error:
            lost = isinstance(error, openai.APIConnectionError | openai.InternalServerError)
            return Failed(_said(error), lost)

    def _request(
        self, job: _Job, sampling: SamplingParameters
    ) -> tuple[str, dict[str, Any], Callable[[Any], tuple[Any, Any, Any, Any]]]:
        """Return the address of a request, its JSON, and what reads its answer."""
        if self.backend == SGLANG:
            # Its /v1/completions takes token ids and gives none back, and does not pass seeds on.
            body = {"input_ids": list(job.prompt), "sampling_params": _native_fields(sampling, job.seed)}
            return f"{self.root}/generate", {**body, "return_logprob": True}, _of_sglang
        body = {"model": self.model, "return_token_ids": True, **_fields(sampling, job.seed, self.backend)}
        if _is_chat(job.prompt):
            return "/chat/completions", {**body, "messages": list(job.prompt), "logprobs": True}, _of_chat
        return "/completions", {**body, "prompt": list(job.prompt), "logprobs": 0}, _of_completions

    def stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingParameters,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[str]:
        """Yield the reply to a chat in pieces, as the server renders and samples it; raise NoCompletion without one.

        ``template_kwargs`` are handed to the chat template. Closing the iterator ends the reply at the server too.
        """
        if not self._ready:
            self.ready()
        body = _fields(sampling, sampling.seed, self.backend)
        if template_kwargs:
            body["chat_template_kwargs"] = dict(template_kwargs)
        ended, deadline = None, time.monotonic() + self.timeout
        failures = (openai.APIError, httpx2.HTTPError)  # openai raises those of httpx2 as they are inside a stream
        with translate(failures, lambda error: NoCompletion(_said(error))), asyncio.Runner() as runner:
            client = runner.run(self._opened(self.timeout, self.attempts - 1))
            try:
                chunks = runner.run(
                    client.chat.completions.create(
                        model=self.model, messages=list(messages), stream=True, extra_body=body
                    )
                )
                while (chunk := runner.run(_next(chunks))) is not None:
                    if time.monotonic() > deadline:
                        raise NoCompletion(f"the reply is not whole within {self.timeout:g} s")
                    for choice in chunk.choices:
                        ended = choice.finish_reason or ended
                        if choice.delta.content:
                            yield choice.delta.content
            finally:
                runner.run(client.close())  # the server stops too
        if ended not in _ENDS:
            raise NoCompletion(f"the reply ended by '{ended}'" if ended else "the server broke the reply off")

    async def _opened(self, timeout: float, retries: int) -> openai.AsyncOpenAI:
        return self._async(timeout, retries)

    def _async(self, timeout: float, retries: int) -> openai.AsyncOpenAI:
        http = bounded_client(timeout, self.owner)
        return openai.AsyncOpenAI(http_client=http, **self._settings(timeout, retries))

    def _settings(self, timeout: float, retries: int) -> dict[str, Any]:
        key = self.token or "none"
        return {"base_url": f"{self.root}/v1", "api_key": key, "timeout": timeout, "max_retries": retries}


async def _next(chunks: Any) -> Any:
    return await anext(chunks, None)


def _is_chat(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _fields(sampling: SamplingParameters, seed: int | None, backend: str) -> dict[str, Any]:
    """Return the fields of the OpenAI-compatible requests, which SGLang takes for chats alone."""
    off = 0 if backend == VLLM else -1
    return {
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "top_k": sampling.top_k or off, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty,
        **({"stop": list(sampling.stop)} if sampling.stop else {}), **({} if seed is None else {"seed": seed}),
    }  # fmt: skip


def _native_fields(sampling: SamplingParameters, seed: int | None) -> dict[str, Any]:
    """Return the ``sampling_params`` of SGLang's own /generate, two of which have other names."""
    fields = _fields(sampling, seed, SGLANG)
    names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    return {names.get(name, name): value for name, value in fields.items()}


def _of_completions(answer: Any) -> tuple[Any, Any, Any, Any]:
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["text"], choice["finish_reason"]


def _of_chat(answer: Any) -> tuple[Any, Any, Any, Any]:
    (choice,) = answer["choices"]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, choice["message"]["content"] or "", choice["finish_reason"]


def _of_sglang(answer: Any) -> tuple[Any, Any, Any, Any]:
    # Not ``output_ids``: versions of SGLang begin them with tokens of the prompt.
    meta = answer["meta_info"]
    scored = meta["output_token_logprobs"]
    reason = meta["finish_reason"]
    return [one[1] for one in scored], [one[0] for one in scored], answer["text"], reason and reason["type"]


def _whole(ids: Any, logprobs: Any, text: Any, reason: Any) -> Sample:
    """Return a completion; NoCompletion where it was broken off, ValueError unless each token has its log-prob."""
    if reason not in _ENDS:
        raise NoCompletion(f"the completion ended by '{reason}'")
    ids, logprobs = [int(one) for one in ids], [float(one) for one in logprobs]
    if not ids or len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs")
    if wrong := [logprob for logprob in logprobs if not is_logprob(logprob)]:
        raise ValueError(f"{wrong[0]:g} is not the log-prob of a sampled token")
    return Sample(ids, logprobs, str(text), str(reason))


def _said(error: Exception) -> str:
    """Return an error in a line, without secrets."""
    if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None:
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return masked(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": "))
