"""Whether a host answers, in seconds: a job on a node without a route must say so before it starts anything."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit


def reachable(host: str, port: int, timeout: float = 5.0) -> bool:
    """Return whether a TCP connection to ``host:port`` opens within ``timeout`` seconds, name lookup included."""
    opened = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=timeout):
            opened.set()

    # In a thread: on a node without a name server the lookup of the name alone can take half a minute.
    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(timeout)
    return opened.is_set()


def route_to(address: str, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port that a client of ``address`` (with its scheme) connects to.

    These are the proxy's where ``HTTPS_PROXY`` or its like in ``environment`` names one for that address.
    """
    wanted = urlsplit(address)
    host = wanted.hostname or ""
    lower = {name.lower(): value for name, value in environment.items()}
    proxy = lower.get(f"{wanted.scheme}_proxy") or lower.get("all_proxy")
    direct = lower.get("no_proxy", "").split(",")
    names = [entry.strip().partition(":")[0].removeprefix("*").removeprefix(".") for entry in direct]
    if proxy and "*" not in direct and not any(name and (host == name or host.endswith(f".{name}")) for name in names):
        wanted = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return wanted.hostname or "", wanted.port or (80 if wanted.scheme == "http" else 443)


def address_reachable(address: str, environment: Mapping[str, str], timeout: float = 5.0) -> bool:
    """Return whether a client of ``address`` would get a connection, to it or to its proxy."""
    return reachable(*route_to(address, environment), timeout)
