"""Replace attributes while a block runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of ``owner`` inside, and put back what was there."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}  # the others come from its class, or none
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            elif name in vars(owner):
                delattr(owner, name)
