"""The environment that a recipe names: a library's, or a class of the user as ``module:Class`` or ``file.py:Class``."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.environments.libraries import LIBRARIES, load_library, need_arguments
from grpo_recipes.numbers import LARGEST_REWARD, reward_problem
from grpo_recipes.recipe.user_code import load_object, split_spec
from grpo_recipes.rollouts.turns import Environment, Message, Noise, Turn, seeded_noise

ROLES = ("system", "user", "assistant", "tool")
_WANTED = "return a text or a list of {role, content} from reset, (observation, reward, done[, info]) from step"


def load_environment(spec: str, args: Mapping[str, Any], copies: Path | None = None) -> Environment:
    """Make the environment that ``spec`` names; a ConfigError says what is wrong with the name or the arguments.

    A file that was copied to ``copies`` is run in place of the original.
    """
    kind, _, name = spec.partition(":")
    return load_library(kind, name, args) if kind in LIBRARIES else _own(spec, args, copies)


class _Own(Environment):
    """The user's class, with what it returns checked."""

    def __init__(self, inner: Any):
        self._inner, self._name, self._noise = inner, type(inner).__name__, Noise()
        self.tools: list[dict[str, Any]] = list(getattr(inner, "tools", []))

    def reset(self, seed: int) -> Turn:
        """Begin the episode; a ConfigError where the observation is none."""
        self._noise.seed("own", seed)
        with self._noise.running():
            return Turn(self._messages("reset", self._inner.reset(seed)))

    def step(self, action: str) -> Turn:
        """Hand the action over; a ConfigError says which part of the answer is wrong and what to return."""
        with self._noise.running():
            answer = self._inner.step(action)
        if not isinstance(answer, tuple) or len(answer) not in (3, 4):
            raise self._wrong("step", answer)
        observation, reward, done, info = (*answer, {})[:4]
        if isinstance(reward, bool | str) or not hasattr(reward, "__float__") or reward_problem(float(reward)):
            raise self._wrong(
                "step",
                reward,
                "as the reward",
                f"return a number between {-LARGEST_REWARD:.0e} and {LARGEST_REWARD:.0e}",
            )
        if not isinstance(done, bool) and type(done).__name__ not in ("bool_", "bool"):
            raise self._wrong("step", done, "as done", "return True or False")
        if not isinstance(info, Mapping) or not all(_informs(value) for value in info.values()):
            raise self._wrong("step", info, "as info", "return a dict of finite numbers and texts")
        told = {str(name): value if isinstance(value, str) else float(value) for name, value in info.items()}
        messages = [] if done else self._messages("step", observation)
        return Turn(messages, float(reward), bool(done), told)

    def close(self) -> None:
        """Call its ``close``, where it has one."""
        if callable(close := getattr(self._inner, "close", None)):
            with self._noise.running():
                close()

    def _messages(self, method: str, observation: Any) -> list[Message]:
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        if not isinstance(observation, list) or not observation or not all(map(_is_message, observation)):
            raise self._wrong(method, observation, "as the observation")
        return [{"role": one["role"], "content": one["content"]} for one in observation]

    def _wrong(self, method: str, value: Any, part: str = "", fix: str = _WANTED) -> ConfigError:
        shown = repr(value)
        what = f"{self._name}.{method} returned {shown[:100]}{'...' if len(shown) > 100 else ''} {part}".rstrip()
        return config_error("environment", what, fix)


def _is_message(one: Any) -> bool:
    return isinstance(one, Mapping) and one.get("role") in ROLES and isinstance(one.get("content"), str)


def _informs(value: Any) -> bool:
    return isinstance(value, str) or (hasattr(value, "__float__") and math.isfinite(value))


def _own(spec: str, args: Mapping[str, Any], copies: Path | None) -> Environment:
    name = split_spec(spec)[1]
    with seeded_noise("read", name):  # in every process the same, as episodes of one group are in several
        made = load_object(spec, copies)
    missing = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
    if missing:
        what = f"'{spec}' has no {' and no '.join(missing)}"
        raise config_error("environment", what, "name a class with reset(seed) and step(action)")
    need_arguments(spec, made, args)
    with seeded_noise("made", name, json.dumps(args, sort_keys=True)):
        return _Own(made(**args))
