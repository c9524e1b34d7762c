"""Whether the hub can be reached from here, and what fetching says. No torch, no hub client."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_recipes.fetch.gated import HUB
from grpo_recipes.process.network import address_reachable

EXIT_INTERRUPTED = 130
INTERRUPTED = "grpo: interrupted; run it again: what came is kept"
_TRUE = ("1", "on", "yes", "true")  # as huggingface_hub reads them


def told_offline(environment: Mapping[str, str]) -> bool:
    """Whether the user keeps the hub's clients off the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(environment.get(name, "").lower() in _TRUE for name in names)


def endpoint(environment: Mapping[str, str]) -> str:
    """The hub's address: HF_ENDPOINT, or the public one."""
    return (environment.get("HF_ENDPOINT") or HUB).rstrip("/")


def hub_answers(environment: Mapping[str, str], timeout: float = 5.0) -> bool:
    """Whether the hub, or the proxy to it, takes a connection within ``timeout`` seconds; False when told offline."""
    return not told_offline(environment) and address_reachable(endpoint(environment), environment, timeout)


def human(size: float) -> str:
    """A number of bytes for a person."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
