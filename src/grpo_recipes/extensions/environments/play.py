"""The command `grpo play`: play an episode of a recipe's environment yourself, in the role of the policy."""

import argparse
import json
import os
import random
import sys

from grpo_recipes.cli import chosen_recipe, command, option
from grpo_recipes.errors import config_error
from grpo_recipes.extensions.environments.arguments import EnvironmentKeys
from grpo_recipes.extensions.environments.episode import play_turns
from grpo_recipes.extensions.environments.recipe import list_model_opponents, uses_trl_environment
from grpo_recipes.extensions.environments.rules import SOURCE
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import hub_environment
from grpo_recipes.process.terminal import strip_control_codes
from grpo_recipes.recipe.sources import source_of
from grpo_recipes.rollouts.turns import Turn
from grpo_recipes.secrets import mask_secrets

_CALL = '{"name": "...", "arguments": {...}}'


@command(
    "Play an environment of a recipe in the role of the policy",
    option("--seed", type=int, metavar="N", help="Seed of the episode; drawn and printed by default"),
    option("--entry", type=int, default=1, metavar="N", help="Number of the environment in a mixture (default: 1)"),
    takes_recipe=True,
)
def play(options: argparse.Namespace) -> int:
    """Play one episode on the terminal: read one line of stdin per turn, and print the environment's answers.

    Return 0 (also at the end of stdin), or 130 after Ctrl-C. Raise ConfigError if there is no environment to play,
    an option is wrong, or the environment fails.
    """
    recipe = chosen_recipe(options)
    entries = SOURCE.benchmarks(recipe.__getitem__)
    source = source_of(recipe.__getitem__)
    if not entries and source is not None:
        message = f"completions of {source.title} are sampled elsewhere and can't be typed here"
        raise config_error(display_path(recipe.path), message, source.unchecked_rewards[1])
    if uses_trl_environment(recipe.__getitem__):
        message = f"'{EnvironmentKeys(recipe).environment}' is a TRL environment, which can't be played by hand"
        raise config_error(display_path(recipe.path), message, "run grpo check --deep, which plays an episode")
    if not entries:
        fix = "add environment: file.py:Class, or an environment of a library, e.g. textarena:SecretMafia-v0"
        raise config_error(
            display_path(recipe.path), "the recipe trains on a dataset and has no environment to play", fix
        )
    if not 1 <= options.entry <= len(entries):
        choices = ", ".join(f"{number} ({spec})" for number, spec in enumerate(entries, start=1))
        raise config_error("--entry", f"the recipe has no environment {options.entry}", f"use {choices}")
    if options.seed is not None and options.seed < 0:
        raise config_error("--seed", f"expected 0 or more, got {options.seed}", "use 0 or more")
    spec = entries[options.entry - 1]
    seed = random.randrange(10_000) if options.seed is None else options.seed
    max_turns = EnvironmentKeys(recipe).max_turns
    os.environ.update(hub_environment(os.environ))
    opponents = "; opponents play random moves" if spec in dict(list_model_opponents(recipe.__getitem__)) else ""
    _print(f"grpo: {spec}, seed {seed}{opponents}; one line per turn, at most {max_turns} turns; Ctrl-D quits")
    table = _Table(max_turns)
    try:
        for turn in play_turns(recipe, options.entry - 1, seed, lambda _: table.ask()):
            table.show(turn)
    except (EOFError, KeyboardInterrupt) as error:
        print()
        table.close("left")
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 0
    table.close("ended" if table.done else "unfinished (environment_max_turns)")
    return 0


class _Table:
    """The episode on the terminal: prompts for actions, prints turns, and counts actions and rewards."""

    def __init__(self, max_turns: int):
        self._max_turns, self._actions, self._reward = max_turns, 0, 0.0
        self.done = False

    def ask(self) -> str:
        """Count a turn, print its prompt, and return the next line of stdin; raise EOFError at the end of stdin.

        If stdin is not a terminal, the line is printed too.
        """
        self._actions += 1
        if sys.stdin is None:  # closed
            raise EOFError
        action = input(f"turn {self._actions} of {self._max_turns}> ")
        if not sys.stdin.isatty():
            print(action)  # a terminal shows it while it is typed
        return action

    def show(self, turn: Turn) -> None:
        """Print a turn: reward and info of the last action, tools and next messages; add the reward to the total."""
        self._reward, self.done = self._reward + turn.reward, turn.done
        reward = f"reward {turn.reward:g}" if self._actions else ""
        info = [
            f"{name} {value:g}" if isinstance(value, int | float) else f"{name}: {value}"
            for name, value in turn.info.items()
        ]
        if line := "  ".join(filter(None, [reward, *info])):
            _print(line)
        for tool in turn.tools:
            _print(f"[tool] {json.dumps(tool.get('function', tool))}, called as <tool_call>{_CALL}</tool_call>")
        for message in turn.messages:
            _print(f"[{message['role']}] {message['content']}")

    def close(self, ending: str) -> None:
        """Print the last line of the episode: how it ended, the number of the turn, and the total reward."""
        _print(f"grpo: {ending} in turn {self._actions}, reward {self._reward:g}")


def _print(text: str) -> None:
    """Print a text with secrets masked and control characters made visible."""
    print(strip_control_codes(mask_secrets(text)), flush=True)
