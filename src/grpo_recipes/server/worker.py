"""Mixed into vLLM's worker by ``--worker-extension-cls``; its methods are called through ``/collective_rpc``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

_INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements at a time: 8 bytes each while they are summed, on a GPU that vLLM has filled
_LOGGER = logging.getLogger("vllm.grpo_recipes")  # a child of vLLM's own: only those reach the server's log


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bit patterns, each mixed by a multiplicative hash, as an int64 scalar.

    It does not depend on the order of the elements, so that the parts of a fused tensor (q, k and v in ``qkv_proj``),
    or its shards, add up to the whole; zero padding adds nothing. Sums wrap around at 64 bits.
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGER_VIEWS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(_CHUNK):
        # Without mixing, one step of the last bit up in one element and down in another would cancel.
        mixed = chunk.to(torch.int64) * 0x9E3779B97F4A7C1
        mixed ^= mixed >> 29
        total += (mixed * 0x3C79AC492BA7B653).sum()
    return total


class WeightReport:
    """Report what this worker's model holds, for the guard; and load weights, which the server's log shows."""

    _grpo_loads = 0

    def grpo_load(self, folder: str) -> int:
        """Load the safetensors of ``folder`` into the model in place; return the count of loads so far."""
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined]
        self._grpo_loads += 1
        _LOGGER.info("grpo: weights loaded, load %d", self._grpo_loads)
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
        """Return what TRL asks vLLM's ``/server_info`` for, which runs pip too: seconds, and an error without it."""
        config = self.vllm_config  # type: ignore[attr-defined]
        transfer = config.weight_transfer_config
        return {
            "model_config": {"logprobs_mode": str(config.model_config.logprobs_mode)},
            "weight_transfer_config": None if transfer is None else {"backend": transfer.backend},
        }


def _rows_without_copies(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield q's rows of each qkv projection whose key and value heads another worker holds too, and counts."""
    for prefix, module in model.named_modules():
        replicas = getattr(module, "num_kv_head_replicas", 1)
        if replicas > 1 and module.tp_rank % replicas:
            for name, parameter in module.named_parameters(recurse=False):
                if name in ("weight", "bias"):
                    yield f"{prefix}.{name}", parameter.data[: module.num_heads * module.head_size]
