"""vLLM plug-in (entry point ``vllm.general_plugins``), loaded in every process of the server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from grpo_recipes.process.reports import dump_stacks_on_signal


def register() -> None:
    """Let every process of the server write its stacks on request and, on CPU, renew its weights."""
    if os.environ.get("GRPO_SERVER") == "1":  # a rank that has vLLM inside writes its stacks to a file of its own
        _dump_stacks()
        os.register_at_fork(after_in_child=_dump_stacks)
    _keep_linear_weights()


def _dump_stacks() -> None:
    dump_stacks_on_signal(Path(os.environ["GRPO_RUN_DIR"]), f"server_{os.getpid()}")


def _keep_linear_weights() -> None:
    """On CPU keep linear weights as they are, so that a reload reaches the matrix product, and the guard can read them.

    vLLM's CPU build packs each weight into a private copy when the model is loaded and multiplies with that copy. With
    tied embeddings a reload does not renew it: the server answers 200 and computes with old weights.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.model_executor.layers.utils as layer_utils

    if not hasattr(layer_utils, "dispatch_cpu_unquantized_gemm"):
        raise RuntimeError("this vLLM has no dispatch_cpu_unquantized_gemm: the CPU plug-in does not fit it")
    layer_utils.dispatch_cpu_unquantized_gemm = _multiply_unpacked


def _multiply_unpacked(layer: Any, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear
