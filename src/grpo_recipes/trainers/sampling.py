"""Context managers around TRL's trainer: build our vLLM client or engine, or change sampling settings in a block.

``choose_client`` selects the client's class by the weight sync method.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from grpo_recipes.plan.commands import seeds_sampling
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.trainer_protocol import Trainer
from grpo_recipes.weights.bridges import CLIENTS, trl_building_client
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.colocated import trl_building_colocated


def building_vllm_client(args: GRPOConfig, run_dir: Path, stop: StopRequest) -> AbstractContextManager[None]:
    """In the block, let TRL build our client of the vLLM server, or vLLM in this process. Without vLLM, do nothing."""
    if not args.use_vllm:
        return nullcontext()
    seed = args.seed if seeds_sampling(args.seed_server, args.use_cpu) else None
    if args.vllm_mode == "colocate":
        return trl_building_colocated(args=args, run_seed=seed, stop=stop)
    return trl_building_client(choose_client(args), args=args, run_dir=run_dir, seed=seed, stop=stop)


def choose_client(args: GRPOConfig) -> type[BridgeClient]:
    """Return the client class for the recipe's weight sync method, or for an external server."""
    if not args.vllm_server_base_url:
        return CLIENTS[args.weight_sync]
    from grpo_recipes.rollouts.external import ExternalClient  # importing openai takes 0.4 s

    return ExternalClient


@contextmanager
def changing_sampling(trainer: Trainer, settings: dict[str, Any]) -> Iterator[None]:
    """Let the trainer sample with these settings in the block, and restore its own afterwards.

    ``settings`` may have ``temperature``, ``top_p`` and ``max_completion_length``, which is ``max_new_tokens`` for
    transformers. A temperature of 0 is greedy.
    """
    if not settings:
        yield
        return
    if not trainer.use_vllm:
        config = copy.deepcopy(trainer.generation_config)
        for name, value in settings.items():
            setattr(config, "max_new_tokens" if name == "max_completion_length" else name, value)
        if settings.get("temperature") == 0:
            config.do_sample = False
            config.temperature = config.top_p = config.top_k = config.min_p = None
        with trainer.with_settings(generation_config=config):
            yield
        return
    training_settings = {name: getattr(trainer.vllm_generation, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(trainer.vllm_generation, name, value)
        yield
    finally:
        for name, value in training_settings.items():
            setattr(trainer.vllm_generation, name, value)
