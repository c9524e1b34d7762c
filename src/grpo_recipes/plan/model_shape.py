"""The sizes of a model, from its ``config.json`` alone. Pure: no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Decoders with grouped attention and a gated MLP, which are all counted the same way.
_KNOWN = frozenset({"gemma", "granite", "llama", "mistral", "qwen2", "qwen3"})
_HEAD_NORMS = frozenset({"qwen3"})
_TIED_BY_DEFAULT = frozenset({"gemma"})


class UnknownShape(Exception):
    """The sizes cannot be told; the message says why and, after a semicolon, what to do."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        layers: number of layers.
        heads: query heads.
        kv_heads: key and value heads.
        head: width of a head.
        vocabulary: rows of the embedding.
        tied: whether the output layer is the embedding.
        attention_bias: elements of the biases of a layer's q, k and v.
        head_norms: whether queries and keys are normalised head by head.
        positions: longest sequence.
        dtype: dtype of the saved weights, None where the file does not say.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool
    attention_bias: int
    head_norms: bool
    positions: int
    dtype: str | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """The sizes that a ``config.json`` tells.

        Raises:
            UnknownShape: a family that is not counted here, a mixture of experts, or a number is missing.
        """
        kind = config.get("model_type")
        if kind not in _KNOWN:
            raise UnknownShape(f"models of type '{kind}' are not counted")
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head = int(config.get("head_dim") or hidden // heads)
            biased = kind == "qwen2" or bool(config.get("attention_bias"))
            return cls(
                hidden=hidden,
                intermediate=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=kv_heads,
                head=head,
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", kind in _TIED_BY_DEFAULT)),
                attention_bias=(heads + 2 * kv_heads) * head if biased else 0,
                head_norms=kind in _HEAD_NORMS,
                positions=int(config["max_position_embeddings"]),
                dtype=config.get("dtype") or config.get("torch_dtype"),
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise UnknownShape(f"its config.json is not understood ({type(error).__name__}: {error})") from None

    @property
    def embedding(self) -> int:
        """Elements of the embedding, and of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Linear layers of one layer: name -> (inputs, outputs)."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer(self) -> int:
        """Elements of one layer."""
        norms = 2 * self.hidden + (2 * self.head if self.head_norms else 0)
        return sum(inputs * outputs for inputs, outputs in self.linear.values()) + self.attention_bias + norms

    @property
    def parameters(self) -> int:
        """Elements of the model, tied ones once."""
        return self.layers * self.layer + self.embedding * (1 if self.tied else 2) + self.hidden


def read_shape(model: str) -> ModelShape:
    """The sizes of the model a plan names.

    Args:
        model: its folder; a hub id where it has not been fetched.

    Raises:
        UnknownShape: its configuration is not here, or not understood.
    """
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise UnknownShape("its config.json is not on this machine; grpo fetch RECIPE brings it") from None
    except ValueError:
        raise UnknownShape("its config.json is not JSON") from None
    return ModelShape.of(config if isinstance(config, dict) else {})
