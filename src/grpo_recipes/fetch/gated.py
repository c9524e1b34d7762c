"""Models behind a licence that a person must accept. No torch, no socket: a table of the best known."""

from __future__ import annotations

HUB = "https://huggingface.co"
# Beginnings of names whose repositories ask for an accepted licence. The hub alone knows for sure: `grpo fetch` asks.
_GATED = (
    "meta-llama/",
    "google/gemma-",
    "google/codegemma-",
    "google/medgemma-",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.2",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mistral-Nemo",
    "mistralai/Mistral-Large",
    "mistralai/Mistral-Small-24B",
    "mistralai/Ministral-8B",
    "mistralai/Mixtral-8x",
    "mistralai/Codestral-",
    "CohereForAI/",
    "CohereLabs/",
    "bigcode/starcoder",
    "tiiuae/falcon-180B",
)


def gated_note(model: str) -> str | None:
    """What a person must do before this model can be downloaded, or None when nothing is known."""
    if not model.startswith(_GATED):
        return None
    return f"{model} is gated: {how_to_get_access(model)}; grpo fetch tests it"


def how_to_get_access(name: str, kind: str = "model") -> str:
    """The steps that open a gated model or dataset."""
    page = f"{HUB}/{'datasets/' if kind == 'dataset' else ''}{name}"
    return f"accept its licence at {page}, then export HF_TOKEN or run hf auth login"
