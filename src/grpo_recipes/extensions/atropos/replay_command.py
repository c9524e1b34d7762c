"""The command `grpo atropos`: keep groups of Atropos' environments in a file, and post them again."""

import argparse
import sys
from pathlib import Path
from typing import Any

from grpo_recipes.cli import command, option, switch
from grpo_recipes.errors import config_error
from grpo_recipes.extensions.atropos.client import AtroposClient, AtroposError
from grpo_recipes.extensions.atropos.replay import record, replay
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.recipe.rules import is_url

ACTIONS = ("record", "replay")
# Options of `record`, all needed: the trainer's keys that they stand for.
_SIZES = {
    "--groups": "groups of a batch, as prompts_per_step",
    "--group-size": "completions of a group, as num_generations",
    "--max-tokens": "most tokens of a completion with its prompt",
    "--batches": "how many batches to take",
}


@command(
    "keep scored groups of Atropos in a file, or post those of a file again",
    option("action", choices=ACTIONS, help="record: take groups from run-api in the place of a trainer; replay: post"),
    option("file", type=Path, metavar="FILE", help="what record writes, or replay reads"),
    option("--api-url", default="http://127.0.0.1:8000", metavar="URL", help="of run-api (%(default)s)"),
    option(
        "--wait",
        type=float,
        default=600.0,
        metavar="S",
        help="longest wait in seconds for groups or trainer (%(default)g)",
    ),
    *(option(name, type=int, metavar="N", help=f"record: {text}") for name, text in _SIZES.items()),
    switch("--without-versions", help="replay: for weights unlike the recorded run's; no group counts as old"),
)
def atropos(options: argparse.Namespace) -> int:
    """Record or replay; return 1 where run-api or the other side is gone, 130 after Ctrl-C."""
    if not is_url(options.api_url):
        raise config_error("--api-url", f"'{options.api_url}' is not an http or https URL", "write http://HOST:PORT")
    if not options.wait > 0:
        raise config_error("--wait", f"is {options.wait:g}", "write seconds above 0")
    sizes: dict[str, Any] = {name: getattr(options, name[2:].replace("-", "_")) for name in _SIZES}
    strange = [name for name, value in sizes.items() if value is not None] if options.action == "replay" else []
    strange += ["--without-versions"] if options.action == "record" and options.without_versions else []
    for name in strange:
        raise config_error(name, f"does nothing with {options.action}", "leave it out")
    client = AtroposClient(options.api_url, max_wait=options.wait, say=_say)
    try:
        if options.action == "replay":
            replay(options.file, client, wait=options.wait, versions=not options.without_versions, say=_say)
            return 0
        for name, value in sizes.items():
            if value is None or value < 1:
                what = "is missing" if value is None else f"is {value}"
                raise config_error(name, what, f"write {name} N, at least 1: {_SIZES[name]}")
        groups, size, longest, batches = sizes.values()
        record(options.file, client, groups=groups, size=size, longest=longest, batches=batches, say=_say)
    except AtroposError as error:
        print(f"grpo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _say(text: str) -> None:
    print(f"grpo: {text}", flush=True)
