"""The command `grpo`: recipes from the first check to the report."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from grpo_recipes.cli.command import Command
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, config_error
from grpo_recipes.recipe.keys import nearest_of

# Each command with its module, in the order of `grpo --help`.
COMMANDS = {
    **dict.fromkeys(("new", "keys", "check", "check-rewards", "plan"), "recipes"),
    **dict.fromkeys(("doctor", "fetch"), "machine"),
    **dict.fromkeys(("launch", "submit", "status", "logs", "stop"), "runs"),
    **dict.fromkeys(("sweep", "report"), "sweep"),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors look like all others: what is wrong, where, and the fix."""

    def error(self, message: str) -> NoReturn:
        where, _, what = message.removeprefix("argument ").partition(": ")
        if where == "the following arguments are required":
            where, what = what, "is missing"
        raise config_error(where, what, f"see {self.prog} --help")


def _load(name: str) -> Command:
    """Import a command; `grpo check` does without the modules of the others, each a good part of the package."""
    command: Command = getattr(importlib.import_module(f"{__name__}.{COMMANDS[name]}"), name.replace("-", "_"))
    return command


def make_parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser of some commands, by default all."""
    parser = _Parser(prog="grpo", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in names:
        _load(name).add_to(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; print a line for each problem of a ``ConfigError`` and return 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows the letters it lacks as \\x..
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _options(list(sys.argv[1:] if argv is None else argv))
        return int(options.command.run(options))
    except ConfigError as error:
        for problem in error.problems:
            print(f"grpo: {problem}", file=sys.stderr)
        return EXIT_CONFIG_ERROR
    except BrokenPipeError:
        # `grpo plan | head`: nobody reads on; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CONFIG_ERROR


def _options(arguments: list[str]) -> argparse.Namespace:
    """Return the command's options, with its recipe and the flags that belong to the recipe."""
    name = arguments[0] if arguments else ""
    if name and not name.startswith("-") and name not in COMMANDS:
        fix = f"write {nearest_of(name, COMMANDS) or 'one of ' + ', '.join(COMMANDS)}"
        raise config_error(name, "is not a command", fix)
    parser = make_parser([name] if name in COMMANDS else COMMANDS)
    takes_recipe = name in COMMANDS and _load(name).takes_recipe
    # The recipe comes right after the command: later on a bare word is the value of a recipe flag.
    recipe = None
    if takes_recipe and len(arguments) > 1 and not arguments[1].startswith("-"):
        recipe = arguments.pop(1)
    options, flags = parser.parse_known_args(arguments)
    if takes_recipe and recipe is None and flags and not flags[0].startswith("-"):
        recipe = flags.pop(0)  # after options of the command alone, e.g. `grpo check --deep my.yaml`
    if flags and not takes_recipe:
        raise config_error(flags[0], "is not an option of this command", f"see grpo {name} --help")
    options.recipe, options.flags = recipe, flags
    try:
        os.getcwd()
    except OSError as error:
        what = f"the working folder is gone ({error.strerror})"
        raise config_error(".", what, "cd to a folder that exists") from None
    return options
