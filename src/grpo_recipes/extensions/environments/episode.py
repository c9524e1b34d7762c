"""One episode: what the policy, and models in other seats, have read and written; and an episode that a caller plays.

No torch: ``grpo play`` and ``check`` play episodes too.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.environments.recipe import environments_of
from grpo_recipes.extensions.environments.rules import environment_place
from grpo_recipes.extensions.environments.stage import PLAY, digest, turn_of
from grpo_recipes.recipe import Recipe
from grpo_recipes.rewards.child import TIME_LIMIT
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.turns import POLICY, Message, Turn

Tokens = list[int]
_LIMITS = {TIME_LIMIT: "raise environment_timeout", "memory limit": "raise environment_memory_gib"}


@dataclass
class Side:
    """What a model that plays an opponent has read and written, at ``most`` so many tokens."""

    ids: Tokens
    most: int
    speechless: bool = False  # it has no room for another turn


@dataclass
class Episode:
    """One row of a batch: what the policy has read and written so far."""

    row: int  # of the batch of all ranks
    spec: str  # of its environment
    arguments: str  # of that, as JSON
    seed: int
    prompt_ids: Tokens = field(default_factory=list)
    ids: Tokens = field(default_factory=list)  # all after the prompt
    logprobs: list[float | None] = field(default_factory=list)  # of the policy's tokens; 0 of others
    turn_ids: list[int | None] = field(default_factory=list)  # which of the policy's turns a token is of; None: none
    actions: list[str] = field(default_factory=list)  # of the policy, and of models that play opponents
    turns: list[Turn] = field(default_factory=list)  # the environment's, the first one before any action
    opponents: dict[int, Side] = field(default_factory=dict)  # by seat
    seen: str = ""  # digest of the last turn
    done: bool = False
    unfinished: str = ""  # the key whose limit ended it: for want of turns or tokens
    failed: str | None = None  # why it has no reward

    @property
    def active(self) -> bool:
        """Return whether the policy or an opponent is to move."""
        return not (self.done or self.unfinished or self.failed)

    @property
    def own_actions(self) -> list[str]:
        """Return the policy's actions."""
        return [action for turn, action in zip(self.turns, self.actions, strict=False) if not turn.opponent]

    @property
    def opening(self) -> list[Message]:
        """Return what the policy read first."""
        return self.own_turns[0].messages if self.turns else []

    @property
    def own_turns(self) -> list[Turn]:
        """Return what the policy read first, and what each of its actions was answered, after opponents' turns."""
        found: list[Turn] = []
        reward, info = 0.0, dict[str, float | str]()
        for turn in self.turns:
            reward, info = reward + turn.reward, info | turn.info
            if not turn.opponent or turn is self.turns[-1]:
                found.append(replace(turn, reward=reward, info=info, messages=[] if turn.opponent else turn.messages))
                reward, info = 0.0, {}
        return found

    @property
    def mover(self) -> str:
        """Return the model that is to move, empty where it has no room to."""
        last = self.turns[-1]
        return "" if last.opponent and self.opponents[last.seat].speechless else last.opponent or POLICY

    def read(self) -> Tokens:
        """Return all that whoever is to move has read and written."""
        last = self.turns[-1]
        return self.opponents[last.seat].ids if last.opponent else self.prompt_ids + self.ids

    def write(self, ids: Tokens, logprobs: Any, action: str) -> None:
        """Enter a turn that was sampled for whoever was to move, with its log-probs or None."""
        last = self.turns[-1]
        if last.opponent:
            self.opponents[last.seat].ids += ids
        else:
            self.turn_ids += [len(self.own_actions)] * len(ids)
            self.ids += ids
            self.logprobs += [0.0] * len(ids) if logprobs is None else list(logprobs)
        self.actions.append(action)

    def take(self, score: Score) -> None:
        """Enter what the child answered to the last action."""
        if score.reason is not None:
            self.failed = score.reason
            return
        try:
            turn = turn_of(score.value)
        except (TypeError, ValueError) as error:
            self.failed = f"its process sent no turn ({error})"
            return
        self.turns.append(turn)
        self.seen, self.done = digest(score.value), turn.done

    def transcript(self) -> list[Message]:
        """Return the episode as chat messages, as the policy sees it."""
        first, *later = self.own_turns or [Turn([])]
        messages = list(first.messages)
        for action, turn in zip_longest(self.own_actions, later):
            messages += [{"role": "assistant", "content": action}, *(turn.messages if turn else [])]
        return messages

    def record(self) -> dict[str, Any]:
        """Return the episode as ``samples.jsonl`` keeps it; with a reward of its own where it began at its end."""
        first, *later = self.own_turns or [Turn([])]
        turns: list[dict[str, Any]] = [{"action": action} for action in self.own_actions]
        for turn, answer in zip(turns, later, strict=False):  # an environment that failed did not answer the last one
            turn |= {"reward": answer.reward, "info": answer.info, "messages": answer.messages}
        ended = {"unfinished": self.unfinished, "failed": self.failed}
        begun = {"environment": self.spec, "seed": self.seed, "messages": first.messages, "info": first.info}
        begun |= {"reward": first.reward} if first.done else {}
        return begun | {"turns": turns} | {name: why for name, why in ended.items() if why}


def environment_pool(recipe: Callable[[str], Any], copies: Path | None, workers: int | None = None) -> RewardPool:
    """Return the pool of child processes for the environments of a recipe, whose keys ``recipe`` looks up."""
    return RewardPool(
        PLAY,
        workers=workers or recipe("environment_workers"),
        timeout=recipe("environment_timeout"),
        memory_gib=recipe("environment_memory_gib"),
        copies=copies,
        environment=recipe("reward_environment"),
        network=recipe("environment_network"),
        valid=lambda value: isinstance(value, str),
    )


def turns_of(recipe: Recipe, index: int, seed: int, act: Callable[[Turn], str]) -> Iterator[Turn]:
    """Play an episode in a child, with ``act`` as the policy, and yield what the environment says, turn by turn.

    The environment is the recipe's with this ``index``. It ends after ``environment_max_turns`` actions at the latest.
    ConfigError where the environment fails.
    """
    spec, arguments, _ = environments_of(recipe.__getitem__)[index]
    episode = Episode(0, spec, json.dumps(arguments, sort_keys=True), seed)
    columns: dict[str, Sequence[Any]] = {
        "environment": [spec], "arguments": [episode.arguments], "seed": [seed], "episode": ["played/0"],
    }  # fmt: skip
    with environment_pool(recipe.__getitem__, None, workers=1) as pool:
        while not episode.done and len(episode.own_actions) < recipe["environment_max_turns"]:
            episode.actions += [act(episode.own_turns[-1])] if episode.turns else []
            while True:
                (score,) = pool.score(PLAY, [episode.actions], {**columns, "seen": [episode.seen]}, names=["played/0"])
                episode.take(score)
                if episode.failed:
                    raise _failure(recipe, index, episode)
                if not episode.turns[-1].opponent:
                    break
                episode.actions.append("")  # of a model that is not there: its moves are drawn
            yield episode.own_turns[-1]


def _failure(recipe: Recipe, index: int, episode: Episode) -> ConfigError:
    why = str(episode.failed)
    limit = f" of {recipe['environment_timeout']:g} s" if why == TIME_LIMIT else ""
    at = f"turn {len(episode.own_turns)}" if episode.turns else "reset"
    fix = f"correct it, or {_LIMITS.get(why, 'its environment_args')}"
    return config_error(environment_place(recipe, index), f"'{episode.spec}' failed in {at}: {why}{limit}", fix)
