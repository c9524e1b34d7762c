"""The function that a child process calls to take an episode one turn further. No torch.

The environment of an episode stays in the child between its turns. A child that does not have it (another died, or was
killed) plays the episode again from its seed and the policy's actions, and compares: an environment that does not
repeat itself is an error, never another episode.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_recipes.environments.turns import Environment, Turn
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.environments import load_environment

PLAY = "grpo_recipes.rollouts.stage:play"  # as the pool of child processes names it
_MOST_CHARACTERS = 200_000  # of a turn; what a child sends is read into memory at once
_LIVE: dict[str, "_Episode"] = {}  # of the generation under way


@dataclass
class _Episode:
    """An episode that this process plays."""

    environment: Environment
    actions: list[str]
    turn: str  # the last one, as JSON


def play(
    completions: Sequence[list[str]], environment: Sequence[str], arguments: Sequence[str], seed: Sequence[int],
    episode: Sequence[str], seen: Sequence[str],
) -> list[str]:  # fmt: skip
    """Return the next turn of each episode as JSON, which ``turn_of`` reads.

    ``completions`` are the policy's actions so far, ``arguments`` the environment's as JSON, ``episode`` the
    generation's name and the row's, ``seen`` the digest of the turn before.
    """
    rows = zip(completions, environment, arguments, seed, episode, seen, strict=True)
    return [_play(*row) for row in rows]


play.converts = lambda text: Score(text)  # type: ignore[attr-defined]  # a text, where rewards return a number


def _play(actions: list[str], spec: str, arguments: str, seed: int, episode: str, seen: str) -> str:
    generation = episode.rpartition("/")[0]
    for name in [name for name in _LIVE if name.rpartition("/")[0] != generation]:
        del _LIVE[name]
    found = _LIVE.pop(episode, None)
    if found is None or found.actions != actions[:-1]:
        environment = load_environment(spec, json.loads(arguments))
        found = _Episode(environment, [], _as_json(environment.reset(seed), environment.tools))
        for action in actions[:-1]:
            _step(found, action)
        if actions and digest(found.turn) != seen:
            raise RuntimeError("the environment does not repeat itself from its seed and the same actions")
    if actions:
        _step(found, actions[-1])
    if not turn_of(found.turn).done:
        _LIVE[episode] = found
    return found.turn


def _step(episode: _Episode, action: str) -> None:
    episode.turn = _as_json(episode.environment.step(action))
    episode.actions.append(action)


def _as_json(turn: Turn, tools: Sequence[dict[str, Any]] = ()) -> str:
    parts = {**asdict(turn), "tools": list(tools)}
    text = json.dumps(parts)
    json.dumps(parts, ensure_ascii=False).encode()  # UnicodeEncodeError on half characters, which no tokenizer takes
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"a turn of {len(text):,} characters, more than {_MOST_CHARACTERS:,}")
    return text


def turn_of(text: str) -> Turn:
    """Return the turn that ``play`` returned; ValueError or TypeError where it is none."""
    turn = Turn(**json.loads(text))
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in turn.messages):
        raise ValueError("messages without role and content")
    return turn


def digest(text: str) -> str:
    """Return what a replayed turn is compared by."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
