"""Define multi-turn environments: a turn, the protocol of all environments, and reproducible random numbers.

This module imports neither torch nor a library of environments.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_recipes.errors import config_error
from grpo_recipes.numbers import LARGEST_REWARD, find_reward_problem

Message = dict[str, str]  # role, content
POLICY, BASE = "policy", "base"  # models that play opponents: the trained model, and its untrained base model
SCRIPTED = ("random", "crowd")  # opponents without a model


@dataclass(frozen=True)
class Turn:
    """The messages that the policy reads next, and the reward of its last action."""

    messages: list[Message]
    """Empty at the end."""
    reward: float = 0.0
    """Reward of the previous action."""
    done: bool = False
    info: dict[str, float | str] = field(default_factory=dict)
    """Numbers are averaged over episodes, texts are shown in transcripts."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Tools that the policy may call, given with the first turn."""
    opponent: str = ""
    """The model that answers instead of the policy: "policy" without training on its answer, or "base"."""
    seat: int = 0
    """The seat of that opponent."""

    def __post_init__(self) -> None:
        """Raise ConfigError if the reward is not finite or too large."""
        if problem := find_reward_problem(self.reward):
            raise config_error("environment", f"it gave the reward {problem}", f"return at most {LARGEST_REWARD:.0e}")


class Environment(Protocol):
    """An environment that plays one episode at a time: ``reset`` starts it, ``step`` receives the text of a turn."""

    tools: list[dict[str, Any]]
    """Tools for the chat template, in OpenAI's schema. Valid after ``reset``."""

    def reset(self, seed: int) -> Turn:
        """Start the episode of this seed, and return the first turn."""

    def step(self, action: str) -> Turn:
        """Apply the text of the policy's turn, and return the next turn with the reward of the action."""

    def close(self) -> None:
        """Release the resources of the episode, finished or not. No method is called afterwards."""
        return


class Noise:
    """The states of the global random generators of ``random`` and NumPy for one episode.

    Libraries draw from the global generators, so episodes that alternate in one process would change each other.
    """

    _state: tuple[Any, Any] | None = None  # of ``random`` and of NumPy

    def seed(self, *parts: int | str) -> None:
        """Restart the episode's random generators with a seed derived from these parts."""
        import numpy

        seed = derive_seed(*parts)
        self._state = random.Random(seed).getstate(), numpy.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Use the episode's generators in the block, then save them for the next call and restore the global state."""
        import numpy

        with restoring_noise():
            if self._state is not None:
                random.setstate(self._state[0])
                numpy.random.set_state(self._state[1])
            try:
                yield
            finally:
                self._state = random.getstate(), numpy.random.get_state()


@contextlib.contextmanager
def seeded_noise(*parts: int | str) -> Iterator[None]:
    """Seed the global random generators from these parts in the block, and restore them afterwards."""
    noise = Noise()
    noise.seed(*parts)
    with noise.running():
        yield


@contextlib.contextmanager
def restoring_noise() -> Iterator[None]:
    """Restore the states of the global random generators of ``random`` and NumPy after the block."""
    import numpy

    state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(numpy_state)


def derive_seed(*parts: int | str) -> int:
    """Return a seed below 2**32 that depends only on these parts, in every process."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")
