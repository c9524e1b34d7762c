"""Tools of tests: they look things up, calculate, and fail in several ways."""

from __future__ import annotations

import os
import socket
import time

PRICES = {"pear": 3, "fig": 4}


def price(item: str) -> int:
    """
    Look up the price of an item.

    Args:
        item: Name of the item.
    """
    return PRICES[item]


async def multiply(a: int, b: int = 2) -> int:
    """
    Multiply two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a * b


def misbehave(how: str) -> str:
    """
    Fail in a way.

    Args:
        how: What to do.
    """
    if how == "sleep":
        time.sleep(60)
    if how == "die":
        os._exit(3)
    if how == "eat":
        return str(len(bytearray(64 << 30)))
    if how == "connect":
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    return "x" * 300_000 if how == "talk" else how


def vague(item):  # type: ignore[no-untyped-def]
    return item
