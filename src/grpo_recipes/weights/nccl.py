"""Send weights by ``weight_sync: nccl``: TRL's native transfer between the trainer's and the server's GPUs."""

import os
from typing import Any
from urllib.parse import urlsplit

import torch

from grpo_recipes.process.reports import PhaseFile
from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors
from grpo_recipes.weights.transport import NOT_REPEATED, ServerError


class NcclClient(BridgeClient):
    """Send weights with TRL's native transfer: the trainer's and the server's GPUs are in one NCCL group."""

    bridge = "nccl"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Form the group as TRL does, in its own phase: NCCL waits without a limit for a side that never joins."""
        phase = PhaseFile(self._run_dir, int(os.environ.get("RANK", "0")))
        phase.enter("connect", 0)
        super(BridgeClient, self).init_communicator(device)
        phase.enter("start", 0)

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Post as every client does; if a step of a weight transfer fails, also print the error at once.

        The server has then left the collective, and this process may wait for it until the launcher ends the run.
        """
        try:
            return super()._post(url, **kwargs)
        except ServerError as error:
            if urlsplit(url).path in NOT_REPEATED:
                print(f"grpo: {error}", flush=True)
            raise

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Send as TRL does, once the optimizer's writes have finished, while the engine is paused.

        vLLM packs the tensors on its own streams, and the fingerprints are computed there too. These streams do not
        wait for the optimizer's default stream. Between the requests of a transfer, vLLM's parameters
        have no memory: a step for a request of another program would end the engine. So the engine stays paused after
        a failed transfer.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._sync += 1
        self.pause("keep")
        super(BridgeClient, self).update_named_params(metadata, named_params)
        self._retry(self.resume)

    def _finish_weight_update(self) -> None:
        """Finish as TRL does, then send the workers the number of the sync: TRL's transfer cannot contain it."""
        super()._finish_weight_update()
        self.call_workers("grpo_count", sync=self._sync)
