"""Environments of libraries: ``textarena:ID``, ``reasoning_gym:NAME``, ``verifiers:NAME`` and ``openenv:URL``.

They run third-party code, so a run plays them in child processes.
"""

import difflib
import importlib.util
import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.numbers import find_reward_problem
from grpo_recipes.rollouts.turns import Environment, Noise, Turn, derive_seed

_MAX_SIGNATURE = 200  # characters of a signature in a message
INSTALL = "EXTRAS=environments bash scripts/setup.sh"
# Prefixes of the key environment, with the Python module that each needs.
LIBRARIES = {
    "textarena": "textarena",
    "reasoning_gym": "reasoning_gym",
    "verifiers": "verifiers",
    "openenv": "openenv",
}


def load_library(kind: str, name: str, args: Mapping[str, Any]) -> Environment:
    """Create the environment ``name`` of the library ``kind``, e.g. "textarena", with its arguments.

    Raise ConfigError if the library is not installed, or name or arguments are wrong.
    """
    _check_installed(kind, name)
    if kind == "textarena":
        from textarena.envs.registration import ENV_REGISTRY

        from grpo_recipes.extensions.environments.games import Game

        _check_name(kind, name, list(ENV_REGISTRY))
        return Game(name, args)
    if kind == "verifiers":
        from grpo_recipes.extensions.environments.verifiers_tasks import VerifiersTask

        return VerifiersTask(name, args)
    return _ReasoningTask(name, args) if kind == "reasoning_gym" else _OpenEnvServer(name, args)


def find_library_problems(spec: str, args: Mapping[str, Any]) -> list[Problem]:
    """Import a library and check name and arguments of its environment; return the problems, [] if there are none.

    ``spec`` is e.g. textarena:Nim-v0. No server is contacted, and an environment of verifiers is not created, because
    that loads its dataset.
    """
    kind, _, name = spec.partition(":")
    try:
        if kind == "verifiers":  # loading the environment would build its dataset
            _check_installed(kind, name)
            from grpo_recipes.extensions.environments.verifiers_tasks import find_library_class

            module = name.replace("-", "_").split("/")[-1]
            if not (module.isidentifier() and importlib.util.find_spec(module)):
                if (environment_class := find_library_class(name)) is None:
                    fix = "install its package into the Python environment, or use one of the library's classes"
                    raise config_error("environment", f"verifiers has no environment '{name}'", fix)
                check_arguments(spec, environment_class, args)
        else:
            load_library(kind, name, args)
    except ConfigError as error:
        return error.problems
    return []


def check_arguments(spec: str, environment_class: Any, args: Mapping[str, Any]) -> None:
    """Raise ConfigError if the signature of ``environment_class``, the class of ``spec``, does not accept ``args``.

    A class without a signature, because it is written in C, is accepted.
    """
    try:
        signature = inspect.signature(environment_class)
    except ValueError:  # a class written in C
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        message = f"'{spec}' does not accept these arguments ({error})"
        text = str(signature)
        parameters = text if len(text) <= _MAX_SIGNATURE else f"({', '.join(signature.parameters)})"
        fix = f"use the arguments of {environment_class.__name__}{parameters}"
        raise config_error("environment_args", message, fix) from error


def _check_installed(kind: str, name: str) -> None:
    """Raise ConfigError if the library ``kind`` is not installed, or the environment's name is empty."""
    if importlib.util.find_spec(LIBRARIES[kind]) is None:
        raise config_error("environment", f"'{kind}' is not installed", f"install it with: {INSTALL}")
    if not name:
        raise config_error("environment", f"'{kind}:' has no name", f"set {kind}:NAME")


def _check_name(kind: str, name: str, names: list[str]) -> None:
    """Raise ConfigError with the nearest names if ``name`` is not one of the library's ``names``."""
    if name not in names:
        close = difflib.get_close_matches(name, names, 3, 0.5)
        fix = f"use {kind}:{f' or {kind}:'.join(close)}" if close else f"use one of its {len(names)} names"
        raise config_error("environment", f"{kind} has no '{name}'", fix)


# --- reasoning-gym ---------------------------------------------------------------------------------------------------


class _ReasoningTask(Environment):
    """A dataset of reasoning-gym as one-turn episodes: it creates an item from the seed, and scores ``<answer>``.

    Arguments are the dataset's configuration and two others: ``system_prompt`` (a name of the library or a text) and
    ``answer_tag`` (empty if the whole text is the answer).
    """

    def __init__(self, name: str, args: Mapping[str, Any]):
        """Create a first item to test the arguments; raise ConfigError for a wrong name or argument."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a library that is compiled at its first import
            from reasoning_gym.factory import DATASETS
            from reasoning_gym.utils import SYSTEM_PROMPTS

        _check_name("reasoning_gym", name, list(DATASETS))
        config = dict(args)
        prompt = config.pop("system_prompt", "")
        self._system = SYSTEM_PROMPTS.get(prompt, prompt)
        self._tag = config.pop("answer_tag", "answer")
        if derived_names := {"seed", "size"} & set(config):
            message = f"{name}: {sorted(derived_names)} follow from the run's seed"
            raise config_error("environment_args", message, "remove them")
        fields = inspect.signature(DATASETS[name][1]).parameters
        if unknown := sorted(set(config) - set(fields)):
            fix = f"use {', '.join(sorted(set(fields) - {'seed', 'size'}))}"
            raise config_error("environment_args", f"{name} has no {', '.join(unknown)}", fix)
        self._name, self._config, self._noise = name, config, Noise()
        self.tools: list[dict[str, Any]] = []
        try:
            self._make_item(0)
        except (AssertionError, TypeError, ValueError) as error:
            raise config_error("environment_args", f"{name} rejects them ({error})", "correct the value") from error

    def _make_item(self, seed: int) -> None:
        """Create a dataset with one item from a seed; store the dataset and the item."""
        from reasoning_gym import create_dataset

        self._noise.seed("reasoning_gym", seed)
        with self._noise.running():
            self._dataset = create_dataset(self._name, seed=derive_seed("reasoning_gym", seed), size=1, **self._config)
            self._entry = self._dataset[0]

    def reset(self, seed: int) -> Turn:
        """Create the item of this seed, and return a turn with the system prompt and its question."""
        self._make_item(seed)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return Turn([*system, {"role": "user", "content": self._entry["question"]}])

    def step(self, action: str) -> Turn:
        """End the episode with the dataset's score of the answer as the reward.

        The reward is 0 if the scorer raises; the error is in the info ``scorer``. Raise ConfigError if the score is not
        a valid reward.
        """
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(action, self._tag) if self._tag else action.strip()
        with self._noise.running():
            try:
                score, failed = float(self._dataset.score_answer(answer, self._entry)), ""
            except Exception as error:  # some scorers fail on answers they can't parse: score 0, and show the error
                score, failed = 0.0, repr(error)
        if problem := find_reward_problem(score):
            raise config_error("environment", f"{self._name} returned the reward {problem}", "remove this dataset")
        info = {"correct": float(score == 1), "answered": float(answer is not None)}
        texts = {"answer": str(self._entry["answer"])} | ({"scorer": failed} if failed else {})
        return Turn([], score, True, info | texts)


# --- OpenEnv ---------------------------------------------------------------------------------------------------------


class _OpenEnvServer(Environment):
    """A session of an OpenEnv server.

    Arguments: the policy's text is sent as ``action_field`` next to the fixed fields ``action``; ``observation_field``
    is the field that the policy reads (by default the only field, or all fields as JSON); ``reset`` are arguments of
    the server's reset next to the seed; ``timeout`` is the limit of each answer in seconds.
    """

    def __init__(self, url: str, args: Mapping[str, Any]):
        """Store the arguments without connecting; raise ConfigError for an unknown argument or a wrong address."""
        defaults: dict[str, Any] = {"action_field": "message", "action": {}, "observation_field": "", "reset": {}}
        defaults["timeout"] = 60.0
        if unknown := sorted(set(args) - set(defaults)):
            message = f"openenv has no {', '.join(unknown)}"
            raise config_error("environment_args", message, f"use {', '.join(defaults)}")
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise config_error("environment", f"'{url}' is not an address", "set openenv:http://HOST:PORT")
        self._url, self._args = url, defaults | dict(args)
        self._client: Any = None
        self.tools: list[dict[str, Any]] = []

    def reset(self, seed: int) -> Turn:
        """Connect at the first call, and reset the session; return its first turn.

        Raise ConfigError if the server does not answer or sends no valid turn.
        """
        from openenv.core.generic_client import GenericEnvClient

        if self._client is None:
            client = GenericEnvClient(self._url, message_timeout_s=self._args["timeout"])
            try:
                self._client = client.connect()
            except ConnectionError as error:
                fix = "start the server, or correct the address"
                raise config_error("environment", f"no OpenEnv server at {self._url} ({error})", fix) from error
        return self._request_turn("reset", lambda: self._client.reset(seed=seed, **self._args["reset"]))

    def step(self, action: str) -> Turn:
        """Send the action to the server and return its answer as a turn.

        Raise ConfigError if the server rejects it, does not answer, or sends no valid turn.
        """
        fields = {**self._args["action"], self._args["action_field"]: action}
        return self._request_turn("step", lambda: self._client.step(fields))

    def close(self) -> None:
        """End the session, so that the server can start another."""
        if self._client is not None:
            self._client.close()

    def _request_turn(self, method: str, request: Callable[[], Any]) -> Turn:
        """Call ``request`` and return the server's answer as a turn; the last turn has its text as ``end`` in the info.

        A missing reward counts as 0. Raise ConfigError if the call fails, or the answer lacks the observation_field
        or has an invalid reward. ``method`` is "reset" or "step", for the error.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            result = request()
        except (RuntimeError, ConnectionClosed, TimeoutError) as error:
            message = f"{self._url} did not answer {method} ({' '.join(str(error).split())[:300]})"
            fix = "correct environment_args, or raise the server's number of sessions (max_concurrent_envs)"
            raise config_error("environment", message, fix) from error
        observation, name = result.observation, self._args["observation_field"]
        if name and name not in observation:
            fix = f"use {' or '.join(observation)}"
            raise config_error("environment_args", f"observation_field: the server sends no '{name}'", fix)
        if not name:
            value = next(iter(observation.values())) if len(observation) == 1 else observation
        else:
            value = observation[name]
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
        reward = float(result.reward or 0.0)
        if problem := find_reward_problem(reward):
            raise config_error("environment", f"{self._url} returned the reward {problem}", "correct the server")
        messages = [] if result.done else [{"role": "user", "content": text}]
        return Turn(messages, reward, bool(result.done), {"end": text} if result.done else {})
