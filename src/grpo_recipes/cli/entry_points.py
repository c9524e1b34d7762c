"""What the doors share, which turn the flags of another trainer into one `grpo launch`."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace

from grpo_recipes.cli import Option, load_command, meant_option
from grpo_recipes.cli.nodes import NODE_OPTIONS
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.launch.rendezvous import Meeting
from grpo_recipes.launch.resolve import Options
from grpo_recipes.paths import quoted
from grpo_recipes.plan.devices import Resources


def launch_words(start: list[str], options: Options, variables: Mapping[str, str]) -> str:
    """Return the command of a shell that does the same, beginning with ``start``."""
    words = [
        *start,
        *([options.recipe] if options.recipe else []),
        *(["--task", options.task] if options.task else []),
        *(["--resume", options.resume] if options.resume else []),
        *options.flags,
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
    """Return options of `grpo launch` without those of several nodes."""
    return [option for option in options if option not in NODE_OPTIONS]


def strange(flags: list[str], own: Iterable[str], program: str) -> Iterator[Problem]:
    """Yield the flags that begin or misspell one of a door's ``own``; `grpo launch` knows the others."""
    if flags and not flags[0].startswith("-"):
        yield Problem(f"'{flags[0]}'", "is no flag", f"write --config {quoted(flags[0])} for a recipe")
    known = [*own, *(name for names, _ in one_node_options(load_command("launch").all_options()) for name in names)]
    for flag in flags:
        if close := meant_option(flag, known, takes_recipe=True):
            yield Problem(flag.partition("=")[0], f"is not an option of {program}", f"write {close}")


def in_words_of(error: ConfigError, names: Mapping[str, str]) -> ConfigError:
    """Return an error of the launch with the door's flags in place of those that stand for them."""

    def ours(one: Problem) -> Problem:
        trial, colon, where = one.where.rpartition(": ")  # of a sweep the trial's name is before it
        flag = names.get(where)
        # A command in it is one of ours, which knows recipe keys alone.
        fix = one.fix if "grpo " in one.fix else one.fix.replace(where.removeprefix("--"), flag or "")
        return replace(one, where=f"{trial}{colon}{flag}", fix=fix) if flag else one

    return ConfigError(*map(ours, error.problems))


def with_gpus(
    resources: Resources, wanted: int, source: str, fix: str, dry_run: bool, nodes: int = 1
) -> tuple[Resources, list[str]]:
    """Return the devices of a launch that wants so many GPUs, those that a dry run imagines too, and a note of them.

    Fewer visible ones are a ConfigError at ``source``, but none at all: the launch says what is missing then.
    """
    shows = len(resources.gpus)
    if shows >= wanted or (not shows and not dry_run):
        return resources, []
    if not dry_run:
        raise config_error(source, f"{wanted} GPUs are asked for, {shows} are visible here", fix)
    imagined = replace(resources, gpus=tuple(map(str, range(wanted)))).on_nodes(nodes)
    return imagined, [f"{shows} GPUs are visible here: what follows is for a node with {wanted}"]
