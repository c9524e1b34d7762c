"""The sizes of a model, from its ``config.json`` or, before it is fetched, from the numbers shipped in ``models.json``.

read_model(plan.model, recipe["model_name_or_path"])["parameters"]
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.errors import translate
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


def model_facts(config: Mapping[str, Any]) -> Facts:
    """Return the sizes of a decoder from its ``config.json``: name -> number, and ``saved``, the dtype in the file.

    Raise UnknownShape for another kind of model, or if a size is missing.
    """
    kind = config.get("model_type")
    if kind not in _KNOWN:
        raise UnknownShape(f"models of type '{kind}' are not supported")
    wrong = (KeyError, TypeError, ValueError, ZeroDivisionError)
    with translate(wrong, lambda error: UnknownShape(f"its config.json lacks a size ({error!r})")):
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
    """Return the sizes of the model in a folder; without a config.json there, the shipped sizes of the model ``name``.

    Raise UnknownShape if neither exists.
    """
    file = Path(folder) / "config.json"
    if name in shipped_configs() and not file.is_file():
        return model_facts(shipped_configs()[name])
    absent = "its config.json is not on this machine; grpo fetch RECIPE downloads it"
    with translate(OSError, lambda _: UnknownShape(absent)):
        config = load_json_mapping(file.read_bytes())
    if config is None:
        raise UnknownShape("its config.json is not a JSON mapping")
    return model_facts(config)


@functools.cache
def shipped_configs() -> Mapping[str, Any]:
    """Return the sizes in config.json of the models of shipped recipes, by model_name_or_path."""
    configs: Mapping[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text())
    return configs
