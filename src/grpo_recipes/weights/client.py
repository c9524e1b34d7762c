"""The base class of all weight sync methods: TRL's client with the run's token, time limits, seeds and the guard.

Each method is a subclass in its own module. If the launcher can restart the server by itself, every request survives
a restart: the new server first receives the last weights, then the request is repeated. If the run is asked to stop,
the client waits for no request.

    client = FileClient(args=args, run_dir=run_dir, seed=args.seed, stop=StopRequest(run_dir), base_url=url)
    client.update_named_params(metadata, named_params)
    client.generate(prompt_ids, n=8)
"""

import contextlib
import copy
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from trl.generation.vllm_client import VLLMClient

from grpo_recipes.errors import translate
from grpo_recipes.process.answers import MAX_BYTES
from grpo_recipes.process.sessions import secure_session
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.registry import SYNC_METHODS
from grpo_recipes.runs.rundir import SERVER_STATE
from grpo_recipes.runs.server_state import read_server_state, read_server_url, server_listener
from grpo_recipes.runs.stop_request import POLL_SECONDS, StopRequest
from grpo_recipes.server.middleware import ACTIVITY_PATH, POLICY_HEADER, SYNCED_PATH
from grpo_recipes.server.wire import BYTES_PER_TOKEN, COMPLETIONS_PATH, completions_of, unpacked
from grpo_recipes.trainer_protocol import Trainer
from grpo_recipes.weights.connection import ServerConnection
from grpo_recipes.weights.guard import WeightsDiffer, checksum_error, differing, sent_fingerprint
from grpo_recipes.weights.sampling import SamplingSeeds
from grpo_recipes.weights.transport import (
    QUICK_SECONDS,
    Answer,
    BadAnswer,
    GenerationAborted,
    ServerAdapter,
    ServerError,
    ServerLost,
    check_completions,
    run_in_thread,
)  # fmt: skip

_ABORT_SECONDS = 10.0  # time the server has to release the generations under way
_SIGNAL_SECONDS = 3.0  # a signal to every process of a job may reach the server before this process
_QUEUE_SECONDS, _STATE_SECONDS = 0.005, 0.2  # pauses between two checks of the engine's queue and the server's state
_NOTICE_SECONDS = 90.0  # time until the launcher notices that its server is gone and we see that through an NFS cache
_MARGIN_SECONDS = 60.0  # added to a server start: the launcher first ends the old server and writes its state
Metadata = list[tuple[str, str, list[int]]]  # name, dtype and shape of each tensor, in order
NamedTensors = Iterator[tuple[str, torch.Tensor]]
Rows = tuple[list[list[int]], list[list[list[float]]] | None]  # ids of completions, and log-probs, (B, T, 1)
_TRL_SAMPLING = {  # TRL's defaults for sampling parameters that the caller does not set
    name: parameter.default
    for name, parameter in inspect.signature(VLLMClient.generate).parameters.items()
    if parameter.default is not None and name not in ("self", "prompts", "n")
}


class BridgeClient(SamplingSeeds, ServerConnection):
    """Send weights to the run's server and sample from it.

    A subclass implements ``_send``, or ``sync_model`` if it does not stream parameters. If it can serve a restarted
    server, it also implements ``_resend``, which repeats the last transfer. Sampling seeds of prompts
    derive from ``seed``, the run's seed. ``None`` leaves sampling to the server's own seed.
    """

    bridge = ""  # the name in recipes (weight_sync) and messages
    cache_path = SYNCED_PATH  # endpoint that empties the server's prefix cache
    streams = True  # whether a sync streams every parameter; otherwise it calls ``sync_model`` with the trained model

    def __init__(self, *, args: GRPOConfig, run_dir: Path, seed: int | None, stop: StopRequest, **kwargs: Any) -> None:
        self._args, self._run_seed, self.stop = args, seed, stop
        self._run_dir, self._state_file = run_dir, run_dir / SERVER_STATE
        self.vocabulary: int | None = None  # number of token ids of the trained model
        self.checksum_error: str | None = None  # why the last sync failed the checksum
        self.policy_version: int | None = None  # optimizer step of the weights of the next sync
        self.has_other_clients = False  # whether environments also send requests to the server
        self._served_version: int | None = None  # ``policy_version`` of the last completed sync
        self._held: dict[str, Any] = {}  # the server's first report of its parameters
        self._streamed: dict[str, torch.Tensor] = {}  # fingerprint of each parameter sent last
        self._stopping = False
        self._sync = 0  # number of the last sync; with 0, a restarted server needs no weights
        self._epoch = self._server_state()[0]  # number of the server that was last waited for
        super().__init__(**kwargs)

    # --- settings from the trainer ---------------------------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Read the trainer's other properties that the client needs. Called once, on rank 0."""
        embeddings: Any = trainer.model.get_input_embeddings()
        self.vocabulary = embeddings.num_embeddings

    def sync_model(self, model: nn.Module) -> None:
        """Make the server serve this model's weights, if ``streams`` is false."""
        raise NotImplementedError

    def set_policy_version(self, step: int) -> None:
        """Set the optimizer step that the server reports for the weights of the next sync."""
        self.policy_version = step

    def expect_other_clients(self, expected: bool) -> None:
        """Tell the client whether other programs sample from the server, so that it must not pause the engine."""
        self.has_other_clients = expected

    def copy_for(self, generation_name: str) -> Self:
        """Return a client that samples one generation, also after a stop request: the checkpoint needs it."""
        client = copy.copy(self)
        client.generation_name, client.stop = generation_name, StopRequest(self._run_dir)
        return client

    def give_up(self) -> None:
        """Let the generation under way end as if the run stopped."""
        self._stopping = True

    @contextlib.contextmanager
    def answering_with(self, generate: Callable[..., dict[str, Any]]) -> Iterator[None]:
        """Let ``generate`` answer the calls of ``self.generate`` inside."""
        self.__dict__["generate"] = generate
        try:
            yield
        finally:
            del self.__dict__["generate"]

    # --- connection and requests -----------------------------------------------------------------------------------

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """Set token and limits of the session, then wait for this run's own server. Reject another server."""
        token = Path(os.environ["GRPO_TOKEN_FILE"]).read_text().strip()
        self.base_url = read_server_url(self._state_file) or self.base_url
        self._adapter = ServerAdapter(
            self._args.server_request_timeout,
            owner=server_listener(self._state_file, self.base_url),
            connections=self._args.max_concurrent_requests,
        )
        secure_session(self.session, self._adapter, token)
        lost = ServerError(f"no vLLM server answers at {self.base_url} after {total_timeout:.0f} s")
        served = self._wait_for(self.served_names, total_timeout, lost, retry_interval)
        if (run_name := os.environ["GRPO_RUN"]) not in served:
            raise ServerError(f"the server at {self.base_url} serves {served}, not this run's {run_name}")

    def _wait_for(
        self, condition: Callable[[], Answer | None], seconds: float, error: ServerError, pause: float
    ) -> Answer:
        """Return the first value that is neither None nor False; raise ``error`` after ``seconds``.

        Raise GenerationAborted if the run stops.
        """

        def holds() -> tuple[Answer] | None:
            value = condition()
            if value is not None and value is not False:
                return (value,)
            if self.is_stopping():
                raise GenerationAborted
            return None

        if (result := wait_until(holds, seconds, pause)) is None:
            raise error
        return result[0]

    def get_server_info(self) -> dict[str, Any]:
        """Return the configuration that TRL needs, from a worker of our server. Another vLLM does not have it."""
        foreign = "is it one that grpo launch started? Another vLLM of this name cannot take the trainer's weights"
        with (
            translate(BadAnswer, lambda error: ServerError(f"{error}; {foreign}")),
            self._parsing("/collective_rpc"),
        ):
            return dict(self._through_restarts(partial(self.call_workers, "grpo_config"))[0])

    # --- restarts of the server ------------------------------------------------------------------------------------

    def _through_restarts(self, request: Callable[[], Answer]) -> Answer:
        """Make a request. If the launcher restarts the server, send the last weights and repeat the request."""
        if ("cpu" if self._args.use_cpu else "cuda") not in SYNC_METHODS[self.bridge].reconnects:
            return self._retried(request)
        while True:
            try:
                if self._server_changed():
                    self._retried(self._prepare_next_server)
                answer = self._retried(request)
            except ServerLost as lost:
                self._wait_for(partial(self._loss_noticed, lost), _NOTICE_SECONDS, lost, _STATE_SECONDS)
            else:
                if not self._server_changed():  # otherwise a server without the weights may have answered
                    return answer

    def _server_state(self) -> tuple[int, str]:
        """Return the number of the run's current server, and its state as the launcher wrote it."""
        return read_server_state(self._state_file)

    def _server_changed(self) -> bool:
        """Return whether another server than the last known one is up, or will be soon."""
        return self._server_state() != (self._epoch, "ready")

    def _loss_noticed(self, lost: ServerLost) -> bool:
        """Return whether the launcher has noticed the loss; raise ``lost`` if no launcher restarts servers."""
        if not self._state_file.exists():
            raise lost
        return self._server_changed()

    def _server_ready(self) -> bool:
        """Return whether the next server is up, and note its number; raise ServerError if there will be none."""
        epoch, state = self._server_state()
        if state == "gone":
            raise ServerError("the vLLM server is gone and is not started again")
        self._epoch = epoch if state == "ready" else self._epoch
        return state == "ready"

    def _prepare_next_server(self) -> None:
        """Wait for the next server, and bring it to the state of the last sync."""
        self._wait_for_server(self._server_ready)
        if self._sync:
            self._resend()
            self._verify()
            if self.checksum_error:
                raise WeightsDiffer(f"{self.checksum_error}; this was the load into a restarted server")
        if self._served_version is not None:
            self._empty_prefix_cache(self._served_version)

    def reconnect(self) -> None:
        """If the server was restarted, wait for it and send it the weights of the last sync.

        For a trainer that waits for completions which other programs request: it does not see a restart by itself.
        """
        with self._ignoring_failures_while_stopping():
            self._through_restarts(lambda: None)

    def _wait_for_server(self, ready: Callable[[], bool]) -> None:
        """Wait until the launcher has started the next server, at most for the time that a start may need."""
        limit = self._args.vllm_server_timeout + _MARGIN_SECONDS
        late = ServerError(f"the vLLM server was not ready again after {limit:g} s")
        self._wait_for(ready, limit, late, _STATE_SECONDS)
        self.check_server(total_timeout=QUICK_SECONDS)

    # --- stop requests ---------------------------------------------------------------------------------------------

    def is_stopping(self, within: float = 0.0) -> bool:
        """Return whether the run stops now, or within so many seconds. Then no answer is needed any more."""
        deadline = time.monotonic() + within
        while self.stop.may_cut and not self._stopping:
            self._stopping = self.stop.cuts()
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        return self._stopping

    @contextlib.contextmanager
    def _ignoring_failures_while_stopping(self) -> Iterator[None]:
        """Ignore an error inside if the run stops: the server may have been stopped first."""
        try:
            yield
        except Exception:
            if not self.is_stopping(_SIGNAL_SECONDS):
                raise

    # --- weights ---------------------------------------------------------------------------------------------------

    def update_named_params(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Send every tensor, materialized one at a time, then verify the server's parameters."""
        with self._ignoring_failures_while_stopping():
            if self._args.weight_guard and not self._held:
                self._held = self._through_restarts(self._reports)[0]
            self._send(metadata, self._fingerprinted(named_params) if self._args.weight_guard else named_params)
            self._through_restarts(self._verify)
        for _ in named_params:  # only if the run stops: the other ranks still gather the remaining tensors
            pass

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Transfer the parameters to the server."""
        raise NotImplementedError

    def _resend(self) -> None:
        """Repeat the last transfer for a restarted server."""
        raise NotImplementedError

    def _verify(self) -> None:
        """With the guard, compare the server's parameters with the parameters sent last."""
        if self._args.weight_guard:
            reports = self._reports()
            wrong = differing(self._sent_values(), reports)
            self.checksum_error = checksum_error(self.bridge, wrong, self._sync, reports)

    def _sent_values(self) -> dict[str, int]:
        """Return the fingerprint of each parameter that was sent last."""
        return {name: int(value) for name, value in self._streamed.items()}

    def _reports(self) -> list[dict[str, Any]]:
        """Return each worker's report of its parameters, the result of ``grpo_weights``."""
        reports = self.call_workers("grpo_weights")
        with self._parsing("/collective_rpc"):
            for report in reports:
                parameters, _, _ = report["parameters"], dict(report["packed"]), int(report["sync"])
                if not all(type(value) is int and hasattr(torch, dtype) for value, dtype, *_ in parameters.values()):
                    raise ValueError("a parameter without fingerprint and dtype")
                if parameters.keys() != reports[0]["parameters"].keys():
                    raise ValueError("workers that hold different parameters")
        return reports

    def _fingerprinted(self, named_params: NamedTensors) -> NamedTensors:
        """Yield the tensors and compute their fingerprints: on CPU in a thread, on a GPU in the same stream."""
        self._streamed = {}
        for name, tensor in named_params:
            compute = partial(sent_fingerprint, name, tensor, self._held)
            background = run_in_thread(compute) if tensor.is_cpu else None
            yield name, tensor
            self._streamed[name] = background.result() if background else compute()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, also through a restart: blocks of the old weights must not serve the new ones.

        This ends a sync: from now on the server answers with the ``policy_version`` of its weights.
        """
        with self._ignoring_failures_while_stopping():
            self._through_restarts(partial(self._empty_prefix_cache, self.policy_version))
            self._served_version = self.policy_version

    def _empty_prefix_cache(self, version: int | None) -> None:
        """Empty the cache as TRL does. If another client's request uses it, let the engine recompute that request."""
        paths = (self.cache_path, f"{self.cache_path}?reset_running_requests=true")
        headers = {} if version is None else {POLICY_HEADER: str(version)}
        if not any(self._post(f"{self.base_url}{path}", headers=headers).get("success") is True for path in paths):
            raise self._bad_answer(paths[1], "did not empty its prefix cache, which belongs to the previous weights")

    # --- completions -----------------------------------------------------------------------------------------------

    def generate(  # type: ignore[override]  # TRL passes the sampling parameters by name
        self, prompts: list[Any], features: Any = None, n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Generate as TRL does, with one request per prompt. With a run seed, each request has its own seed."""
        if features is not None:
            sample = partial(self._with_images, prompts, features, n, **kwargs)
            return self._unless_stopping(sample, prompts, n)
        return self.generate_seeded(prompts, self._seeds(len(prompts)), n=n, **kwargs)

    def _seeds(self, prompts: int) -> list[int] | None:
        """Return a sampling seed for each of so many prompts; None in a run without seeds."""
        if self._run_seed is None:
            return None
        numbers = range(prompts) if self.seed_numbers is None else self.seed_numbers
        return [self.seed_of(number) for number in numbers]

    def generate_seeded(
        self, prompts: Sequence[Any], seeds: Sequence[int] | None, n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Generate as TRL does, with a request and a seed per prompt. vLLM gives completion k the seed + k.

        With ``seeds=None`` the server uses its own seed. If other clients use the server too, the engine is not
        paused: its queue would never contain only our completions.
        """
        extra = kwargs.pop("generation_kwargs", None) or {}
        ordered = self._run_seed is not None and not self.has_other_clients

        def sample(index: int) -> Rows:
            seed = {} if seeds is None else {"seed": seeds[index]}
            priority = {"priority": index} if ordered else {}
            return self._completions(prompts[index], n, {**kwargs, **seed, **priority, **extra})

        def sample_all() -> dict[str, Any]:
            """Send requests, a limited number at a time, and join the answers in the order of the prompts."""
            at_once, answers = self._args.max_concurrent_requests, dict[int, Rows]()
            for start in range(0, len(prompts), at_once if ordered else len(prompts)):
                part = range(start, min(start + at_once, len(prompts)) if ordered else len(prompts))
                scope: contextlib.AbstractContextManager[list[Future[None]]] = contextlib.nullcontext([])
                if ordered:
                    scope = self._engine_paused(len(part) * n)
                with scope as futures:
                    futures += self._in_window(sample, part, answers)
                for future in futures:
                    future.result()
            joined = [answers[index] for index in range(len(prompts))]
            logprobs = None if joined[0][1] is None else [row for _, rows in joined for row in rows or []]
            ids = [row for rows, _ in joined for row in rows]
            return {"prompt_ids": list(prompts), "completion_ids": ids, "logprobs": logprobs}

        return self._unless_stopping(sample_all, prompts, n)

    def _in_window(
        self, sample: Callable[[int], Rows], indices: Sequence[int], answers: dict[int, Rows]
    ) -> list[Future[None]]:
        """Sample each index, ``max_concurrent_requests`` at a time, and store the answers; return the workers.

        After a failure, or if the run stops, no further request is sent.
        """
        remaining, workers = iter(indices), list[Future[None]]()

        def work() -> None:
            for index in remaining:  # shared by all workers
                if self._stopping or any(worker.done() for worker in workers):  # a worker that ends early has failed
                    return
                answers[index] = sample(index)

        workers += [run_in_thread(work) for _ in range(min(self._args.max_concurrent_requests, len(indices)))]
        return workers

    def _completions(self, prompt: Sequence[int], n: int, sampling: dict[str, Any]) -> Rows:
        """Return ids and log-probs of a prompt's completions; raise BadAnswer unless they match the request."""
        if (regex := sampling.pop("structured_outputs_regex", None)) is not None:
            sampling.setdefault("structured_outputs", {"regex": regex})
        request = {"model": self.model, "prompt": prompt, "n": n, **_TRL_SAMPLING, **sampling}
        self._adapter.allow(MAX_BYTES + BYTES_PER_TOKEN * n * request["max_tokens"])
        answer = self.session.post(f"{self.base_url}{COMPLETIONS_PATH}", json=request)
        if answer.status_code != 200:
            raise self._rejected(COMPLETIONS_PATH, answer)
        with self._parsing(COMPLETIONS_PATH):
            completions = unpacked(answer.content)
            check_completions(completions, n, request["max_tokens"], self.vocabulary, request["logprobs"])
            return completions.rows()

    def _with_images(self, prompts: Sequence[Any], features: Any, n: int, **kwargs: Any) -> dict[str, Any]:
        """Request completions of prompts with images as TRL does."""
        sampling = {**_TRL_SAMPLING, **kwargs, **(kwargs.get("generation_kwargs") or {})}
        with self._parsing("/inference/v1/generate"):
            answer: dict[str, Any] = VLLMClient.generate(self, list(prompts), features, n, **kwargs)
            logprobs = answer["logprobs"] and [[token[0] for token in row] for row in answer["logprobs"]]
            completions = completions_of(answer["completion_ids"], logprobs)
            count = len(prompts) * n
            check_completions(completions, count, sampling["max_tokens"], self.vocabulary, sampling["logprobs"])
        return answer

    @contextlib.contextmanager
    def _engine_paused(self, completions: int) -> Iterator[list[Future[None]]]:
        """Pause the engine until all ``completions`` requested inside have arrived, or a request has failed.

        The arrival times decide which completions share a forward pass, and that decides the last bits of their
        log-probs. Pausing also empties the engine's prefix cache.
        """
        futures: list[Future[None]] = []
        self._wait_for_queue(0, futures)  # until the engine has finished or dropped everything else
        self.pause("keep")
        with contextlib.ExitStack() as at_exit:
            at_exit.callback(self._retried, self.resume)
            yield futures
            self._wait_for_queue(completions, futures)

    def _wait_for_queue(self, completions: int, futures: Sequence[Future[Any]]) -> None:
        """Wait until the engine has so many unfinished completions. A paused engine counts them too."""

        def queued() -> bool:
            with self._parsing(ACTIVITY_PATH):
                unfinished = int(self._get(f"{self.base_url}{ACTIVITY_PATH}")["completions"])
            return unfinished == completions or any(future.done() for future in futures)

        limit = self._args.server_request_timeout
        lost = ServerLost(f"the vLLM server did not take up {completions} completions within {limit:g} s")
        self._wait_for(queued, limit, lost, _QUEUE_SECONDS)

    def _unless_stopping(
        self, sample: Callable[[], dict[str, Any]], prompts: Sequence[Any], n: int
    ) -> dict[str, list[Any]]:
        """Return the server's completions. If the run stops, return placeholders, since other ranks wait for them."""
        if not self.is_stopping():
            answer = run_in_thread(partial(self._through_restarts, sample))
            while not wait([answer], POLL_SECONDS).done and not self.is_stopping():
                pass
            if not self._stopping and (answer.exception() is None or not self.is_stopping(_SIGNAL_SECONDS)):
                return dict(answer.result())
            self._abort(answer)
        rows = len(prompts) * n
        return {"prompt_ids": list(prompts), "completion_ids": [[0]] * rows, "logprobs": [[[0.0]]] * rows}

    def _abort(self, generation: Future[Any]) -> None:
        """End the generation under way; do not wait longer than 10 seconds for a server that hangs."""
        deadline = time.monotonic() + _ABORT_SECONDS
        while True:  # repeat: the engine does not abort a request that has not reached it yet
            with contextlib.suppress(Exception):  # a dead server has no generation to abort
                self.pause("abort", timeout=QUICK_SECONDS)
                self.resume(timeout=QUICK_SECONDS)
            if wait([generation], 0.05).done or time.monotonic() > deadline:
                return
