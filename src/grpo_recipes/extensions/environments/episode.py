"""One episode: the turns and tokens that the policy, and models in other seats, have read and written.

``play_turns`` plays an episode with a caller as the policy. No torch: ``grpo play`` and ``grpo check`` use it too.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.environments.arguments import EnvironmentKeys
from grpo_recipes.extensions.environments.environment_python import find_python
from grpo_recipes.extensions.environments.recipe import list_episode_environments
from grpo_recipes.extensions.environments.rules import locate_environment
from grpo_recipes.extensions.environments.stage import PLAY, hash_turn, parse_turn
from grpo_recipes.recipe import Recipe
from grpo_recipes.rewards.child import TIME_LIMIT
from grpo_recipes.rewards.pool import RewardPool
from grpo_recipes.rewards.score import Score
from grpo_recipes.rollouts.turns import POLICY, Message, Turn

Tokens = list[int]
_LIMITS = {TIME_LIMIT: "raise environment_timeout", "memory limit": "raise environment_memory_gib"}


@dataclass
class Opponent:
    """A model that plays another seat of an episode."""

    ids: Tokens  # all tokens that it has read and written
    max_tokens: int  # limit of ``ids``
    out_of_room: bool = False  # its token limit allows no further turn


@dataclass
class Episode:
    """One row of a batch: the tokens and turns so far."""

    row: int  # index in the batch of all ranks
    spec: str  # name of the environment, as in the recipe
    arguments: str  # arguments of the environment, as JSON
    seed: int
    prompt_ids: Tokens = field(default_factory=list)
    ids: Tokens = field(default_factory=list)  # all tokens after the prompt
    logprobs: list[float | None] = field(default_factory=list)  # one per token of ``ids``; 0 if not the policy's
    turn_ids: list[int | None] = field(default_factory=list)  # the policy's turn of each token of ``ids``, or None
    actions: list[str] = field(default_factory=list)  # texts of the policy and of models that play opponents
    turns: list[Turn] = field(default_factory=list)  # answers of the environment; the first one precedes all actions
    opponents: dict[int, Opponent] = field(default_factory=dict)  # by seat
    last_digest: str = ""  # digest of the last turn
    done: bool = False
    unfinished: str = ""  # the recipe key that ended it: a limit of turns or tokens
    failed: str | None = None  # why it has no reward

    @property
    def active(self) -> bool:
        """Whether the episode continues: it is not done, unfinished or failed."""
        return not (self.done or self.unfinished or self.failed)

    @property
    def policy_actions(self) -> list[str]:
        """The texts of the policy, without the texts of models in opponents' seats."""
        return [action for turn, action in zip(self.turns, self.actions, strict=False) if not turn.opponent]

    @property
    def opening(self) -> list[Message]:
        """The first messages that the policy read; [] before the environment has answered."""
        return self.policy_turns[0].messages if self.turns else []

    @property
    def policy_turns(self) -> list[Turn]:
        """The first turn and the environment's answers to the policy's actions, without opponents' turns.

        Rewards and info of opponents' turns are merged into the next turn of the policy.
        """
        policy_turns: list[Turn] = []
        reward, info = 0.0, dict[str, float | str]()
        for turn in self.turns:
            reward, info = reward + turn.reward, info | turn.info
            if not turn.opponent or turn is self.turns[-1]:
                messages = [] if turn.opponent else turn.messages
                policy_turns.append(replace(turn, reward=reward, info=info, messages=messages))
                reward, info = 0.0, {}
        return policy_turns

    @property
    def next_model(self) -> str:
        """The model of the next turn, "policy" or an opponent's model; "" if its token limit allows no turn."""
        last = self.turns[-1]
        return "" if last.opponent and self.opponents[last.seat].out_of_room else last.opponent or POLICY

    def context(self) -> Tokens:
        """Return all tokens that the model of the next turn has read and written so far: the policy or an opponent."""
        last = self.turns[-1]
        return self.opponents[last.seat].ids if last.opponent else self.prompt_ids + self.ids

    def add_action(self, ids: Tokens, logprobs: Sequence[float | None] | None, action: str) -> None:
        """Append a sampled turn: ``ids`` to the tokens of the model that wrote it, the text ``action`` to the actions.

        ``logprobs`` has one value per token; None stores 0 for each. An opponent's log-probs are not stored.
        """
        last = self.turns[-1]
        if last.opponent:
            self.opponents[last.seat].ids += ids
        else:
            self.turn_ids += [len(self.policy_actions)] * len(ids)
            self.ids += ids
            self.logprobs += [0.0] * len(ids) if logprobs is None else list(logprobs)
        self.actions.append(action)

    def add_answer(self, score: Score) -> None:
        """Parse the environment's answer to the last action and append it to the turns; set ``done`` if it is the last.

        ``score`` has the JSON from the environment's child process. If the call failed, or the JSON is not a turn,
        store the reason in ``failed`` and append nothing.
        """
        if score.reason is not None:
            self.failed = score.reason
            return
        try:
            turn = parse_turn(score.value)
        except (TypeError, ValueError) as error:
            self.failed = f"its process sent no turn ({error})"
            return
        self.turns.append(turn)
        self.last_digest, self.done = hash_turn(score.value), turn.done

    def transcript(self) -> list[Message]:
        """Return the episode as chat messages, as the policy sees it: observations and its actions."""
        first, *answers = self.policy_turns or [Turn([])]
        messages = list(first.messages)
        for action, turn in zip_longest(self.policy_actions, answers):
            messages += [{"role": "assistant", "content": action}, *(turn.messages if turn else [])]
        return messages

    def record(self) -> dict[str, Any]:
        """Return the episode's entry in ``samples.jsonl``: messages, and per turn the action, reward and info.

        A last action that a failed environment did not answer has neither reward nor info. ``failed`` or
        ``unfinished`` is set if it applies. The entry has a reward only if the episode ended before any action.
        """
        first, *answers = self.policy_turns or [Turn([])]
        turns: list[dict[str, Any]] = [{"action": action} for action in self.policy_actions]
        for turn, answer in zip(turns, answers, strict=False):  # a failed environment did not answer the last action
            turn |= {"reward": answer.reward, "info": answer.info, "messages": answer.messages}
        record = {"environment": self.spec, "seed": self.seed, "messages": first.messages, "info": first.info}
        record |= {"reward": first.reward} if first.done else {}
        record |= {"turns": turns}
        reasons = {"unfinished": self.unfinished, "failed": self.failed}
        return record | {name: reason for name, reason in reasons.items() if reason}


def make_environment_pool(
    recipe: Callable[[str], Any], copies: Path | None, workers: int | None = None, function: str = PLAY,
    timeout: float | None = None,
) -> RewardPool:  # fmt: skip
    """Create a pool of child processes that run a recipe's environments or tools with its limits; do not start it.

    ``recipe`` looks up a key, ``copies`` is the folder with the run's copies of the user's code, and ``workers`` is the
    number of processes, by default environment_workers. The processes call ``function``, ``module:name``, for at most
    ``timeout`` seconds, by default environment_timeout.
    """
    return RewardPool(
        function,
        workers=workers or recipe("environment_workers"),
        timeout=timeout or recipe("environment_timeout"),
        memory_gib=recipe("environment_memory_gib"),
        copies=copies,
        environment=recipe("reward_environment"),
        network=recipe("environment_network"),
        python=find_python(recipe),
        valid=lambda value: isinstance(value, str),
    )


def play_turns(
    recipe: Recipe, index: int, seed: int, act: Callable[[Turn], str], function: str = PLAY, setup: str | None = None,
    calls: Sequence[str] = (),
) -> Iterator[Turn]:  # fmt: skip
    """Play an episode in a child process; yield the first turn, then the environment's answer to each action.

    ``act`` returns the policy's action for a turn, and the game draws the moves of all opponents. ``index`` selects the
    recipe's environment. The episode ends after at most ``environment_max_turns`` actions. The child process calls
    ``function`` with ``setup``, by default the environment's arguments. ``calls`` names what it does for each turn, in
    messages, and limits the turns. Raise ConfigError if the environment fails.
    """
    spec, arguments, _ = list_episode_environments(recipe.__getitem__)[index]
    episode = Episode(0, spec, setup or json.dumps(arguments, sort_keys=True), seed)
    max_turns = len(calls) - 1 if calls else EnvironmentKeys(recipe).max_turns
    columns: dict[str, Sequence[Any]] = {
        "environment": [spec], "arguments": [episode.arguments], "seed": [seed], "episode": ["played/0"],
    }  # fmt: skip
    with make_environment_pool(recipe.__getitem__, None, workers=1, function=function) as pool:
        while not episode.done and len(episode.policy_actions) < max_turns:
            episode.actions += [act(episode.policy_turns[-1])] if episode.turns else []
            while True:
                turn_columns = {**columns, "last_digest": [episode.last_digest]}
                (score,) = pool.score(function, [episode.actions], turn_columns, names=["played/0"])
                episode.add_answer(score)
                if episode.failed:
                    raise _make_failure_error(recipe, index, episode, calls)
                if not episode.turns[-1].opponent:
                    break
                episode.actions.append("")  # no model plays here: the game draws the opponent's move
            yield episode.policy_turns[-1]


def _make_failure_error(recipe: Recipe, index: int, episode: Episode, calls: Sequence[str]) -> ConfigError:
    """Return a ConfigError for a failed episode: the turn that failed, the reason, and the recipe key that may help.

    ``calls`` names the turns; if it is empty, they are the reset and numbered turns.
    """
    reason = str(episode.failed)
    limit = f" of {EnvironmentKeys(recipe).timeout:g} s" if reason == TIME_LIMIT else ""
    number = len(episode.policy_turns)
    call = calls[number] if calls else f"turn {number}" if number else "reset"
    fix = f"correct it, or {_LIMITS.get(reason, 'its environment_args')}"
    return config_error(locate_environment(recipe, index), f"'{episode.spec}' failed in {call}: {reason}{limit}", fix)
