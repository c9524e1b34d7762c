"""Environments of the library ``verifiers``: its own rollout and rubric, with the policy's text as the model's answer.

``rollout`` asks an OpenAI client for each completion. Ours waits there for the text of the next ``step``, so that
prompts, stops, tools and scores are those of the library's own evaluation.
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

_HELD_OUT = 10  # of so many rows one is evaluated on, where all are of one dataset
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class VerifiersTask(Environment):
    """One rollout at a time of ``verifiers.load_environment(name, **args)``; the seed picks the dataset's row.

    ``name`` may also be a class that verifiers itself has, such as ``ReasoningGymEnv``.
    """

    def __init__(self, name: str, args: Mapping[str, Any]):
        self._env = _loaded(name, json.dumps(args, sort_keys=True))
        self._noise, self._loop = Noise(), _event_loop()
        self._rollout: asyncio.Task[Any] | None = None
        self.tools: list[dict[str, Any]] = []
        self._read: list[Any] = []

    def reset(self, seed: int) -> Turn:
        """Begin a rollout of the row of this seed, and return the messages that it asks a completion for."""
        self._noise.seed("verifiers", seed)
        self._policy, self._read = _Policy(), []
        self._rollout = self._loop.create_task(self._play(self._row(seed)))
        return self._until_asked()

    def step(self, action: str) -> Turn:
        """Give the rollout its completion, and run it until it asks for another or is scored."""
        answer = _completion(action, bool(self.tools))
        self._read = [*self._read, {"role": "assistant", "content": answer.choices[0].message.content or ""}]
        self._policy.answers.put_nowait(answer)
        return self._until_asked()

    def close(self) -> None:
        """Cancel an unfinished rollout: the library runs its clean-up."""
        if self._rollout is not None and not self._rollout.done():
            with self._noise.running():
                self._cancel(self._rollout)

    def _row(self, seed: int) -> dict[str, Any]:
        """Return the row of this seed: of the set to evaluate on for odd ones, which a run holds out."""
        train, evaluation = self._env.build_dataset() or [], self._env.build_eval_dataset() or []
        if train and evaluation:
            rows = evaluation if seed % 2 else train
            return dict(rows[derive_seed("row", seed) % len(rows)])
        rows = train or evaluation
        return dict(rows[place(seed, len(rows), bool(seed % 2))])

    async def _play(self, row: dict[str, Any]) -> Any:
        state = await self._env.rollout(row, self._policy, "policy", {})
        await self._env.rubric.score_rollout(state)
        return state

    def _until_asked(self) -> Turn:
        """Run the library until it asks for a completion or the rollout is scored."""
        assert self._rollout is not None
        with self._noise.running():
            asked = self._loop.create_task(self._policy.prompts.get())
            self._loop.run_until_complete(asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED))
        if asked.done():
            messages, tools = asked.result()
            return self._turn(messages, tools)
        self._cancel(asked)
        state = self._rollout.result()
        info: dict[str, float | str] = {name: float(value) for name, value in state["metrics"].items()}
        info |= {"stop": str(state.get("stop_condition")), "turns": float(len(state["trajectory"]))}
        if state["error"] is not None:
            info["error"] = repr(state["error"])
        return Turn([], float(state["reward"]), True, info)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))

    def _turn(self, messages: list[Any], tools: list[dict[str, Any]]) -> Turn:
        self.tools = tools
        shown = [_shown(message) for message in messages]
        if [one["role"] for one in shown[: len(self._read)]] != [one["role"] for one in self._read] or any(
            one != read for one, read in zip(shown, self._read, strict=False) if one["role"] != "assistant"
        ):
            what = "it rewrites the conversation between turns, so that sampled tokens are not those trained on"
            raise config_error("environment", what, "use an environment that only adds messages")
        new, self._read = shown[len(self._read) :], shown
        return Turn(new)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's loop: it holds open files, and the clients of an environment stay with one loop."""
    return asyncio.new_event_loop()


@functools.cache
def _loaded(name: str, arguments: str) -> Any:
    """Return the library's environment, made once in a process: it serves many rollouts, and builds its dataset."""
    import verifiers

    # The library sets handlers that end the process; what is drawn here has to be the same in every process.
    with _signals_kept(), seeded_noise("verifiers", name, arguments):
        try:
            own, args = own_class(name), json.loads(arguments)
            env = own(**args) if own else verifiers.load_environment(name, **args)
        except (ValueError, RuntimeError, TypeError) as error:
            what = f"'verifiers:{name}' does not load ({' '.join(str(error).split())})"
            fix = "correct environment_args" if own_class(name) else _install(name)
            raise config_error("environment", what, fix) from error
    if not isinstance(env, (verifiers.MultiTurnEnv, verifiers.EnvGroup)) or env.message_type != "chat":
        fix = "use one whose prompts are lists of messages"
        raise config_error("environment", f"'verifiers:{name}' is no chat environment", fix)
    if names := _group_functions(env.rubric):
        what = f"'verifiers:{name}' scores several rollouts together ({', '.join(names)})"
        raise config_error("environment", what, "use one that scores each rollout by itself")
    return env


def place(seed: int, rows: int, held_out: bool) -> int:
    """Return which row of a dataset is of this seed: with ten or more, each tenth one is held out of training."""
    number, tenths = derive_seed("row", seed), rows // _HELD_OUT
    if not tenths:
        return number % rows
    if held_out:
        return number % tenths * _HELD_OUT + _HELD_OUT - 1
    among = number % (rows - tenths)
    return among + among // (_HELD_OUT - 1)


def own_class(name: str) -> Any:
    """Return verifiers' own class of environments of this name, or None."""
    import verifiers

    found = getattr(verifiers, name, None) if name in verifiers.__all__ else None
    return found if isinstance(found, type) and issubclass(found, verifiers.Environment) else None


class _Policy:
    """Stand in for ``openai.AsyncOpenAI``: hand the messages over, and wait for the policy's answer."""

    def __init__(self) -> None:
        self.prompts: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.chat = self.completions = self

    async def create(self, *, messages: list[Any], tools: list[dict[str, Any]] | None = None, **_: Any) -> Any:
        self.prompts.put_nowait((messages, tools or []))
        return await self.answers.get()


def _completion(text: str, tools: bool) -> Any:
    """Return the answer as OpenAI's client gives it, with ``<tool_call>{...}</tool_call>`` read as a call of a tool.

    A call whose JSON is wrong leaves the whole text as content, so that the environment sees no call.
    """
    from openai.types.chat import ChatCompletion

    calls: list[dict[str, Any]] = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = [json.loads(call) for call in _TOOL_CALL.findall(text)] if tools else []
        calls = [
            {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)} for call in found
        ]
    text = text.partition("<tool_call>")[0] if calls else text
    calls = [{"id": f"call_{index}", "type": "function", "function": call} for index, call in enumerate(calls)]
    message = {"role": "assistant", "content": text, "tool_calls": calls or None}
    choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
    return ChatCompletion.model_validate(
        {"id": "policy", "created": 0, "model": "policy", "object": "chat.completion", "choices": [choice]}
    )


def _shown(message: Mapping[str, Any]) -> Message:
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise config_error("environment", "it shows images or sound", "use one that shows text alone")
        content = "".join(part["text"] for part in content)
    return {"role": message["role"], "content": content}


def _group_functions(rubric: Any) -> list[str]:
    several = [*getattr(rubric, "rubrics", []), *(one.rubric for one in getattr(rubric, "env_map", {}).values())]
    inner = [name for one in several for name in _group_functions(one)]
    return [*rubric._get_group_reward_func_names(), *inner]


def _install(name: str) -> str:
    return f"install its package into the environment, or correct environment_args (module {name.replace('-', '_')})"


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
