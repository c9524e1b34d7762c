"""Environments of libraries: ``textarena:ID``, ``reasoning_gym:NAME``, ``verifiers:NAME`` and ``openenv:URL``.

They are strangers' code: a run plays them in children.
"""

import difflib
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.numbers import reward_problem
from grpo_recipes.rollouts.turns import Environment, Noise, Turn, derive_seed

_LONGEST = 200  # characters of arguments in a message
INSTALL = "EXTRAS=environments bash scripts/setup.sh"
# Kinds of the key, with the module that each needs.
LIBRARIES = {
    "textarena": "textarena",
    "reasoning_gym": "reasoning_gym",
    "verifiers": "verifiers",
    "openenv": "openenv",
}


def load_library(kind: str, name: str, args: Mapping[str, Any]) -> Environment:
    """Make a library's environment; a ConfigError says what is wrong with the name or the arguments."""
    _require(kind, name)
    if kind == "textarena":
        from textarena.envs.registration import ENV_REGISTRY

        from grpo_recipes.extensions.environments.games import Game

        _known(kind, name, list(ENV_REGISTRY))
        return Game(name, args)
    if kind == "verifiers":
        from grpo_recipes.extensions.environments.verifiers_tasks import VerifiersTask

        return VerifiersTask(name, args)
    return _Task(name, args) if kind == "reasoning_gym" else _Server(name, args)


def library_problems(spec: str, args: Mapping[str, Any]) -> list[Problem]:
    """Return what keeps a library's environment from being made; import the library, but ask no server."""
    kind, _, name = spec.partition(":")
    try:
        if kind == "verifiers":  # to load one builds its dataset
            _require(kind, name)
            from grpo_recipes.extensions.environments.verifiers_tasks import own_class

            module = name.replace("-", "_").split("/")[-1]
            if not (module.isidentifier() and importlib.util.find_spec(module)):
                if (own := own_class(name)) is None:
                    fix = "install its package into the environment, or name one of the library's classes"
                    raise config_error("environment", f"verifiers finds no environment '{name}'", fix)
                need_arguments(spec, own, args)
        else:
            load_library(kind, name, args)
    except ConfigError as error:
        return error.problems
    return []


def need_arguments(spec: str, made: Any, args: Mapping[str, Any]) -> None:
    """Refuse arguments that the class ``made``, which ``spec`` names, does not take."""
    try:
        taken = inspect.signature(made)
    except ValueError:  # of a class of C
        return
    try:
        taken.bind(**args)
    except TypeError as error:
        what = f"'{spec}' does not take these arguments ({error})"
        known = str(taken) if len(str(taken)) <= _LONGEST else f"({', '.join(taken.parameters)})"
        raise config_error("environment_args", what, f"write those of {made.__name__}{known}") from error


def _require(kind: str, name: str) -> None:
    if importlib.util.find_spec(LIBRARIES[kind]) is None:
        raise config_error("environment", f"'{kind}' is not installed", f"install it with: {INSTALL}")
    if not name:
        raise config_error("environment", f"'{kind}:' names nothing", f"write {kind}:NAME")


def _known(kind: str, name: str, names: list[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, 3, 0.5)
        fix = f"write {kind}:{f' or {kind}:'.join(near)}" if near else f"write one of its {len(names)} names"
        raise config_error("environment", f"{kind} has no '{name}'", fix)


# --- reasoning-gym ---------------------------------------------------------------------------------------------------


class _Task(Environment):
    """A dataset of reasoning-gym in one turn: the seed makes the item, the dataset scores the text in ``<answer>``.

    Beside the dataset's own configuration: ``system_prompt``, one of the library's names or a text, and ``answer_tag``,
    empty where the whole text is the answer.
    """

    def __init__(self, name: str, args: Mapping[str, Any]):
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import SYSTEM_PROMPTS

        _known("reasoning_gym", name, list(DATASETS))
        given = dict(args)
        prompt = given.pop("system_prompt", "")
        self._system = SYSTEM_PROMPTS.get(prompt, prompt)
        self._tag = given.pop("answer_tag", "answer")
        if own := {"seed", "size"} & set(given):
            raise config_error("environment_args", f"{name}: {sorted(own)} follow from the run's seed", "remove them")
        fields = inspect.signature(DATASETS[name][1]).parameters
        if unknown := sorted(set(given) - set(fields)):
            fix = f"write some of {', '.join(sorted(set(fields) - {'seed', 'size'}))}"
            raise config_error("environment_args", f"{name} has no {', '.join(unknown)}", fix)
        self._name, self._config, self._noise = name, given, Noise()
        self.tools: list[dict[str, Any]] = []
        try:
            self._item(0)
        except (AssertionError, TypeError, ValueError) as error:
            raise config_error("environment_args", f"{name} refuses them ({error})", "correct the value") from error

    def _item(self, seed: int) -> None:
        from reasoning_gym import create_dataset

        self._noise.seed("reasoning_gym", seed)
        with self._noise.running():
            self._dataset = create_dataset(self._name, seed=derive_seed("reasoning_gym", seed), size=1, **self._config)
            self._entry = self._dataset[0]

    def reset(self, seed: int) -> Turn:
        """Make the item of this seed, and ask its question."""
        self._item(seed)
        system = [{"role": "system", "content": self._system}] if self._system else []
        return Turn([*system, {"role": "user", "content": self._entry["question"]}])

    def step(self, action: str) -> Turn:
        """End the episode with the dataset's score of the answer."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(action, self._tag) if self._tag else action.strip()
        with self._noise.running():
            try:
                score, failed = float(self._dataset.score_answer(answer, self._entry)), ""
            except Exception as error:  # some scorers parse the answer and trip over it: it is wrong, and that is shown
                score, failed = 0.0, repr(error)
        if problem := reward_problem(score):
            raise config_error("environment", f"{self._name} scored {problem}", "leave this dataset out")
        info = {"correct": float(score == 1), "answered": float(answer is not None)}
        told = {"answer": str(self._entry["answer"])} | ({"scorer": failed} if failed else {})
        return Turn([], score, True, info | told)


# --- OpenEnv ---------------------------------------------------------------------------------------------------------


class _Server(Environment):
    """A server of OpenEnv: the text goes into ``action_field``, beside ``action``; ``observation_field`` is shown.

    ``reset`` is what the server's reset takes beside the seed; ``timeout`` bounds each answer in seconds. Without
    ``observation_field``, an observation of one text is shown as that text, another one as JSON.
    """

    def __init__(self, url: str, args: Mapping[str, Any]):
        usual: dict[str, Any] = {"action_field": "message", "action": {}, "observation_field": "", "reset": {}}
        usual["timeout"] = 60.0
        if unknown := sorted(set(args) - set(usual)):
            what = f"openenv takes no {', '.join(unknown)}"
            raise config_error("environment_args", what, f"write some of {', '.join(usual)}")
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise config_error("environment", f"'{url}' is no address", "write openenv:http://HOST:PORT")
        self._url, self._args = url, usual | dict(args)
        self._client: Any = None
        self.tools: list[dict[str, Any]] = []

    def reset(self, seed: int) -> Turn:
        """Connect once, and have the server reset; a ConfigError where it does not answer."""
        from openenv.core.generic_client import GenericEnvClient

        if self._client is None:
            client = GenericEnvClient(self._url, message_timeout_s=self._args["timeout"])
            try:
                self._client = client.connect()
            except ConnectionError as error:
                fix = "start the server, or correct the address"
                raise config_error("environment", f"no OpenEnv server at {self._url} ({error})", fix) from error
        return self._turn("reset", lambda: self._client.reset(seed=seed, **self._args["reset"]))

    def step(self, action: str) -> Turn:
        """Send the action; a ConfigError where the server does not take it."""
        sent = {**self._args["action"], self._args["action_field"]: action}
        return self._turn("step", lambda: self._client.step(sent))

    def close(self) -> None:
        """Give the session back to the server."""
        if self._client is not None:
            self._client.close()

    def _turn(self, method: str, ask: Callable[[], Any]) -> Turn:
        from websockets.exceptions import ConnectionClosed

        try:
            result = ask()
        except (RuntimeError, ConnectionClosed, TimeoutError) as error:
            what = f"{self._url} did not answer {method} ({' '.join(str(error).split())[:300]})"
            fix = "correct environment_args, or let the server hold more sessions (max_concurrent_envs)"
            raise config_error("environment", what, fix) from error
        seen, name = result.observation, self._args["observation_field"]
        if name and name not in seen:
            fix = f"write one of {', '.join(seen)}"
            raise config_error("environment_args", f"observation_field: the server shows no '{name}'", fix)
        shown = seen[name] if name else next(iter(seen.values())) if len(seen) == 1 else seen
        text = shown if isinstance(shown, str) else json.dumps(shown, sort_keys=True, ensure_ascii=False)
        reward = float(result.reward or 0.0)
        if problem := reward_problem(reward):
            raise config_error("environment", f"{self._url} gave the reward {problem}", "correct the server")
        messages = [] if result.done else [{"role": "user", "content": text}]
        return Turn(messages, reward, bool(result.done), {"end": text} if result.done else {})
