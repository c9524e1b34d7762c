"""Reaching the hub: whether it answers from here, which models need an accepted licence, and a limit on every wait."""

from collections.abc import Mapping
from typing import Any

from grpo_recipes.process.reports import address_reachable
from grpo_recipes.secrets import masked

HUB = "https://huggingface.co"
EXIT_INTERRUPTED = 130
INTERRUPTED = "grpo: interrupted; run it again: what came is kept"
# Beginnings of names whose repositories ask for an accepted licence. The hub alone knows for sure: `grpo fetch` asks.
_GATED = (
    "meta-llama/", "google/gemma-", "google/codegemma-", "google/medgemma-", "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.1", "mistralai/Mistral-7B-Instruct-v0.2", "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mistral-Nemo", "mistralai/Mistral-Large", "mistralai/Mistral-Small-24B", "mistralai/Ministral-8B",
    "mistralai/Mixtral-8x", "mistralai/Codestral-", "CohereForAI/", "CohereLabs/", "bigcode/starcoder",
    "tiiuae/falcon-180B",
)  # fmt: skip


def is_offline(environment: Mapping[str, str]) -> bool:
    """Return whether the user keeps the hub's clients off the network."""
    given = (environment.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.lower() in ("1", "on", "yes", "true") for value in given)  # as huggingface_hub reads them


def endpoint(environment: Mapping[str, str]) -> str:
    """Return the hub's address: HF_ENDPOINT, or the public one."""
    return (environment.get("HF_ENDPOINT") or HUB).rstrip("/")


def hub_answers(environment: Mapping[str, str], timeout: float = 5.0) -> bool:
    """Return whether the hub, or the proxy to it, takes a connection within ``timeout`` seconds; False when offline."""
    return not is_offline(environment) and address_reachable(endpoint(environment), environment, timeout)


def unreachable_reason(environment: Mapping[str, str]) -> str:
    """Return why the hub does not answer, where it does not."""
    return "HF_HUB_OFFLINE is set" if is_offline(environment) else f"{endpoint(environment)} does not answer"


def error_line(error: Exception) -> str:
    """Return the message of an error, secrets masked, as one line."""
    return masked(" ".join(str(error).split())[:300]).rstrip(".") or type(error).__name__


def limit_every_wait(seconds: float) -> None:
    """Let no connection, read or write of huggingface_hub wait longer; by default some wait without a limit."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def client() -> Any:
        made = default_client_factory()
        made.timeout = seconds
        return made

    set_client_factory(client)


def gated_note(model: str) -> str | None:
    """Return what a person must do before this model can be downloaded, None for one not known to be gated."""
    return f"{model} is gated: {how_to_get_access(model)}; grpo fetch tests it" if model.startswith(_GATED) else None


def how_to_get_access(name: str, kind: str = "model") -> str:
    """Return the steps that open a gated model or dataset."""
    page = f"{HUB}/{'datasets/' if kind == 'dataset' else ''}{name}"
    return f"accept its licence at {page}, then export HF_TOKEN or run hf auth login"
