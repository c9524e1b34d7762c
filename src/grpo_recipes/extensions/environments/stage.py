"""The function that a child process runs to play one turn of an episode. No torch.

The environment of an episode stays in the child process between its turns. It is closed when the episode ends or fails,
or when the next generation starts. If a child process does not have the environment (another child died or was killed),
it replays the episode from its seed and the policy's actions, and compares digests: an environment that does not repeat
itself is an error, never another episode.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_recipes.extensions.environments.load import load_environment
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.turns import Environment, Turn

PLAY = "grpo_recipes.extensions.environments.stage:play"  # name of ``play`` for the pool of child processes
_MAX_CHARACTERS = 200_000  # per turn; the parent reads a child's whole answer into memory
_LIVE: dict[str, "_LiveEpisode"] = {}  # episodes of the current generation, by name


@dataclass
class _LiveEpisode:
    """An episode with its environment in this child process."""

    spec: str
    environment: Environment
    actions: list[str] = field(default_factory=list)
    turn: str = ""  # the last turn, as JSON

    def step(self, action: str) -> None:
        """Send an action to the environment; store its answer as JSON in ``turn``, and add the action to ``actions``.

        Raise ValueError if the answer is too long or has characters without UTF-8 form.
        """
        self.turn = _serialize_turn(self.environment.step(action))
        self.actions.append(action)

    def close(self) -> None:
        """Close the environment. If it raises, print only the error's type: the text may contain secrets."""
        try:
            self.environment.close()
        except Exception as error:
            print(f"{self.spec}: close raised {type(error).__name__}", file=sys.stderr)


def play(
    completions: Sequence[list[str]], environment: Sequence[str], arguments: Sequence[str], seed: Sequence[int],
    episode: Sequence[str], last_digest: Sequence[str],
) -> list[str]:  # fmt: skip
    """Play the next turn of each episode; return each turn as JSON, for ``parse_turn``.

    ``completions`` has the actions of each episode so far, [] before its first turn. ``arguments`` are JSON, and
    ``episode`` is GENERATION/ROW. ``last_digest`` is ``hash_turn`` of the previous turn's JSON, "" before the first
    turn. Raise RuntimeError if an episode has to be replayed and the replay has another digest.
    """
    rows = zip(completions, environment, arguments, seed, episode, last_digest, strict=True)
    return [play_turn(*row) for row in rows]


play.converts = lambda text: Score(text)  # type: ignore[attr-defined]  # a text; reward functions return a number


def play_turn(
    actions: list[str], spec: str, arguments: str, seed: int, name: str, last_digest: str,
    load: Callable[[str, Any], Environment] = load_environment,
) -> str:  # fmt: skip
    """Send the last of ``actions`` to the environment and return its answer as JSON; without actions, reset it.

    If the environment of the episode ``name`` is not in this process, ``load`` it by ``spec`` and ``arguments`` (JSON),
    reset it with ``seed`` and replay the earlier actions. Raise RuntimeError if their result differs from
    ``last_digest``. The environment is closed when the episode ends or raises.
    """
    # Close the episodes of other generations, and this episode if it was played with other earlier actions.
    generation = name.rpartition("/")[0]
    for other, live_episode in list(_LIVE.items()):
        if other.rpartition("/")[0] != generation or (other == name and live_episode.actions != actions[:-1]):
            _LIVE.pop(other).close()
    episode = _LIVE.pop(name, None) or _LiveEpisode(spec, load(spec, json.loads(arguments)))
    with contextlib.ExitStack() as at_end:
        at_end.callback(episode.close)
        if not episode.turn:
            episode.turn = _serialize_turn(episode.environment.reset(seed), episode.environment.tools)
            for action in actions[:-1]:
                episode.step(action)
            if actions and hash_turn(episode.turn) != last_digest:
                raise RuntimeError("the environment does not repeat itself from its seed and the same actions")
        if actions:
            episode.step(actions[-1])
        if not parse_turn(episode.turn).done:
            at_end.pop_all()
            _LIVE[name] = episode
    return episode.turn


def _serialize_turn(turn: Turn, tools: Sequence[dict[str, Any]] = ()) -> str:
    """Return a turn with its tools as JSON; raise ValueError if it is too long or has characters without UTF-8 form."""
    fields = {**asdict(turn), "tools": list(tools)}
    text = json.dumps(fields)
    json.dumps(fields, ensure_ascii=False).encode()  # UnicodeEncodeError for lone surrogates: no tokenizer accepts them
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"a turn of {len(text):,} characters, more than {_MAX_CHARACTERS:,}")
    return text


def parse_turn(text: str) -> Turn:
    """Parse the JSON of a turn that ``play`` wrote; raise ValueError or TypeError if the text is not a turn."""
    turn = Turn(**json.loads(text))
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in turn.messages):
        raise ValueError("messages without role and content")
    return turn


def hash_turn(text: str) -> str:
    """Return a short hash of a turn's JSON; a replayed episode must have the same hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
