"""The bridges, and how one takes the place of TRL's client; ``recipe.registry.BRIDGES`` says what each needs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors.torch import save_file
from trl.generation import vllm_generation

from grpo_recipes.weights.client import BridgeClient, ClientSettings, Metadata, NamedTensors


class FileClient(BridgeClient):
    """Safetensors in a folder that trainer and server both see, usually shared memory; the server reloads them."""

    bridge = "file"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files, so there is no channel to open."""

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        folder = self.settings.sync_dir
        folder.mkdir(parents=True, exist_ok=True)
        # Cloned: under ZeRO-3 and FSDP a gathered parameter is gone when the next one comes.
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_params}
        temporary = folder / ".model.safetensors"
        save_file(tensors, temporary)
        temporary.replace(folder / "model.safetensors")
        self._sent = True
        self._through_restarts(self._resend)

    def _resend(self) -> None:
        self.call_workers("grpo_load", folder=str(self.settings.sync_dir))


class NcclClient(BridgeClient):
    """TRL's native transfer, with the trainer's and the server's GPUs in one NCCL group."""

    bridge = "nccl"

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        super(BridgeClient, self).update_named_params(metadata, named_params)


CLIENTS: dict[str, type[BridgeClient]] = {client.bridge: client for client in (FileClient, NcclClient)}


@contextmanager
def bridge_in_place(name: str, settings: ClientSettings) -> Iterator[None]:
    """Let TRL's ``VLLMGeneration`` build the bridge ``name`` as its client inside."""
    original = vllm_generation.VLLMClient
    vllm_generation.VLLMClient = functools.partial(CLIENTS[name], settings=settings)
    try:
        yield
    finally:
        vllm_generation.VLLMClient = original
