"""An injected fault: a server that packs its tied output embeddings once and never again, as vLLM's CPU build does."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Our packing for every layer except the output embeddings, which keep their first weights."""
    import vllm.model_executor.layers.utils as layer_utils

    from grpo_recipes.server import plugin

    plugin.register()
    unpacked = layer_utils.dispatch_cpu_unquantized_gemm

    def pack_embeddings(layer: Any, remove_weight: bool) -> None:
        if remove_weight:  # vLLM removes the original of every packed weight but the embeddings'
            unpacked(layer, remove_weight)
        elif not hasattr(layer, "fake_packed"):
            layer.fake_packed = layer.weight.detach().clone()
            layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, layer.fake_packed, bias)

    layer_utils.dispatch_cpu_unquantized_gemm = pack_embeddings
