"""The functions of rewards: how one is found and called, and its score for a completion, or why there is none."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_recipes.errors import ConfigError, translate
from grpo_recipes.numbers import reward_problem
from grpo_recipes.recipe.extensions import load
from grpo_recipes.recipe.registry import NO_ANSWER, rewards
from grpo_recipes.recipe.user_code import copy_path, load_object, source_path, split_spec
from grpo_recipes.runs.stop_request import CutShort, StopRequest

Reward = Callable[..., list[float | None]]
NOT_CALLED = "not called: too many unscored before it, or the run was stopped"
_LONGEST_REASON = 300  # characters; a reply of a child must fit a pipe's atomic write


class RewardFailed(Exception):
    """A reward cannot be called at all: its code, not a completion, is at fault."""


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of one reward for one completion."""

    value: Any  # a number, or what the pool's function returns in its place; None
    # Why it is unscored: a limit, a death, an exception, no number. None where there is a value, and where the reward
    # returned None by itself, which says that the completion is not its task.
    reason: str | None = None
    seconds: float = 0.0  # wall time of the call; 0 where it is unknown or no call was made
    by_limit: bool = False  # a limit or a death decided: another call might end otherwise
    replayed: bool = False  # an earlier outcome was given again without a call

    @property
    def unscored(self) -> bool:
        """Return whether a value is missing that should be there."""
        return self.reason is not None


def is_user_reward(name: str) -> bool:
    """Return whether a recipe's reward is the user's own: ``module:function`` or ``file.py:function``."""
    return ":" in name


def make_reward(name: str, script_args: Any = None, args: Any = None) -> Reward:
    """Return a reward of ours with the recipe's keys bound, which no column of that name replaces."""
    entry = rewards()[name]
    function = load(entry.function)
    bound = {key: getattr(script_args if hasattr(script_args, key) else args, key) for key in entry.keys}

    @functools.wraps(function)
    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        scores: list[float | None] = function(completions, **{**columns, **bound})
        return scores

    return reward


def load_reward(spec: str, copies: Path | None) -> Reward:
    """Return a reward of ours that takes no recipe keys, or the user's, from the run's copy where its module is gone.

    RewardFailed where it is not there, raises or does not fit.
    """
    if not is_user_reward(spec):
        return make_reward(spec)
    place, name = split_spec(spec)
    gone = not place.endswith(".py") and source_path(spec) is None
    failed = (Exception, SystemExit)
    with translate(failed, lambda error: RewardFailed(f"reward '{spec}' cannot be loaded: {describe_error(error)}")):
        function: Reward = load_object(f"{copy_path(spec, copies)}:{name}" if copies and gone else spec, copies)
        if not callable(function):
            raise TypeError(f"it is a {type(function).__name__}, not a function")
        takes = accepted_columns(function)
        if takes is not None and "completions" not in takes:
            raise TypeError(
                f"it takes no argument 'completions'; write def {function.__name__}(completions, **columns)"
            )
    return function


def accepted_columns(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of the columns a reward takes, None for all."""
    kinds = inspect.signature(function).parameters.values()
    everything = any(parameter.kind == parameter.VAR_KEYWORD for parameter in kinds)
    return None if everything else [parameter.name for parameter in kinds]


def select_columns(columns: Mapping[str, Sequence[Any]], takes: Sequence[str] | None) -> dict[str, Sequence[Any]]:
    """Return the columns that a reward with these ``parameters`` takes."""
    return {name: values for name, values in columns.items() if takes is None or name in takes}


def call_reward(function: Callable[..., Any], columns: Mapping[str, Sequence[Any]], rows: int) -> list[Score]:
    """Call a reward, plain or async, on ``rows`` completions; what is not a list of that length scores none of them."""
    result = function(**columns)

    async def awaited() -> Any:
        return await result

    result = event_loop().run(awaited()) if inspect.isawaitable(result) else result
    return read_scores(result, rows, getattr(function, "converts", None))


@functools.cache
def event_loop() -> Any:
    """Return this process's ``asyncio.Runner`` for rewards: one loop for all calls, so that a client keeps its own."""
    import asyncio

    return asyncio.Runner()


def read_scores(result: Any, rows: int, converts: Callable[[Any], Score] | None = None) -> list[Score]:
    """Return the scores in what a reward returned for ``rows`` completions; ``converts`` makes one of an entry."""
    if hasattr(result, "tolist") and getattr(result, "ndim", 0) == 1:
        result = result.tolist()
    if not isinstance(result, list | tuple):
        return [Score(None, f"wrong type: returned {type(result).__name__} instead of a list")] * rows
    if len(result) != rows:
        return [Score(None, f"wrong length: returned {len(result)} entries instead of {rows}")] * rows
    return [(converts or _score)(entry) for entry in result]


def _score(entry: Any) -> Score:
    if entry is None:
        return Score(None)
    if isinstance(entry, str | bytes) or not hasattr(type(entry), "__float__"):
        return Score(None, f"wrong type: {type(entry).__name__} instead of a number")
    try:
        value = float(entry)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Score(None, describe_error(error))
    problem = reward_problem(value)
    return Score(value) if problem is None else Score(None, f"not a number: {problem}")


def describe_error(error: BaseException) -> str:
    """Return an exception in one short line."""
    if isinstance(error, ConfigError):
        return error.problems[0].what  # its fix would be a second one
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}"[:_LONGEST_REASON] if lines else type(error).__name__
    return f"{NO_ANSWER} ({said})" if _unconnected(error) else said


def _unconnected(error: BaseException | None) -> bool:
    """Return whether a connection failed below an exception; by name, since each client library has its own class."""
    while error is not None:
        if any(kind.__name__.endswith(("ConnectionError", "gaierror")) for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


class RewardWrapper:
    """The user's reward as TRL calls it: on the whole batch, in this process and without limits.

    It remembers the scores of the last call. RewardFailed where it raises, or does not return a number or None for each
    completion.
    """

    timeout: float | None = None  # seconds it may take for one completion, None without a limit

    def __init__(
        self, function: Callable[..., Any], spec: str, name: str, solutions: Collection[str] = (),
        left_out: Mapping[str, str] = MappingProxyType({}),
    ):  # fmt: skip
        self._function = function
        self._solutions = solutions  # further names under which it gets ``answer``
        self._left_out = left_out  # columns of the dataset that rewards do not get, and why
        self.spec = spec  # as the recipe names it
        self.__name__ = name  # TRL's name for its metrics
        self.scores: list[Score] = []  # (B,) of the last call
        self.generation = 0  # number of the generation being scored
        self.give_up_after: int | None = None  # unscored completions after which the rest is left out, None for all
        self.stop: StopRequest | None = None  # leaves out the rest of a call; None outside a training
        self.watch: Callable[[], bool] | None = None  # asked in its place while children are waited for

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return the reward of each completion, (B,); None where it is unscored."""
        scores = self._score(len(completions), self.named({**columns, "completions": completions}))
        self.scores = [self._explained(score) if score.reason else score for score in scores]
        return [score.value for score in self.scores]

    def named(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return columns of TRL's, and ``answer`` under its further names."""
        return {**(dict.fromkeys(self._solutions, columns["answer"]) if "answer" in columns else {}), **columns}

    def _explained(self, score: Score) -> Score:
        """Add the left-out column to the reason for a missing score, if the reason names that column."""
        return replace(score, reason=f"{score.reason}{self._about_column(str(score.reason))}")

    def _about_column(self, reason: str) -> str:
        column = next((name for name in self._left_out if f"'{name}'" in reason), None)
        return f"; column '{column}' is not passed to rewards: {self._left_out[column]}" if column else ""

    def _score(self, rows: int, columns: dict[str, Any]) -> list[Score]:
        try:
            with self.stop.interrupting() if self.stop else contextlib.nullcontext():
                scores = call_reward(self._function, select_columns(columns, accepted_columns(self._function)), rows)
        except CutShort:
            return [Score(None, NOT_CALLED)] * rows
        except Exception as error:
            what = describe_error(error)
            what += self._about_column(what)
            verb = "got" if what.startswith(NO_ANSWER) else "raised"
            raise RewardFailed(f"reward '{self.spec}' {verb} {what}") from error
        for score in scores:
            if score.reason is not None and not score.reason.startswith("not a number"):
                raise RewardFailed(f"reward '{self.spec}': {score.reason}")
        return scores
