"""All bridges by name, and the one place where a bridge takes the place of TRL's client."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from trl.generation import vllm_generation

from grpo_recipes.attributes import replaced
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.nccl import NcclClient

CLIENTS: dict[str, type[BridgeClient]] = {client.bridge: client for client in (FileClient, NcclClient)}


def bridge_in_place(name: str, **settings: Any) -> AbstractContextManager[Any]:
    """Let TRL's ``VLLMGeneration`` build the bridge ``name`` as its client inside."""
    return replaced(vllm_generation, VLLMClient=partial(CLIENTS[name], **settings))
