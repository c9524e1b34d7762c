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

from grpo_recipes.errors import translate_errors
from grpo_recipes.process.answers import MAX_BYTES
from grpo_recipes.process.sessions import secure_session
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.registry import SYNC_METHODS
from grpo_recipes.runs.rundir import SERVER_STATE
from grpo_recipes.runs.server_state import read_server_state, read_server_url, server_listener
from grpo_recipes.runs.stop_request import POLL_SECONDS, StopRequest
from grpo_recipes.server.middleware import ACTIVITY_PATH, POLICY_HEADER, SYNCED_PATH
from grpo_recipes.server.wire import (
    BYTES_PER_TOKEN,
    COMPLETIONS_PATH,
    REPLICA_HEADER,
    Completions,
    flatten_completions,
    join_completions,
    unpack_completions,
)  # fmt: skip
from grpo_recipes.trainer_protocol import Trainer
from grpo_recipes.weights.connection import ServerConnection
from grpo_recipes.weights.guard import (
    WeightsDiffer,
    compute_sent_fingerprint,
    describe_checksum_error,
    find_differences,
)
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
_TRL_SAMPLING = {  # TRL's defaults for sampling parameters that the caller does not set
    name: parameter.default
    for name, parameter in inspect.signature(VLLMClient.generate).parameters.items()
    if parameter.default is not None and name not in ("self", "prompts", "n")
}


class BridgeClient(SamplingSeeds, ServerConnection):
    """Send weights to the run's server and sample from it; the base class of all weight sync methods.

    A subclass implements ``_send``, or ``sync_model`` if it does not stream parameters. If its method works with a
    restarted server, it also implements ``_resend``, which repeats the last transfer. Sampling seeds of prompts derive
    from ``seed``, the run's seed. With ``None``, the server uses its own seed.
    """

    bridge = ""  # the name in recipes (weight_sync) and messages
    cache_path = SYNCED_PATH  # endpoint that empties the server's prefix cache
    streams = True  # whether a sync streams every parameter; otherwise it calls ``sync_model`` with the trained model

    def __init__(self, *, args: GRPOConfig, run_dir: Path, seed: int | None, stop: StopRequest, **kwargs: Any) -> None:
        self._args, self._run_seed, self.stop = args, seed, stop
        self._replicas = args.vllm_data_parallel_size or 1
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
        self._epoch = read_server_state(self._state_file)[0]  # number of the server that was last waited for
        super().__init__(**kwargs)

    # --- settings from the trainer ---------------------------------------------------------------------------------

    def attach(self, trainer: Trainer) -> None:
        """Read the vocabulary size from the trainer's model. Called once, on rank 0; subclasses read more."""
        embeddings: Any = trainer.model.get_input_embeddings()
        self.vocabulary = embeddings.num_embeddings

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files, or shares its memory. A method with another channel overrides it."""

    def sync_model(self, model: nn.Module) -> None:
        """Make the server use this model's weights. Implemented by methods with ``streams = False``."""
        raise NotImplementedError

    def set_policy_version(self, step: int) -> None:
        """Set the optimizer step that the server reports for the weights of the next sync."""
        self.policy_version = step

    def expect_other_clients(self, expected: bool) -> None:
        """Set whether other programs sample from the server too. If they do, the client does not pause the engine."""
        self.has_other_clients = expected

    def copy_for_generation(self, generation_name: str, stop: StopRequest | None = None) -> Self:
        """Return a copy of the client for a generation. With ``stop`` None, a stop request does not end it."""
        client = copy.copy(self)
        client.generation_name, client.stop = generation_name, stop or StopRequest(self._run_dir)
        return client

    def abort_generation(self) -> None:
        """Abort the client's running generation, as if the run stopped: the caller then gets placeholders."""
        self._stopping = True

    # --- connection and requests -----------------------------------------------------------------------------------

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """Read the token file, set token and limits of the session, and wait for the run's own server.

        Wait at most ``total_timeout`` seconds; with 0, try once. Raise ServerError if no server answers in time, or at
        once if it serves another run's model. Raise GenerationAborted if the run stops.
        """
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
        """Call ``condition`` until its result is neither None nor False, and return the result.

        Pause ``pause`` seconds between calls. Raise ``error`` after ``seconds``, and GenerationAborted if the run
        stops.
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
        """Return the configuration that TRL reads, equal in all workers. Raise ServerError for a foreign vLLM."""
        foreign = "is it one that grpo launch started? Another vLLM of this name cannot take the trainer's weights"
        with translate_errors(BadAnswer, lambda error: ServerError(f"{error}; {foreign}")):
            return self._repeat_through_restarts(self.request_config)

    # --- restarts of the server ------------------------------------------------------------------------------------

    def _repeat_through_restarts(self, request: Callable[[], Answer]) -> Answer:
        """Make a request and return its answer; repeat it after a restart of the server.

        Before the repetition, send the last weights to the new server. Methods that don't support restarts only retry.
        """
        method = SYNC_METHODS.get(self.bridge)  # None: an external server, which the launcher does not restart
        if method is None or ("cpu" if self._args.use_cpu else "cuda") not in method.reconnects:
            return self._retry(request)
        while True:
            try:
                if self._has_server_changed():
                    self._retry(self._prepare_next_server)
                answer = self._retry(request)
            except ServerLost as lost:
                self._wait_for(partial(self._is_loss_detected, lost), _NOTICE_SECONDS, lost, _STATE_SECONDS)
            else:
                if not self._has_server_changed():  # otherwise a server without the weights may have answered
                    return answer

    def _has_server_changed(self) -> bool:
        """Return whether the server is not the last known one, or not ready, according to the launcher's state file."""
        return read_server_state(self._state_file) != (self._epoch, "ready")

    def _is_loss_detected(self, lost: ServerLost) -> bool:
        """Return whether the launcher has detected the server's loss; raise ``lost`` if no launcher watches it."""
        if not self._state_file.exists():
            raise lost
        return self._has_server_changed()

    def _adopt_ready_server(self) -> bool:
        """Return whether the launcher reports a ready server, and store its number as the last known one.

        Raise ServerError if the launcher reports that the server is gone and no other one is started.
        """
        epoch, state = read_server_state(self._state_file)
        if state == "gone":
            raise ServerError("the vLLM server is gone and is not started again")
        self._epoch = epoch if state == "ready" else self._epoch
        return state == "ready"

    def _prepare_next_server(self) -> None:
        """Wait for the next server, resend the last weights, empty its cache. Raise WeightsDiffer if they differ."""
        self._wait_for_server(self._adopt_ready_server)
        if self._sync:
            self._resend()
            self._verify()
            if self.checksum_error:
                raise WeightsDiffer(f"{self.checksum_error}; this was the load into a restarted server")
        if self._served_version is not None:
            self._empty_prefix_cache(self._served_version)

    def reconnect(self) -> None:
        """If the server was restarted, wait for it and send it the weights of the last sync.

        A trainer calls it while other programs request completions: without own requests it would not notice a restart.
        """
        with self._ignoring_failures_while_stopping():
            self._repeat_through_restarts(lambda: None)

    def _wait_for_server(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready`` is true, within the limit of a server start, and then until the server answers.

        The answer must come within QUICK_SECONDS. Raise ServerError after one of the limits.
        """
        limit = self._args.vllm_server_timeout + _MARGIN_SECONDS
        late = ServerError(f"the vLLM server was not ready again after {limit:g} s")
        self._wait_for(ready, limit, late, _STATE_SECONDS)
        self.check_server(total_timeout=QUICK_SECONDS)

    # --- stop requests ---------------------------------------------------------------------------------------------

    def is_stopping(self, within: float = 0.0) -> bool:
        """Return whether a stop request ends the current work; wait at most ``within`` seconds for a request.

        Outside of ``StopRequest.cutting_short``, no request ends it: don't wait. Once True, the result stays True.
        """
        deadline = time.monotonic() + within
        while self.stop.may_cut and not self._stopping:
            self._stopping = self.stop.cuts()
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        return self._stopping

    @contextlib.contextmanager
    def _ignoring_failures_while_stopping(self) -> Iterator[None]:
        """Suppress an exception in the block if the run stops at most 3 seconds later: the server may stop first."""
        try:
            yield
        except Exception:
            if not self.is_stopping(_SIGNAL_SECONDS):
                raise

    # --- weights ---------------------------------------------------------------------------------------------------

    def update_named_params(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Send every tensor, materialized one at a time; with the guard, verify them and set ``checksum_error``."""
        with self._ignoring_failures_while_stopping():
            if self._args.weight_guard and not self._held:
                self._held = self._repeat_through_restarts(self._request_reports)[0][0]
            self._send(metadata, self._compute_fingerprints(named_params) if self._args.weight_guard else named_params)
            self._repeat_through_restarts(self._verify)
        for _ in named_params:  # only if the run stops: the other ranks still gather the remaining tensors
            pass

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Transfer the parameters to the server."""
        raise NotImplementedError

    def _resend(self) -> None:
        """Repeat the last transfer for a restarted server."""
        raise NotImplementedError

    def _verify(self) -> None:
        """With the guard, compare every replica's parameters with those sent last, and set ``self.checksum_error``."""
        if self._args.weight_guard:
            sent, replicas = self._sent_values(), self._request_reports()
            wrong = [find_differences(sent, reports) for reports in replicas]
            self.checksum_error = describe_checksum_error(self.bridge, wrong, self._sync, replicas)

    def _sent_values(self) -> dict[str, int]:
        """Return the fingerprint of each parameter that was sent last."""
        return {name: int(value) for name, value in self._streamed.items()}

    def _compute_fingerprints(self, named_params: NamedTensors) -> NamedTensors:
        """Yield the tensors, and store their fingerprints: computed on CPU in a thread, on a GPU in its stream.

        On a GPU, a tensor may still be gathered in the current stream, and after the ``yield`` vLLM has selected
        another stream. So its fingerprint is requested before.
        """
        self._streamed = {}
        for name, tensor in named_params:
            compute = partial(compute_sent_fingerprint, name, tensor, self._held)
            if tensor.is_cpu:
                background = run_in_thread(compute)
                yield name, tensor
                self._streamed[name] = background.result()
            else:
                self._streamed[name] = compute()
                yield name, tensor

    def reset_prefix_cache(self) -> None:
        """Empty the server's prefix cache after a sync, so that blocks of the old weights are not reused.

        This ends a sync: from now on the server answers with the ``policy_version`` of its weights. Repeat it after a
        restart.
        """
        with self._ignoring_failures_while_stopping():
            self._repeat_through_restarts(partial(self._empty_prefix_cache, self.policy_version))
            self._served_version = self.policy_version

    def _empty_prefix_cache(self, version: int | None) -> None:
        """Let the server empty its prefix cache, and send it the weights' policy version unless that is None.

        If running requests prevent that, let the server restart these requests. Raise BadAnswer if that fails too.
        """
        paths = (self.cache_path, f"{self.cache_path}?reset_running_requests=true")
        headers = {} if version is None else {POLICY_HEADER: str(version)}
        if not any(self._post(f"{self.base_url}{path}", headers=headers).get("success") is True for path in paths):
            raise self._make_bad_answer(
                paths[1], "did not empty its prefix cache, which belongs to the previous weights"
            )

    # --- completions -----------------------------------------------------------------------------------------------

    def generate(  # type: ignore[override]  # TRL passes the sampling parameters by name
        self, prompts: list[Any], features: Any = None, n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Generate as TRL does, with one request per prompt. With a run seed, each request has its own seed.

        If the run stops, return placeholders of one token.
        """
        if features is not None:
            sample = partial(self._generate_with_images, prompts, features, n, **kwargs)
            return self._generate_unless_stopping(sample, prompts, n)
        return self.generate_seeded(prompts, self._derive_seeds(len(prompts)), n=n, **kwargs)

    def _derive_seeds(self, prompts: int) -> list[int] | None:
        """Return a sampling seed for each of ``prompts`` prompts; None in a run without seeds."""
        if self._run_seed is None:
            return None
        numbers = range(prompts) if self.seed_numbers is None else self.seed_numbers
        return [self.derive_prompt_seed(number) for number in numbers]

    def generate_seeded(
        self, prompts: Sequence[Any], seeds: Sequence[int] | None, n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Generate as TRL does, with a request and a seed per prompt. vLLM gives completion k the seed + k.

        With ``seeds=None`` the server uses its own seed. In a run with a seed, the engine is paused until it has
        all requests. If other clients use the server too, it is not paused, because they fill its queue. If the run
        stops, return placeholders of one token.
        """
        extra = kwargs.pop("generation_kwargs", None) or {}
        ordered = self._run_seed is not None and not self.has_other_clients

        def sample(index: int) -> Completions:
            """Request the completions of the prompt with this index."""
            seed = {} if seeds is None else {"seed": seeds[index]}
            priority = {"priority": index} if ordered else {}
            # The completions of a forward pass decide the last bits of log-probs, so they must not depend on the load.
            replica = index % self._replicas if ordered and self._replicas > 1 else None
            return self._request_completions(prompts[index], n, {**kwargs, **seed, **priority, **extra}, replica)

        def sample_all() -> dict[str, Any]:
            """Send requests, a limited number at a time, and join the answers in the order of the prompts."""
            at_once, answers = self._args.max_concurrent_requests, dict[int, Completions]()
            for start in range(0, len(prompts), at_once if ordered else len(prompts)):
                part = range(start, min(start + at_once, len(prompts)) if ordered else len(prompts))
                scope: contextlib.AbstractContextManager[list[Future[None]]] = contextlib.nullcontext([])
                if ordered:
                    scope = self._engine_paused(len(part) * n)
                with scope as futures:
                    futures += self._start_workers(sample, part, answers)
                for future in futures:
                    future.result()
            ids, logprobs = join_completions([answers[index] for index in range(len(prompts))]).rows()
            return {"prompt_ids": list(prompts), "completion_ids": ids, "logprobs": logprobs}

        return self._generate_unless_stopping(sample_all, prompts, n)

    def _start_workers(
        self, sample: Callable[[int], Completions], indices: Sequence[int], answers: dict[int, Completions]
    ) -> list[Future[None]]:
        """Start threads that call ``sample`` for each index and store the results in ``answers``; return their futures.

        At most ``max_concurrent_requests`` threads run. After a failure, or if the run stops, no further request is
        sent.
        """
        remaining, workers = iter(indices), list[Future[None]]()

        def work() -> None:
            for index in remaining:  # shared by all workers
                if self._stopping or any(worker.done() for worker in workers):  # a worker that ends early has failed
                    return
                answers[index] = sample(index)

        workers += [run_in_thread(work) for _ in range(min(self._args.max_concurrent_requests, len(indices)))]
        return workers

    def _request_completions(
        self, prompt: Sequence[int], n: int, sampling: dict[str, Any], replica: int | None = None
    ) -> Completions:
        """Request ``n`` completions of a prompt. Raise BadAnswer for another number.

        With ``replica=None``, vLLM chooses the replica of each completion.
        """
        if (regex := sampling.pop("structured_outputs_regex", None)) is not None:
            sampling.setdefault("structured_outputs", {"regex": regex})
        request = {"model": self.model, "prompt": prompt, "n": n, **_TRL_SAMPLING, **sampling}
        self._adapter.raise_size_limit(MAX_BYTES + BYTES_PER_TOKEN * n * request["max_tokens"])
        headers = {} if replica is None else {REPLICA_HEADER: str(replica)}
        answer = self.session.post(f"{self.base_url}{COMPLETIONS_PATH}", json=request, headers=headers)
        if answer.status_code != 200:
            raise self._make_rejected_error(COMPLETIONS_PATH, answer)
        with self._translate_parse_errors(COMPLETIONS_PATH):
            completions = unpack_completions(answer.content)
            check_completions(completions, n, request["max_tokens"], self.vocabulary, request["logprobs"])
            return completions

    def _generate_with_images(self, prompts: Sequence[Any], features: Any, n: int, **kwargs: Any) -> dict[str, Any]:
        """Request completions of prompts with images as TRL does. Raise BadAnswer for an unusable answer."""
        sampling = {**_TRL_SAMPLING, **kwargs, **(kwargs.get("generation_kwargs") or {})}
        with self._translate_parse_errors("/inference/v1/generate"):
            answer: dict[str, Any] = VLLMClient.generate(self, list(prompts), features, n, **kwargs)
            logprobs = answer["logprobs"] and [[token[0] for token in row] for row in answer["logprobs"]]
            completions = flatten_completions(answer["completion_ids"], logprobs)
            count = len(prompts) * n
            check_completions(completions, count, sampling["max_tokens"], self.vocabulary, sampling["logprobs"])
        return answer

    @contextlib.contextmanager
    def _engine_paused(self, completions: int) -> Iterator[list[Future[None]]]:
        """Pause the engine until all ``completions`` requested in the block have arrived, or a request has failed.

        The block adds its requests to the yielded list. The arrival times decide which completions share a forward
        pass, and that decides the last bits of their log-probs. Pausing also empties the engine's prefix cache.
        """
        futures: list[Future[None]] = []
        self._wait_for_queue(0, futures)  # until the engine has finished or dropped everything else
        self.pause("keep")
        with contextlib.ExitStack() as at_exit:
            at_exit.callback(self._retry, self.resume)
            yield futures
            self._wait_for_queue(completions, futures)

    def _wait_for_queue(self, completions: int, futures: Sequence[Future[Any]]) -> None:
        """Wait until the engine has ``completions`` unfinished completions, or one of ``futures`` is done.

        Completions that wait in a paused engine count too. Raise ServerLost after ``server_request_timeout``.
        """

        def queued() -> bool:
            with self._translate_parse_errors(ACTIVITY_PATH):
                unfinished = int(self._parse_answer(url, self.session.get(url))["completions"])
            return unfinished == completions or any(future.done() for future in futures)

        url, limit = f"{self.base_url}{ACTIVITY_PATH}", self._args.server_request_timeout
        lost = ServerLost(f"the vLLM server did not take up {completions} completions within {limit:g} s")
        self._wait_for(queued, limit, lost, _QUEUE_SECONDS)

    def _generate_unless_stopping(
        self, sample: Callable[[], dict[str, Any]], prompts: Sequence[Any], n: int
    ) -> dict[str, list[Any]]:
        """Return the result of ``sample``. If the run stops, abort its requests and return placeholders of one token.

        Other ranks wait for the result in both cases. ``sample`` is repeated after a restart of the server.
        """
        if not self.is_stopping():
            answer = run_in_thread(partial(self._repeat_through_restarts, sample))
            while not wait([answer], POLL_SECONDS).done and not self.is_stopping():
                pass
            if not self._stopping and (answer.exception() is None or not self.is_stopping(_SIGNAL_SECONDS)):
                return dict(answer.result())
            self._abort(answer)
        rows = len(prompts) * n
        return {"prompt_ids": list(prompts), "completion_ids": [[0]] * rows, "logprobs": [[[0.0]]] * rows}

    def _abort(self, generation: Future[Any]) -> None:
        """Tell the server to abort its running requests, until ``generation`` has ended or 10 seconds have passed."""
        deadline = time.monotonic() + _ABORT_SECONDS
        while True:  # repeat: the engine does not abort a request that has not reached it yet
            with contextlib.suppress(Exception):  # a dead server has no generation to abort
                self.pause("abort", timeout=QUICK_SECONDS)
                self.resume(timeout=QUICK_SECONDS)
            if wait([generation], 0.05).done or time.monotonic() > deadline:
                return
