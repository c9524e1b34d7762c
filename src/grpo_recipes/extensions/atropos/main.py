"""The flags of Atropos' example trainer, which become one `grpo launch` of run-api, server, environment and trainers.

What becomes of each flag and variable is in ``recipe.converters.atropos_flags``.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.cli import Parser, answer, load_command, recipe_name
from grpo_recipes.cli.entry_points import in_words_of, launch_words, one_node_options, strange, with_gpus
from grpo_recipes.cli.nodes import reject_other_launchers
from grpo_recipes.cli.runs import launch_options
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.extensions.atropos.flag_keys import MODE, PORT, Translation, count
from grpo_recipes.extensions.atropos.flag_keys import translate as translate_flags
from grpo_recipes.extensions.atropos.flags import DOOR, FLAG, FLAGS, OF_THE_SCRIPT, SHARED, VARIABLES
from grpo_recipes.launch.resolve import Options
from grpo_recipes.launch.run import launch
from grpo_recipes.paths import home, shown
from grpo_recipes.plan.devices import Resources, find_resources, rows_of_generation, some_trainers
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.process.reports import address_reachable, say
from grpo_recipes.recipe import Recipe, merge_recipe
from grpo_recipes.recipe.check import choose_recipe, resolve_recipe
from grpo_recipes.recipe.converters import ALIASES
from grpo_recipes.recipe.document import read_flags
from grpo_recipes.recipe.registry import ATROPOS_ENVIRONMENTS
from grpo_recipes.recipe.rules import takes_groups
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
class Door:
    """One launch, as the flags ask for it."""

    options: Options
    resources: Resources
    variables: dict[str, str]  # that are set for it
    notes: list[str]
    names: dict[str, str]  # flag of a key -> what it comes from, for messages
    api_url: str | None = None  # of a run-api that is to run already


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the launch; 2 with a line for each thing that is wrong, before anything is started."""
    return answer(lambda: _launch(read(list(sys.argv[1:] if argv is None else argv))))


def read(arguments: list[str]) -> Door:
    """Return the launch that flags and variables ask for; a ConfigError names everything that is wrong with them."""
    options, rest = _parser().parse_known_args(arguments)
    dotted, flags = _apart(rest)
    names = [*(name for one in FLAGS for name in one.names), READ_ALL]
    if problems := [*_refused(options), *strange(flags, names, PROGRAM)]:
        raise ConfigError(*problems)
    resources, recipe = find_resources(os.environ), _recipe(options)
    bare = recipe == str(home() / BASE)
    given, notes = _given(options, bare)
    own = frozenset(ALIASES.get(name, name) for name, _ in read_flags(flags, []))
    it = Translation(given, own, os.environ, bare, options.read_variables, resources.device, resources.job is not None)
    mode = translate_flags(it, dotted)
    if recipe is not None:
        merged, _ = merge_recipe(_path(recipe, resources.device), [*it.words(), *flags], os.environ, resources.device)
        count(it, lambda key: merged.values[key].value, mode)
        it.problems += _no_groups(merged)
    if it.problems:
        raise ConfigError(*it.problems)
    resources, more = _gpus(it, resources, options.dry_run)
    variables = {"LOGDIR": str(folder)} if (folder := it.text("--log-dir")) else {}
    variables |= {VERBOSITY: "debug"} if it.text("--debug-loading") else {}
    variables |= _where_the_last_is(it) if options.resume == "last" else {}
    asked = launch_options(options, shown(recipe) if recipe else None, [*it.words(), *flags])
    door = Door(asked, resources, variables, [*notes, *it.notes, *more], it.names())
    with translate(ConfigError, lambda error: _in_our_words(error, door.names)):
        return _checked(door) if recipe else door


def _launch(door: Door) -> int:
    reject_other_launchers(f"{DOOR} --num_processes", os.environ)
    say(launch_words(["grpo", "launch"], door.options, door.variables))
    for note in door.notes:
        say(f"note: {note}")
    os.environ.update(door.variables)
    if door.api_url and not door.options.dry_run and not address_reachable(door.api_url, os.environ):
        fix = "start it with run-api --port PORT, or leave --atropos-url out: the launch starts one"
        raise config_error("--atropos-url", f"Atropos API not reachable at {door.api_url}", fix)
    with translate(ConfigError, lambda error: _in_our_words(error, door.names)):
        return launch(door.options, door.resources)


def _in_our_words(error: ConfigError, names: dict[str, str]) -> ConfigError:
    """Return an error of the launch with our flags; that of a default says nothing of leaving it out."""
    ours = in_words_of(error, names)
    left_out = f"remove {PORT} and let the launcher choose"
    return ConfigError(*(replace(one, fix=one.fix.replace(left_out, f"write another {PORT}")) for one in ours.problems))


def _dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _parser() -> Parser:
    """Return the parser of all flags, whose help says what becomes of each flag and variable."""
    always, of_script = ([one for one in VARIABLES if one.script is script] for script in (False, True))
    epilog = "\n".join(
        [
            "variables, over which flags win:",
            *(f"  {one.name:<27} {one.about}" for one in always),
            f"variables that {OF_THE_SCRIPT} reads too:",
            *(f"  {one.name:<27} {one.about}{f' (default {one.default})' if one.default else ''}" for one in of_script),
            "",
            "Any recipe key is a flag too, e.g. --num_generations 4, and so is any field of the environment's own",
            "configuration, e.g. --env.max_num_workers 4; see docs/atropos.md.",
        ]
    )
    parser = Parser(
        prog=PROGRAM, usage=f"{DOOR} --model-name MODEL [options]", description=_ABOUT, epilog=epilog,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(recipe=None)
    taken, refused = parser.add_argument_group("flags"), parser.add_argument_group("refused, with what to do instead")
    for one in FLAGS:
        shape: dict[str, Any] = {"metavar": "VALUE", "nargs": "+" if one.words else "*" if one.refused else None}
        shape = {"choices": list(one.values)} if one.values else shape
        shape = {"action": "store_true", "default": None} if one.switch else shape
        (refused if one.refused else taken).add_argument(*one.names, dest=_dest(one.name), help=one.help(), **shape)
    launching = parser.add_argument_group("options of grpo launch")
    names_of_script = ", ".join(one.name for one in of_script)
    launching.add_argument(READ_ALL, action="store_true", help=f"read {names_of_script} too, as {OF_THE_SCRIPT} does")
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


def _refused(options: argparse.Namespace) -> Iterator[Problem]:
    for one in FLAGS:
        if one.refused and getattr(options, _dest(one.name)) is not None:
            yield Problem(one.name, "has no equal here", one.about)


def _recipe(options: argparse.Namespace) -> str | None:
    """Return the recipe: the named one, that of the variable CONFIG, or ``BASE``; None of a run that is resumed."""
    named = recipe_name(options)
    return named if named or options.resume is not None else os.environ.get("CONFIG") or str(home() / BASE)


def _path(recipe: str, device: str) -> Path:
    with translate(ConfigError, lambda error: in_words_of(error, {"RECIPE": "--config"})):
        return choose_recipe(recipe, os.environ, GRPO, device)


def _given(options: argparse.Namespace, bare: bool) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Return what was given for each flag, by itself or by a variable, and a note for each variable."""
    given = {one.name: (text, one.name) for one in FLAGS if (text := getattr(options, _dest(one.name))) is not None}
    notes = []
    for one in VARIABLES:
        exported = os.environ.get(one.name) if options.read_variables or not one.script else None
        text = exported or (one.default if bare and options.read_variables else None)
        if text and options.resume is None and one.flag not in given:
            given[one.flag or one.name] = text, one.name
            notes += [f"{one.name}={text} is read as {one.flag}"] if exported and one.flag else []
    return given, notes


def _where_the_last_is(it: Translation) -> dict[str, str]:
    """Return the folder of run directories as the variable, since no flag may change a run that has completed."""
    usual = os.environ.get("RUN_ROOT") or FLAG[SAVE_PATH].default
    return {} if "run_root" in it.own else {"RUN_ROOT": str(it.keys.pop("run_root", usual))}


def _no_groups(recipe: Recipe) -> Iterator[Problem]:
    """Yield that nothing sends groups, where the recipe and the flags name neither an environment nor a run-api."""
    if not takes_groups(recipe):
        named = " or ".join([*ATROPOS_ENVIRONMENTS, "file.py:Class"])
        fix = f"write --environment {named}, or --atropos-url of a run-api to which environments of yours send"
        yield Problem("--environment", "is missing: nothing would send groups", fix)


def _gpus(it: Translation, resources: Resources, dry_run: bool) -> tuple[Resources, list[str]]:
    """Return the devices of the launch, those that a dry run imagines for NUM_GPUS too."""
    if resources.device == "cpu" or "NUM_GPUS" not in it.given:
        return resources, []
    wanted = int(it.text("NUM_GPUS"))
    fix = f"export NUM_GPUS={len(resources.gpus)}, or ask for more: sbatch --gres=gpu:{wanted} {OF_THE_SCRIPT}"
    return with_gpus(resources, wanted, "NUM_GPUS", fix, dry_run)


def _checked(door: Door) -> Door:
    """Check the recipe and the plan of a new run; add notes on what is registered at run-api, and who starts that."""
    device = door.resources.device
    recipe = resolve_recipe(door.options.recipe, door.options.task, door.options.flags, os.environ, device)
    if device == "cuda" and len(door.resources.gpus) == 1 and recipe["weight_sync"] != "shared":
        fix = f"write {MODE} {SHARED}, with which they share it, or ask for more GPUs"
        raise config_error(MODE, "a server and a trainer apart need two GPUs, one is visible", fix)
    batch = make_plan(recipe, door.resources, os.environ).batch
    rows, group = rows_of_generation(recipe, batch), batch.num_generations
    steps = f" x {rows // batch.completions} steps" if rows > batch.completions else ""
    each = f"{batch.per_device} a forward pass x {batch.accumulation} accumulated x {some_trainers(batch.world_size)}"
    notes = [f"registers {rows} sequences at run-api, {rows // group} groups of {group}: {each}{steps}"]
    if recipe["atropos_api_url"] is None:
        notes.append("no --atropos-url: the launch starts a run-api of its own")
    return replace(door, notes=[*door.notes, *notes], api_url=recipe["atropos_api_url"])


if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # as launch.log names the command
    raise SystemExit(main())
