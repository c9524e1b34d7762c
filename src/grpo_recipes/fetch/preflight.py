"""Before a launch starts anything: everything the recipe reads is here, or is brought now, or the launch is refused."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, endpoint, hub_answers, told_offline
from grpo_recipes.fetch.sources import Sources, changed_sources, find_sources
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.recipe import Recipe


def need_sources(
    recipe: Recipe,
    environment: Mapping[str, str],
    recorded: list[dict[str, Any]] | None,
    arguments: Sequence[str],
    allow_changed: bool = False,
) -> Sources:
    """Everything a run reads, on this machine.

    What is missing is fetched first where the hub answers: by `grpo fetch` in a process of its own, since the hub's
    clients stay as large as they get and a launcher lives for days.

    Args:
        recipe: the recipe.
        environment: variables of the user.
        recorded: sources of the run that is resumed; its commits are used.
        arguments: what follows ``grpo fetch`` for this recipe.
        allow_changed: take a local model or dataset though it changed since the run began.

    Raises:
        ConfigError: something is missing and cannot be brought, or a resumed run's local files changed.
    """
    sources = find_sources(recipe, environment, recorded)
    changed = changed_sources(sources, recorded)
    if changed and not allow_changed:
        raise config_error("--resume", changed, "put back what it began with, or add --allow-changed-code")
    if not sources.missing:
        return sources
    command = f"grpo fetch {shlex.join(arguments)}"
    if not hub_answers(environment):
        why = "HF_HUB_OFFLINE is set" if told_offline(environment) else f"{endpoint(environment)} does not answer"
        raise ConfigError(*[_missing(str(piece), piece.where, why, command) for piece in sources.missing])
    print(f"grpo: not here yet: {', '.join(map(str, sources.missing))}; running {command}", flush=True)
    _fetch(arguments, environment, command)
    sources = find_sources(recipe, environment, recorded)
    if sources.missing:
        raise config_error("grpo fetch", f"left out {sources.missing[0]}", f"run {command} and look at what it says")
    return sources


def _missing(piece: str, where: str, why: str, command: str) -> Problem:
    return Problem(where, f"{piece} is not on this machine and {why}", f"run on the login node: {command}")


def _fetch(arguments: Sequence[str], environment: Mapping[str, str], command: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "grpo_recipes", "fetch", *arguments],
            env=dict(environment),
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
            check=False,
        )
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    if done.returncode == EXIT_INTERRUPTED:
        raise SystemExit(EXIT_INTERRUPTED)
    if done.returncode:
        raise config_error(
            "grpo fetch", f"ended with code {done.returncode}", f"mend what it says above; then: {command}"
        )
