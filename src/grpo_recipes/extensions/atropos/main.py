"""The entry point for flags of Atropos' example trainer: one launch of run-api, server, environment and trainers.

``flags.yaml`` has each flag and variable.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.cli import Parser, load_command, recipe_name, run_reporting_errors
from grpo_recipes.cli.entry_points import (
    LaunchRequest,
    one_node_options,
    unknown_flags,
    with_flags_of,
    with_gpus,
)
from grpo_recipes.cli.nodes import reject_other_launchers
from grpo_recipes.cli.runs import launch_options
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.extensions.atropos.flag_keys import PORT, Translation, translate_counts
from grpo_recipes.extensions.atropos.flag_keys import translate as translate_flags
from grpo_recipes.extensions.atropos.flags import COMMAND, FLAGS, MODE, SCRIPT, SHARED, VARIABLES, help_of
from grpo_recipes.extensions.atropos.recipe import ATROPOS_ENVIRONMENTS
from grpo_recipes.extensions.atropos.rules import takes_groups
from grpo_recipes.launch.run import launch
from grpo_recipes.paths import display_path, home
from grpo_recipes.plan.devices import Resources, find_resources, format_trainers, rows_of_generation
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.process.reports import can_reach
from grpo_recipes.recipe import Recipe, merge_recipe
from grpo_recipes.recipe.check import choose_recipe, resolve_recipe
from grpo_recipes.recipe.converters import ALIASES
from grpo_recipes.recipe.document import Value, read_flags
from grpo_recipes.recipe.tasks import GRPO

PROGRAM = "atropos_grpo.py"
SAVE_PATH = "--save-path"
BASE = "recipes/base/atropos_grpo.yaml"  # of a launch that names no recipe
READ_ALL = "--read-variables"
VERBOSITY = "TRANSFORMERS_VERBOSITY"  # the model is loaded before a trainer reads log_level
_ABOUT = """\
Train on the scored groups of Atropos environments: one grpo launch, which starts run-api, the vLLM server, the
trainers and the environment, and ends them together.

It takes the place of `python -m example_trainer.grpo`, and of `run-api`, `vllm_api_server.py` and
`ENVIRONMENT.py serve` in the other terminals."""
_DOTTED = ("--env.", "--openai.", "--server.")  # begin the flags of an environment


@dataclass(frozen=True)
class AtroposLaunch(LaunchRequest):
    """The launch that the flags request."""

    api_url: str | None = None  # of a run-api that must run already


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the launch; 2 with a line for each thing that is wrong, before anything is started."""
    return run_reporting_errors(lambda: _launch(read(list(sys.argv[1:] if argv is None else argv))))


def read(arguments: list[str]) -> AtroposLaunch:
    """Return the launch that flags and variables request; a ConfigError lists everything that is wrong with them."""
    options, words = _parser().parse_known_args(arguments)
    dotted, flags = _apart(words)
    if problems := [*_rejected(options), *unknown_flags(flags, [*FLAGS.by_name, READ_ALL], PROGRAM)]:
        raise ConfigError(*problems)
    resources, recipe = find_resources(os.environ), _recipe(options)
    device, in_job = resources.device, resources.job is not None
    bare = recipe == str(home() / BASE)
    values, notes = _read_values(options, bare)
    explicit = frozenset(ALIASES.get(name, name) for name, _ in read_flags(flags, []))
    translation = Translation(values, explicit, os.environ, bare, options.read_variables, device, in_job)
    mode = translate_flags(translation, dotted)
    if recipe is not None:
        merged, _ = merge_recipe(_path(recipe, device), flags, os.environ, device, translation.keys)
        translate_counts(translation, lambda key: merged.values[key].value, mode)
        translation.problems += _no_groups(merged)
    if translation.problems:
        raise ConfigError(*translation.problems)
    resources, more = _gpus(translation, resources, options.dry_run)
    variables = {"LOGDIR": str(folder)} if (folder := translation.text("--log-dir")) else {}
    variables |= {VERBOSITY: "debug"} if translation.text("--debug-loading") else {}
    variables |= _folder_of_the_last(translation) if options.resume == "last" else {}
    launching = launch_options(options, display_path(recipe) if recipe else None, flags, keys=translation.keys)
    request = AtroposLaunch(launching, resources, variables, [*notes, *translation.notes, *more])
    with translate(ConfigError, lambda error: _with_our_flags(error, translation.keys)):
        return _checked(request) if recipe else request


def _launch(request: AtroposLaunch) -> int:
    reject_other_launchers(f"{COMMAND} --num_processes", os.environ)
    request.announce()
    if request.api_url and not request.options.dry_run and not can_reach(request.api_url, os.environ):
        fix = "start it with run-api --port PORT, or leave --atropos-url out: the launch starts one"
        raise config_error("--atropos-url", f"Atropos API not reachable at {request.api_url}", fix)
    with translate(ConfigError, lambda error: _with_our_flags(error, request.options.keys)):
        return launch(request.options, request.resources)


def _with_our_flags(error: ConfigError, keys: Mapping[str, Value]) -> ConfigError:
    """Return an error of the launch with our flags; a port has a default, so its fix is another port."""
    removal, fix = f"remove {PORT} and let the launcher choose", f"write another {PORT}"
    problems = with_flags_of(error, keys).problems
    return ConfigError(*(replace(problem, fix=problem.fix.replace(removal, fix)) for problem in problems))


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _parser() -> Parser:
    """Return the parser of all flags, whose help has each flag and variable."""
    always, of_script = ([row for row in VARIABLES.rows if row.script is script] for script in (False, True))
    epilog = "\n".join(
        [
            "variables, over which flags win:",
            *(f"  {row.name:<27} {row.help}" for row in always),
            f"variables that {SCRIPT} reads too:",
            *(f"  {row.name:<27} {row.help}{f' (default {row.default})' if row.default else ''}" for row in of_script),
            "",
            "Any recipe key is a flag too, e.g. --num_generations 4, and so is any field of the environment's own",
            "configuration, e.g. --env.max_num_workers 4; see docs/atropos.md.",
        ]
    )
    parser = Parser(
        prog=PROGRAM, usage=f"{COMMAND} --model-name MODEL [options]", description=_ABOUT, epilog=epilog,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(recipe=None)
    accepted, rejected = (parser.add_argument_group(title) for title in ("flags", "refused, with what to do instead"))
    for row in FLAGS.rows:
        nargs = "+" if row.type == "words" else "*" if row.rejected else None
        shape: dict[str, Any] = {"metavar": "VALUE", "nargs": nargs}
        shape = {"choices": list(row.values)} if row.values and row.least is None else shape
        shape = {"action": "store_true", "default": None} if row.type == "switch" else shape
        group = rejected if row.rejected else accepted
        group.add_argument(*row.names, dest=_dest(row.name), help=help_of(row), **shape)
    launching = parser.add_argument_group("options of grpo launch")
    names_of_script = ", ".join(row.name for row in of_script)
    launching.add_argument(READ_ALL, action="store_true", help=f"read {names_of_script} too, as {SCRIPT} does")
    for names, settings in one_node_options(load_command("launch").all_options()):
        launching.add_argument(*names, **settings)
    return parser


def _apart(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the flags of an environment, ``--env.x`` for example, with their values, and the other words."""
    dotted: list[tuple[str, str]] = []
    flags: list[str] = []
    open_ended = False  # whether the next word is the value of the last dotted flag
    for word in words:
        name, equals, text = word.partition("=")
        if name.startswith(_DOTTED):
            dotted.append((name, text))
        elif open_ended and not word.startswith("--"):
            dotted[-1] = dotted[-1][0], word
        else:
            flags.append(word)
        open_ended = name.startswith(_DOTTED) and not equals
    return dotted, flags


def _rejected(options: argparse.Namespace) -> Iterator[Problem]:
    for row in FLAGS.rows:
        if row.rejected and getattr(options, _dest(row.name)) is not None:
            yield Problem(row.name, "has no equivalent here", row.fix)


def _recipe(options: argparse.Namespace) -> str | None:
    """Return the named recipe, the variable CONFIG, or ``BASE``; None for a run that is resumed."""
    named = recipe_name(options)
    return named if named or options.resume is not None else os.environ.get("CONFIG") or str(home() / BASE)


def _path(recipe: str, device: str) -> Path:
    with translate(ConfigError, lambda error: with_flags_of(error, {}, {"RECIPE": "--config"})):
        return choose_recipe(recipe, os.environ, GRPO, device)


def _read_values(options: argparse.Namespace, bare: bool) -> tuple[dict[str, Value], list[str]]:
    """Return the value of each flag, from the command line or a variable, and a note for each variable."""
    texts = {row.name: getattr(options, _dest(row.name)) for row in FLAGS.rows}
    values = {name: Value(text, name, from_text=True) for name, text in texts.items() if text is not None}
    notes = []
    for row in VARIABLES.rows:
        exported = os.environ.get(row.name) if options.read_variables or not row.script else None
        text = exported or (row.default if bare and options.read_variables else None)
        if text and options.resume is None and row.variable not in values:
            values[row.variable or row.name] = Value(text, row.name, from_text=True)
            notes += [f"{row.name}={text} is read as {row.variable}"] if exported and row.variable else []
    return values, notes


def _folder_of_the_last(translation: Translation) -> dict[str, str]:
    """Return the folder of run directories as a variable, since no flag may change a run that has completed."""
    usual = os.environ.get("RUN_ROOT") or FLAGS.by_name[SAVE_PATH].default
    return (
        {}
        if "run_root" in translation.explicit
        else {"RUN_ROOT": translation.keys.pop("run_root", Value(usual, SAVE_PATH)).value}
    )


def _no_groups(recipe: Recipe) -> Iterator[Problem]:
    """Yield that nothing sends groups if the recipe and the flags name neither an environment nor a run-api."""
    if not takes_groups(recipe):
        named = " or ".join([*ATROPOS_ENVIRONMENTS, "file.py:Class"])
        fix = f"write --environment {named}, or --atropos-url of a run-api to which environments of yours send"
        yield Problem("--environment", "is missing: nothing would send groups", fix)


def _gpus(translation: Translation, resources: Resources, dry_run: bool) -> tuple[Resources, list[str]]:
    """Return the devices of the launch, with the devices that a dry run imagines for NUM_GPUS."""
    if resources.device == "cpu" or "NUM_GPUS" not in translation.flags:
        return resources, []
    wanted = int(translation.text("NUM_GPUS"))
    fix = f"export NUM_GPUS={len(resources.gpus)}, or ask for more: sbatch --gres=gpu:{wanted} {SCRIPT}"
    return with_gpus(resources, wanted, "NUM_GPUS", fix, dry_run)


def _checked(request: AtroposLaunch) -> AtroposLaunch:
    """Check the recipe and the plan of a new run; add notes about its batches and its run-api."""
    options, device = request.options, request.resources.device
    recipe = resolve_recipe(options.recipe, options.task, options.flags, os.environ, device, options.keys)
    if device == "cuda" and len(request.resources.gpus) == 1 and recipe["weight_sync"] != "shared":
        fix = f"write {MODE} {SHARED}, with which they share it, or ask for more GPUs"
        raise config_error(MODE, "a server and a trainer apart need two GPUs, one is visible", fix)
    batch = make_plan(recipe, request.resources, os.environ).batch
    rows, group = rows_of_generation(recipe, batch), batch.num_generations
    steps = f" x {rows // batch.completions} steps" if rows > batch.completions else ""
    each = f"{batch.per_device} a forward pass x {batch.accumulation} accumulated x {format_trainers(batch.world_size)}"
    notes = [f"registers {rows} sequences at run-api, {rows // group} groups of {group}: {each}{steps}"]
    if recipe["atropos_api_url"] is None:
        notes.append("no --atropos-url: the launch starts a run-api of its own")
    return replace(request, notes=[*request.notes, *notes], api_url=recipe["atropos_api_url"])


if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # as launch.log names the command
    raise SystemExit(main())
