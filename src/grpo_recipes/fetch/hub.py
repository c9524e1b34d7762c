"""Test the connection to the Hugging Face hub, explain failures and gated models, and limit every wait."""

from collections.abc import Mapping
from typing import Any

from grpo_recipes.process.reports import can_reach
from grpo_recipes.secrets import mask_secrets

HUB = "https://huggingface.co"
EXIT_INTERRUPTED = 130
INTERRUPTED = "grpo: interrupted; run it again to continue: finished files are kept"
# Prefixes of repositories that require an accepted license. Only the hub knows for sure, and `grpo fetch` asks it.
_GATED = (
    "meta-llama/", "google/gemma-", "google/codegemma-", "google/medgemma-", "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.1", "mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mistral-Nemo", "mistralai/Mistral-Large", "mistralai/Mistral-Small-24B", "mistralai/Ministral-8B",
    "mistralai/Mixtral-8x", "mistralai/Codestral-", "CohereForAI/", "CohereLabs/", "bigcode/starcoder",
    "tiiuae/falcon-180B",
)  # fmt: skip


def is_offline(environment: Mapping[str, str]) -> bool:
    """Return whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE keeps the hub's clients offline."""
    values = (environment.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.lower() in ("1", "on", "yes", "true") for value in values)  # the values huggingface_hub accepts


def endpoint(environment: Mapping[str, str]) -> str:
    """Return the hub's address without a final slash: HF_ENDPOINT, or the public hub."""
    return (environment.get("HF_ENDPOINT") or HUB).rstrip("/")


def hub_answers(environment: Mapping[str, str], timeout: float = 5.0) -> bool:
    """Return whether the hub or its proxy accepts a connection within ``timeout`` seconds; False when offline."""
    return not is_offline(environment) and can_reach(endpoint(environment), environment, timeout)


def explain_unreachable_hub(environment: Mapping[str, str]) -> str:
    """Return why the hub cannot be reached: "HF_HUB_OFFLINE is set", or "ADDRESS does not answer"."""
    return "HF_HUB_OFFLINE is set" if is_offline(environment) else f"{endpoint(environment)} does not answer"


def format_error_line(error: Exception) -> str:
    """Return an error's message as one line with masked secrets."""
    return mask_secrets(" ".join(str(error).split())[:300]).rstrip(".") or type(error).__name__


def limit_every_wait(seconds: float) -> None:
    """Set a timeout for each later connection, read and write of huggingface_hub in this process.

    Some have none by default.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def client_with_timeout() -> Any:
        """Return huggingface_hub's default HTTP client with the timeout."""
        client = default_client_factory()
        client.timeout = seconds
        return client

    set_client_factory(client_with_timeout)


def describe_gated_model(model: str) -> str | None:
    """Return a note with the steps before this model can be downloaded, or None if its name is not known as gated."""
    return f"{model} is gated: {explain_access(model)}; grpo fetch tests it" if model.startswith(_GATED) else None


def explain_access(name: str, kind: str = "model") -> str:
    """Return the steps that give access to a gated model or dataset."""
    page = f"{HUB}/{'datasets/' if kind == 'dataset' else ''}{name}"
    return f"accept its license at {page}, then export HF_TOKEN or run hf auth login"
