"""The command `grpo play`: a person takes the policy's turns in an episode of a recipe's environment."""

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping

from grpo_recipes.cli import chosen_recipe, command, option
from grpo_recipes.errors import config_error
from grpo_recipes.extensions.environments.episode import turns_of
from grpo_recipes.extensions.environments.recipe import environments_of, model_opponents
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import hub_environment
from grpo_recipes.process.terminal import readable
from grpo_recipes.recipe.sources import source_of
from grpo_recipes.rollouts.turns import Message, Turn
from grpo_recipes.secrets import masked

_CALL = '{"name": "...", "arguments": {...}}'


@command(
    "play an environment of a recipe in the policy's place",
    option("--seed", type=int, metavar="N", help="seed of the episode; by default one is drawn and shown"),
    option("--entry", type=int, default=1, metavar="N", help="which environment of a mixture (1)"),
    takes_recipe=True,
)
def play(options: argparse.Namespace) -> int:
    """Play one episode with a line of stdin for each turn; return 0, also where stdin ends, and 130 after Ctrl-C."""
    recipe = chosen_recipe(options)
    entries = [spec for spec, _, _ in environments_of(recipe.__getitem__)]
    source = source_of(recipe.__getitem__)
    if not entries and source is not None:
        what = f"completions of {source.title} are sampled elsewhere, and cannot be typed here"
        raise config_error(display_path(recipe.path), what, source.unchecked_rewards[1])
    if not entries:
        fix = "add environment: file.py:Class, or a library's, e.g. textarena:SecretMafia-v0"
        raise config_error(display_path(recipe.path), "it trains on a dataset, and has no environment to play", fix)
    if not 1 <= options.entry <= len(entries):
        named = ", ".join(f"{place} ({spec})" for place, spec in enumerate(entries, start=1))
        raise config_error("--entry", f"there is no environment {options.entry} in the recipe", f"write {named}")
    if options.seed is not None and options.seed < 0:
        raise config_error("--seed", f"is {options.seed}", "write 0 or more")
    spec = entries[options.entry - 1]
    seed = random.randrange(10_000) if options.seed is None else options.seed
    most = recipe["environment_max_turns"]
    os.environ.update(hub_environment(os.environ))
    drawn = "; opponents' moves are drawn" if spec in dict(model_opponents(recipe.__getitem__)) else ""
    _say(f"grpo: {spec}, seed {seed}{drawn}; a line is a turn, of at most {most}; Ctrl-D leaves")
    table = _Table(most)
    try:
        for turn in turns_of(recipe, options.entry - 1, seed, lambda _: table.ask()):
            table.show(turn)
    except (EOFError, KeyboardInterrupt) as error:
        print()
        table.close("left")
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 0
    table.close("ended" if table.done else "unfinished (environment_max_turns)")
    return 0


class _Table:
    """What the person sees of the episode, and what was counted so far."""

    def __init__(self, most: int):
        self._most, self._actions, self._reward = most, 0, 0.0
        self.done = False

    def ask(self) -> str:
        """Return the next line of stdin; EOFError at its end."""
        self._actions += 1
        if sys.stdin is None:  # closed
            raise EOFError
        action = input(f"turn {self._actions} of {self._most}> ")
        if not sys.stdin.isatty():
            print(action)  # which a terminal shows while it is typed
        return action

    def show(self, turn: Turn) -> None:
        """Print what the last action was worth, and what is to be read next."""
        self._reward, self.done = self._reward + turn.reward, turn.done
        worth = f"reward {turn.reward:g}" if self._actions else ""
        if line := "  ".join(filter(None, [worth, *_facts(turn.info)])):
            _say(line)
        for tool in turn.tools:
            _say(f"[tool] {json.dumps(tool.get('function', tool))}, called as <tool_call>{_CALL}</tool_call>")
        for message in turn.messages:
            _say(_text(message))

    def close(self, how: str) -> None:
        """Print how the episode ended."""
        _say(f"grpo: {how} in turn {self._actions}, reward {self._reward:g}")


def _facts(info: Mapping[str, float | str]) -> list[str]:
    return [f"{name} {one:g}" if isinstance(one, int | float) else f"{name}: {one}" for name, one in info.items()]


def _text(message: Message) -> str:
    return f"[{message['role']}] {message['content']}"


def _say(text: str) -> None:
    print(readable(masked(text)), flush=True)
