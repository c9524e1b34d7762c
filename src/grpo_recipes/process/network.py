"""Whether a host answers, in seconds: a job on a node without a route must say so before it starts anything."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}


def reachable(host: str, port: int, timeout: float = 5.0) -> bool:
    """Whether a TCP connection to ``host:port`` opens within ``timeout`` seconds, the lookup of the name included."""
    opened: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout):
            opened.append(True)

    # In a thread: on a node without a name server the lookup of the name alone can take half a minute.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(timeout)
    return bool(opened)


def route_to(address: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port that a client of ``address`` connects to: those of its proxy, where the environment names one.

    Args:
        address: an address with its scheme, e.g. ``https://api.wandb.ai``.
        environment: variables of the processes that will connect; ``HTTPS_PROXY`` and its like are looked at.
    """
    wanted = urlsplit(address)
    lower = {name.lower(): value for name, value in environment.items() if name.lower().endswith("_proxy")}
    proxy = lower.get(f"{wanted.scheme}_proxy") or lower.get("all_proxy")
    if proxy and not _bypassed(wanted.hostname or "", lower.get("no_proxy", "")):
        used = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    else:
        used = wanted
    return used.hostname or "", used.port or _PORTS.get(used.scheme, 443)


def _bypassed(host: str, no_proxy: str) -> bool:
    names = [entry.strip().partition(":")[0].removeprefix("*").removeprefix(".") for entry in no_proxy.split(",")]
    return "*" in no_proxy.split(",") or any(name and (host == name or host.endswith(f".{name}")) for name in names)


def address_reachable(address: str, environment: Mapping[str, str], timeout: float = 5.0) -> bool:
    """Whether a client of ``address`` would get a connection, to it or to its proxy."""
    return reachable(*route_to(address, environment), timeout)
