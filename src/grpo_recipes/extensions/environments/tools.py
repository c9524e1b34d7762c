"""Tools: describe the user's functions for the chat template, find the policy's calls, and run them in child processes.

A tool is a plain or async function. Its result becomes a text, ``str(result)``. Each call is separate: the processes
keep no episode. No torch in the functions that child processes run for each call.
"""

import copy
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_recipes.errors import config_error
from grpo_recipes.extensions.environments.episode import make_environment_pool
from grpo_recipes.recipe.user_code import load_object
from grpo_recipes.rewards.child import TIME_LIMIT
from grpo_recipes.rewards.score import Score, get_async_runner
from grpo_recipes.rollouts.turns import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schema = dict[str, Any]  # OpenAI's schema of a tool
_MODULE = "grpo_recipes.extensions.environments.tools"
CALL, DESCRIBE = f"{_MODULE}:call", f"{_MODULE}:describe"  # names of ``call`` and ``describe`` for child processes
_DESCRIBE_SECONDS = 120.0  # importing transformers takes seconds
_MAX_CHARACTERS = 200_000  # of a result


class Call(NamedTuple):
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""  # why it can't be run, for the policy


# --- in a child process -----------------------------------------------------------------------------------------------


def call(completions: Sequence[str]) -> list[str]:
    """Run each call and return its result as text. Errors of a tool are raised.

    A call is JSON with ``tool`` (module:name or file.py:name), ``copies`` (the folder with the run's copies of the
    user's code) and ``arguments``.
    """
    return [_run(**json.loads(text)) for text in completions]


def describe(completions: Sequence[str]) -> list[str]:
    """Return for each tool in ``completions`` the list of its schemas as JSON. Called in a child process.

    A tool is JSON with ``tool`` (its name in the recipe), ``copies`` (a folder) and ``arguments``: None for a function,
    and the arguments of a TRL environment.

    Raise an error if a tool can't be imported, or lacks type hints or a docstring.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for tool in map(json.loads, completions):
        loaded, functions = load_object(tool["tool"], Path(tool["copies"])), []
        if tool["arguments"] is None:
            functions = [loaded]
        elif isinstance(loaded, type):
            functions = list_methods(object.__new__(loaded))
        else:  # a function that makes environments
            functions = list_methods(loaded(**tool["arguments"]))
        schemas.append(json.dumps([get_json_schema(function) for function in functions]))
    return schemas


def list_methods(environment: Any) -> list[Callable[..., Any]]:
    """Return the bound methods of a TRL environment that the policy may call, as in TRL.

    They are the public methods of its class except ``reset`` and ``get_reward``, sorted by name.
    """
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction) if not name.startswith("_")]
    return [getattr(environment, name) for name in names if name not in ("reset", "get_reward")]


call.converts = describe.converts = lambda text: Score(text)  # type: ignore[attr-defined]  # rewards return numbers


def _run(tool: str, copies: str, arguments: dict[str, Any]) -> str:
    """Call a tool, plain or async, and return its result as text; ``copies`` is the folder of the run's copies."""
    return make_text(load_object(tool, Path(copies))(**arguments))


def make_text(result: Any) -> str:
    """Return the result of a tool as text, after the end of a coroutine.

    Raise ValueError if the text is too long or has no UTF-8 form. Errors of a coroutine are raised.
    """
    text = str(get_async_runner().run(result) if inspect.iscoroutine(result) else result)
    text.encode()  # UnicodeEncodeError for lone surrogates: no tokenizer accepts them
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"a result of {len(text):,} characters, more than {_MAX_CHARACTERS:,}")
    return text


def make_results_turn(results: Sequence[tuple[str, Score]], unfinished: str = "") -> Turn:
    """Return a turn with a message for each of ``results``, pairs of a tool's name and its result.

    Without results, the turn is the episode's last, unless a limit ended the episode (``unfinished`` is not empty).
    """
    messages = [
        {"role": "tool", "name": name, "content": f"Error: {score.reason}" if score.reason else str(score.value)}
        for name, score in results
    ]
    failures = sum(score.reason is not None for _, score in results)
    info: dict[str, float | str] = {"tool_calls": float(len(results)), "tool_failures": float(failures)}
    return Turn(messages, done=not results and not unfinished, info=info)


# --- in a training process --------------------------------------------------------------------------------------------


def describe_tools(recipe: Callable[[str], Any], copies: Path) -> dict[str, Schema]:
    """Return the schema of each tool of a recipe, by its name in ``tools``; ``recipe`` looks up a key.

    The tools of a TRL environment are its methods. Raise ConfigError if a tool can't be imported, lacks type hints or a
    docstring, or has the name of another.
    """
    key = "tools" if recipe("tools") else "environment"
    specs, schemas = list(recipe("tools") or [recipe(key)]), dict[str, Schema]()
    arguments = None if recipe("tools") else recipe("environment_args") or {}
    texts = [json.dumps({"tool": spec, "copies": str(copies), "arguments": arguments}) for spec in specs]
    with make_environment_pool(recipe, copies, 1, DESCRIBE, _DESCRIBE_SECONDS) as pool:
        scores = pool.score(DESCRIBE, texts)
    for spec, score in zip(specs, scores, strict=True):
        if score.reason == TIME_LIMIT:
            problem = f"'{spec}' was not imported and described within {_DESCRIBE_SECONDS:g} s"
            raise config_error(key, problem, "try again on a less busy machine, or import less in its file")
        if score.reason is not None:
            reason = " ".join(score.reason.split())
            fix = "add type hints, and a docstring that describes each argument under Args:"
            raise config_error(key, f"'{spec}' can't be described ({reason})", fix)
        described = json.loads(str(score.value))
        if not described:
            raise config_error(key, f"'{spec}' has no method for the policy to call", "add a method with a docstring")
        schemas |= {spec if key == "tools" else f"{spec}.{name_of(schema)}": schema for schema in described}
    names = [name_of(schema) for schema in schemas.values()]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise config_error(key, f"two tools have the name '{repeated}'", "rename one of the functions")
    return schemas


def name_of(schema: Schema) -> str:
    """Return the name by which the policy calls a tool."""
    return str(schema["function"]["name"])


class CallParser:
    """Find the calls in the policy's turns, in the format of the model's chat template.

    The parser is transformers', with TRL's description of the format. Unknown chat templates must contain the format of
    Qwen and Hermes, or of Llama 3.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Schema]):
        """Find the format of calls in the tokenizer or its chat template; raise ConfigError if there is none."""
        from trl.chat_template_utils import add_response_schema, llama3_template, qwen3_template

        self._tokenizer, self._tools, self._end = tokenizer, list(tools), ""
        self._format: dict[Any, Any] | None = getattr(tokenizer, "response_template", None)
        if self._format is None:
            known: Any = copy.copy(tokenizer)
            try:
                self._format = add_response_schema(known).response_template
            except ValueError:  # a chat template that TRL does not know
                template = str(tokenizer.get_chat_template(tools=self._tools))
                if "<tool_call>" in template:
                    self._format, self._end = qwen3_template, "<|im_end|>"
                elif '"parameters"' in template:
                    self._format, self._end = llama3_template, "<|eot_id|>"
        if self._format is None:
            problem = "the template does not show how the model calls tools"
            fix = 'add a chat_template that asks for <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
            raise config_error("chat_template", problem, fix)

    def parse(self, context: list[int], ids: list[int], text: str) -> list[Call]:
        """Return the calls of a turn, [] for an answer. If it can't be parsed, return a single Call with a problem.

        ``context`` are the tokens before the turn, ``ids`` its tokens, and ``text`` its text without the end token.
        """
        response, prefix = (text + self._end, "") if self._end else (self._tokenizer.decode(ids), context)
        options: Any = {"prefix": prefix, "tools": self._tools}
        try:
            message = self._tokenizer.parse_response(response, self._format, **options)
        except (ValueError, TypeError) as error:
            reason = " ".join(line for line in str(error).splitlines() if not line.startswith("Content: "))
            return [Call("", {}, f"malformed call: {reason}")]
        calls = message.get("tool_calls") or []
        return [self._read_call(entry.get("function", entry) if isinstance(entry, dict) else entry) for entry in calls]

    def _read_call(self, function: Any) -> Call:
        """Return a parsed call, with a problem if it has no name, an unknown name, or arguments that are no mapping."""
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return Call("", {}, "malformed call: expected name and arguments")
        name, arguments = function["name"], function.get("arguments") or {}
        names = [name_of(schema) for schema in self._tools]
        if name not in names:
            return Call(name, {}, f"unknown tool '{name}'; the tools are {', '.join(names)}")
        if not isinstance(arguments, dict):
            return Call(name, {}, "malformed call: arguments must be a mapping")
        return Call(name, arguments)
