"""Replace attributes while a block runs."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of ``owner``, which may forward them to what it wraps, inside, and put back what was there."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}  # the others come from its class, or none
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)} | own
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name not in own:
                with suppress(AttributeError):  # deleted inside, or never set
                    delattr(owner, name)
            if name in own or (name in before and not hasattr(owner, name)):
                setattr(owner, name, before[name])
