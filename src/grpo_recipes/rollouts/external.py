"""Sample from an external server, a vLLM or SGLang that the launch did not start.

The client uses its OpenAI-compatible API, and it loads new weights from files that it can read. It does not run our
code, so no checksum of its weights is possible. To verify them, the trainer compares log-probs of a completion that is
sampled only for this check.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import requests

from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.process.sessions import BoundedAdapter, secure_session
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import EXTERNAL
from grpo_recipes.rollouts.openai import VLLM, CompletionClient, Failed, Sample, SamplingParameters
from grpo_recipes.runs.rundir import Run
from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors
from grpo_recipes.weights.file import write_weights
from grpo_recipes.weights.transport import ServerAdapter, ServerError

KEY = "vllm_server_base_url"
_PROBED_TOKENS = 32  # length of the completion that verifies the weights
_READY_SECONDS = 60.0
_PLACEHOLDER = ([0], [0.0])  # ids and log-probs of a failed completion; the loss does not use them


def connect(recipe: Recipe, model: str, environment: Mapping[str, str]) -> CompletionClient:
    """Wait until the recipe's external server serves the model, and return a client. Used before the training starts.

    ``model`` is the path of the recipe's model on this machine. The server may use either name. Its token is
    OPENAI_API_KEY in ``environment``. Raise ConfigError if training can't use the server.
    """

    def at_key(error: ConfigError) -> ConfigError:
        """Return the same problems at the recipe's line of the server's key."""
        return ConfigError(*(replace(problem, where=recipe.location(KEY)) for problem in error.problems))

    client = CompletionClient(
        recipe[KEY],
        backend=recipe.server.backend,
        model=recipe.model.name,
        aliases=(model,),
        token=environment.get("OPENAI_API_KEY"),
    )
    with translate_errors(ConfigError, at_key):
        client.ready(_READY_SECONDS)
    if client.backend == VLLM:
        _check_vllm_options(recipe, client)
    return client


def _check_vllm_options(recipe: Recipe, client: CompletionClient) -> None:
    """Raise ConfigError if a vLLM server can't load weights, or if its log-probs don't fit the training.

    Also raise it if the server does not report its configuration.
    """
    session = secure_session(requests.Session(), BoundedAdapter(_READY_SECONDS), client.token)

    def unknown_version(error: Exception) -> ConfigError:
        """Return a ConfigError for a server that does not report its configuration."""
        problem = f"the server at {client.root} does not say how it was started ({type(error).__name__}: {error})"
        return config_error(recipe.location(KEY), problem, "name a vLLM of the version that is installed here")

    with translate_errors(requests.RequestException, unknown_version):
        answer = session.get(f"{client.root}/server_info", params={"config_format": "json"})
    if not answer.ok:
        problem = f"the vLLM server at {client.root} can't load new weights"
        fix = "start it with VLLM_SERVER_DEV_MODE=1 in its environment, or remove the key: the launch starts a server"
        raise config_error(recipe.location(KEY), problem, fix)
    with translate_errors((LookupError, TypeError, ValueError), unknown_version):
        mode = answer.json()["vllm_config"]["model_config"]["logprobs_mode"]
    if (
        recipe.sampling.importance_sampling_correction
        and recipe.sampling.temperature != 1
        and mode != "processed_logprobs"
    ):
        problem = f"the log-probs of the vLLM server at {client.root} are {mode}, without the temperature"
        fix = "start it with --logprobs-mode processed_logprobs, or write vllm_importance_sampling_correction: false"
        raise config_error(recipe.location(KEY), problem, fix)


class ExternalClient(BridgeClient):
    """Send weights to an external server, and sample from it.

    ``failed`` contains for each completion of the last generation whether it is missing.
    """

    bridge = EXTERNAL
    cache_path = "/reset_prefix_cache"
    failed: Sequence[bool] = ()
    first_failure = ""
    """The reason of the first missing completion of the last generation."""

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 0.5) -> None:
        """Wait until the server answers, at most ``total_timeout`` seconds. The token is OPENAI_API_KEY.

        TRL's ``retry_interval`` has no effect. Raise ConfigError if the server does not answer in time, rejects the
        token, or serves another model.
        """
        args, run, token = self._args, Run(self._run_dir), os.environ.get("OPENAI_API_KEY")
        secure_session(self.session, ServerAdapter(args.server_request_timeout), token)
        self._sampler = CompletionClient(
            self.base_url,
            backend=args.server_backend,
            model=run.recipe["model_name_or_path"],
            aliases=(run.plan["model"],),
            token=token,
            batch_size=args.max_concurrent_requests,
            timeout=args.server_request_timeout,
        )
        self._sampler.ready(total_timeout)
        self.base_url = self._sampler.root

    def get_server_info(self) -> dict[str, Any]:
        """Return a fixed ``logprobs_mode`` that TRL accepts. The launch has rejected servers with another mode."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Write the weights to a file in GRPO_SYNC_DIR, and let the server load it."""
        with self._ignoring_failures_while_stopping():
            folder = Path(os.environ["GRPO_SYNC_DIR"])
            self._sync += 1
            write_weights(folder, metadata, named_params, self._sync)
            self._retry(partial(self._load, str(folder)))
        for _ in named_params:  # only if the run stops: the other ranks still gather the remaining tensors
            pass

    def _load(self, folder: str) -> None:
        """Let the server load the weights in this folder. Raise BadAnswer if it rejects them."""
        if self._args.server_backend == VLLM:
            body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self._post(f"{self.base_url}/collective_rpc", json=body)
            return
        path = "/update_weights_from_disk"
        answer = self._post(f"{self.base_url}{path}", json={"model_path": folder, "flush_cache": True})
        if answer.get("success") is not True:
            raise self._make_bad_answer(path, f"did not load the weights: {answer.get('message')}")

    def reset_prefix_cache(self) -> None:
        """Empty vLLM's prefix cache of the previous weights. SGLang has emptied its cache with the load."""
        if self._args.server_backend == VLLM:
            super().reset_prefix_cache()

    def generate(  # type: ignore[override]  # TRL passes the sampling parameters by name
        self, prompts: list[Any], features: Any = None, n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Sample ``n`` completions of each prompt, one request each; return the same columns as TRL's client.

        A missing completion becomes a placeholder of one token and is True in ``failed``. ``features`` are the prompts'
        images: raise ServerError unless it is None. Raise BadAnswer if all completions are missing.
        """
        if features is not None:
            raise ServerError("images can't be sent to an external server")
        sample = partial(self._sample, prompts, self._derive_seeds(len(prompts)), n, kwargs)
        return self._generate_unless_stopping(sample, prompts, n)

    def generate_seeded(
        self, prompts: Sequence[Any], seeds: Sequence[int] | None, n: int = 1, **kwargs: Any
    ) -> dict[str, list[Any]]:
        """Generate for a benchmark, with a seed for each prompt. Raise ServerError if a completion is missing."""
        answer = self._generate_unless_stopping(partial(self._sample, prompts, seeds, n, kwargs), prompts, n)
        if any(self.failed):
            raise ServerError(f"{sum(self.failed)} of {len(self.failed)} completions failed: {self.first_failure}")
        return answer

    def _sample(
        self, prompts: Sequence[Any], seeds: Sequence[int] | None, n: int, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return TRL's answer for ``n`` completions of each prompt, with placeholders for missing ones.

        ``seeds`` are None, or one for each prompt. ``kwargs`` has the sampling parameters; other entries are ignored.
        Set ``failed`` and ``first_failure``. Raise BadAnswer if all completions are missing.
        """
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        sampling = SamplingParameters(**{name: kwargs[name] for name in names})
        outcomes = [outcome for group in self._sampler.sample(prompts, n, sampling, seeds) for outcome in group]
        reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Failed)]
        self.failed = [isinstance(outcome, Failed) for outcome in outcomes]
        self.first_failure = reasons[0] if reasons else ""
        if all(self.failed):
            raise self._make_bad_answer("its completions", f"gave none of {len(outcomes)}: {self.first_failure}")
        rows = [
            (outcome.ids, outcome.logprobs) if isinstance(outcome, Sample) else _PLACEHOLDER for outcome in outcomes
        ]
        return {
            "prompt_ids": list(prompts),
            "completion_ids": [ids for ids, _ in rows],
            "logprobs": [[[logprob] for logprob in logprobs] for _, logprobs in rows],
            "logprob_token_ids": [[[token] for token in ids] for ids, _ in rows],
        }

    def probe(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """Sample a completion of up to 32 tokens at temperature 1, and return its ids and log-probs.

        Without other sampling settings, all servers report the same log-probs. Raise BadAnswer if three attempts fail.
        """
        sampling = SamplingParameters(max_tokens=_PROBED_TOKENS, seed=self._sync)

        def draw() -> tuple[list[int], list[float]]:
            """Sample once; return ids and log-probs, or raise BadAnswer if sampling failed."""
            ((outcome,),) = self._sampler.sample([prompt], 1, sampling)
            if isinstance(outcome, Failed):
                raise self._make_bad_answer("its completions", outcome.reason)
            return outcome.ids, outcome.logprobs

        return self._retry(draw)

    def _abort(self, generation: Any) -> None:
        """Do nothing: aborting would end the requests of other clients too."""
