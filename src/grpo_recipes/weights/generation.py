"""Extend TRL's ``VLLMGeneration`` with hooks that TRL does not have: a source of parameters, and code around each sync.

``bridges.ServerGeneration`` samples from the run's server. ``colocated.ColocatedGeneration`` has vLLM in this process.
"""

from collections.abc import Callable, Iterator

import torch
from trl.generation.vllm_generation import VLLMGeneration

from grpo_recipes.trainer_protocol import Trainer

Tensors = Iterator[tuple[str, torch.Tensor]]
Sync = Callable[[], None]


class Generation(VLLMGeneration):
    """TRL's generation with vLLM; the trainer can choose the parameters of a sync and add code around it."""

    _parameter_source: Callable[[], Tensors] | None = None
    _sync_wrappers: tuple[Callable[[Sync], Sync], ...] = ()

    def attach(self, trainer: Trainer) -> None:
        """Connect the generation to the trainer. Called once, on every rank."""

    def stream_parameters_from(self, source: Callable[[], Tensors]) -> None:
        """Let each sync send the parameters that ``source`` yields instead of the model's own."""
        self._parameter_source = source

    def wrap_sync(self, wrapper: Callable[[Sync], Sync]) -> None:
        """Let each later sync run ``wrapper(sync)`` instead of ``sync``. The last added wrapper is the outermost."""
        self._sync_wrappers = (*self._sync_wrappers, wrapper)

    def sync_weights(self) -> None:
        """Send the weights to vLLM, with the wrappers of ``wrap_sync`` around the transfer."""
        sync: Sync = self._send_weights
        for wrapper in self._sync_wrappers:
            sync = wrapper(sync)
        sync()

    def _send_weights(self) -> None:
        """Send the weights as TRL does, without the wrappers."""
        super().sync_weights()

    def _iter_named_params(self) -> Tensors:
        """Yield the names and values of a sync: from ``stream_parameters_from``, or else the model's own."""
        return super()._iter_named_params() if self._parameter_source is None else self._parameter_source()
