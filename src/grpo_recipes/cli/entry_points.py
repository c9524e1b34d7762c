"""Shared code of entry points that translate the flags of another tool to a `grpo launch` with recipe keys.

The scripts ``src/*_grpo.py`` of extensions use it. ``LaunchRequest`` is the translated launch, and
``with_flags_of`` puts the tool's flags into errors.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from grpo_recipes.cli import Option, load_command, meant_option
from grpo_recipes.cli.nodes import NODE_OPTIONS
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.launch.resolve import Options
from grpo_recipes.paths import shell_quote
from grpo_recipes.plan.devices import Resources
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.document import Value


@dataclass(frozen=True)
class LaunchRequest:
    """A launch, translated from the flags of another tool."""

    options: Options  # options of the equivalent `grpo launch`
    resources: Resources  # devices for the plan
    variables: dict[str, str]  # environment variables to set
    notes: list[str]  # notes for the user

    def announce(self) -> None:
        """Print the equivalent `grpo launch` command and the notes, and set the variables."""
        say(launch_command(self.options, self.variables))
        for note in self.notes:
            say(f"note: {note}")
        os.environ.update(self.variables)


def launch_command(options: Options, variables: Mapping[str, str]) -> str:
    """Return the equivalent `grpo launch` command as a line for the shell, with ``variables`` before it.

    It lacks the recipes in ``options.then`` and the timeout of a meeting.
    """
    meeting = options.meeting
    meeting_flags = {
        "--nodes": meeting.nodes, "--node-rank": meeting.rank, "--master-addr": meeting.address,
        "--master-port": meeting.port,
    } if meeting else {}  # fmt: skip
    words = [
        "grpo", "launch",
        *([options.recipe] if options.recipe else []),
        *(["--task", options.task] if options.task else []),
        *(["--resume", options.resume] if options.resume else []),
        *options.words(),
        *(str(word) for pair in meeting_flags.items() for word in pair),
        *(f"--{field.name.replace('_', '-')}" for field in fields(options) if getattr(options, field.name) is True),
    ]  # fmt: skip
    return " ".join([*(f"{name}={shlex.quote(text)}" for name, text in variables.items()), shlex.join(words)])


def one_node_options(options: Iterable[Option]) -> list[Option]:
    """Return the options of a command except the options for several nodes."""
    return [option for option in options if option not in NODE_OPTIONS]


def unknown_flags(flags: list[str], options: Iterable[str], program: str) -> Iterator[Problem]:
    """Yield problems of flags that abbreviate or misspell an option; `grpo launch` checks the other flags.

    ``options`` are the names of the options of ``program``; the options of `grpo launch` are known, too. A first
    word that is not a flag is also a problem.
    """
    if flags and not flags[0].startswith("-"):
        yield Problem(f"'{flags[0]}'", "is not a flag", f"use --config {shell_quote(flags[0])} for a recipe")
    launch_options = one_node_options(load_command("launch").all_options())
    names = [*options, *(name for option_names, _ in launch_options for name in option_names)]
    for flag in flags:
        if meant := meant_option(flag, names, takes_recipe=True):
            yield Problem(flag.partition("=")[0], f"is not an option of {program}", f"use {meant}")


def with_flags_of(
    error: ConfigError, keys: Mapping[str, Value], options: Mapping[str, str] | None = None
) -> ConfigError:
    """Return an error of the launch with the entry point's flags in its locations and fixes.

    If a problem is at a flag that sets some of the ``keys``, the flag replaces these keys in the fix, except in a
    fix with a `grpo` command. ``options`` maps options of `grpo launch` to other flags.
    """
    problems = []
    for problem in error.problems:
        trial, colon, where = problem.where.rpartition(": ")  # a sweep puts the trial first
        flag = (options or {}).get(where, where)
        set_keys = [key for key, value in keys.items() if value.source == where]
        set_keys += [where.removeprefix("--")] if flag != where else []
        fix = problem.fix
        for key in set_keys if "grpo " not in fix else ():  # commands of `grpo` accept recipe keys
            fix = fix.replace(key, flag)
        problems.append(replace(problem, where=f"{trial}{colon}{flag}", fix=fix))
    return ConfigError(*problems)


def with_gpus(
    resources: Resources, requested: int, source: str, fix: str, dry_run: bool, nodes: int = 1
) -> tuple[Resources, list[str]]:
    """Return the devices for a launch that needs ``requested`` GPUs on each node, and notes for the user.

    With too few visible GPUs or none, a dry run plans for ``nodes`` nodes with ``requested`` GPUs. Another launch
    raises a ConfigError at ``source`` with the fix ``fix`` if there are too few, and gets ``resources`` unchanged
    if there are none, because the launch itself reports that.
    """
    visible = len(resources.gpus)
    if visible >= requested or (not visible and not dry_run):
        return resources, []
    if not dry_run:
        raise config_error(source, f"{requested} GPUs are requested, but only {visible} are visible", fix)
    hypothetical = replace(resources, gpus=tuple(map(str, range(requested)))).on_nodes(nodes)
    return hypothetical, [f"{visible} GPUs are visible: this dry run plans for a node with {requested}"]
