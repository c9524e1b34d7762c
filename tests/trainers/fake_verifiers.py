"""A fake of the library verifiers, for ``environment_python``: a later version than ours, with clients of its own."""

from __future__ import annotations

import json
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["EnvGroup", "Environment", "MultiTurnEnv", "OpenAIChatCompletionsClient", "load_environment"]

# The only part of the package openai that our code imports.
openai = ModuleType("openai.types.chat")
openai.ChatCompletion = SimpleNamespace(  # type: ignore[attr-defined]
    model_validate=lambda fields: json.loads(json.dumps(fields), object_hook=lambda part: SimpleNamespace(**part))
)
sys.modules |= {"openai": openai, "openai.types": openai, "openai.types.chat": openai}


class OpenAIChatCompletionsClient:
    def __init__(self, client: Any):
        self.client = client

    async def get_response(self, messages: list[dict[str, str]]) -> str:
        response = await self.get_native_response(messages, "model", {}, None, state=None)
        return str(response.choices[0].message.content)

    async def get_native_response(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a server was called")


class Rubric:
    def _get_group_reward_funcs(self) -> list[Any]:
        return []

    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["reward"] = sum(state["trajectory"]) / 2
        state["metrics"] = {"right": float(sum(state["trajectory"]))}


class Environment:
    message_type = "chat"
    rubric = Rubric()


class MultiTurnEnv(Environment):
    """Two sums, the second one drawn with ``random`` after the first answer."""

    def build_dataset(self) -> list[dict[str, int]]:
        return [{"first": number} for number in range(20)]

    def build_eval_dataset(self) -> list[dict[str, int]]:
        return []

    async def rollout(
        self, row: dict[str, int], client: OpenAIChatCompletionsClient, model: str, sampling_args: dict[str, Any]
    ) -> dict[str, Any]:
        state: dict[str, Any] = {"trajectory": [], "error": None, "stop_condition": "two sums"}
        messages: list[dict[str, str]] = []
        for number in (row["first"], None):
            number = random.randrange(100) if number is None else number
            messages = [*messages, {"role": "user", "content": f"{number}+1="}]
            answer = await client.get_response(messages)
            state["trajectory"].append(answer == str(number + 1))
            messages.append({"role": "assistant", "content": answer})
        return state


class EnvGroup(Environment):
    pass


def load_environment(name: str) -> MultiTurnEnv:
    if name != "two-sums":
        raise ValueError(f"no environment {name}")
    return MultiTurnEnv()
