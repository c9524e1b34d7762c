"""Environments of the library ``verifiers``: its own rollout and rubric, with the policy's text as the model's answer.

The library's ``rollout`` requests each completion from an OpenAI client. Here, the client waits for the text of the
next ``step``. Prompts, stops, tools and scores therefore equal the library's own evaluation.
"""

import asyncio
import contextlib
import functools
import json
import re
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.rollouts.turns import Environment, Message, Noise, Turn, derive_seed, seeded_noise

_HELD_OUT = 10  # every tenth row is for evaluation, if the environment has only one dataset
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class VerifiersTask(Environment):
    """One rollout at a time of ``verifiers.load_environment(name, **args)``; the seed picks the dataset's row.

    ``name`` may also be a class of verifiers itself, such as ``ReasoningGymEnv``.
    """

    def __init__(self, name: str, args: Mapping[str, Any]):
        """Load the environment, which is cached in this process; raise ConfigError if it is not usable."""
        self._env = _load_environment(name, json.dumps(args, sort_keys=True))
        self._noise, self._loop = Noise(), _get_event_loop()
        self._rollout: asyncio.Task[Any] | None = None
        self.tools: list[dict[str, Any]] = []
        self._conversation: list[Message] = []  # messages up to the last turn

    def reset(self, seed: int) -> Turn:
        """Start a rollout of this seed's dataset row, and return a turn with the messages of its first request."""
        self._noise.seed("verifiers", seed)
        self._policy, self._conversation = _PolicyClient(), []
        self._rollout = self._loop.create_task(self._run_rollout(self._find_row(seed)))
        return self._run_until_request()

    def step(self, action: str) -> Turn:
        """Answer the rollout's request with the policy's text, and return the turn of its next request or its score."""
        answer = _parse_completion(action, bool(self.tools))
        self._conversation.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        self._policy.answers.put_nowait(answer)
        return self._run_until_request()

    def close(self) -> None:
        """Cancel an unfinished rollout, so that the library cleans up; do nothing without one."""
        if self._rollout is not None and not self._rollout.done():
            with self._noise.running():
                self._cancel(self._rollout)

    def _find_row(self, seed: int) -> dict[str, Any]:
        """Return the dataset row of a seed: even seeds get training rows, odd seeds evaluation rows.

        If the environment has only one dataset, its rows are split between both as in ``choose_row_index``.
        """
        train, evaluation = self._env.build_dataset() or [], self._env.build_eval_dataset() or []
        if train and evaluation:
            rows = evaluation if seed % 2 else train
            return dict(rows[derive_seed("row", seed) % len(rows)])
        rows = train or evaluation
        return dict(rows[choose_row_index(seed, len(rows), bool(seed % 2))])

    async def _run_rollout(self, row: dict[str, Any]) -> Any:
        """Run the library's rollout of a row and score it; return its final state."""
        state = await self._env.rollout(row, _make_client(self._policy), "policy", {})
        await self._env.rubric.score_rollout(state)
        return state

    def _run_until_request(self) -> Turn:
        """Run the rollout until it requests a completion or ends.

        Return a turn with the new messages, or the last turn with reward, metrics, stop condition and error. Raise
        ConfigError if the library rewrote earlier messages.
        """
        assert self._rollout is not None
        with self._noise.running():
            request = self._loop.create_task(self._policy.prompts.get())
            self._loop.run_until_complete(asyncio.wait({request, self._rollout}, return_when=asyncio.FIRST_COMPLETED))
        if request.done():
            messages, tools = request.result()
            return self._read_new_messages(messages, tools)
        self._cancel(request)
        state = self._rollout.result()
        info: dict[str, float | str] = {name: float(value) for name, value in state["metrics"].items()}
        info |= {"stop": str(state.get("stop_condition")), "turns": float(len(state["trajectory"]))}
        if state["error"] is not None:
            info["error"] = repr(state["error"])
        return Turn([], float(state["reward"]), True, info)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel an asyncio task and wait until it has ended."""
        task.cancel()
        self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))

    def _read_new_messages(self, messages: list[Any], tools: list[dict[str, Any]]) -> Turn:
        """Return a turn with the messages that a request adds to the conversation, and store conversation and tools.

        Raise ConfigError if the request changed earlier messages.
        """
        self.tools = tools
        conversation = [_convert_message(message) for message in messages]
        old = self._conversation
        same_roles = [message["role"] for message in conversation[: len(old)]] == [message["role"] for message in old]
        if not same_roles or any(
            message != old_message
            for message, old_message in zip(conversation, old, strict=False)
            if message["role"] != "assistant"
        ):
            problem = "it rewrites the conversation between turns, so training tokens would differ from sampled tokens"
            raise config_error("environment", problem, "use an environment that only adds messages")
        self._conversation = conversation
        return Turn(conversation[len(old) :])


@functools.cache
def _get_event_loop() -> asyncio.AbstractEventLoop:
    """Create this process's event loop at the first call; return the same loop later.

    A loop keeps files open, and an environment's clients are bound to one loop.
    """
    return asyncio.new_event_loop()


@functools.cache
def _load_environment(name: str, arguments: str) -> Any:
    """Load and return an environment of verifiers; cached, because it serves many rollouts and builds its dataset once.

    ``arguments`` is JSON. Raise ConfigError if the environment can't be loaded, has no chat prompts, or scores
    several rollouts together.
    """
    import verifiers

    # The library sets signal handlers that end the process. Random draws here must be equal in every process.
    with _keep_signal_handlers(), seeded_noise("verifiers", name, arguments):
        try:
            environment_class, args = find_library_class(name), json.loads(arguments)
            env = environment_class(**args) if environment_class else verifiers.load_environment(name, **args)
        except (ValueError, RuntimeError, TypeError) as error:
            message = f"'verifiers:{name}' can't be loaded ({' '.join(str(error).split())})"
            module = name.replace("-", "_")
            fix = "correct environment_args"
            if not find_library_class(name):
                fix = f"install its package into the Python environment, or {fix} (module {module})"
            raise config_error("environment", message, fix) from error
    if not isinstance(env, (verifiers.MultiTurnEnv, verifiers.EnvGroup)) or env.message_type != "chat":
        fix = "use an environment with lists of messages as prompts"
        raise config_error("environment", f"'verifiers:{name}' is not a chat environment", fix)
    if names := _list_group_functions(env.rubric):
        message = f"'verifiers:{name}' scores several rollouts together ({', '.join(names)})"
        raise config_error("environment", message, "use an environment that scores each rollout separately")
    return env


def choose_row_index(seed: int, rows: int, held_out: bool) -> int:
    """Return the index of a seed's dataset row, from 0 to ``rows`` - 1.

    With ten or more rows, every tenth row is held out: only ``held_out`` seeds get it. With fewer, all rows are shared.
    """
    number, tenths = derive_seed("row", seed), rows // _HELD_OUT
    if not tenths:
        return number % rows
    if held_out:
        return number % tenths * _HELD_OUT + _HELD_OUT - 1
    training_index = number % (rows - tenths)
    return training_index + training_index // (_HELD_OUT - 1)


def find_library_class(name: str) -> Any:
    """Return the environment class that verifiers itself exports under this name, or None if there is none."""
    import verifiers

    member = getattr(verifiers, name, None) if name in verifiers.__all__ else None
    return member if isinstance(member, type) and issubclass(member, verifiers.Environment) else None


class _PolicyClient:
    """A replacement of ``openai.AsyncOpenAI`` that queues the messages and waits for the policy's answer."""

    def __init__(self) -> None:
        """Create empty queues; the client is its own ``chat.completions``."""
        self.prompts: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.chat = self.completions = self

    async def create(self, *, messages: list[Any], tools: list[dict[str, Any]] | None = None, **_: Any) -> Any:
        """Queue the messages and tools of a request, and return the policy's answer once it comes."""
        self.prompts.put_nowait((messages, tools or []))
        return await self.answers.get()


def _make_client(policy: _PolicyClient) -> Any:
    """Return the client of a rollout: ``policy``, or around it a client of the library, as 0.1.11 and later expect."""
    import verifiers

    client_class = getattr(verifiers, "OpenAIChatCompletionsClient", None)
    if client_class is None:
        return policy

    class LibraryClient(client_class):  # type: ignore[misc, valid-type]  # it converts messages and tools
        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            """Return the policy's answer to a request instead of a server's."""
            return await policy.create(messages=prompt, tools=tools)

    return LibraryClient(policy)


def _parse_completion(text: str, tools: bool) -> Any:
    """Convert a text to an OpenAI ``ChatCompletion``; if ``tools``, parse ``<tool_call>{...}</tool_call>`` in it.

    If the JSON of a call is wrong, the whole text becomes content, and the environment sees no call.
    """
    from openai.types.chat import ChatCompletion

    calls: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        parsed = [json.loads(call) for call in _TOOL_CALL.findall(text)] if tools else []
        calls = [
            {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in parsed
        ]
    text = text.partition("<tool_call>")[0] if calls else text
    calls = [{"id": f"call_{index}", "type": "function", "function": call} for index, call in enumerate(calls)]
    message = {"role": "assistant", "content": text, "tool_calls": calls or None}
    choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
    return ChatCompletion.model_validate(
        {"id": "policy", "created": 0, "model": "policy", "object": "chat.completion", "choices": [choice]}
    )


def _convert_message(message: Mapping[str, Any]) -> Message:
    """Return the role and text of an OpenAI message; raise ConfigError if it contains images or sound."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise config_error("environment", "its messages contain images or sound", "use an environment of text")
        content = "".join(part["text"] for part in content)
    return {"role": message["role"], "content": content}


def _list_group_functions(rubric: Any) -> list[str]:
    """Return the names of reward functions that score several rollouts together, in a rubric and its nested rubrics."""
    parts = [*getattr(rubric, "rubrics", []), *(env.rubric for env in getattr(rubric, "env_map", {}).values())]
    names = [name for part in parts for name in _list_group_functions(part)]
    return [*(getattr(function, "__name__", repr(function)) for function in rubric._get_group_reward_funcs()), *names]


@contextlib.contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after the ``with`` block, also after an error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
