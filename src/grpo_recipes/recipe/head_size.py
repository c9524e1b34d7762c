"""Reject a model with an attention head size that vLLM lacks on CPU. Its engine dies at the first request."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.rules import uses_external_server

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm/v1/attention/backends/cpu_attn.py


def head_size_problems(recipe: Recipe, _: Mapping[str, str], device: str | None = None) -> Iterator[Problem]:
    """Yield a problem if vLLM on CPU does not support the head_dim of the model's folder.

    Without a local folder or a vLLM of the run, or if ``device`` is not "cpu", nothing is checked.
    """
    if not recipe.server.use_vllm or uses_external_server(recipe) or device != "cpu":
        return
    size = head_size(Path(os.path.expanduser(recipe.model.name)))
    if size is not None and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        message = f"head_dim is {size}, but vLLM's attention on CPU supports only {sizes}"
        yield recipe.problem("model_name_or_path", message, "use a model with one of these, or set use_vllm: false")


def head_size(folder: Path) -> int | None:
    """Return the size of an attention head from a model folder's config.json, or None if it is unknown.

    Without ``head_dim``, the size is ``hidden_size // num_attention_heads``. Return None for a model with multi-head
    latent attention (MLA), and if the file is missing or damaged.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        config = json.loads((folder / "config.json").read_bytes())
        config = config.get("text_config") or config
        if config.get("kv_lora_rank"):
            return None
        heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
        return config.get("head_dim") or (hidden // heads if heads and hidden else None)
    return None
