"""The hub's own client with a limit on every wait: by default it waits for an answer for ever."""

from __future__ import annotations

import httpx
from huggingface_hub import set_client_factory
from huggingface_hub.utils._http import default_client_factory


def bound_every_wait(seconds: float) -> None:
    """From now on no connection, read or write of huggingface_hub waits longer than ``seconds``."""

    def client() -> httpx.Client:
        made = default_client_factory()
        made.timeout = httpx.Timeout(seconds)
        return made

    set_client_factory(client)
