"""What an environment of several turns gives: a turn, the protocol of all environments, and noise that repeats.

No torch, and no library of environments.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_recipes.errors import config_error
from grpo_recipes.numbers import LARGEST_REWARD, reward_problem

Message = dict[str, str]  # role, content
POLICY, BASE = "policy", "base"  # models that play opponents: the one that is trained, and what it began as
SCRIPTED = ("random", "crowd")  # opponents that are no model


@dataclass(frozen=True)
class Turn:
    """What the policy reads next, and what its last action was worth."""

    messages: list[Message]  # empty at the end
    reward: float = 0.0  # of the action before it
    done: bool = False
    info: dict[str, float | str] = field(default_factory=dict)  # numbers are averaged, texts shown in transcripts
    tools: list[dict[str, Any]] = field(default_factory=list)  # that the policy may call, with the first turn
    opponent: str = ""  # the model that is to answer in the policy's place: "policy" untrained, or "base"
    seat: int = 0  # of that opponent

    def __post_init__(self) -> None:
        if problem := reward_problem(self.reward):
            raise config_error("environment", f"it gave the reward {problem}", f"return at most {LARGEST_REWARD:.0e}")


class Environment(Protocol):
    """One episode at a time: ``reset`` starts it, each ``step`` takes the text of whoever's turn it is."""

    tools: list[dict[str, Any]]  # for the chat template, in OpenAI's schema; read it after reset

    def reset(self, seed: int) -> Turn:
        """Begin the episode of this seed, and return what the policy reads first."""

    def step(self, action: str) -> Turn:
        """Take the text of the policy's turn, and return what it reads next with the reward of the action."""

    def close(self) -> None:
        """Give back what the episode holds, finished or not; nothing is asked of it after that."""
        return


class Noise:
    """The global generators of ``random`` and NumPy, which belong to one episode while its environment runs.

    Libraries draw from them, so that episodes played in turns in one process would change each other.
    """

    def __init__(self) -> None:
        self._state: tuple[Any, Any] | None = None

    def seed(self, *parts: int | str) -> None:
        """Begin again, with a stream of these parts."""
        import numpy

        number = derived(*parts)
        self._state = random.Random(number).getstate(), numpy.random.RandomState(number).get_state()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Put the episode's generators in place, and go on from there the next time."""
        with kept():
            if self._state is not None:
                _put(self._state)
            try:
                yield
            finally:
                self._state = _taken()


@contextlib.contextmanager
def seeded(*parts: int | str) -> Iterator[None]:
    """Have the global generators begin with a stream of these parts, and leave them as they were."""
    noise = Noise()
    noise.seed(*parts)
    with noise.running():
        yield


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Leave the global generators as they were."""
    before = _taken()
    try:
        yield
    finally:
        _put(before)


def _taken() -> tuple[Any, Any]:
    import numpy

    return random.getstate(), numpy.random.get_state()


def _put(state: tuple[Any, Any]) -> None:
    import numpy

    random.setstate(state[0])
    numpy.random.set_state(state[1])


def derived(*parts: int | str) -> int:
    """Return a seed below 2**32 that these parts alone decide, in every process."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")
