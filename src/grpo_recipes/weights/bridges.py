"""List the client class of each weight sync method, and make TRL's trainer use one of them.

TRL's trainer builds its own generation class and its own vLLM client. Inside ``trl_building_client``, it builds
``ServerGeneration`` with our client instead::

    with trl_building_client(CLIENTS["file"], args=args, run_dir=run_dir, seed=seed, stop=stop):
        trl.GRPOTrainer.__init__(trainer, ...)
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from grpo_recipes.attributes import replace_attributes
from grpo_recipes.trainer_protocol import Trainer
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.generation import Generation
from grpo_recipes.weights.lora import LoraClient
from grpo_recipes.weights.nccl import NcclClient
from grpo_recipes.weights.restart import RestartClient
from grpo_recipes.weights.shared import SharedClient

CLIENTS: dict[str, type[BridgeClient]] = {
    client.bridge: client for client in (FileClient, NcclClient, SharedClient, LoraClient, RestartClient)
}


class ServerGeneration(Generation):
    """TRL's generation with a vLLM server. Rank 0 creates the ``client`` class with ``settings`` as ``vllm_client``."""

    vllm_client: BridgeClient

    def __init__(self, *, client: type[BridgeClient], settings: dict[str, Any], **kwargs: Any) -> None:
        self._client_class, self._client_settings = client, settings
        super().__init__(**kwargs)

    def _init_vllm(self) -> None:
        """Connect as TRL does, with our client class instead of ``VLLMClient`` in TRL's module."""
        with replace_attributes(vllm_generation, VLLMClient=partial(self._client_class, **self._client_settings)):
            super()._init_vllm()

    def attach(self, trainer: Trainer) -> None:
        """Attach rank 0's client to the trainer."""
        if self.accelerator.is_main_process:
            self.vllm_client.attach(trainer)

    def _send_weights(self) -> None:
        """Send each parameter as TRL does, or let rank 0's client send the model while the other ranks wait."""
        if self._client_class.streams:
            super()._send_weights()
            return
        if self.accelerator.is_main_process:
            self.vllm_client.sync_model(self.accelerator.unwrap_model(self.model))
            self.vllm_client.reset_prefix_cache()
        self.accelerator.wait_for_everyone()


def trl_building_client(client: type[BridgeClient], **settings: Any) -> AbstractContextManager[None]:
    """Return a context manager: TRL's trainer builds a ``ServerGeneration`` with this client class in it.

    ``settings`` are keyword arguments of the client.
    """
    return replace_attributes(grpo_trainer, VLLMGeneration=partial(ServerGeneration, client=client, settings=settings))
