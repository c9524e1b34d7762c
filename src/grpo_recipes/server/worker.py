"""Mixed into vLLM's worker by ``--worker-extension-cls``; its methods are called through ``/collective_rpc``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.logger import init_logger

from grpo_recipes.server.fingerprint import fingerprint

# A child of vLLM's own logger: only those reach the server's log.
logger = init_logger("vllm.grpo_recipes")


class WeightReport:
    """Report what this worker's model holds, for the guard; and load weights, which the server's log shows."""

    _grpo_loads = 0

    def grpo_load(self, folder: str) -> int:
        """Load the safetensors of ``folder`` into the model in place; return the count of loads so far."""
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]
        self._grpo_loads += 1
        logger.info("grpo: weights loaded, load %d", self._grpo_loads)
        return self._grpo_loads

    def grpo_weights(self) -> dict[str, Any]:
        """Return ``parameters``: name -> [fingerprint, dtype], tied ones once; ``packed``: fused name -> its parts."""
        model = self.get_model()  # type: ignore[attr-defined]
        parameters = {
            name: [int(fingerprint(parameter.data)), str(parameter.dtype).removeprefix("torch.")]
            for name, parameter in model.named_parameters()
        }
        for name, owned in _rows_without_copies(model):
            parameters[name][0] = int(fingerprint(owned))
        return {"parameters": parameters, "packed": dict(getattr(model, "packed_modules_mapping", {}))}

    def grpo_config(self) -> dict[str, Any]:
        """Return the part of vLLM's configuration that TRL asks a server for.

        vLLM's own ``/server_info`` also lists the machine's packages with pip: seconds, and an error where pip is not
        installed.
        """
        config = self.vllm_config  # type: ignore[attr-defined]
        transfer = config.weight_transfer_config
        return {
            "model_config": {"logprobs_mode": str(config.model_config.logprobs_mode)},
            "weight_transfer_config": None if transfer is None else {"backend": transfer.backend},
        }


def _rows_without_copies(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the rows of every qkv projection that this worker alone counts for.

    With more workers than key and value heads, vLLM gives several of them the same heads: only the first counts them.
    """
    for prefix, module in model.named_modules():
        replicas = getattr(module, "num_kv_head_replicas", 1)
        if replicas > 1 and module.tp_rank % replicas:
            for name, parameter in module.named_parameters(recurse=False):
                if name in ("weight", "bias"):
                    yield f"{prefix}.{name}", parameter.data[: module.num_heads * module.head_size]
