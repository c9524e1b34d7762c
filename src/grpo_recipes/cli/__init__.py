"""The command `grpo`: recipes from the first check to the report."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from grpo_recipes.cli.recipes import EPILOG, USAGE
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, config_error
from grpo_recipes.recipe.keys import nearest_of

COMMANDS = (
    "new",
    "keys",
    "check",
    "check-rewards",
    "plan",
    "doctor",
    "fetch",
    "launch",
    "submit",
    "status",
    "logs",
    "stop",
    "sweep",
    "report",
)


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong in a command line as everything else is told that is wrong."""

    def error(self, message: str) -> NoReturn:
        where, _, what = message.removeprefix("argument ").partition(": ")
        if where == "the following arguments are required":
            where, what = what, "is missing"
        raise config_error(where, what, f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; every refusal is one line a problem and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows the letters it lacks as \\x..
            stream.reconfigure(errors="backslashreplace")
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as refused:
        for problem in refused.problems:
            print(f"grpo: {problem}", file=sys.stderr)
        return EXIT_CONFIG_ERROR
    except BrokenPipeError:
        # `grpo plan | head`: nothing is left to tell; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CONFIG_ERROR


def _run(arguments: list[str]) -> int:
    parser, takes_recipe = _parser()
    _look_at_command(arguments)
    # The recipe stands right after the command: later on a bare word is the value of a recipe flag.
    recipe = None
    if len(arguments) > 1 and arguments[0] in takes_recipe and not arguments[1].startswith("-"):
        recipe = arguments.pop(1)
    options, flags = parser.parse_known_args(arguments)
    if recipe is None and flags and arguments[0] in takes_recipe and not flags[0].startswith("-"):
        recipe = flags.pop(0)  # after options of the command alone, e.g. `grpo check --deep my.yaml`
    options.recipe = recipe
    if flags and arguments[0] not in takes_recipe:
        raise config_error(flags[0], "is no option of this command", f"see grpo {arguments[0]} --help")
    _look_at_folder()
    return int(options.run(options, flags))


def _look_at_command(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-") or arguments[0] in COMMANDS:
        return
    close = nearest_of(arguments[0], COMMANDS)
    raise config_error(arguments[0], "is no command", f"write {close or 'one of ' + ', '.join(COMMANDS)}")


def _look_at_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise config_error(
            ".", f"the working folder is gone ({error.strerror})", "cd to a folder that exists"
        ) from None


def _parser() -> tuple[argparse.ArgumentParser, set[str]]:
    """The parser, and the commands that take a recipe and its flags."""
    parser = _Parser(prog="grpo", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    takes_recipe = set()
    for name in COMMANDS:
        module = importlib.import_module(f"grpo_recipes.cli.{name.replace('-', '_')}")
        about = {"help": module.HELP, "description": module.HELP}
        if module.TAKES_RECIPE:
            takes_recipe.add(name)
            about |= {"usage": f"grpo {name} {USAGE}", "epilog": EPILOG}
        command = commands.add_parser(name, allow_abbrev=False, **about)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser, takes_recipe


if __name__ == "__main__":
    sys.exit(main())
