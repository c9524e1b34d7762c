"""Play one episode of each environment of a recipe, for `grpo check --deep`.

No model is loaded. Scripted or fixed actions and dummy calls replace the policy, and the chat template renders the
messages.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from grpo_recipes.data.prompts import make_renderer, shorten
from grpo_recipes.extensions.environments.arguments import EnvironmentKeys
from grpo_recipes.extensions.environments.environment_python import find_library, find_python
from grpo_recipes.extensions.environments.episode import play_turns
from grpo_recipes.extensions.environments.games import Game
from grpo_recipes.extensions.environments.recipe import list_episode_environments, uses_trl_environment
from grpo_recipes.extensions.environments.rules import uses_tools
from grpo_recipes.extensions.environments.tools import CallParser, Schema, describe_tools, name_of
from grpo_recipes.extensions.environments.trl_environments import PLAY, make_setup
from grpo_recipes.paths import display_path
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import SOURCE_REWARD
from grpo_recipes.recipe.user_code import REWARD_COPIES
from grpo_recipes.rewards.probe import read_first_rows
from grpo_recipes.rollouts.renderer import DUMMY, Renderer
from grpo_recipes.rollouts.turns import Turn
from grpo_recipes.trainers.deep_check import ANSWER, DeepCheck

_SEED = 0  # seed of the episode
_DUMMY: dict[str, Any] = {"integer": 0, "number": 0.0, "boolean": False, "array": [], "object": {}}  # by type
_MOVE = re.compile(r"\[(?!GAME\]|Player )[^\[\]\n]{1,60}\]")  # a move in brackets; speakers are in brackets too


def play_episodes(check: DeepCheck) -> list[str]:
    """Play an episode of each environment in a child process; return lines with a summary and the transcript of each.

    If the recipe has tools instead, return a line about them, and an episode of a TRL environment. Raise ConfigError if
    an episode fails, a tool can't be described, or the chat template can't render the messages or tools.
    """
    recipe, tokenizer = check.recipe, check.tokenizer()
    make_renderer(recipe.model.chat_template, tokenizer, recipe.model.chat_template_kwargs)
    renderer = Renderer(tokenizer, recipe.model.chat_template_kwargs, check.stops())
    if uses_tools(recipe):
        tools = list(describe_tools(recipe.__getitem__, recipe.path.parent / REWARD_COPIES).values())
        lines = [_describe_tools(tools, tokenizer, renderer)]
        return lines + (_play_trl_episode(check, tools, renderer) if uses_trl_environment(recipe.__getitem__) else [])
    multi_turn = EnvironmentKeys(recipe).max_turns > 1
    end = [renderer.end()] if multi_turn else []
    lines = []
    python = find_python(recipe.__getitem__)
    for index, (spec, _, _) in enumerate(list_episode_environments(recipe.__getitem__)):
        turns, actions = _play_episode(recipe, index)
        tokens = len(renderer.prompt(turns[0]))
        for turn in turns[1:-1]:  # the policy does not read the last turn
            tokens += len(renderer.between(turn.messages, end))
        # Other episodes may contain these roles even if this episode does not.
        for role in ("user", *["tool"] * bool(turns[0].tools)) if multi_turn else ():
            renderer.between([{"role": role, "content": "0"}], end)
        if python:
            lines.append(f"python     {display_path(python)} {find_library(python, spec)}".rstrip())
        lines += _describe_episode(spec, turns, actions, tokens)
    return lines


def _describe_episode(
    spec: str, turns: Sequence[Turn], actions: Sequence[str], tokens: int, scored: bool = True
) -> list[str]:
    """Return a line with a summary of an episode, with its reward if it is ``scored``, and the lines of its transcript.

    ``tokens`` is the number of tokens that the policy reads.
    """
    reward = f"reward {sum(turn.reward for turn in turns):g}, " if scored else ""
    count = f"{len(actions)} turn{'s' if len(actions) != 1 else ''}"
    ending = f"{reward}{'ended' if turns[-1].done else 'not finished'} after {count}"
    lines = [f"episode    {spec}: {tokens} tokens from the environment, {ending}"]
    for turn, action in zip_longest(turns, actions):
        lines += [f"  [{message['role']}] {shorten(message['content'])}" for message in turn.messages]
        lines += [f"  [policy] {action}"] if action is not None else []
    return lines


def _play_trl_episode(check: DeepCheck, tools: Sequence[Schema], renderer: Renderer) -> list[str]:
    """Play an episode of a TRL environment that starts from the dataset's first row; return a summary and transcript.

    Dummy calls of all methods replace the policy, and then a fixed answer. An error of a method is its result. Raise
    ConfigError if the environment fails.
    """
    recipe = check.recipe
    (row,), _ = read_first_rows(recipe, 1, check.sources.lookup)
    setup = make_setup(recipe.__getitem__, recipe.path.parent / REWARD_COPIES, row)
    calls = [{"name": name_of(tool), "arguments": _make_dummy_arguments(tool), "problem": ""} for tool in tools]
    scored = SOURCE_REWARD in recipe.rewards.funcs
    actions = iter([json.dumps(calls), json.dumps({"reward": scored})])
    names = ("reset", "a dummy call of its methods", "get_reward" if scored else "its end")
    first, *turns = play_turns(recipe, 0, _SEED, lambda _: next(actions), PLAY, setup, names)
    tokens = len(renderer.prompt(replace(first, tools=list(tools))))
    tokens += len(renderer.between(turns[0].messages, [renderer.end()]))
    shown = ", ".join(f"{call['name']}({json.dumps(call['arguments'])})" for call in calls)
    spec, _, _ = list_episode_environments(recipe.__getitem__)[0]
    return _describe_episode(spec, [first, *turns], [f"dummy calls: {shown}", ANSWER], tokens, scored)


def _make_dummy_arguments(tool: Schema) -> dict[str, Any]:
    """Return a value of the right type for each required argument of a tool."""
    parameters = tool["function"]["parameters"]
    types = {name: parameters["properties"][name] for name in parameters.get("required", ())}
    return {name: kind["enum"][0] if "enum" in kind else _DUMMY.get(str(kind.get("type")), "0")
            for name, kind in types.items()}  # fmt: skip


def _describe_tools(tools: Sequence[Schema], tokenizer: Any, renderer: Renderer) -> str:
    """Return a line with the tools' names and their tokens in each prompt.

    Raise ConfigError if the chat template can't render tools or shows no format of calls.
    """
    CallParser(tokenizer, tools)
    tokens = len(renderer.prompt(Turn(DUMMY[:1], tools=list(tools)))) - len(renderer.prompt(Turn(DUMMY[:1])))
    renderer.between([{"role": "tool", "name": name_of(tools[0]), "content": "0"}], [renderer.end()])
    return f"tools      {', '.join(map(name_of, tools))}; {tokens} tokens in each prompt"


def _play_episode(recipe: Recipe, index: int) -> tuple[list[Turn], list[str]]:
    """Play an episode of the recipe's environment ``index`` without a model; return its turns, and the actions.

    Raise ConfigError if the environment fails.
    """
    spec, arguments, _ = list_episode_environments(recipe.__getitem__)[index]
    choose_action = _make_simple_policy(spec, arguments, EnvironmentKeys(recipe).python is None)
    actions: list[str] = []

    def act(turn: Turn) -> str:
        """Choose an action for a turn with the simple policy, record it, and return it."""
        actions.append(choose_action(turn))
        return actions[-1]

    return list(play_turns(recipe, index, _SEED, act)), actions


def _make_simple_policy(spec: str, arguments: Mapping[str, Any], installed_here: bool) -> Callable[[Turn], str]:
    """Return a function that chooses the action for a turn instead of a model.

    In SecretMafia it returns scripted moves, in other games of textarena the first text in brackets of the turn's last
    message. If there is none, and in all other environments, it returns a fixed answer. If the library is not
    ``installed_here``, SecretMafia is like other games.
    """
    kind, _, name = spec.partition(":")
    if kind != "textarena":
        return lambda _: ANSWER
    if not (name.startswith("SecretMafia") and installed_here):
        return lambda turn: next(iter(_MOVE.findall(turn.messages[-1]["content"])), ANSWER)
    game, generator = Game(name, arguments), random.Random(_SEED)  # a copy of the episode, played with the same moves

    def skip_opponents(turn: Turn) -> None:
        """Play the opponents' turns in the copy, until it is the policy's turn."""
        while turn.opponent:
            turn = game.step("")  # no model plays here: the game draws the opponent's move

    def scripted_action(_: Turn) -> str:
        """Return the next scripted move, and play it in the copy."""
        move = game.choose_scripted_move(generator)
        skip_opponents(game.step(move))
        return move

    skip_opponents(game.reset(_SEED))
    return scripted_action
