"""The ``nccl`` bridge: TRL's native transfer between GPUs."""

from __future__ import annotations

from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors


class NcclClient(BridgeClient):
    """Needs the trainer's and the server's GPUs in one NCCL group."""

    bridge = "nccl"

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        super(BridgeClient, self).update_named_params(metadata, named_params)
