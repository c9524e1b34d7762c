"""`grpo fetch`: download model and data of a recipe, so that its job needs no network."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from grpo_recipes.cli import chosen_recipe, command, option, recipe_name, switch
from grpo_recipes.errors import collect, config_error
from grpo_recipes.fetch.assets import Asset, find_record, local_assets, wanted_assets
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, INTERRUPTED, hub_answers, limit_every_wait, unreachable_reason
from grpo_recipes.paths import display_path
from grpo_recipes.plan.commands import hub_environment
from grpo_recipes.process.reports import aligned, gigabytes
from grpo_recipes.recipe import read_frozen
from grpo_recipes.recipe.generated import generated
from grpo_recipes.runs.rundir import find_run
from grpo_recipes.smoke import smoke_command

_LONGEST_WAIT = 60.0  # seconds for one read or write; a download as a whole may take hours
_WHERE_ONLINE = "run grpo fetch where the hub can be reached, e.g. on the login node"


@command(
    "bring model and data of a recipe, so that its job needs no network",
    switch("--update", help="bring newer commits of what is here already"),
    option("--resume", metavar="DIR", help="bring the commits a run began with, if they are gone"),
    takes_recipe=True,
)
def fetch(options: argparse.Namespace) -> int:
    """Bring what is missing, with ``--update`` what is newer, and print a row for each; return 130 after Ctrl-C."""
    os.environ.update(hub_environment(os.environ))
    if not sys.stderr.isatty():  # a log file keeps every state of a progress bar
        for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    if options.resume is None:
        recipe, recorded = chosen_recipe(options), None
    elif recipe_name(options):
        raise config_error("--resume", "a run has its own recipe", "leave the recipe out")
    else:
        run = find_run(Path(), options.resume)
        recipe = read_frozen(run.folder / "recipe.yaml", options.flags, os.environ)
        recorded = run.identity.get("sources")
    wanted = wanted_assets(recipe, recorded)
    try:
        rows = [_local_row(asset) for asset in local_assets(recipe, os.environ)]
        online = bool(wanted) and hub_answers(os.environ)
        rows += collect(wanted, lambda asset: _hub_row(asset, find_record(asset, os.environ), online, options.update))
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return EXIT_INTERRUPTED
    print(*aligned([("what", "name", "commit", "size", "place", ""), *rows]), sep="\n")
    print(f"grpo: everything {display_path(recipe.path)} reads is here; its job needs no network")
    return 0


def _local_row(asset: Asset) -> tuple[str, ...]:
    """Make the built-in model and data where the recipe names them and they are missing; return the asset's row."""
    if asset.id.startswith("smoke:"):
        folder, program = smoke_command(asset.id, os.environ)
        if not (folder / "COMPLETE").exists():
            print(f"grpo: making the smoke model and data in {display_path(folder)} (once, about a minute)", flush=True)
            if code := subprocess.run(program, check=False).returncode:
                what = f"python -m grpo_recipes.smoke exited with code {code}"
                raise config_error(asset.id, what, "look at its message above")
    data = generated(asset.id)
    made = data is not None and not data.in_files
    return (
        asset.kind,
        asset.id,
        "",
        "",
        "" if made else display_path(asset.path),
        "made by the run" if made else "local",
    )


def _hub_row(asset: Asset, record: Asset | None, online: bool, update: bool) -> tuple[str, ...]:
    """Bring an asset of the hub if it is missing, or older with ``update``, and return its row."""
    if not online and (record is None or update):
        lacks = "is not here" if record is None else "is here, but cannot be updated"
        raise config_error(asset.where, f"{asset} {lacks} and {unreachable_reason(os.environ)}", _WHERE_ONLINE)
    state = f"here; {unreachable_reason(os.environ)}, so not compared"
    if online:
        from grpo_recipes.fetch import download

        limit_every_wait(_LONGEST_WAIT)
        newest = download.commit_of(asset)
        if record is None or (update and record.commit != newest):
            print(f"grpo: fetching {asset} at {newest[:12]}", flush=True)
            record, state = download.fetch(asset, os.environ), "fetched"
        else:
            state = "here" if record.commit == newest else f"here; the hub has {newest[:12]}: --update brings it"
    assert record is not None
    name = " ".join(str(part) for part in (record.id, record.config, record.split, record.limit) if part)
    size = gigabytes(sum(record.files.values()))
    return (record.kind, name, record.commit[:12], size, display_path(record.path), state)
