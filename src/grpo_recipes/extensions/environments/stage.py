"""The function that a child process calls to take an episode one turn further. No torch.

The environment of an episode stays in the child between its turns, and is closed when the episode ends or fails, or
when the next generation begins. A child that does not have it (another died, or was killed) plays the episode again
from its seed and the policy's actions, and compares: an environment that does not repeat itself is an error, never
another episode.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_recipes.extensions.environments.load import load_environment
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.turns import Environment, Turn

PLAY = "grpo_recipes.extensions.environments.stage:play"  # as the pool of child processes names it
_MOST_CHARACTERS = 200_000  # of a turn; what a child sends is read into memory at once
_LIVE: dict[str, "_Episode"] = {}  # of the generation under way


@dataclass
class _Episode:
    """An episode that this process plays."""

    spec: str
    environment: Environment
    actions: list[str] = field(default_factory=list)
    turn: str = ""  # the last one, as JSON

    def step(self, action: str) -> None:
        """Take one turn."""
        self.turn = _as_json(self.environment.step(action))
        self.actions.append(action)

    def close(self) -> None:
        """Close the environment; what that raises costs no reward: print its kind, since its text may have secrets."""
        try:
            self.environment.close()
        except Exception as error:
            print(f"{self.spec}: close raised {type(error).__name__}", file=sys.stderr)


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


def _play(actions: list[str], spec: str, arguments: str, seed: int, name: str, seen: str) -> str:
    _close_others(name, actions)
    episode = _LIVE.pop(name, None) or _Episode(spec, load_environment(spec, json.loads(arguments)))
    with contextlib.ExitStack() as over:
        over.callback(episode.close)
        if not episode.turn:
            episode.turn = _as_json(episode.environment.reset(seed), episode.environment.tools)
            for action in actions[:-1]:
                episode.step(action)
            if actions and digest(episode.turn) != seen:
                raise RuntimeError("the environment does not repeat itself from its seed and the same actions")
        if actions:
            episode.step(actions[-1])
        if not turn_of(episode.turn).done:
            over.pop_all()
            _LIVE[name] = episode
    return episode.turn


def _close_others(name: str, actions: list[str]) -> None:
    """Close the episodes of other generations, and one of this name that is not where ``actions`` lead."""
    generation = name.rpartition("/")[0]
    for other, episode in list(_LIVE.items()):
        if other.rpartition("/")[0] != generation or (other == name and episode.actions != actions[:-1]):
            _LIVE.pop(other).close()


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
