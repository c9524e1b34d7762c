"""Parts that the entry points of other tools share: flags become recipe keys and a launch."""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from grpo_recipes.cli import Option, load_command, meant_option
from grpo_recipes.cli.nodes import NODE_OPTIONS
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.launch.rendezvous import Meeting
from grpo_recipes.launch.resolve import Options
from grpo_recipes.paths import shell_quote
from grpo_recipes.plan.devices import Resources
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.document import Value


@dataclass(frozen=True)
class LaunchRequest:
    """The launch that the flags of another tool request."""

    options: Options
    resources: Resources
    variables: dict[str, str]  # environment variables to set for it
    notes: list[str]

    def announce(self) -> None:
        """Print the equal `grpo launch` command and the notes, and set the variables."""
        say(launch_command(self.options, self.variables))
        for note in self.notes:
            say(f"note: {note}")
        os.environ.update(self.variables)


def launch_command(options: Options, variables: Mapping[str, str]) -> str:
    """Return the `grpo launch` command that does the same as the entry point."""
    words = [
        "grpo", "launch",
        *([options.recipe] if options.recipe else []),
        *(["--task", options.task] if options.task else []),
        *(["--resume", options.resume] if options.resume else []),
        *options.words(),
        *_meeting_words(options.meeting),
        *(f"--{field.name.replace('_', '-')}" for field in fields(options) if getattr(options, field.name) is True),
    ]  # fmt: skip
    return " ".join([*(f"{name}={shlex.quote(text)}" for name, text in variables.items()), shlex.join(words)])


def _meeting_words(meeting: Meeting | None) -> list[str]:
    """Return the flags of nodes that are started by hand."""
    if meeting is None:
        return []
    flags = {"--nodes": meeting.nodes, "--node-rank": meeting.rank, "--master-addr": meeting.address,
             "--master-port": meeting.port}  # fmt: skip
    return [str(word) for pair in flags.items() for word in pair]


def one_node_options(options: Iterable[Option]) -> list[Option]:
    """Return options of `grpo launch` without the options for several nodes."""
    return [option for option in options if option not in NODE_OPTIONS]


def unknown_flags(flags: list[str], options: Iterable[str], program: str) -> Iterator[Problem]:
    """Yield the flags that begin or misspell one of the entry point's options; `grpo launch` checks the others."""
    if flags and not flags[0].startswith("-"):
        yield Problem(f"'{flags[0]}'", "is no flag", f"write --config {shell_quote(flags[0])} for a recipe")
    launching = one_node_options(load_command("launch").all_options())
    known = [*options, *(name for names, _ in launching for name in names)]
    for flag in flags:
        if close := meant_option(flag, known, takes_recipe=True):
            yield Problem(flag.partition("=")[0], f"is not an option of {program}", f"write {close}")


def with_flags_of(
    error: ConfigError, keys: Mapping[str, Value], options: Mapping[str, str] | None = None
) -> ConfigError:
    """Return an error of the launch with the entry point's flags in its fixes.

    A key that a flag sets is replaced by that flag. ``options`` maps options of `grpo launch` to other flags.
    """

    def renamed(problem: Problem) -> Problem:
        trial, colon, where = problem.where.rpartition(": ")  # a sweep names the trial first
        flag = (options or {}).get(where, where)
        replaced = [key for key, value in keys.items() if value.source == where]
        replaced += [where.removeprefix("--")] if flag != where else []
        fix = problem.fix
        for key in replaced if "grpo " not in fix else ():  # commands of `grpo` take recipe keys
            fix = fix.replace(key, flag)
        return replace(problem, where=f"{trial}{colon}{flag}", fix=fix)

    return ConfigError(*map(renamed, error.problems))


def with_gpus(
    resources: Resources, wanted: int, source: str, fix: str, dry_run: bool, nodes: int = 1
) -> tuple[Resources, list[str]]:
    """Return the devices of a launch that needs ``wanted`` GPUs, and a note if a dry run imagines some of them.

    Fewer visible GPUs are a ConfigError at ``source``. If none is visible, the launch reports what is missing.
    """
    visible = len(resources.gpus)
    if visible >= wanted or (not visible and not dry_run):
        return resources, []
    if not dry_run:
        raise config_error(source, f"{wanted} GPUs are asked for, {visible} are visible here", fix)
    imagined = replace(resources, gpus=tuple(map(str, range(wanted)))).on_nodes(nodes)
    return imagined, [f"{visible} GPUs are visible here: what follows is for a node with {wanted}"]
