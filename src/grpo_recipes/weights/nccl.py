"""The bridge ``nccl``: TRL's native transfer between the trainer's and the server's GPUs."""

import os
from typing import Any
from urllib.parse import urlsplit

import torch

from grpo_recipes.process.reports import PhaseFile
from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors
from grpo_recipes.weights.transport import NOT_REPEATED, ServerError


class NcclClient(BridgeClient):
    """TRL's native transfer, with the trainer's and the server's GPUs in one NCCL group."""

    bridge = "nccl"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Form the group as TRL does, in a phase of its own: NCCL waits without a limit for a side that never comes."""
        phase = PhaseFile(self._run_dir, int(os.environ.get("RANK", "0")))
        phase.enter("connect", 0)
        super().init_communicator(device)
        phase.enter("start", 0)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Post as every bridge does, and print at once why a step of a transfer failed.

        The server's side of the collective is then gone, and ours may wait for it until the launcher ends the run.
        """
        try:
            return super()._post(url, **kwargs)
        except ServerError as error:
            if urlsplit(url).path in NOT_REPEATED:
                print(f"grpo: {error}", flush=True)
            raise

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Send as TRL does, once the optimizer's writes have finished.

        vLLM packs the tensors on its own streams, and the fingerprints are taken there too. These streams do not wait
        for the default stream, on which the optimizer writes.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._sync += 1
        super(BridgeClient, self).update_named_params(metadata, named_params)

    def _finish_weight_update(self) -> None:
        """Finish as TRL does, and give the workers the sync's number, for which the transfer itself has no place."""
        super()._finish_weight_update()
        self.call_workers("grpo_count", sync=self._sync)
