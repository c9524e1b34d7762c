"""Putting a bridge in TRL's place: one name replaced around the trainer's construction."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from trl.generation import vllm_generation

from grpo_recipes.weights.client import BridgeClient, ClientSettings
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.nccl import NcclClient

BRIDGES: dict[str, type[BridgeClient]] = {client.bridge: client for client in (FileClient, NcclClient)}


@contextmanager
def bridge_in_place(name: str, settings: ClientSettings) -> Iterator[None]:
    """While inside, TRL's ``VLLMGeneration`` builds the bridge ``name`` as its client."""
    original = vllm_generation.VLLMClient
    vllm_generation.VLLMClient = functools.partial(BRIDGES[name], settings=settings)
    try:
        yield
    finally:
        vllm_generation.VLLMClient = original
