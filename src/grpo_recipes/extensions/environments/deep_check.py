"""Play an episode of each environment of a recipe, for `grpo check --deep`."""

import random
import re
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

from grpo_recipes.data.prompts import make_renderer, shorten
from grpo_recipes.extensions.environments.episode import turns_of
from grpo_recipes.extensions.environments.games import Game
from grpo_recipes.extensions.environments.recipe import environments_of
from grpo_recipes.recipe import Recipe
from grpo_recipes.rollouts.renderer import Renderer
from grpo_recipes.rollouts.turns import Turn
from grpo_recipes.trainers.deep_check import ANSWER, DeepCheck

_SEED = 0  # of the episode that is played
_MOVE = re.compile(r"\[(?!GAME\]|Player )[^\[\]\n]{1,60}\]")  # as games list moves; who speaks is in brackets too


def play_episodes(check: DeepCheck) -> list[str]:
    """Play an episode of each environment, render it and its roles as the model reads them, and show it."""
    recipe, tokenizer = check.recipe, check.tokenizer()
    make_renderer(recipe["chat_template"], tokenizer, recipe["chat_template_kwargs"])
    renderer, seen = Renderer(tokenizer, recipe["chat_template_kwargs"], check.stops()), []
    several = recipe["environment_max_turns"] > 1
    end = [renderer.end()] if several else []
    for index, (spec, _, _) in enumerate(environments_of(recipe.__getitem__)):
        turns, actions = _play(recipe, index)
        tokens = len(renderer.prompt(turns[0]))
        for turn in turns[1:-1]:  # the policy does not read the last one
            tokens += len(renderer.between(turn.messages, end))
        for role in ("user", *["tool"] * bool(turns[0].tools)) if several else ():  # this episode may not have it
            renderer.between([{"role": role, "content": "0"}], end)
        reward, ended = sum(turn.reward for turn in turns), "ended" if turns[-1].done else "goes on"
        told = f"{ended} after {len(actions)} turn{'s' if len(actions) != 1 else ''}"
        seen.append(f"episode    of {spec}: {tokens} tokens of its own, reward {reward:g}, {told}")
        for turn, action in zip_longest(turns, actions):
            seen += [f"  [{one['role']}] {shorten(one['content'])}" for one in turn.messages]
            seen += [f"  [policy] {action}"] if action is not None else []
    return seen


def _play(recipe: Recipe, index: int) -> tuple[list[Turn], list[str]]:
    """Play an episode of the environment with this index; return its turns and the policy's actions."""
    spec, arguments, _ = environments_of(recipe.__getitem__)[index]
    choose, actions = _policy(spec, arguments), list[str]()

    def act(turn: Turn) -> str:
        actions.append(choose(turn))
        return actions[-1]

    return list(turns_of(recipe, index, _SEED, act)), actions


def _policy(spec: str, arguments: Mapping[str, Any]) -> Callable[[Turn], str]:
    """Return what takes the policy's turns: the script of SecretMafia, the first move that another game lists."""
    kind, _, name = spec.partition(":")
    if kind != "textarena":
        return lambda _: ANSWER
    if not name.startswith("SecretMafia"):
        return lambda turn: next(iter(_MOVE.findall(turn.messages[-1]["content"])), ANSWER)
    game, generator = Game(name, arguments), random.Random(_SEED)  # played beside the episode, with the same moves

    def until_policy(turn: Turn) -> None:
        while turn.opponent:
            turn = game.step("")  # of a model that is not there: its moves are drawn

    def scripted(_: Turn) -> str:
        move = game.scripted(generator)
        until_policy(game.step(move))
        return move

    until_policy(game.reset(_SEED))
    return scripted
