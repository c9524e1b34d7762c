"""TRL's client of the vLLM server, with the run's token, time limits, per-prompt seeds, and the guard's checksum."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter
from trl.generation.vllm_client import VLLMClient

from grpo_recipes.weights.fingerprint import fingerprint
from grpo_recipes.weights.guard import checksum_verdict, differing, held_name

_CONNECTIONS = 64
Metadata = list[tuple[str, str, list[int]]]
NamedTensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class ClientSettings:
    """What the bridge needs of the recipe.

    Attributes:
        served_name: the server's ``--served-model-name``; another server on the port is refused.
        request_timeout: longest wait in seconds for one answer.
        guard: whether to compare checksums after every sync.
        seed: run seed for per-prompt sampling seeds, or None for the server's own.
        sync_dir: where the file bridge writes.
    """

    served_name: str
    request_timeout: float
    guard: bool
    seed: int | None
    sync_dir: Path


class ServerError(RuntimeError):
    """The vLLM server did not answer, or answered with an error."""


class BridgeClient(VLLMClient):
    """A bridge is a subclass that says how to open the channel and how to send tensors through it.

    Attributes:
        bridge: its name in recipes and messages.
        verdict: why the last sync failed the checksum, or None.
        syncs: weight loads so far.
        sync_seconds: seconds spent in them.
        generation: what the next sampling seeds are derived from, set by the trainer.
    """

    bridge = ""

    def __init__(self, *, settings: ClientSettings, **kwargs: Any):
        self.settings = settings
        self.verdict: str | None = None
        self.syncs = 0
        self.sync_seconds = 0.0
        self.generation = ""
        self._dtypes: dict[str, str] = {}
        self._packed: dict[str, list[str]] = {}
        super().__init__(**kwargs)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """Put token and time limit into the session, then wait for this run's own server.

        Raises:
            ServerError: it does not answer in time, or another server answers.
        """
        token = Path(os.environ["GRPO_TOKEN_FILE"]).read_text().strip()
        self.session.headers["Authorization"] = f"Bearer {token}"
        self.session.trust_env = False  # an http_proxy must not see, or swallow, requests to our own server
        adapter = _TimeLimitAdapter(self.settings.request_timeout)
        self.session.mount("http://", adapter)
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
            answer = self.session.get(f"{self.base_url}/v1/models")
        except requests.exceptions.ConnectionError:
            return None
        if answer.status_code == 401:
            return ["(a server that refuses this run's token)"]
        return [model["id"] for model in answer.json()["data"]] if answer.ok else None

    def get_server_info(self) -> dict[str, Any]:
        """The configuration TRL asks for, from the worker itself."""
        return dict(self.call_workers("grpo_config")[0])

    def update_named_params(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Send every tensor, then compare what the server holds with what was sent.

        Args:
            metadata: (name, dtype, shape) of each tensor, in order.
            named_params: the tensors, materialized one at a time.
        """
        start = time.perf_counter()
        if not self.settings.guard:
            self._send(metadata, named_params)
        else:
            self._dtypes = self._dtypes or self._report_dtypes()
            streamed: dict[str, torch.Tensor] = {}
            self._send(metadata, self._fingerprinted(named_params, streamed))
            wrong = differing({name: int(value) for name, value in streamed.items()}, self._reports())
            self.verdict = checksum_verdict(self.bridge, wrong)
        self.syncs += 1
        self.sync_seconds += time.perf_counter() - start

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        raise NotImplementedError

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
        """Call a method of every worker of the server.

        Returns:
            One result a worker.
        """
        answer = self._post(f"{self.base_url}/collective_rpc", json={"method": method, "kwargs": kwargs})
        return list(answer["results"])

    def generate(self, prompts: list[Any], features: Any = None, n: int = 1, **kwargs: Any) -> dict[str, list[Any]]:
        """TRL's ``generate``; with a run seed, one request and one seed per prompt.

        One ``seed`` in TRL's single request would give every prompt the same noise.
        """
        if self.settings.seed is None or features is not None:
            return dict(super().generate(prompts, features=features, n=n, **kwargs))
        extra = kwargs.pop("generation_kwargs", None) or {}

        def sample(index: int) -> dict[str, list[Any]]:
            seeded = {"seed": self._sampling_seed(index), **extra}
            return VLLMClient.generate(self, [prompts[index]], n=n, generation_kwargs=seeded, **kwargs)

        with ThreadPoolExecutor(max_workers=min(_CONNECTIONS, len(prompts))) as executor:
            answers = list(executor.map(sample, range(len(prompts))))
        return {
            key: None if answers[0][key] is None else [row for answer in answers for row in answer[key]]
            for key in answers[0]
        }

    def _sampling_seed(self, index: int) -> int:
        # A hash, since vLLM gives completion k of a prompt the seed + k: neighbours would share noise.
        text = f"{self.settings.seed}/{self.generation}/{index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


class _TimeLimitAdapter(HTTPAdapter):
    """TRL's calls have no time limit, and retry for about a minute on a dead server."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        super().__init__(pool_maxsize=_CONNECTIONS, max_retries=0)

    def send(self, request: Any, **kwargs: Any) -> requests.Response:
        kwargs["timeout"] = self._timeout
        try:
            return super().send(request, **kwargs)
        except requests.exceptions.ReadTimeout as error:
            path = request.path_url
            raise ServerError(f"the vLLM server did not answer {path} within {self._timeout:.0f} s") from error
