"""Compute a model's layer sizes and number of parameters from its ``config.json``, without loading the model.

For the models of shipped recipes, ``models.json`` has the numbers before the model is downloaded. Only decoders of
the types in ``_KNOWN`` are supported. For other models, and without numbers, UnknownShape is raised.

    read_model(plan.model, recipe.model.name)["parameters"]
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.errors import translate_errors
from grpo_recipes.runs.rundir import load_json_mapping

Facts = dict[str, Any]
# Decoders with grouped attention and a gated MLP: the same formula counts their parameters.
_KNOWN = frozenset({"gemma", "granite", "llama", "mistral", "qwen2", "qwen3"})
_CONFIG_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


class UnknownShape(Exception):
    """The sizes of a model are unknown. The message gives the reason and, after a semicolon, the fix."""


def compute_model_sizes(config: Mapping[str, Any]) -> Facts:
    """Compute the sizes of a decoder from its ``config.json``: widths, layers, heads and numbers of elements, by name.

    ``saved`` in the result is the dtype in the file, or None.

    Raise UnknownShape for another kind of model, or if a size is missing.
    """
    kind = config.get("model_type")
    if kind not in _KNOWN:
        raise UnknownShape(f"models of type '{kind}' are not supported")
    wrong = (KeyError, TypeError, ValueError, ZeroDivisionError)
    with translate_errors(wrong, lambda error: UnknownShape(f"its config.json lacks a size ({error!r})")):
        hidden, intermediate, layers, heads, words, positions = (int(config[name]) for name in _CONFIG_KEYS)
        kv_heads, head = int(config.get("num_key_value_heads") or heads), int(config.get("head_dim") or hidden // heads)
    queries, keys, embedding = heads * head, kv_heads * head, words * hidden
    biases = queries + 2 * keys if kind == "qwen2" or config.get("attention_bias") else 0
    norms = 2 * hidden + (2 * head if kind == "qwen3" else 0)
    layer = 2 * hidden * (queries + keys) + 3 * hidden * intermediate + biases + norms
    ends = embedding if config.get("tie_word_embeddings", kind == "gemma") else 2 * embedding
    return {
        "hidden": hidden, "intermediate": intermediate, "layers": layers, "heads": heads, "kv_heads": kv_heads,
        "queries": queries, "keys": keys,  # width of all query heads, width of all key heads
        "head_norms": queries + keys if kind == "qwen3" else 0,  # width that a norm for each head covers
        "layer": layer, "embedding": embedding, "parameters": layers * layer + ends + hidden,  # elements
        "vocabulary": words, "positions": positions, "saved": config.get("dtype") or config.get("torch_dtype"),
    }  # fmt: skip


def read_model(folder: str, name: str = "") -> Facts:
    """Read the sizes of a model (see ``compute_model_sizes``) from the config.json in a folder.

    Without that file, use the shipped numbers of the model ``name``. Raise UnknownShape if neither exists, if the file
    is not a JSON mapping, or if the type of model is not supported.
    """
    file = Path(folder) / "config.json"
    if name in load_shipped_configs() and not file.is_file():
        return compute_model_sizes(load_shipped_configs()[name])
    absent = "its config.json is not on this machine; grpo fetch RECIPE downloads it"
    with translate_errors(OSError, lambda _: UnknownShape(absent)):
        config = load_json_mapping(file.read_bytes())
    if config is None:
        raise UnknownShape("its config.json is not a JSON mapping")
    return compute_model_sizes(config)


@functools.cache
def load_shipped_configs() -> Mapping[str, Any]:
    """Read ``models.json``: for each model of the shipped recipes, the sizes in its config.json."""
    configs: Mapping[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text())
    return configs
