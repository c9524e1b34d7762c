"""TRL's client of the vLLM server, with the run's token, time limits, per-prompt seeds, and the guard's checksum.

Where the launcher can restart the server alone, every request survives that: the new server is given the last weights
and asked again.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from trl.generation.vllm_client import VLLMClient

from grpo_recipes.recipe.registry import RECONNECTING
from grpo_recipes.server.fingerprint import fingerprint
from grpo_recipes.server.middleware import ACTIVITY_PATH
from grpo_recipes.weights.guard import WeightsDiffer, checksum_verdict, differing, held_name
from grpo_recipes.weights.transport import GenerationAborted, ServerAdapter, ServerError, ServerLost, ServerRestarts

_QUICK_SECONDS = 5.0  # for an answer that a server in order gives at once
_ABORT_SECONDS = 10.0
_LOOK_SECONDS = 0.005
REQUESTS = 256  # at a time: each holds a thread and a connection until it is answered
Metadata = list[tuple[str, str, list[int]]]
NamedTensors = Iterator[tuple[str, torch.Tensor]]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ClientSettings:
    """What a bridge needs of the recipe and the run; times in seconds."""

    served_name: str  # the server's ``--served-model-name``; another server on the port is refused
    request_timeout: float  # longest wait for one answer
    guard: bool  # whether to compare checksums after every sync
    seed: int | None  # of the run, for per-prompt sampling seeds, or None for the server's own
    sync_dir: Path  # where the file bridge writes
    state_file: Path  # where the launcher writes which server is up (``runs.rundir.server_state_file``)
    start_timeout: float  # longest time a server may take to be ready


class BridgeClient(VLLMClient):
    """A bridge is a subclass that opens the channel and sends tensors through it."""

    bridge = ""  # its name in recipes and messages

    def __init__(self, *, settings: ClientSettings, **kwargs: Any):
        self.settings = settings
        self.verdict: str | None = None  # why the last sync failed the checksum
        self.syncs = 0  # weight loads so far
        self.sync_seconds = 0.0  # spent in them
        self.generation = ""  # what the next sampling seeds are derived from, set by the trainer
        self._dtypes: dict[str, str] = {}
        self._packed: dict[str, list[str]] = {}
        self._streamed: dict[str, torch.Tensor] = {}
        self._aborted = threading.Event()
        self._idle = threading.Event()  # no generation is in flight
        self._idle.set()
        self._sent = False  # whether a server that is restarted can be given weights
        self._restarts: ServerRestarts | None = None
        super().__init__(**kwargs)
        if self.bridge in RECONNECTING:
            self._restarts = ServerRestarts(settings.state_file, settings.start_timeout, self._aborted)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """Put token and time limit into the session, then wait for this run's own server; refuse another."""
        token = Path(os.environ["GRPO_TOKEN_FILE"]).read_text().strip()
        self.session.headers["Authorization"] = f"Bearer {token}"
        self.session.trust_env = False  # an http_proxy must not see, or swallow, requests to our own server
        self.session.mount("http://", ServerAdapter(self.settings.request_timeout, connections=REQUESTS))
        deadline = time.monotonic() + total_timeout
        while (served := self._served_names()) is None:
            if time.monotonic() > deadline:
                raise ServerError(f"no vLLM server answers at {self.base_url} after {total_timeout:.0f} s")
            time.sleep(retry_interval)
        if self.settings.served_name not in served:
            raise ServerError(
                f"the server at {self.base_url} serves {served}, not this run's {self.settings.served_name}"
            )

    def _served_names(self) -> list[str] | None:
        try:
            answer = self.session.get(f"{self.base_url}/v1/models", timeout=_QUICK_SECONDS)
        except ServerLost:
            return None
        if answer.status_code == 401:
            return ["(a server that refuses this run's token)"]
        return [model["id"] for model in answer.json()["data"]] if answer.ok else None

    def get_server_info(self) -> dict[str, Any]:
        """Return the configuration that TRL asks for, from the worker itself."""
        return dict(self._through_restarts(partial(self.call_workers, "grpo_config"))[0])

    # --- restarts of the server ----------------------------------------------------------------------------------

    def _through_restarts(self, ask: Callable[[], Answer]) -> Answer:
        """Ask the server; where the launcher starts another meanwhile, ask that one, which was given the weights first.

        ServerError when the server is lost for good, GenerationAborted while waiting for another.
        """
        if self._restarts is None:
            return ask()
        while True:
            try:
                if self._restarts.changed:
                    self._greet_next_server(self._restarts)
                answer = ask()
            except ServerLost as lost:
                self._restarts.wait_until_noticed(lost)
            else:
                if not self._restarts.changed:  # else it may come from a server without the weights
                    return answer

    def _greet_next_server(self, restarts: ServerRestarts) -> None:
        restarts.wait_until_ready()
        self.check_server(total_timeout=_QUICK_SECONDS)
        if self._sent:
            self._resend()
            self._verify()
            if self.verdict:
                raise WeightsDiffer(f"{self.verdict}, which was a load into a restarted server")

    def _resend(self) -> None:
        """Give the server the weights that were sent last."""
        raise NotImplementedError

    # --- weights -------------------------------------------------------------------------------------------------

    def update_named_params(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Send every tensor, materialized one at a time, then compare what the server holds with what was sent.

        ``metadata`` is (name, dtype, shape) of each tensor, in order.
        """
        start = time.perf_counter()
        if self.settings.guard:
            self._dtypes = self._dtypes or self._through_restarts(self._report_dtypes)
            self._streamed = {}
            named_params = self._fingerprinted(named_params, self._streamed)
        self._send(metadata, named_params)
        self._through_restarts(self._verify)
        self.syncs += 1
        self.sync_seconds += time.perf_counter() - start

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        raise NotImplementedError

    def _verify(self) -> None:
        """With the guard, compare what the server holds with what was sent."""
        if self.settings.guard:
            sent = {name: int(value) for name, value in self._streamed.items()}
            self.verdict = checksum_verdict(self.bridge, differing(sent, self._reports()))

    def _fingerprinted(self, named_params: NamedTensors, streamed: dict[str, torch.Tensor]) -> NamedTensors:
        for name, tensor in named_params:
            place = held_name(name, self._dtypes, self._packed)
            dtype = getattr(torch, self._dtypes[place]) if place else tensor.dtype
            streamed[name] = fingerprint(tensor.to(dtype))
            yield name, tensor

    def _report_dtypes(self) -> dict[str, str]:
        report = self._reports()[0]
        self._packed = report["packed"]
        return {name: entry[1] for name, entry in report["parameters"].items()}

    def _reports(self) -> list[dict[str, Any]]:
        return self.call_workers("grpo_weights")

    def call_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker of the server; return a result per worker."""
        answer = self._post(f"{self.base_url}/collective_rpc", json={"method": method, "kwargs": kwargs})
        return list(answer["results"])

    def reset_prefix_cache(self) -> None:
        """Reset it as TRL does, also through a restart of the server."""
        self._through_restarts(super().reset_prefix_cache)

    # --- sampling ------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[Any], features: Any = None, n: int = 1, **kwargs: Any) -> dict[str, list[Any]]:
        """Generate as TRL does; with a run seed, one request and one seed per prompt.

        GenerationAborted when ``abort`` was called, now or earlier; ServerError when no server answers.
        """
        if self.settings.seed is None or features is not None:
            return self._sampled(partial(super().generate, prompts, features=features, n=n, **kwargs))
        seeds = [self._sampling_seed(index) for index in range(len(prompts))]
        return self.generate_seeded(prompts, seeds, n=n, **kwargs)

    def generate_seeded(
        self, prompts: Sequence[Any], seeds: Sequence[int], n: int = 1, **kwargs: Any
    ) -> dict[str, Any]:
        """Generate as TRL does, with a seed of its own for every prompt, in one request each.

        One ``seed`` in TRL's single request would give every prompt the same noise. In a seeded run, log-probs are the
        same bits each time (``EnginePause``).
        vLLM gives the n completions of a prompt seed, seed + 1, ...
        """
        extra = kwargs.pop("generation_kwargs", None) or {}
        pause = EnginePause(self, n, self.settings.request_timeout) if self.settings.seed is not None else None

        def sample(index: int) -> dict[str, Any]:
            order = {"priority": index} if pause else {}
            own = {"seed": seeds[index], **order, **extra}
            return dict(VLLMClient.generate(self, [prompts[index]], n=n, generation_kwargs=own, **kwargs))

        return self._sampled(partial(sample_each, sample, len(prompts), pause))

    def _sampled(self, sample: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._idle.clear()
        try:
            answer = None if self.aborted else self._through_restarts(sample)
        except Exception:
            if not self.aborted:
                raise
            answer = None  # whatever an aborted generation failed of
        finally:
            self._idle.set()
        if answer is None or self.aborted:
            raise GenerationAborted
        return dict(answer)

    def _sampling_seed(self, index: int) -> int:
        # A hash, since vLLM gives completion k of a prompt the seed + k: neighbours would share noise.
        text = f"{self.settings.seed}/{self.generation}/{index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    @property
    def aborted(self) -> bool:
        """Whether ``abort`` was called."""
        return self._aborted.is_set()

    def abort(self) -> None:
        """End the generation in flight, from any thread: the run is about to end, and waits for nothing any more.

        The generation in flight, a wait for a restarted server, and every later ``generate`` raise GenerationAborted.
        Returns when none is in flight, at the latest after 10 seconds: a server that hangs releases nothing.
        """
        self._aborted.set()
        deadline = time.monotonic() + _ABORT_SECONDS
        # Again and again: a request that was on its way is not among those the engine ends.
        while not self._idle.is_set() and time.monotonic() < deadline:
            try:
                self.pause("abort", timeout=_QUICK_SECONDS)
                self.resume(timeout=_QUICK_SECONDS)
            except ServerError:
                pass  # a dead one has nothing in flight
            self._idle.wait(0.05)

    def pause(self, mode: str, timeout: float | None = None) -> None:
        """Stop the engine: ``keep`` what it has for later, or ``abort`` it. It goes on collecting requests."""
        self._post(f"{self.base_url}/pause", params={"mode": mode}, timeout=timeout)

    def resume(self, timeout: float | None = None) -> None:
        """Let a paused engine go on."""
        self._post(f"{self.base_url}/resume", timeout=timeout)

    def completions_under_way(self) -> int:
        """Return how many completions the engine has been given and has not finished, also while it is paused."""
        return int(self._get(f"{self.base_url}{ACTIVITY_PATH}")["completions"])


def sample_each(sample: Callable[[int], dict[str, Any]], prompts: int, pause: EnginePause | None) -> dict[str, Any]:
    """Make one request per prompt, by its index, many at a time; return the answers joined in the order of prompts."""
    answers: list[dict[str, Any]] = []
    for start in range(0, prompts, REQUESTS):
        share = range(start, min(start + REQUESTS, prompts))
        executor = ThreadPoolExecutor(max_workers=len(share))
        try:
            if pause is not None:
                pause.begin()
            futures = [executor.submit(sample, index) for index in share]
            if pause is not None:
                pause.end(futures)
            answers += [future.result() for future in futures]
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    return {
        key: None if answers[0][key] is None else [row for answer in answers for row in answer[key]]
        for key in answers[0]
    }


class EnginePause:
    """Pause the server's engine until it has all requests of a moment.

    Which completions share a forward pass decides the last bits of their log-probs, and that depends on when each
    arrives. Pausing also empties the engine's prefix cache, so that nothing depends on what it sampled before.
    """

    def __init__(self, engine: BridgeClient, n: int, limit: float):
        self._engine = engine
        self._limit = limit
        self._n = n

    def begin(self) -> None:
        """Pause the engine once it has finished or dropped everything else."""
        self._wait_for(0, [])
        self._engine.pause("keep")

    def end(self, futures: Sequence[Future[dict[str, Any]]]) -> None:
        """Let the engine go on when it has the requests, or when one of them has failed."""
        try:
            self._wait_for(len(futures) * self._n, futures)
        finally:
            self._engine.resume()

    def _wait_for(self, completions: int, futures: Sequence[Future[dict[str, Any]]]) -> None:
        deadline = time.monotonic() + self._limit
        while self._engine.completions_under_way() != completions:
            if any(future.done() for future in futures):
                return
            if self._engine.aborted:
                raise GenerationAborted
            if time.monotonic() > deadline:
                raise ServerLost(f"the vLLM server did not take up {completions} completions within {self._limit:g} s")
            time.sleep(_LOOK_SECONDS)
