"""All bridges by name, and the one place where a bridge takes the place of TRL's client."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from trl.generation import vllm_generation

from grpo_recipes.attributes import replaced
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.lora import LoraClient
from grpo_recipes.weights.nccl import NcclClient
from grpo_recipes.weights.restart import RestartClient
from grpo_recipes.weights.shared import SharedClient

CLIENTS: dict[str, type[BridgeClient]] = {
    client.bridge: client for client in (FileClient, NcclClient, SharedClient, LoraClient, RestartClient)
}


def trl_building_client(client: type[BridgeClient], **settings: Any) -> AbstractContextManager[Any]:
    """Let TRL's ``VLLMGeneration`` build this bridge as its client inside."""
    return replaced(vllm_generation, VLLMClient=partial(client, **settings))


def attach_client(trainer: Any, client: type[BridgeClient]) -> None:
    """Let a bridge that streams nothing take the trained model at a sync, and rank 0's client join the trainer."""
    generation = trainer.vllm_generation
    if not client.streams:
        generation.sync_weights = partial(_hand_over, generation)
    if trainer.accelerator.is_main_process:
        generation.vllm_client.attach(trainer)


def _hand_over(generation: vllm_generation.VLLMGeneration) -> None:
    """Give rank 0's model to the bridge; the other ranks wait for it."""
    if generation.accelerator.is_main_process:
        generation.vllm_client.sync_model(generation.accelerator.unwrap_model(generation.model))
        generation.vllm_client.reset_prefix_cache()
    generation.accelerator.wait_for_everyone()
