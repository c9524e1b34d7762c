"""Which files of a model's repository a run needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_LARGEST_SMALL_FILE = 64 << 20
# The same weights in the formats of other libraries, archives, and pictures for the page.
_NEVER = (
    ".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ggml", ".ot", ".tflite",
    ".mlmodel", ".npz", ".zip", ".tar", ".gz", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".mp4",
    ".md", ".gitattributes",
)  # fmt: skip
_FOLDERS = ("additional_chat_templates/",)


def wanted_files(sizes: Mapping[str, int], code: bool = False) -> list[str]:
    """The files to download: safetensors (or pytorch_model*.bin without any), configuration and tokenizer.

    Args:
        sizes: every file of the repository with its size in bytes.
        code: whether its Python files are wanted (trust_remote_code).
    """
    root = [name for name in sizes if "/" not in name or name.startswith(_FOLDERS)]
    weights = [name for name in root if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if not weights:
        weights = [name for name in root if name.startswith("pytorch_model") and name.endswith(".bin")]
    small = [name for name in root if _is_small_part(name, sizes[name], code)]
    return sorted({*weights, *small})


def _is_small_part(name: str, size: int, code: bool) -> bool:
    if name.endswith(_NEVER) or name.endswith(".safetensors") or size > _LARGEST_SMALL_FILE:
        return False
    # params.json and consolidated.* are Mistral's own format, which vLLM would prefer to the one that is trained.
    if name == "params.json" or name.startswith("consolidated"):
        return False
    return code or not name.endswith(".py")
