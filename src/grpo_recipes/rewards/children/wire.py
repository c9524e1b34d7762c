"""How a request travels to a child: its length, and a pickle. Replies are lines of JSON: a child is not trusted."""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")


def framed(request: Any) -> bytes:
    """A request as the bytes to send."""
    body = pickle.dumps(request)
    return _LENGTH.pack(len(body)) + body


def next_request(stream: BinaryIO) -> Any:
    """The next request of the parent; None when it closed the pipe."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return pickle.loads(stream.read(_LENGTH.unpack(head)[0]))
