"""Load and call reward functions, and turn their results into scores.

A ``Score`` has a value, or the reason why the completion is unscored. ``RewardWrapper`` is the user's reward as TRL
calls it.
"""

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_recipes.errors import ConfigError, translate_errors
from grpo_recipes.numbers import find_reward_problem
from grpo_recipes.recipe.extensions import load
from grpo_recipes.recipe.registry import NO_ANSWER, rewards
from grpo_recipes.recipe.user_code import copy_path, load_object, source_path, split_spec
from grpo_recipes.runs.stop_request import CutShort, StopRequest

Reward = Callable[..., list[float | None]]
NOT_CALLED = "not called: too many completions before it are unscored, or the run was stopped"
_LONGEST_REASON = 300  # characters; a reply of a child must fit a pipe's atomic write


class RewardFailed(Exception):
    """A reward can't be loaded or called at all: the fault is in its code or server, not in a completion."""


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of one reward for one completion."""

    value: Any  # a number, another result that the pool accepts, or None
    # Why it is unscored: a limit, a death, an exception, or a result that is not a number. None if there is a value,
    # and if the reward itself returned None because the completion is not its task.
    reason: str | None = None
    seconds: float = 0.0  # wall time of the call; 0 if it is unknown or no call was made
    by_limit: bool = False  # caused by a limit or a death, so another call might have another outcome
    replayed: bool = False  # an earlier outcome was repeated without a call

    @property
    def unscored(self) -> bool:
        """Whether the reward failed to score the completion; False if it returned None on purpose."""
        return self.reason is not None

    @property
    def may_differ(self) -> bool:
        """Whether a second call might score the completion soon: the first one failed, but not by a limit."""
        return self.unscored and not self.by_limit and self.reason != NOT_CALLED


def is_user_reward(name: str) -> bool:
    """Return whether a reward of the recipe is user code: ``module:function`` or ``file.py:function``."""
    return ":" in name


def make_reward(name: str, script_args: Any = None, args: Any = None) -> Reward:
    """Return a built-in reward as a function, with the values of the recipe keys that it uses as fixed arguments.

    The values are attributes of ``script_args`` or else of ``args``. A reward without keys needs neither. Raise
    KeyError for an unknown name.
    """
    return bind_keys(load(rewards()[name].function), read_keys(name, script_args, args))


def read_keys(name: str, script_args: Any, args: Any) -> dict[str, Any]:
    """Return the values of the recipe keys that a built-in reward uses, by key.

    They are attributes of ``script_args``, or else of ``args``. Raise KeyError for an unknown reward.
    """
    keys = rewards()[name].keys
    return {key: getattr(script_args if hasattr(script_args, key) else args, key) for key in keys}


def bind_keys(function: Callable[..., Any], bound_keys: Mapping[str, Any]) -> Reward:
    """Return a reward with ``bound_keys`` as fixed arguments, async if ``function`` is async.

    Dataset columns with the name of a key are ignored.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def async_reward(completions: list[Any], **columns: Any) -> Any:
            """Await the function with the keys, which override columns of the same name."""
            return await function(completions, **{**columns, **bound_keys})

        return async_reward  # type: ignore[return-value]

    @functools.wraps(function)
    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        """Call the function with the keys, which override columns of the same name."""
        scores: list[float | None] = function(completions, **{**columns, **bound_keys})
        return scores

    return reward


def load_reward(spec: str, copies: Path | None, bound_keys: Mapping[str, Any] = MappingProxyType({})) -> Reward:
    """Load a built-in reward with the values of its recipe keys (``bound_keys``), or a user reward, which gets none.

    A user reward in a ``.py`` file is loaded from its copy in the folder ``copies``, if that copy exists. A user reward
    in a module is loaded from its copy only if the module is gone. Raise RewardFailed if a user reward does not exist,
    raises during its import, or is not a function that accepts ``completions``. Raise KeyError for an unknown built-in
    name.
    """
    if not is_user_reward(spec):
        return bind_keys(load(rewards()[spec].function), bound_keys)
    module, name = split_spec(spec)
    is_gone = not module.endswith(".py") and source_path(spec) is None
    with translate_errors(
        (Exception, SystemExit),
        lambda error: RewardFailed(f"reward '{spec}' cannot be loaded: {describe_error(error)}"),
    ):
        function: Reward = load_object(f"{copy_path(spec, copies)}:{name}" if copies and is_gone else spec, copies)
        if not callable(function):
            raise TypeError(f"it is a {type(function).__name__}, not a function")
        columns = list_accepted_columns(function)
        if columns is not None and "completions" not in columns:
            raise TypeError(f"it has no parameter 'completions'; write def {function.__name__}(completions, **columns)")
    return function


def list_accepted_columns(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of a reward's parameters, which are columns, or None if it accepts any (``**columns``)."""
    parameters = inspect.signature(function).parameters.values()
    accepts_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    return None if accepts_all else [parameter.name for parameter in parameters]


def select_columns(columns: Mapping[str, Sequence[Any]], accepted: Sequence[str] | None) -> dict[str, Sequence[Any]]:
    """Return only the columns whose names are in ``accepted``, or all of them if it is None."""
    return {name: values for name, values in columns.items() if accepted is None or name in accepted}


def call_reward(function: Callable[..., Any], columns: Mapping[str, Sequence[Any]], rows: int) -> list[Score]:
    """Call a plain or async reward on ``rows`` completions and return their scores.

    ``columns`` are all arguments of the call, also ``completions``. A result of another type or length leaves all
    completions unscored. Exceptions of the reward are raised.
    """
    result = function(**columns)
    if inspect.isawaitable(result):
        result = get_async_runner().run(_await_result(result))
    return read_scores(result, rows, getattr(function, "converts", None))


async def _await_result(awaitable: Awaitable[Any]) -> Any:
    """Return the result of any awaitable, since ``asyncio.Runner.run`` accepts only coroutines."""
    return await awaitable


@functools.cache
def get_async_runner() -> Any:
    """Return the ``asyncio.Runner`` of this process for async rewards; create it at the first call.

    All calls of rewards share its event loop, so their clients stay connected.
    """
    import asyncio

    return asyncio.Runner()


def read_scores(result: Any, rows: int, converts: Callable[[Any], Score] | None = None) -> list[Score]:
    """Convert the result of a reward to a score for each of ``rows`` completions.

    If the result is not a list, tuple or 1-D array with ``rows`` entries, all scores have no value, only the reason.
    ``converts`` translates an entry to a score; by default, entries are numbers or None.
    """
    if hasattr(result, "tolist") and getattr(result, "ndim", 0) == 1:
        result = result.tolist()
    if not isinstance(result, list | tuple):
        return [Score(None, f"wrong type: returned {type(result).__name__} instead of a list")] * rows
    if len(result) != rows:
        return [Score(None, f"wrong length: returned {len(result)} entries instead of {rows}")] * rows
    return [(converts or _convert_entry)(entry) for entry in result]


def _convert_entry(entry: Any) -> Score:
    """Convert an entry of a reward's result, a number or None, to a score.

    None gives a score without value. Anything else, and a number that can't be trained on (nan, inf, beyond 1e15),
    gives a score without value but with a reason.
    """
    if entry is None:
        return Score(None)
    if isinstance(entry, str | bytes) or not hasattr(type(entry), "__float__"):
        return Score(None, f"wrong type: {type(entry).__name__} instead of a number")
    try:
        value = float(entry)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Score(None, describe_error(error))
    problem = find_reward_problem(value)
    return Score(value) if problem is None else Score(None, f"not a number: {problem}")


def describe_error(error: BaseException, mask: Callable[[str], str] = str) -> str:
    """Return an exception in one line of at most about 300 characters: its type and the first line of its message.

    For a ConfigError, this is its first problem without the fix. Connection errors begin with ``NO_ANSWER``. ``mask``
    hides secrets in the message before it is cut.
    """
    if isinstance(error, ConfigError):
        return error.problems[0].what  # without its fix, since the caller adds a fix
    lines = mask(str(error)).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}"[:_LONGEST_REASON] if lines else type(error).__name__
    cause: BaseException | None = error  # the error, or an error that caused it
    while cause is not None:
        # Class names such as ``ConnectionError`` decide, since each client library has its own class.
        if any(kind.__name__.endswith(("ConnectionError", "gaierror")) for kind in type(cause).__mro__):
            return f"{NO_ANSWER} ({text})"
        cause = cause.__cause__ or cause.__context__
    return text


class RewardWrapper:
    """A reward function as TRL calls it: on the whole batch, in this process and without limits.

    After a call, ``scores`` tells why completions are unscored. A reward of NaN, infinity or above 1e15 is
    unscored. Raise RewardFailed if the function raises, or does not return a number or None for each completion.
    """

    timeout: float | None = None  # seconds per completion; None without a limit

    def __init__(
        self, function: Callable[..., Any], spec: str, name: str, solutions: Collection[str] = (),
        left_out: Mapping[str, str] = MappingProxyType({}),
    ):  # fmt: skip
        """Create the reward ``spec`` of a recipe from its function; ``name`` is its name in TRL's metrics.

        ``solutions`` are more names for the column ``answer``. ``left_out`` maps columns that the reward does not
        get to the reasons, for error messages.
        """
        self._function = function
        self._solutions = solutions  # more names for the column ``answer``
        self._left_out = left_out  # columns of the dataset that rewards do not get -> reason
        self.spec = spec  # the name in the recipe
        self.__name__ = name  # the name in TRL's metrics
        self.scores: list[Score] = []  # (B,) scores of the last call
        self.generation = 0  # number of the generation that is scored
        self.give_up_after: int | None = None  # unscored completions after which no more are called; None for no limit
        self.stop: StopRequest | None = None  # ends a call early; None outside a training

    def start_generation(self, number: int, stop: StopRequest, give_up_after: int | None) -> None:
        """Store the number of the next generation, the stop request that ends calls, and the limit of unscored rows.

        After more than ``give_up_after`` unscored completions, a call in child processes scores no more rows; None
        sets no limit. A call in this process ignores the limit.
        """
        self.generation, self.stop, self.give_up_after = number, stop, give_up_after

    def discard_generation(self) -> None:
        """Forget outcomes of the current generation that a resumed run would repeat; without limits, there are none."""

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return (B,) rewards, None for unscored completions, and keep the scores with their reasons in ``scores``.

        The function does not get rows with a reason in the column ``episode_failed``: they are unscored.
        """
        other_names = dict.fromkeys(self._solutions, columns["answer"]) if "answer" in columns else {}
        columns = {**other_names, **columns, "completions": completions}
        failures = columns.get("episode_failed") or [None] * len(completions)  # reasons: these have no completion
        rows = [row for row, reason in enumerate(failures) if not reason]
        if len(rows) < len(failures):
            columns = {
                name: [values[row] for row in rows] if isinstance(values, list) else values
                for name, values in columns.items()
            }
        called = iter(self._score_batch(len(rows), columns) if rows else ())
        scores = [Score(None, reason) if reason else next(called) for reason in failures]
        self.scores = [
            replace(score, reason=score.reason + self._describe_missing_column(score.reason)) if score.reason else score
            for score in scores
        ]
        return [score.value for score in self.scores]

    def _describe_missing_column(self, reason: str) -> str:
        """Return "; " and a note with the cause if an error names a dataset column that rewards do not get; else ""."""
        column = next((name for name in self._left_out if f"'{name}'" in reason), None)
        return f"; column '{column}' is not passed to rewards: {self._left_out[column]}" if column else ""

    def _score_batch(self, rows: int, columns: dict[str, Any]) -> list[Score]:
        """Call the function on a batch of ``rows`` completions and return a score per row.

        If the run is asked to stop during the call, all rows are unscored. Raise RewardFailed if the function raises,
        or returns the wrong type or length.
        """
        try:
            with self.stop.interrupting() if self.stop else contextlib.nullcontext():
                scores = call_reward(
                    self._function, select_columns(columns, list_accepted_columns(self._function)), rows
                )
        except CutShort:
            return [Score(None, NOT_CALLED)] * rows
        except Exception as error:
            text = describe_error(error)
            text += self._describe_missing_column(text)
            verb = "got" if text.startswith(NO_ANSWER) else "raised"
            raise RewardFailed(f"reward '{self.spec}' {verb} {text}") from error
        for score in scores:
            if score.reason is not None and not score.reason.startswith("not a number"):
                raise RewardFailed(f"reward '{self.spec}': {score.reason}")
        return scores
