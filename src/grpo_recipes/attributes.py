"""Replace attributes while a block runs."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def replace_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of ``owner`` in the ``with`` block, and restore them afterwards, also after an error.

    Attributes that did not exist before are deleted. ``owner`` may pass attributes on to an object that it wraps, like
    a module of torch.compile.
    """
    instance_values = {name: vars(owner)[name] for name in values if name in vars(owner)}  # the rest is inherited
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)} | instance_values
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name not in instance_values:
                with suppress(AttributeError):  # deleted inside, or never set
                    delattr(owner, name)
            if name in instance_values or (name in before and not hasattr(owner, name)):
                setattr(owner, name, before[name])
