"""TRL environments in child processes: classes for TRL's ``environment_factory``, whose methods are an episode's tools.

Each episode has an instance of the class. ``play`` keeps it between the calls, and another process repeats them. At the
end, the instance's attributes are sent to the rewards as text. No torch.
"""

import base64
import inspect
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.extensions.environments.stage import play_turn
from grpo_recipes.extensions.environments.tools import list_methods, make_results_turn, make_text
from grpo_recipes.recipe.datafiles import solution_names
from grpo_recipes.recipe.user_code import load_object
from grpo_recipes.rewards.score import Score, describe_error, get_async_runner, list_accepted_columns, select_columns
from grpo_recipes.rollouts.turns import Environment, Noise, Turn
from grpo_recipes.secrets import mask_secrets

PLAY = "grpo_recipes.extensions.environments.trl_environments:play"  # name of ``play`` for the pool of child processes
_MAX_STATE = 100_000  # bytes of the attributes that rewards get


def make_setup(recipe: Callable[[str], Any], copies: Path, row: Mapping[str, Any]) -> str:
    """Return the setup of an episode from a dataset row, as JSON for ``TRLEnvironment``; ``recipe`` looks up a key."""
    columns = recipe("dataset_solution_column"), recipe("eval_dataset_solution_column")
    names = solution_names(columns, recipe("dataset_mixture")) if "answer" in row else []
    solutions = dict.fromkeys(names, row.get("answer"))
    setup = {"copies": str(copies), "arguments": recipe("environment_args") or {}, "row": {**solutions, **row}}
    return json.dumps(setup, default=str)


class SavedEnvironment(str):
    """An environment after its episode, as text; the process that unpickles it gets an instance of its class.

    ``copies`` is the folder with the run's copies of the user's code. It is not in the text, because the random numbers
    of rewards derive from the text.
    """

    copies: Path

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle call ``_restore`` with the text and the folder of copies."""
        return _restore, (str(self), self.copies)


class Missing:
    """An environment or attribute that rewards can't get; each use raises an error with the reason."""

    def __init__(self, reason: str):
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError with the reason."""
        raise AttributeError(self.__dict__.get("reason", name))


class TRLEnvironment(Environment):
    """An instance of the user's class in an episode. An action is JSON: calls, or {"reward": bool} at the end.

    Instead of the class, the recipe may have a function that returns an instance, as in TRL.
    """

    def __init__(self, spec: str, setup: Mapping[str, Any]):
        """Load the class. ``setup`` has the folder ``copies``, the dataset's ``row``, and the class's ``arguments``."""
        self._class = load_object(spec, Path(setup["copies"]))
        self._setup, self._noise = setup, Noise()
        self._instance: Any = None  # made by ``reset``
        self.tools: list[dict[str, Any]] = []  # the chat template gets them as a variable

    def reset(self, seed: int) -> Turn:
        """Create the instance and call its ``reset`` with the row; return the prompt with the text of ``reset``.

        The text is appended to the last message. Raise ConfigError if ``reset`` returns neither a text nor None.
        """
        row = self._setup["row"]
        self._noise.seed("trl", seed)
        with self._noise.running():
            self._instance = self._class(**self._setup["arguments"])
            reset = self._instance.reset
            text = reset(**select_columns(row, list_accepted_columns(reset)))
        if text is not None and not isinstance(text, str):
            name = type(self._instance).__name__
            message = f"{name}.reset returned {type(text).__name__}, and images are not supported"
            raise config_error("environment", message, "return a text or None")
        *before, last = row["prompt"]
        return Turn([*before, {**last, "content": last["content"] + (text or "")}])

    def step(self, action: str) -> Turn:
        """Run the calls of a turn in their order and return their results as messages, or end the episode.

        ``action`` is JSON: {"reward": bool} at the end, else a list of calls with "name", "arguments" (a mapping)
        and "problem". A call with a problem (not "") is not run, and the problem is its result. An error of a
        method is its result too. The last turn has ``get_reward()`` as its reward if the bool is true, else 0. Its
        info has the instance's attributes as text, ``state``.
        """
        calls = json.loads(action)
        with self._noise.running():
            if isinstance(calls, dict):
                reward = self._instance.get_reward() if calls["reward"] else 0.0
                reward = get_async_runner().run(reward) if inspect.iscoroutine(reward) else reward
                return Turn([], float(reward), True, {"state": _dump(self._instance)})
            methods = {method.__name__: method for method in list_methods(self._instance)}
            return make_results_turn([(call["name"], _run(methods, **call)) for call in calls])


def _run(methods: Mapping[str, Any], name: str, arguments: dict[str, Any], problem: str) -> Score:
    """Call a method and return the text of its result, or the reason of its failure, as a Score.

    A call with a ``problem`` is not run: the problem is the reason. Only MemoryError is raised.
    """
    try:
        return Score(None, problem) if problem else Score(make_text(methods[name](**arguments)))
    except MemoryError:  # the limit of the process
        raise
    except Exception as error:
        return Score(None, mask_secrets(describe_error(error)))


def play(
    completions: Sequence[list[str]], environment: Sequence[str], arguments: Sequence[str], seed: Sequence[int],
    episode: Sequence[str], last_digest: Sequence[str],
) -> list[str]:  # fmt: skip
    """Play the next turn of each episode with a ``TRLEnvironment``, as ``stage.play`` does with other environments."""
    rows = zip(completions, environment, arguments, seed, episode, last_digest, strict=True)
    return [play_turn(*row, load=TRLEnvironment) for row in rows]  # type: ignore[misc]  # a row has six parts


play.converts = lambda text: Score(text)  # type: ignore[attr-defined]  # a text; reward functions return a number


def _dump(instance: Any) -> str:
    """Return the class and the attributes of an instance as text, pickles in base64, for ``_restore``.

    Attributes that pickle can't send, and those beyond 100,000 bytes in total, become Missing. So does the class.
    """
    state, room = dict[str, Any](), _MAX_STATE
    slots = [name for base in type(instance).__mro__ for name in getattr(base, "__slots__", ())]
    attributes = {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
    for name, value in {**getattr(instance, "__dict__", {}), **attributes}.items():
        try:
            data = pickle.dumps(value)
            pickle.loads(data)
            if len(data) > room:
                raise ValueError(f"it has {len(data):,} bytes, more than {room:,}")
            state[name], room = value, room - len(data)
        except Exception as error:
            state[name] = Missing(f"a reward can't get the attribute '{name}' ({describe_error(error)})")
    try:
        kind = pickle.dumps(type(instance))
    except Exception as error:
        kind = pickle.dumps(Missing(f"a reward can't get the environment ({describe_error(error)})"))
    return base64.b64encode(pickle.dumps((kind, state))).decode()


def _restore(text: str, copies: Path) -> Any:
    """Return the environment in the JSON of a ``SavedEnvironment``, or Missing if there is none or loading it fails."""
    saved = json.loads(text)
    if "failed" in saved:
        return Missing(f"a reward can't get the environment ({saved['failed']})")
    try:
        load_object(saved["spec"], copies)  # pickle finds classes only in imported modules
        pickled_class, state = pickle.loads(base64.b64decode(saved["state"]))
        kind = pickle.loads(pickled_class)
        if isinstance(kind, Missing):
            return kind
        instance = kind.__new__(kind)
        for name, value in state.items():
            object.__setattr__(instance, name, value)
    except Exception as error:
        return Missing(f"a reward can't get the environment ({describe_error(error)})")
    return instance
