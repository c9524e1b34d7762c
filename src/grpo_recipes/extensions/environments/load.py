"""Load the environment of a recipe: from a library, or your class as ``module:Class`` or ``file.py:Class``."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.environments.libraries import LIBRARIES, check_arguments, load_library
from grpo_recipes.numbers import LARGEST_REWARD, find_reward_problem
from grpo_recipes.recipe.user_code import load_object, split_spec
from grpo_recipes.rollouts.turns import Environment, Message, Noise, Turn, seeded_noise

ROLES = ("system", "user", "assistant", "tool")
_EXPECTED = "return a text or a list of {role, content} from reset, (observation, reward, done[, info]) from step"


def load_environment(spec: str, args: Mapping[str, Any], copies: Path | None = None) -> Environment:
    """Create the environment ``spec``, of a library or the user; raise ConfigError if ``spec`` or ``args`` is wrong.

    If the folder ``copies`` has a copy of the user's file, the copy is loaded instead of the original. Errors of
    the user's code are not caught.
    """
    kind, _, name = spec.partition(":")
    return load_library(kind, name, args) if kind in LIBRARIES else _load_user_class(spec, args, copies)


class _UserEnvironment(Environment):
    """An instance of the user's class; its return values are checked."""

    def __init__(self, inner: Any):
        self._inner, self._name, self._noise = inner, type(inner).__name__, Noise()
        self.tools: list[dict[str, Any]] = list(getattr(inner, "tools", []))

    def reset(self, seed: int) -> Turn:
        """Call the class's ``reset`` and return its observation as a turn; raise ConfigError if it has a wrong type."""
        self._noise.seed("own", seed)
        with self._noise.running():
            return Turn(self._check_observation("reset", self._inner.reset(seed)))

    def step(self, action: str) -> Turn:
        """Call the class's ``step`` and return its answer as a turn, without messages if it is done.

        Raise ConfigError with the expected type if it returns something else.
        """
        with self._noise.running():
            answer = self._inner.step(action)
        if not isinstance(answer, tuple) or len(answer) not in (3, 4):
            raise self._make_error("step", answer)
        observation, reward, done, info = (*answer, {})[:4]
        if isinstance(reward, bool | str) or not hasattr(reward, "__float__") or find_reward_problem(float(reward)):
            raise self._make_error(
                "step",
                reward,
                "as the reward",
                f"return a number between {-LARGEST_REWARD:.0e} and {LARGEST_REWARD:.0e}",
            )
        if not isinstance(done, bool) and type(done).__name__ not in ("bool_", "bool"):
            raise self._make_error("step", done, "as done", "return True or False")
        if not isinstance(info, Mapping) or not all(_is_info(value) for value in info.values()):
            raise self._make_error("step", info, "as info", "return a dict of finite numbers and texts")
        info = {str(name): value if isinstance(value, str) else float(value) for name, value in info.items()}
        messages = [] if done else self._check_observation("step", observation)
        return Turn(messages, float(reward), bool(done), info)

    def close(self) -> None:
        """Call the class's ``close`` if it has one."""
        if callable(close := getattr(self._inner, "close", None)):
            with self._noise.running():
                close()

    def _check_observation(self, method: str, observation: Any) -> list[Message]:
        """Convert an observation to messages: a text becomes one user message. Raise ConfigError for any other type.

        ``method`` is the user's method that returned it, for the error.
        """
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        if not isinstance(observation, list) or not observation or not all(map(_is_message, observation)):
            raise self._make_error(method, observation, "as the observation")
        return [{"role": message["role"], "content": message["content"]} for message in observation]

    def _make_error(self, method: str, value: Any, part: str = "", fix: str = _EXPECTED) -> ConfigError:
        """Return a ConfigError: the user's ``method`` returned a wrong ``value``; ``part`` is e.g. "as the reward"."""
        text = repr(value)
        message = f"{self._name}.{method} returned {text[:100]}{'...' if len(text) > 100 else ''} {part}".rstrip()
        return config_error("environment", message, fix)


def _is_message(message: Any) -> bool:
    """Return whether a value is a message with a known role and a text."""
    return isinstance(message, Mapping) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _is_info(value: Any) -> bool:
    """Return whether a value of a turn's info is a text or a finite number."""
    return isinstance(value, str) or (hasattr(value, "__float__") and math.isfinite(value))


def _load_user_class(spec: str, args: Mapping[str, Any], copies: Path | None) -> Environment:
    """Import the user's class and create an instance with ``args``.

    Raise ConfigError if it lacks reset or step, or does not accept ``args``. Random draws during import and creation
    are the same in every process.
    """
    name = split_spec(spec)[1]
    with seeded_noise("read", name):  # equal in every process: the episodes of a group may be in different processes
        environment_class = load_object(spec, copies)
    missing = [method for method in ("reset", "step") if not callable(getattr(environment_class, method, None))]
    if missing:
        message = f"'{spec}' has no {' and no '.join(missing)}"
        fix = "use a class with reset(seed) and step(action)"
        fix += ", or add dataset_name if it is a class for TRL" if missing == ["step"] else ""
        raise config_error("environment", message, fix)
    check_arguments(spec, environment_class, args)
    with seeded_noise("made", name, json.dumps(args, sort_keys=True)):
        return _UserEnvironment(environment_class(**args))
