"""`grpo fetch`: bring everything a recipe reads of the hub, for jobs without a network."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from grpo_recipes.cli.recipes import add_recipe_arguments, chosen_recipe, recipe_name
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.fetch.assets import Piece
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, INTERRUPTED, hub_answers, human
from grpo_recipes.fetch.records import Record, find_record
from grpo_recipes.fetch.sources import Source, local_sources, wanted_pieces
from grpo_recipes.modebench.dataset import SCHEME as MODEBENCH_SCHEME
from grpo_recipes.paths import shown
from grpo_recipes.plan.environment import hub_environment
from grpo_recipes.recipe import Recipe, read_frozen
from grpo_recipes.runs.rundir import find_run
from grpo_recipes.smoke import smoke_command

HELP = "bring model and data of a recipe, so that its job needs no network"
TAKES_RECIPE = True

_LONGEST_WAIT = 60.0  # seconds for one read or write; a download as a whole may take hours
_WHERE_ONLINE = "run grpo fetch where the hub can be reached, e.g. on the login node"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--update and --resume, beside the recipe's."""
    add_recipe_arguments(parser)
    parser.add_argument("--update", action="store_true", help="bring newer commits of what is here already")
    parser.add_argument("--resume", metavar="DIR", help="bring the commits a run began with, if they are gone")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Bring what is missing, with ``--update`` what is newer, and print a row for each piece.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        ConfigError: the recipe is wrong, or a piece cannot be had.
    """
    os.environ.update(hub_environment(os.environ))
    if not sys.stderr.isatty():
        _without_progress_bars()
    recipe, recorded = _recipe(options, flags)
    try:
        rows = [_local_row(source) for source in local_sources(recipe, os.environ)]
        rows += _hub_rows(wanted_pieces(recipe, recorded), options.update)
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED
    _print_table(rows)
    print(f"grpo: everything {shown(recipe.path)} reads is here; its job needs no network")
    return 0


def _without_progress_bars() -> None:
    """A log file keeps every state of a bar."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")


def _recipe(options: argparse.Namespace, flags: list[str]) -> tuple[Recipe, list[dict[str, Any]] | None]:
    """The recipe, and the sources of the run whose commits are wanted."""
    if options.resume is None:
        return chosen_recipe(options, flags), None
    if recipe_name(options):
        raise config_error("--resume", "a run has its own recipe", "leave the recipe out")
    found = find_run(Path(), options.resume)
    return read_frozen(found.folder / "recipe.yaml", flags, os.environ), found.identity.get("sources")


def _local_row(source: Source) -> tuple[str, ...]:
    if source.id.startswith("smoke:"):
        _make_smoke_task(source.id)
    made = source.id.startswith(MODEBENCH_SCHEME)
    return (source.kind, source.id, "", "", "" if made else shown(source.path), "made by the run" if made else "local")


def _make_smoke_task(name: str) -> None:
    folder, command = smoke_command(name, os.environ)
    if (folder / "COMPLETE").exists():
        return
    print(f"grpo: making the smoke model and data in {shown(folder)} (once, about a minute)", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise config_error(name, f"python -m grpo_recipes.smoke exited with code {code}", "look at its message above")


def _hub_rows(pieces: list[Piece], update: bool) -> list[tuple[str, ...]]:
    """Bring what is missing, and with ``update`` what is newer; a row of the table for each piece.

    Raises:
        ConfigError: pieces that could not be brought; the others were.
    """
    if not pieces:
        return []
    online, rows = hub_answers(os.environ), []
    problems: list[Problem] = []
    for piece in pieces:
        try:
            rows.append(_hub_row(piece, find_record(piece, os.environ), online, update))
        except ConfigError as refused:
            problems += refused.problems
    if problems:
        raise ConfigError(*problems)
    return rows


def _hub_row(piece: Piece, record: Record | None, online: bool, update: bool) -> tuple[str, ...]:
    if record is None and not online:
        raise config_error(piece.where, f"{piece} is not here and the hub does not answer", _WHERE_ONLINE)
    if record is not None and not online:
        if update:
            raise config_error(
                "--update", f"cannot look for newer commits of {piece}: the hub does not answer", _WHERE_ONLINE
            )
        return _row(record, "here; the hub does not answer, so not compared")
    from grpo_recipes.fetch.client import bound_every_wait
    from grpo_recipes.fetch.download import commit_of, fetch

    bound_every_wait(_LONGEST_WAIT)
    newest = commit_of(piece)
    if record is not None and (not update or record.commit == newest):
        newer = f"; the hub has {newest[:12]}: --update brings it" if record.commit != newest else ""
        return _row(record, f"here{newer}")
    print(f"grpo: fetching {piece} at {newest[:12]}", flush=True)
    return _row(fetch(piece, os.environ), "fetched")


def _row(record: Record, state: str) -> tuple[str, ...]:
    inside = " ".join(str(part) for part in (record.config, record.split, record.limit) if part)
    name = f"{record.id} {inside}".strip()
    return (record.kind, name, record.commit[:12], human(record.bytes), shown(record.path), state)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    table = [("what", "name", "commit", "size", "place", ""), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    for row in table:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip())
