"""Play episodes with scripted actions, here or in a separate process."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from grpo_recipes.extensions.environments import libraries
from grpo_recipes.extensions.environments.load import load_environment
from grpo_recipes.rollouts.turns import Environment, Turn

BRACKETED = re.compile(r"\[\d+\]")


def needs(spec: str) -> None:
    """Skip the test if the library of an environment is not installed."""
    kind = spec.partition(":")[0]
    if kind in libraries.LIBRARIES and importlib.util.find_spec(libraries.LIBRARIES[kind]) is None:
        pytest.skip(f"{kind} is not installed (EXTRAS=environments bash scripts/setup.sh)")


def named_last(turn: Turn) -> str:
    """Answer with the last number in brackets in the text: a legal action in most games."""
    return (BRACKETED.findall(turn.messages[-1]["content"]) or ["[1]"])[-1]


def play(env: Environment, seed: int, act: Callable[[Turn], str], most: int = 60) -> list[Turn]:
    """Play an episode and return its turns."""
    turns = [env.reset(seed)]
    while not turns[-1].done and len(turns) <= most:
        turns.append(env.step(act(turns[-1])))
    return turns


def said(actions: Iterable[str]) -> Callable[[Turn], str]:
    """Answer with these actions in order, independent of the prompt."""
    remaining = iter(actions)
    return lambda turn: next(remaining)


def written(turns: list[Turn]) -> str:
    """Return turns as text, for comparisons between processes."""
    return json.dumps([[turn.messages, turn.reward, turn.done, turn.info] for turn in turns], sort_keys=True)


def main(spec: str, args: Mapping[str, Any], seeds: list[int]) -> None:
    print("torch" in sys.modules, *(written(play(load_environment(spec, args), seed, named_last)) for seed in seeds))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
