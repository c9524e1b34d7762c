"""The base of all bridges: TRL's client with the run's token, time limits, per-prompt seeds and the guard.

Where the launcher can restart the server alone, every request survives that: the new server is given the last weights
and asked again. When the run is asked to stop, no request is waited for.
"""

import contextlib
import copy
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import requests
import torch
from trl.generation.vllm_client import VLLMClient

from grpo_recipes.attributes import replaced
from grpo_recipes.errors import translate
from grpo_recipes.process.answers import MAX_BYTES
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.registry import SYNC_METHODS
from grpo_recipes.runs.rundir import SERVER_STATE, Run, json_mapping
from grpo_recipes.runs.server_state import server_listener, server_state, server_url
from grpo_recipes.runs.stop_request import POLL_SECONDS, StopRequest
from grpo_recipes.server.middleware import ACTIVITY_PATH, POLICY_HEADER, SYNCED_PATH
from grpo_recipes.server.wire import BYTES_PER_TOKEN, COMPLETIONS_PATH, completions_of, unpacked
from grpo_recipes.weights.guard import WeightsDiffer, checksum_error, differing, sent_fingerprint
from grpo_recipes.weights.sampling import sampling_seed
from grpo_recipes.weights.transport import (
    QUICK_SECONDS,
    BadAnswer,
    ServerAdapter,
    ServerError,
    ServerLost,
    check_completions,
)  # fmt: skip

_ABORT_SECONDS = 10.0  # for the server to give back the generations in flight
_SIGNAL_SECONDS = 3.0  # a signal to every process of a job may reach the server first
_QUEUE_SECONDS, _STATE_SECONDS = 0.005, 0.2  # between two looks at the engine's queue, at the server's state
_NOTICE_SECONDS = 90.0  # for the launcher to see that its server is gone, and us to see that through an NFS cache
_MARGIN_SECONDS = 60.0  # beyond the server's own start: the launcher ends the old one and writes its state first
_TRIES, _AGAIN_SECONDS = 3, 0.5  # of a request that is answered wrongly; the pause grows by as much each time
_MOST_TEXT = 200  # characters of an answer in a message
Metadata = list[tuple[str, str, list[int]]]  # name, dtype and shape of each tensor, in order
NamedTensors = Iterator[tuple[str, torch.Tensor]]
Rows = tuple[list[list[int]], list[list[list[float]]] | None]  # of some completions ids, and log-probs of (B, T, 1)
_TRL_SAMPLING = {  # what TRL asks for where its caller does not say
    name: parameter.default
    for name, parameter in inspect.signature(VLLMClient.generate).parameters.items()
    if parameter.default is not None and name not in ("self", "prompts", "n")
}
Answer = TypeVar("Answer")


class GenerationAborted(Exception):
    """A generation was given up because the run stops."""


class BridgeClient(VLLMClient):
    """A bridge is a subclass with ``_send`` or ``take``; with ``_resend`` of what was sent last where it reconnects.

    ``seed`` is the run's, for a sampling seed per prompt, or None for the server's own.
    """

    bridge = ""  # its name in recipes and messages
    cache_path = SYNCED_PATH  # where the server empties its prefix cache
    streams = True  # whether a sync hands it every parameter; else it takes the trained model itself, with ``take``

    def __init__(self, *, args: GRPOConfig, run_dir: Path, seed: int | None, stop: StopRequest, **kwargs: Any):
        self._args, self._seed, self.stop = args, seed, stop
        self._run_dir, self._state_file = run_dir, run_dir / SERVER_STATE
        self.vocabulary: int | None = None  # token ids of the trained model, set by the trainer
        self.checksum_error: str | None = None  # why the last sync failed the checksum
        self.generation_name = ""  # what the next sampling seeds are derived from, set by the trainer
        self.seed_numbers: list[int] | None = None  # by which each prompt's seed is derived; by its place where None
        self.policy_version: int | None = None  # optimizer step of the weights of the next sync, set by the trainer
        self.has_other_clients = (
            False  # whether environments, too, ask the server for completions; set by their rollouts
        )
        self._served_version: int | None = None  # that of the last sync that was completed
        self._held: dict[str, Any] = {}  # the first report of what the server holds
        self._streamed: dict[str, torch.Tensor] = {}
        self._stops = False
        self._sync = 0  # the number of the sync that was sent last; 0: a restarted server is given nothing
        self._epoch = self._server_state()[0]  # which server was last waited for
        super().__init__(**kwargs)

    def using_seed(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """Derive sampling seeds inside from this one; a run without them still has none."""
        return replaced(self, _seed=self._seed if self._seed is None else seed)

    @contextlib.contextmanager
    def answering_with(self, generate: Callable[..., dict[str, Any]]) -> Iterator[None]:
        """Let ``generate`` answer the calls of ``self.generate`` inside."""
        vars(self)["generate"] = generate
        try:
            yield
        finally:
            del vars(self)["generate"]

    def copy_for(self, generation_name: str) -> Self:
        """Return a client that samples one generation, also after a stop request: the checkpoint needs it."""
        client = copy.copy(self)
        client.generation_name, client.stop = generation_name, StopRequest(self._run_dir)
        return client

    def give_up(self) -> None:
        """Let the requests of this client end, without an answer."""
        self._stops = True

    def attach(self, trainer: Any) -> None:
        """Take from the trainer that it serves what it needs beside the weights; called once, on rank 0."""

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """Put token and limits into the session, then wait for this run's own server; reject another one."""
        token = Path(os.environ["GRPO_TOKEN_FILE"]).read_text().strip()
        self.base_url = server_url(self._state_file) or self.base_url
        self.session.headers["Authorization"] = f"Bearer {token}"
        self.session.trust_env = False  # an http_proxy must not see, or swallow, requests to our own server
        self._adapter = ServerAdapter(
            self._args.server_request_timeout,
            owner=server_listener(self._state_file, self.base_url),
            connections=self._args.max_concurrent_requests,
        )
        self.session.mount("http://", self._adapter)
        lost = ServerError(f"no vLLM server answers at {self.base_url} after {total_timeout:.0f} s")
        served = self._wait_for(self._served_names, total_timeout, lost, retry_interval)
        if (own := os.environ["GRPO_RUN"]) not in served:
            raise ServerError(f"the server at {self.base_url} serves {served}, not this run's {own}")

    def _wait_for(self, look: Callable[[], Answer | None], seconds: float, error: ServerError, pause: float) -> Answer:
        """Return the first answer that is neither None nor False; raise ``error`` after ``seconds``.

        Raise GenerationAborted when the run stops.
        """
        deadline = time.monotonic() + seconds
        while (found := look()) is None or found is False:
            if self.is_stopping():
                raise GenerationAborted
            if time.monotonic() > deadline:
                raise error
            time.sleep(pause)
        return found

    def _served_names(self) -> list[str] | None:
        with contextlib.suppress(ServerError, LookupError, TypeError, ValueError):  # or another program answers
            answer = self.session.get(f"{self.base_url}/v1/models", timeout=QUICK_SECONDS)
            if answer.status_code == 401:
                return ["(a server that refuses this run's token)"]
            if answer.ok:
                return [model["id"] for model in answer.json()["data"]]
        return None

    def get_server_info(self) -> dict[str, Any]:
        """Return the configuration that TRL asks for, from the worker itself; another vLLM has none."""
        foreign = "is it one that grpo launch started? Another vLLM of this name cannot take the trainer's weights"
        with translate(BadAnswer, lambda error: ServerError(f"{error}; {foreign}")), self._reading("/collective_rpc"):
            return dict(self._through_restarts(partial(self.call_workers, "grpo_config"))[0])

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._content(url, self.session.post(url, **kwargs))

    def _get(self, url: str, **kwargs: Any) -> dict[str, Any]:
        return self._content(url, self.session.get(url, **kwargs))

    def _content(self, url: str, answer: requests.Response) -> dict[str, Any]:
        """Return the JSON object of an answer; BadAnswer for anything else."""
        content = json_mapping(answer.content)
        if answer.status_code != 200 or content is None:
            raise self._refused(url.removeprefix(self.base_url), answer)
        return content

    def _refused(self, path: str, answer: requests.Response) -> BadAnswer:
        text = " ".join(answer.text[:_MOST_TEXT].split()) or "nothing"
        return self._bad(path, f"answered {answer.status_code}: {text}")

    def _bad(self, path: str, what: str) -> BadAnswer:
        processes = Run(self._run_dir).plan.get("processes", [])
        log = next((one["log"] for one in processes if one.get("role") == "server" and "log" in one), "its own")
        return BadAnswer(f"the vLLM server at {self.base_url} {what} (in {path}; log: {log})")

    def _reading(self, path: str) -> contextlib.AbstractContextManager[None]:
        """Take an error inside, where an answer is read, for an answer that is not what was asked for."""
        kinds = (LookupError, TypeError, ValueError, AttributeError)

        def bad(error: Exception) -> BadAnswer:
            what = str(error) if type(error) is ValueError else repr(error)
            return self._bad(path, f"gave no usable answer: {what[:_MOST_TEXT]}")

        return translate(kinds, bad)

    def _through_restarts(self, ask: Callable[[], Answer]) -> Answer:
        """Ask the server; where the launcher starts another meanwhile, give that one the weights, then ask it."""
        if ("cpu" if self._args.use_cpu else "cuda") not in SYNC_METHODS[self.bridge].reconnects:
            return self._repeated(ask)
        while True:
            try:
                if self._server_changed():
                    self._repeated(self._prepare_next_server)
                answer = self._repeated(ask)
            except ServerLost as lost:
                self._wait_for(partial(self._noticed, lost), _NOTICE_SECONDS, lost, _STATE_SECONDS)
            else:
                if not self._server_changed():  # else it may come from a server without the weights
                    return answer

    def _repeated(self, ask: Callable[[], Answer]) -> Answer:
        """Ask the server, and again, a few times, where it answers wrongly."""
        for number in range(1, _TRIES):
            with contextlib.suppress(BadAnswer):
                return ask()
            time.sleep(_AGAIN_SECONDS * number)
        return ask()

    def _server_state(self) -> tuple[int, str]:
        """Return which of the run's servers is up, by its number, and its state, as the launcher wrote them."""
        return server_state(self._state_file)

    def _server_changed(self) -> bool:
        """Return whether another server than the one last waited for is there, or soon will be."""
        return self._server_state() != (self._epoch, "ready")

    def _noticed(self, lost: ServerLost) -> bool:
        """Return whether the launcher has seen the loss of its server; raise it where nobody restarts servers."""
        if not self._state_file.exists():
            raise lost
        return self._server_changed()

    def _server_ready(self) -> bool:
        """Return whether the next server is up, and remember which that is; ServerError when there will be none."""
        epoch, state = self._server_state()
        if state == "gone":
            raise ServerError("the vLLM server is gone and is not started again")
        self._epoch = epoch if state == "ready" else self._epoch
        return state == "ready"

    def _prepare_next_server(self) -> None:
        self._wait_for_server(self._server_ready)
        if self._sync:
            self._resend()
            self._verify()
            if self.checksum_error:
                raise WeightsDiffer(f"{self.checksum_error}, which was a load into a restarted server")
        if self._served_version is not None:
            self._empty_prefix_cache(self._served_version)

    def reconnect(self) -> None:
        """Give a server that was started again since the last request the weights of the last sync, and wait for it.

        For a trainer that waits for completions which others ask of the server: it would not see the restart itself.
        """
        with self._excused_when_stopping():
            self._through_restarts(lambda: None)

    def _wait_for_server(self, ready: Callable[[], bool]) -> None:
        """Wait until the launcher has started the next server, at most as long as a start may take."""
        limit = self._args.vllm_server_timeout + _MARGIN_SECONDS
        late = ServerError(f"the vLLM server was not ready again after {limit:g} s")
        self._wait_for(ready, limit, late, _STATE_SECONDS)
        self.check_server(total_timeout=QUICK_SECONDS)

    def is_stopping(self, within: float = 0.0) -> bool:
        """Return whether the run stops now, or ``within`` seconds: no answer is needed any more, and none will be."""
        deadline = time.monotonic() + within
        while self.stop.may_cut and not self._stops:
            self._stops = self.stop.cuts()
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        return self._stops

    @contextlib.contextmanager
    def _excused_when_stopping(self) -> Iterator[None]:
        """Take a failure inside for the end of the run where that comes: then the server is gone too."""
        try:
            yield
        except Exception:
            if not self.is_stopping(_SIGNAL_SECONDS):
                raise

    def update_named_params(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Send every tensor, materialized one at a time, then compare what the server holds with what was sent."""
        with self._excused_when_stopping():
            if self._args.weight_guard and not self._held:
                self._held = self._through_restarts(self._reports)[0]
            self._send(metadata, self._fingerprinted(named_params) if self._args.weight_guard else named_params)
            self._through_restarts(self._verify)
        for _ in named_params:  # nothing is left unless the run stops: the other ranks gather all of them
            pass

    def _verify(self) -> None:
        """With the guard, compare what the server holds with what was sent."""
        if self._args.weight_guard:
            reports = self._reports()
            wrong = differing(self._sent_values(), reports)
            self.checksum_error = checksum_error(self.bridge, wrong, self._sync, reports)

    def _sent_values(self) -> dict[str, int]:
        """Return the fingerprints of what was sent last."""
        return {name: int(value) for name, value in self._streamed.items()}

    def _reports(self) -> list[dict[str, Any]]:
        """Return what each worker holds, as ``grpo_weights`` reports it."""
        reports = self.call_workers("grpo_weights")
        with self._reading("/collective_rpc"):
            for report in reports:
                held, _, _ = report["parameters"], dict(report["packed"]), int(report["sync"])
                if not all(type(value) is int and hasattr(torch, kind) for value, kind, *_ in held.values()):
                    raise ValueError("a parameter without fingerprint and dtype")
                if held.keys() != reports[0]["parameters"].keys():
                    raise ValueError("workers that hold different parameters")
        return reports

    def _fingerprinted(self, named_params: NamedTensors) -> NamedTensors:
        """Yield the tensors, and take the fingerprint of each: on CPU while it is sent, on a GPU in the same stream."""
        self._streamed = {}
        for name, tensor in named_params:
            take = partial(sent_fingerprint, name, tensor, self._held)
            beside = run_in_thread(take) if tensor.is_cpu else None
            yield name, tensor
            self._streamed[name] = beside.result() if beside else take()

    def call_workers(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker of the server; return a result per worker."""
        answer = self._post(f"{self.base_url}/collective_rpc", json={"method": method, "kwargs": kwargs})
        if not (isinstance(results := answer.get("results"), list) and results):
            raise self._bad("/collective_rpc", f"gave no results of {method}")
        return results

    def reset_prefix_cache(self) -> None:
        """Empty it, also through a restart of the server: the old weights' cache must not serve the new ones.

        It ends a sync: from now on the server answers with the ``policy_version`` of its weights.
        """
        with self._excused_when_stopping():
            self._through_restarts(partial(self._empty_prefix_cache, self.policy_version))
            self._served_version = self.policy_version

    def _empty_prefix_cache(self, version: int | None) -> None:
        """Ask as TRL does; where another client's request holds cache, have the engine compute that one anew."""
        paths = (self.cache_path, f"{self.cache_path}?reset_running_requests=true")
        headers = {} if version is None else {POLICY_HEADER: str(version)}
        if not any(self._post(f"{self.base_url}{path}", headers=headers).get("success") is True for path in paths):
            raise self._bad(paths[1], "did not empty its prefix cache, which is of the weights before")

    def generate(self, prompts: list[Any], features: Any = None, n: int = 1, **kwargs: Any) -> dict[str, list[Any]]:
        """Generate as TRL does, a request per prompt; with a run seed, each has its own."""
        if features is not None:
            sample = partial(self._with_images, prompts, features, n, **kwargs)
            return self._unless_stopping(sample, prompts, n)
        return self.generate_seeded(prompts, self._seeds(len(prompts)), n=n, **kwargs)

    def _seeds(self, prompts: int) -> list[int] | None:
        """Return the sampling seed of each of so many prompts; None in a run without seeds."""
        if self._seed is None:
            return None
        rows = range(prompts) if self.seed_numbers is None else self.seed_numbers
        return [sampling_seed(self._seed, self.generation_name, row) for row in rows]

    def generate_seeded(
        self, prompts: Sequence[Any], seeds: Sequence[int] | None, n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Generate as TRL does, but a request per prompt with a seed of its own: vLLM gives completion k seed + k.

        None is the server's own seed. Where others ask the server too, the engine is not paused: it would never have
        our completions alone.
        """
        extra = kwargs.pop("generation_kwargs", None) or {}
        ordered = self._seed is not None and not self.has_other_clients

        def sample(index: int) -> Rows:
            own = {} if seeds is None else {"seed": seeds[index]}
            order = {"priority": index} if ordered else {}
            return self._completions(prompts[index], n, {**kwargs, **own, **order, **extra})

        def sample_all() -> dict[str, Any]:
            """Request each prompt, some at a time, and join the answers in the order of the prompts."""
            at_once, answers = self._args.max_concurrent_requests, dict[int, Rows]()
            for start in range(0, len(prompts), at_once if ordered else len(prompts)):
                share = range(start, min(start + at_once, len(prompts)) if ordered else len(prompts))
                with self._engine_paused(len(share) * n) if ordered else contextlib.nullcontext([]) as futures:
                    futures += self._in_window(sample, share, answers)
                for future in futures:
                    future.result()
            joined = [answers[index] for index in range(len(prompts))]
            logprobs = None if joined[0][1] is None else [row for _, rows in joined for row in rows or []]
            ids = [row for rows, _ in joined for row in rows]
            return {"prompt_ids": list(prompts), "completion_ids": ids, "logprobs": logprobs}

        return self._unless_stopping(sample_all, prompts, n)

    def _in_window(
        self, ask: Callable[[int], Rows], places: Sequence[int], answers: dict[int, Rows]
    ) -> list[Future[None]]:
        """Ask for each place, so many at a time, and enter the answers; return what works at it.

        After a failure, or when the run stops, nothing more is asked.
        """
        left, workers = iter(places), list[Future[None]]()

        def work() -> None:
            for place in left:  # which all of them share
                if self._stops or any(one.done() for one in workers):  # one that is done while some are left failed
                    return
                answers[place] = ask(place)

        workers += [run_in_thread(work) for _ in range(min(self._args.max_concurrent_requests, len(places)))]
        return workers

    def _completions(self, prompt: Sequence[int], n: int, sampling: dict[str, Any]) -> Rows:
        """Return ids and log-probs of a prompt's completions; BadAnswer unless each is there, as it was asked for."""
        if (regex := sampling.pop("structured_outputs_regex", None)) is not None:
            sampling.setdefault("structured_outputs", {"regex": regex})
        asked = {"model": self.model, "prompt": prompt, "n": n, **_TRL_SAMPLING, **sampling}
        self._adapter.allow(MAX_BYTES + BYTES_PER_TOKEN * n * asked["max_tokens"])
        answer = self.session.post(f"{self.base_url}{COMPLETIONS_PATH}", json=asked)
        if answer.status_code != 200:
            raise self._refused(COMPLETIONS_PATH, answer)
        with self._reading(COMPLETIONS_PATH):
            found = unpacked(answer.content)
            check_completions(found, n, asked["max_tokens"], self.vocabulary, asked["logprobs"])
            return found.rows()

    def _with_images(self, prompts: Sequence[Any], features: Any, n: int, **kwargs: Any) -> dict[str, Any]:
        """Request completions of prompts with images as TRL does."""
        asked = {**_TRL_SAMPLING, **kwargs, **(kwargs.get("generation_kwargs") or {})}
        with self._reading("/inference/v1/generate"):
            answer = dict(VLLMClient.generate(self, prompts, features, n, **kwargs))
            logprobs = answer["logprobs"] and [[one for (one, *_) in row] for row in answer["logprobs"]]
            found = completions_of(answer["completion_ids"], logprobs)
            check_completions(found, len(prompts) * n, asked["max_tokens"], self.vocabulary, asked["logprobs"])
        return answer

    @contextlib.contextmanager
    def _engine_paused(self, completions: int) -> Iterator[list[Future[None]]]:
        """Pause the engine until it has all ``completions`` that are requested inside, or a request has failed.

        Which completions share a forward pass, by when they arrive, decides the last bits of their log-probs. Pausing
        also empties the engine's prefix cache.
        """
        futures: list[Future[None]] = []
        self._wait_for_queue(0, futures)  # until the engine has finished or dropped everything else
        self.pause("keep")
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(self._repeated, self.resume)
            yield futures
            self._wait_for_queue(completions, futures)

    def _wait_for_queue(self, completions: int, futures: Sequence[Future[Any]]) -> None:
        """Wait until the engine has been given and has not finished so many completions; it counts while paused too."""

        def taken_up() -> bool:
            with self._reading(ACTIVITY_PATH):
                under_way = int(self._get(f"{self.base_url}{ACTIVITY_PATH}")["completions"])
            return under_way == completions or any(future.done() for future in futures)

        limit = self._args.server_request_timeout
        lost = ServerLost(f"the vLLM server did not take up {completions} completions within {limit:g} s")
        self._wait_for(taken_up, limit, lost, _QUEUE_SECONDS)

    def _unless_stopping(
        self, sample: Callable[[], dict[str, Any]], prompts: Sequence[Any], n: int
    ) -> dict[str, list[Any]]:
        """Return the server's completions; as soon as the run stops, anything of the right shape: other ranks wait."""
        if not self.is_stopping():
            answer = run_in_thread(partial(self._through_restarts, sample))
            while not wait([answer], POLL_SECONDS).done and not self.is_stopping():
                pass
            if not self._stops and (answer.exception() is None or not self.is_stopping(_SIGNAL_SECONDS)):
                return dict(answer.result())
            self._abort(answer)
        rows = len(prompts) * n
        return {"prompt_ids": list(prompts), "completion_ids": [[0]] * rows, "logprobs": [[[0.0]]] * rows}

    def _abort(self, generation: Future[Any]) -> None:
        """End the generation in flight; a server that hangs releases nothing, and is left after 10 seconds."""
        deadline = time.monotonic() + _ABORT_SECONDS
        while True:  # again and again: a request that was on its way is not among those the engine ends
            with contextlib.suppress(Exception):  # one that is dead has nothing in flight; TRL raises that of a 500
                self.pause("abort", timeout=QUICK_SECONDS)
                self.resume(timeout=QUICK_SECONDS)
            if wait([generation], 0.05).done or time.monotonic() > deadline:
                return

    def pause(self, mode: str, timeout: float | None = None) -> None:
        """Stop the engine: ``keep`` what it has for later, or ``abort`` it. It continues to collect requests."""
        self._post(f"{self.base_url}/pause", params={"mode": mode}, timeout=timeout)

    def resume(self, timeout: float | None = None) -> None:
        """Let a paused engine continue."""
        self._post(f"{self.base_url}/resume", timeout=timeout)


def run_in_thread(work: Callable[[], Answer]) -> Future[Answer]:
    """Start work in a daemon thread: at its exit the interpreter waits for an executor's threads."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
