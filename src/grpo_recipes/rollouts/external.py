"""A server that somebody started, in the place of the one that a launch starts: vLLM or SGLang.

It is asked through its OpenAI-compatible API, and loads new weights from files that it can read. It has none of ours in
it, so nothing can be called there for a checksum: the guard compares log-probs of a completion, drawn for that alone.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch

from grpo_recipes.errors import ConfigError, config_error, translate
from grpo_recipes.process.sessions import BoundedAdapter
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import EXTERNAL
from grpo_recipes.rollouts.openai import VLLM, CompletionClient, Failed, Sample, SamplingParameters
from grpo_recipes.runs.rundir import Run
from grpo_recipes.weights.client import Answer, BridgeClient, Metadata, NamedTensors
from grpo_recipes.weights.file import write_weights
from grpo_recipes.weights.transport import ServerAdapter, ServerError

KEY = "vllm_server_base_url"
_PROBED_TOKENS = 32  # of the completion that the guard looks at
_READY_SECONDS = 60.0
_FAILED = ([0], [0.0])  # ids and log-probs in the place of a completion that failed; nothing is learned from them


def connect(recipe: Recipe, model: str, environment: Mapping[str, str]) -> CompletionClient:
    """Return a client of the recipe's server, once it serves the model; ConfigError where it cannot train with us.

    ``model`` is where the launch found the recipe's model; the server may call it by either name.
    """

    def of_key(error: ConfigError) -> ConfigError:
        return ConfigError(*(replace(problem, where=recipe.location(KEY)) for problem in error.problems))

    client = CompletionClient(
        recipe[KEY],
        backend=recipe["server_backend"],
        model=recipe["model_name_or_path"],
        aliases=(model,),
        token=environment.get("OPENAI_API_KEY"),
    )
    with translate(ConfigError, of_key):
        client.ready(_READY_SECONDS)
    if client.backend == VLLM:
        _need_development_mode(recipe, client)
    return client


def _need_development_mode(recipe: Recipe, client: CompletionClient) -> None:
    """Refuse a vLLM that loads no weights, or whose log-probs the trainer's correction could not use."""
    session = requests.Session()
    session.trust_env = False
    for scheme in ("http://", "https://"):
        session.mount(scheme, BoundedAdapter(_READY_SECONDS))
    key = {"Authorization": f"Bearer {client.token}"} if client.token else {}

    def strange(error: Exception) -> ConfigError:
        what = f"the server at {client.root} does not say how it was started ({type(error).__name__}: {error})"
        return config_error(recipe.location(KEY), what, "name a vLLM of the version that is installed here")

    with translate(requests.RequestException, strange):
        answer = session.get(f"{client.root}/server_info", params={"config_format": "json"}, headers=key)
    if not answer.ok:
        what = f"the vLLM server at {client.root} takes no new weights: all samples would be of the first ones"
        fix = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, or remove the key: the launch starts a server"
        raise config_error(recipe.location(KEY), what, fix)
    with translate((LookupError, TypeError, ValueError), strange):
        mode = answer.json()["vllm_config"]["model_config"]["logprobs_mode"]
    if recipe["vllm_importance_sampling_correction"] and recipe["temperature"] != 1 and mode != "processed_logprobs":
        what = f"the log-probs of the vLLM server at {client.root} are {mode}, without the temperature"
        fix = "start it with --logprobs-mode processed_logprobs, or write vllm_importance_sampling_correction: false"
        raise config_error(recipe.location(KEY), what, fix)


class ExternalClient(BridgeClient):
    """TRL's client of a server that somebody started.

    ``failed`` says of each completion of the last generation whether the server did not give it.
    """

    bridge = EXTERNAL
    cache_path = "/reset_prefix_cache"
    failed: Sequence[bool] = ()

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """Wait until it answers, and see that it serves the run's model."""
        args, run = self._args, Run(self._run_dir)
        if token := os.environ.get("OPENAI_API_KEY"):
            self.session.headers["Authorization"] = f"Bearer {token}"
        self.session.trust_env = False
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, ServerAdapter(args.server_request_timeout))
        self._asked = CompletionClient(
            self.base_url,
            backend=args.server_backend,
            model=run.recipe["model_name_or_path"],
            aliases=(run.plan["model"],),
            token=token,
            batch_size=args.max_concurrent_requests,
            timeout=args.server_request_timeout,
        )
        self._asked.ready(total_timeout)
        self.base_url = self._asked.root

    def get_server_info(self) -> dict[str, Any]:
        """Return what TRL warns of: the launch has refused log-probs that the correction cannot use."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files, so there is no channel to open."""

    def _through_restarts(self, ask: Callable[[], Answer]) -> Answer:
        """Ask the server, which nobody here starts again."""
        return self._repeated(ask)

    def update_named_params(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Write the weights, and have the server load them."""
        with self._excused_when_stopping():
            folder = Path(os.environ["GRPO_SYNC_DIR"])
            self._sync += 1
            write_weights(folder, metadata, named_params, self._sync)
            self._repeated(partial(self._load, str(folder)))
        for _ in named_params:  # nothing is left unless the run stops: the other ranks gather all of them
            pass

    def _load(self, folder: str) -> None:
        if self._args.server_backend == VLLM:
            self.call_workers("reload_weights", weights_path=folder)
            return
        path = "/update_weights_from_disk"
        answer = self._post(f"{self.base_url}{path}", json={"model_path": folder, "flush_cache": True})
        if answer.get("success") is not True:
            raise self._bad(path, f"did not load the weights: {answer.get('message')}")

    def reset_prefix_cache(self) -> None:
        """Empty it, which is of the weights before; SGLang has done so with the load."""
        if self._args.server_backend == VLLM:
            super().reset_prefix_cache()

    def generate(self, prompts: list[Any], features: Any = None, n: int = 1, **kwargs: Any) -> dict[str, list[Any]]:
        """Generate as TRL does, with a request for each completion; ``failed`` says which were not given."""
        if features is not None:
            raise ServerError("images are not sent to a server that somebody started")
        sample = partial(self._sample, prompts, self._seeds(len(prompts)), n, kwargs)
        return self._unless_stopping(sample, prompts, n)

    def generate_seeded(
        self, prompts: Sequence[Any], seeds: Sequence[int], n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Generate for a benchmark, in which every completion counts: one that failed is a ServerError."""
        found = self._unless_stopping(partial(self._sample, prompts, seeds, n, kwargs), prompts, n)
        if any(self.failed):
            raise ServerError(f"{sum(self.failed)} of {len(self.failed)} completions failed: {self.reason}")
        return found

    def _sample(
        self, prompts: Sequence[Any], seeds: Sequence[int] | None, n: int, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        sampling = SamplingParameters(**{name: kwargs[name] for name in names})
        every = [one for drawn in self._asked.sample(prompts, n, sampling, seeds) for one in drawn]
        self.failed = [isinstance(one, Failed) for one in every]
        self.reason = next((one.reason for one in every if isinstance(one, Failed)), "")
        if all(self.failed):
            raise self._bad("its completions", f"gave none of {len(every)}: {self.reason}")
        parts = [(one.ids, one.logprobs) if isinstance(one, Sample) else _FAILED for one in every]
        return {
            "prompt_ids": list(prompts),
            "completion_ids": [ids for ids, _ in parts],
            "logprobs": [[[logprob] for logprob in logprobs] for _, logprobs in parts],
            "logprob_token_ids": [[[token] for token in ids] for ids, _ in parts],
        }

    def probe(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Draw a completion from the plain distribution, whose log-probs mean the same at every server."""
        sampling = SamplingParameters(max_tokens=_PROBED_TOKENS, seed=self._sync)

        def draw() -> tuple[list[int], list[float]]:
            ((found,),) = self._asked.sample([prompt], 1, sampling)
            if isinstance(found, Failed):
                raise self._bad("its completions", found.reason)
            return found.ids, found.logprobs

        return self._repeated(draw)

    def _abort(self, generation: Any) -> None:
        """Leave the generation in flight: the engine may have work of others."""
