"""The sizes of the models that recipes are shipped for, as their config.json on the hub tells them."""

from __future__ import annotations


def _qwen(kind: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: object) -> dict:
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


# Folder under recipes/ -> (config.json, parameters as published, in billions).
SHIPPED: dict[str, tuple[dict, float]] = {
    "Qwen2.5-0.5B-Instruct": (_qwen("qwen2", 896, 4864, 24, 14, 2), 0.494),
    "Qwen2.5-1.5B-Instruct": (_qwen("qwen2", 1536, 8960, 28, 12, 2), 1.544),
    "Qwen2.5-3B-Instruct": (_qwen("qwen2", 2048, 11008, 36, 16, 2), 3.086),
    "Qwen2.5-7B-Instruct": (
        _qwen("qwen2", 3584, 18944, 28, 28, 4, vocab_size=152064, tie_word_embeddings=False),
        7.616,
    ),
    "Qwen3-0.6B": (_qwen("qwen3", 1024, 3072, 28, 16, 8, head_dim=128, max_position_embeddings=40960), 0.596),
    "Qwen3-4B": (_qwen("qwen3", 2560, 9728, 36, 32, 8, head_dim=128, max_position_embeddings=40960), 4.022),
    "Llama-3.1-8B-Instruct": (
        _qwen("llama", 4096, 14336, 32, 32, 8, vocab_size=128256, tie_word_embeddings=False,
              max_position_embeddings=131072),
        8.030,
    ),
}  # fmt: skip
