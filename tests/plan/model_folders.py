"""Model folders with only a config.json, the only file that an estimate reads."""

from __future__ import annotations

import json
from pathlib import Path

QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL = {**QWEN_7B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip


def model_folder(folder: Path, config: dict | None = None) -> str:
    """Create the folder of a model. The default is a 7B model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN_7B if config is None else config))
    return str(folder)
