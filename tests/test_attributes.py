"""Attributes that were replaced come back, also those that an object has from its class or did not have."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_recipes.attributes import replace_attributes


class Owner:
    of_class = "class"

    def __init__(self) -> None:
        self.own = "own"

    def method(self) -> str:
        return "method"


def test_attributes_are_replaced_inside_and_back_afterwards() -> None:
    owner = Owner()
    with replace_attributes(owner, own=1, of_class=2, method=lambda: 3, new=4):
        assert (owner.own, owner.of_class, owner.method(), owner.new) == (1, 2, 3, 4)  # type: ignore[attr-defined]
    assert vars(owner) == {"own": "own"} and (owner.of_class, owner.method()) == ("class", "method")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_they_are_back_after_an_exception(error: type[BaseException]) -> None:
    owner = Owner()
    with pytest.raises(error), replace_attributes(owner, own=1, new=2):
        del owner.new  # type: ignore[attr-defined]
        raise error
    assert vars(owner) == {"own": "own"}


def test_one_that_cannot_be_set_leaves_the_others_as_they_were() -> None:
    class Fixed(Owner):
        def __setattr__(self, name: str, value: Any) -> None:
            if value == "refused":
                raise TypeError
            super().__setattr__(name, value)

    owner = Fixed()
    with pytest.raises(TypeError), replace_attributes(owner, own=1, new="refused"):
        pass
    assert vars(owner) == {"own": "own"}


def test_a_modules_function_is_replaced_too() -> None:
    plain = math.sqrt
    with replace_attributes(math, sqrt=abs):
        assert math.sqrt(-4) == 4
    assert math.sqrt is plain


class Forwarding:
    """Like the module that torch.compile returns: it passes all attributes to the wrapped module."""

    def __init__(self, wrapped: Any) -> None:
        object.__setattr__(self, "wrapped", wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.wrapped, name)


def test_an_owner_that_forwards_attributes_keeps_none_and_loses_none() -> None:
    inner = Owner()
    with replace_attributes(Forwarding(inner), own=1, method=lambda: 3, new=4):
        assert (inner.own, inner.method(), inner.new) == (1, 3, 4)  # type: ignore[attr-defined]
    assert vars(inner) == {"own": "own"} and inner.method() == "method"
