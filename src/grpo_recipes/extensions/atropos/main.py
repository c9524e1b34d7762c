"""Entry point with the flags of Atropos' example trainer: one launch of run-api, server, environment and trainers.

``flags.yaml`` lists the flags and variables, ``flag_keys`` translates them to recipe keys.

    python src/atropos_grpo.py --model-name Qwen/Qwen2.5-0.5B-Instruct --environment arithmetic
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from grpo_recipes.errors import ConfigError, Problem, config_error, translate_errors
from grpo_recipes.extensions.atropos.arguments import AtroposKeys
from grpo_recipes.extensions.atropos.flag_keys import PORT, Translation, translate_counts
from grpo_recipes.extensions.atropos.flag_keys import translate as translate_flags
from grpo_recipes.extensions.atropos.flags import COMMAND, FLAGS, MODE, SCRIPT, SHARED, VARIABLES, format_flag_help
from grpo_recipes.extensions.atropos.recipe import ATROPOS_ENVIRONMENTS
from grpo_recipes.extensions.atropos.rules import SOURCE
from grpo_recipes.launch.run import launch
from grpo_recipes.paths import display_path, find_code_root
from grpo_recipes.plan.devices import Resources, count_generation_completions, find_resources, format_trainers
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.process.reports import can_reach
from grpo_recipes.recipe import merge_recipe
from grpo_recipes.recipe.check import choose_recipe, resolve_recipe
from grpo_recipes.recipe.converters import ALIASES
from grpo_recipes.recipe.document import Value, read_flags
from grpo_recipes.recipe.tasks import GRPO

PROGRAM = "atropos_grpo.py"
SAVE_PATH = "--save-path"
BASE = "recipes/base/atropos_grpo.yaml"  # recipe of a launch without --config
READ_ALL = "--read-variables"
VERBOSITY = "TRANSFORMERS_VERBOSITY"  # needed in addition to log_level, which is read after the model is loaded
_ABOUT = """\
Train on the scored groups of Atropos environments. This starts run-api, the vLLM server, the trainers and the
environment in one grpo launch, and ends them together.

It replaces `python -m example_trainer.grpo`, and `run-api`, `vllm_api_server.py` and `ENVIRONMENT.py serve` in other
terminals."""
_ENVIRONMENT_PREFIXES = ("--env.", "--openai.", "--server.")  # prefixes of an environment's flags


@dataclass(frozen=True)
class AtroposLaunch(LaunchRequest):
    """The launch that the flags request."""

    api_url: str | None = None  # URL of an external run-api


def main(argv: Sequence[str] | None = None) -> int:
    """Launch a run as the flags request; return its exit code, or 2 after printing every problem with the flags."""
    return run_reporting_errors(lambda: _launch(read_launch(list(sys.argv[1:] if argv is None else argv))))


def read_launch(arguments: list[str]) -> AtroposLaunch:
    """Translate command-line flags and environment variables to a launch, and check its recipe and plan.

    To resume a run without --config, recipe and plan are not checked, because the run directory has them. Raise
    ConfigError if flags, variables, recipe or plan are wrong.
    """
    options, words = _build_parser().parse_known_args(arguments)
    environment_flags, flags = _split_environment_flags(words)
    rejected = [
        row for row in FLAGS.rows if row.rejected and getattr(options, _make_attribute_name(row.name)) is not None
    ]
    problems = [Problem(row.name, "has no equivalent here", row.fix) for row in rejected]
    if problems := [*problems, *unknown_flags(flags, [*FLAGS.by_name, READ_ALL], PROGRAM)]:
        raise ConfigError(*problems)
    recipe = recipe_name(options)  # still None to resume a run without --config
    if not recipe and options.resume is None:
        recipe = os.environ.get("CONFIG") or str(find_code_root() / BASE)
    resources = find_resources(os.environ)
    device, in_job = resources.device, resources.job is not None
    uses_base = recipe == str(find_code_root() / BASE)
    values, notes = _read_values(options, uses_base)
    explicit = frozenset(ALIASES.get(name, name) for name, _ in read_flags(flags, []))
    translation = Translation(values, explicit, os.environ, uses_base, options.read_variables, device, in_job)
    mode = translate_flags(translation, environment_flags)
    if recipe is not None:
        with translate_errors(ConfigError, lambda error: with_flags_of(error, {}, {"RECIPE": "--config"})):
            file = choose_recipe(recipe, os.environ, GRPO, device)
        merged, _ = merge_recipe(file, flags, os.environ, device, translation.keys)
        translate_counts(translation, lambda key: merged.values[key].value, mode)
        if not SOURCE.requested(merged):
            choices = " or ".join([*ATROPOS_ENVIRONMENTS, "file.py:Class"])
            fix = f"set --environment {choices}, or --atropos-url URL of a run-api with your environments"
            translation.problems.append(Problem("--environment", "is missing: nothing would send groups", fix))
    if translation.problems:
        raise ConfigError(*translation.problems)
    resources, gpu_notes = _limit_gpus(translation, resources, options.dry_run)
    variables = {"LOGDIR": str(folder)} if (folder := translation.read_text("--log-dir")) else {}
    variables |= {VERBOSITY: "debug"} if translation.read_text("--debug-loading") else {}
    variables |= _find_run_root(translation) if options.resume == "last" else {}
    launching = launch_options(options, display_path(recipe) if recipe else None, flags, keys=translation.keys)
    request = AtroposLaunch(launching, resources, variables, [*notes, *translation.notes, *gpu_notes])
    with translate_errors(ConfigError, lambda error: _rename_keys(error, translation.keys)):
        return _check_launch(request) if recipe else request


def _launch(request: AtroposLaunch) -> int:
    """Print the notes, launch the run and wait for its end; return its exit code.

    Raise ConfigError if an external run-api can't be reached, or several processes of an outer launcher call this.
    """
    reject_other_launchers(f"{COMMAND} --num_processes", os.environ)
    request.announce()
    if request.api_url and not request.options.dry_run and not can_reach(request.api_url, os.environ):
        fix = "start it with run-api --port PORT, or remove --atropos-url: the launch starts one"
        raise config_error("--atropos-url", f"Atropos API not reachable at {request.api_url}", fix)
    with translate_errors(ConfigError, lambda error: _rename_keys(error, request.options.keys)):
        return launch(request.options, request.resources)


def _rename_keys(error: ConfigError, keys: Mapping[str, Value]) -> ConfigError:
    """Return a copy of a ConfigError that names this program's flags instead of recipe keys.

    ``keys`` maps recipe keys to their values. The ``source`` of a value is the flag that sets it. The fix
    "remove --vllm-port" becomes "set another --vllm-port", because without the flag its default is used.
    """
    removal, fix = f"remove {PORT} and let the launcher choose", f"set another {PORT}"
    problems = with_flags_of(error, keys).problems
    return ConfigError(*(replace(problem, fix=problem.fix.replace(removal, fix)) for problem in problems))


def _make_attribute_name(name: str) -> str:
    """Convert a flag to its attribute in argparse's namespace: ``--save-path`` to ``save_path``."""
    return name.removeprefix("--").replace("-", "_")


def _build_parser() -> Parser:
    """Build the parser with the flags of ``flags.yaml`` and the options of ``grpo launch`` for one node.

    It also accepts the flags that the table rejects, so that the error can name a replacement. The help lists the
    environment variables.
    """
    always, script_only = ([row for row in VARIABLES.rows if row.script is script] for script in (False, True))
    epilog = "\n".join(
        [
            "variables (a flag overrides its variable):",
            *(f"  {row.name:<27} {row.help}" for row in always),
            f"variables of {SCRIPT}, read with {READ_ALL}:",
            *(
                f"  {row.name:<27} {row.help}{f' (default {row.default})' if row.default else ''}"
                for row in script_only
            ),
            "",
            "Any recipe key is a flag too, e.g. --num_generations 4. Any field of the environment's configuration is a",
            "flag with the prefix --env., e.g. --env.max_num_workers 4. See docs/atropos.md.",
        ]
    )
    parser = Parser(
        prog=PROGRAM, usage=f"{COMMAND} --model-name MODEL [options]", description=_ABOUT, epilog=epilog,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(recipe=None)
    accepted, rejected = (
        parser.add_argument_group(title) for title in ("flags", "flags that are not supported, with replacements")
    )
    for row in FLAGS.rows:
        nargs = "+" if row.type == "words" else "*" if row.rejected else None
        shape: dict[str, Any] = {"metavar": "VALUE", "nargs": nargs}
        shape = {"choices": list(row.values)} if row.values and row.least is None else shape
        shape = {"action": "store_true", "default": None} if row.type == "switch" else shape
        group = rejected if row.rejected else accepted
        group.add_argument(*row.names, dest=_make_attribute_name(row.name), help=format_flag_help(row), **shape)
    launching = parser.add_argument_group("options of grpo launch")
    names = ", ".join(row.name for row in script_only)
    launching.add_argument(READ_ALL, action="store_true", help=f"read the variables {names} too, as {SCRIPT} does")
    for option_names, settings in one_node_options(load_command("launch").all_options()):
        launching.add_argument(*option_names, **settings)
    return parser


def _split_environment_flags(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split words into pairs of environment flag and value, e.g. (``--env.seed``, ``1``), and all other words.

    The value is "" if it is missing.
    """
    environment_flags: list[tuple[str, str]] = []
    flags: list[str] = []
    value_follows = False  # whether the next word is the value of the last environment flag
    for word in words:
        name, equals, text = word.partition("=")
        if name.startswith(_ENVIRONMENT_PREFIXES):
            environment_flags.append((name, text))
        elif value_follows and not word.startswith("--"):
            environment_flags[-1] = environment_flags[-1][0], word
        else:
            flags.append(word)
        value_follows = name.startswith(_ENVIRONMENT_PREFIXES) and not equals
    return environment_flags, flags


def _read_values(options: argparse.Namespace, uses_base: bool) -> tuple[dict[str, Value], list[str]]:
    """Collect the values of all flags and variables that are set, and a note for each variable that sets a flag.

    A flag overrides its variable. Variables of run_atropos_grpo.sh, and defaults of variables, count only with
    --read-variables. Defaults also need ``uses_base``: no other recipe is chosen. A resumed run reads no variables.
    """
    texts = {row.name: getattr(options, _make_attribute_name(row.name)) for row in FLAGS.rows}
    values = {name: Value(text, name, from_text=True) for name, text in texts.items() if text is not None}
    notes = []
    for row in VARIABLES.rows:
        exported = os.environ.get(row.name) if options.read_variables or not row.script else None
        text = exported or (row.default if uses_base and options.read_variables else None)
        if text and options.resume is None and row.variable not in values:
            values[row.variable or row.name] = Value(text, row.name, from_text=True)
            notes += [f"{row.name}={text} sets {row.variable}"] if exported and row.variable else []
    return values, notes


def _find_run_root(translation: Translation) -> dict[str, str]:
    """Return {"RUN_ROOT": folder}, the folder of runs in which ``--resume last`` finds the last run.

    Remove the key run_root from ``translation``, because it would count as a change of the resumed run. Return {} if
    the command line sets --run_root.
    """
    if "run_root" in translation.explicit:
        return {}
    default = os.environ.get("RUN_ROOT") or FLAGS.by_name[SAVE_PATH].default
    return {"RUN_ROOT": translation.keys.pop("run_root", Value(default, SAVE_PATH)).value}


def _limit_gpus(translation: Translation, resources: Resources, dry_run: bool) -> tuple[Resources, list[str]]:
    """Limit the GPUs of a launch to the variable NUM_GPUS if it is set; return the resources, and notes to print.

    With too few GPUs, a dry run simulates the missing ones, and any other launch raises ConfigError. On CPU, nothing
    changes.
    """
    if resources.device == "cpu" or "NUM_GPUS" not in translation.flags:
        return resources, []
    count = int(translation.read_text("NUM_GPUS"))
    fix = f"export NUM_GPUS={len(resources.gpus)}, or request more: sbatch --gres=gpu:{count} {SCRIPT}"
    return with_gpus(resources, count, "NUM_GPUS", fix, dry_run)


def _check_launch(request: AtroposLaunch) -> AtroposLaunch:
    """Check the recipe and the plan of a new run; return the request with its run-api's URL and with two more notes.

    The notes are the size of a batch, and that the launch starts run-api, if it does. Raise ConfigError if recipe or
    plan is wrong, or if separate server and trainer have only one GPU.
    """
    options, device = request.options, request.resources.device
    recipe = resolve_recipe(options.recipe, options.task, options.flags, os.environ, device, options.keys)
    if device == "cuda" and len(request.resources.gpus) == 1 and recipe.server.weight_sync != "shared":
        fix = f"set {MODE} {SHARED} to share the GPU, or request more GPUs"
        raise config_error(MODE, "separate server and trainer need two GPUs, only one is visible", fix)
    batch = make_plan(recipe, request.resources, os.environ).batch
    rows, size = count_generation_completions(recipe, batch), batch.num_generations
    steps = f" x {rows // batch.completions} steps" if rows > batch.completions else ""
    factors = (
        f"{batch.per_device} a forward pass x {batch.accumulation} accumulated x {format_trainers(batch.world_size)}"
    )
    notes = [f"registers {rows} sequences at run-api, {rows // size} groups of {size}: {factors}{steps}"]
    if AtroposKeys(recipe).api_url is None:
        notes.append("no --atropos-url: the launch starts its own run-api")
    return replace(request, notes=[*request.notes, *notes], api_url=AtroposKeys(recipe).api_url)


if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # the name of the command in launch.log
    raise SystemExit(main())
