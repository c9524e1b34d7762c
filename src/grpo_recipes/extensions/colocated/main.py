"""The entry point ``run_colocated_grpo.py``: its flags become one launch with vLLM inside the training processes.

    python run_colocated_grpo.py --gpus 4 --config my.yaml --max_steps 10

``--gpus`` is the number of training processes of a node. Other flags are flags of `grpo launch`, or recipe keys.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.cli import Parser, load_command, option, recipe_name, run_reporting_errors
from grpo_recipes.cli.entry_points import LaunchRequest, unknown_flags, with_flags_of, with_gpus
from grpo_recipes.cli.nodes import NODE_OPTIONS, NodeFlags, read_nodes, reject_other_launchers
from grpo_recipes.cli.runs import launch_options
from grpo_recipes.errors import ConfigError, Problem, config_error, translate_errors
from grpo_recipes.launch.run import launch
from grpo_recipes.paths import display_path, find_code_root
from grpo_recipes.plan.devices import Resources, find_resources, format_trainers
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.check import choose_recipe
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import DEFAULT_RECIPE
from grpo_recipes.recipe.tasks import GRPO, requested_task

PROGRAM = "run_colocated_grpo.py"
USUAL = "training_configs/dr_grpo_config.yaml"  # used if it exists and no recipe is given
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
OPTIONS = (
    option("--gpus", type=int, metavar="N",
        help="Training processes per node, each with a GPU and a vLLM, or on CPU without a GPU (default 1)"),
    option("--log-level", type=str.upper, choices=LEVELS, help="Log level of each training process"),
    option("--redirect-output", metavar="FILE", help="Append stdout and stderr to FILE"),
)  # fmt: skip
_NAMES = [name for names, _ in (*OPTIONS, *NODE_OPTIONS) for name in names]
DETAILS = "TORCH_DISTRIBUTED_DEBUG"
# On CPU, DETAIL crashes torch 2.13: DistributedDataParallel uses the wrapped gloo as gloo and dies with signal 11.
_MOST_DETAILS = {"cuda": "DETAIL", "cpu": "INFO"}
_OPTION_NAMES = {"RECIPE": "--config"}  # option of `grpo launch` -> option of this entry point, in messages


@dataclass(frozen=True)
class ColocatedLaunch(LaunchRequest):
    """The launch that the flags request, and the file for its output."""

    output_file: str | None = None  # set by --redirect-output


def main(argv: Sequence[str] | None = None) -> int:
    """Launch a run as the flags request; return its exit code, or 2 after printing every problem with the flags."""

    def run() -> int:
        """Launch with redirected output and return the exit code; if it is not 0, print the path of the output file."""
        request = read_launch(list(sys.argv[1:] if argv is None else argv))
        with _redirect_output(request.output_file):
            code = run_reporting_errors(lambda: _launch(request))
        if request.output_file is not None and code:
            print(f"grpo: exit code {code}, see {display_path(request.output_file)}", file=sys.stderr)
        return code

    return run_reporting_errors(run)


def read_launch(arguments: list[str]) -> ColocatedLaunch:
    """Translate command-line flags to a launch and return it: recipe, keys, devices and variables; launch nothing.

    Raise ConfigError for wrong flags, for a recipe that is not found, and if another launcher started this process.
    """
    reject_other_launchers(f"python {PROGRAM} --gpus", os.environ)
    options, flags = _build_parser().parse_known_args(arguments)
    resources = find_resources(os.environ)
    problems, nodes = list[Problem](), NodeFlags()
    if _count_processes(options) < 1:
        problems.append(Problem("--gpus", f"expected 1 or more, got {options.gpus}", "use --gpus 1"))
    try:
        nodes = read_nodes(options, resources.job)
    except ConfigError as error:
        problems += error.problems
    keys = {**_translate_options(options), **nodes.keys}
    problems += unknown_flags(flags, _NAMES, PROGRAM)
    for flag in flags:
        key = flag.partition("=")[0].removeprefix("--").replace("-", "_")
        if flag.startswith("--") and key.removeprefix("no_") in keys:
            source = keys[key.removeprefix("no_")].source
            fix = f"keep only {source}" if source != PROGRAM else "remove it, or use grpo launch"
            problems.append(Problem(flag.partition("=")[0], f"{source} already sets {key}", fix))
    if problems:
        raise ConfigError(*problems)
    launch_request = launch_options(options, _choose_recipe(options, resources.device), flags, nodes.meeting, keys)
    variables = dict(nodes.variables)
    if options.log_level == "DEBUG" and not os.environ.get(DETAILS):
        variables[DETAILS] = _MOST_DETAILS[resources.device]
    resources, notes = _limit_gpus(options, resources)
    return ColocatedLaunch(launch_request, resources, variables, notes, options.redirect_output)


def _build_parser() -> Parser:
    """Return the argument parser for the options of this entry point and of `grpo launch`."""
    epilog = "Any recipe key is a flag too, e.g. --max_steps 10; see docs/migrate.md."
    about = "Train with vLLM inside the training processes."
    parser = Parser(prog=PROGRAM, description=about, epilog=epilog, allow_abbrev=False)
    parser.set_defaults(recipe=None)
    for names, settings in (*OPTIONS, *load_command("launch").all_options()):
        parser.add_argument(*names, **settings)
    parser.set_defaults(nodes=1)  # --gpus counts the processes of a node
    return parser


def _translate_options(options: argparse.Namespace) -> dict[str, Value]:
    """Return the recipe keys that --gpus and --log-level set; for a new run, also use_vllm and vllm_mode: colocate.

    For a resumed run, only options on the command line set keys.
    """
    keys: dict[str, Value] = {}
    if options.resume is None:
        keys = {"use_vllm": Value(True, PROGRAM), "vllm_mode": Value("colocate", PROGRAM)}
    if options.resume is None or options.gpus is not None:
        keys["num_processes"] = Value(_count_processes(options) * options.nodes, "--gpus")
    if options.log_level is not None:
        level = Value(options.log_level.lower(), "--log-level")
        keys |= {"log_level": level, "log_level_replica": level}
    return keys


def _count_processes(options: argparse.Namespace) -> int:
    """Return the number of training processes of a node: --gpus, by default 1."""
    return 1 if options.gpus is None else int(options.gpus)


def _limit_gpus(options: argparse.Namespace, resources: Resources) -> tuple[Resources, list[str]]:
    """Limit the GPUs of a launch to --gpus; return the resources, and notes to print.

    With too few GPUs, a dry run simulates the missing ones, and any other launch raises ConfigError. A resumed run
    without --gpus, and a run on CPU, keep all devices.
    """
    if options.resume is not None and options.gpus is None:
        return resources, []  # the run keeps its number of processes
    if resources.device == "cpu":
        per_node = " per node" if options.nodes > 1 else ""
        trainers, cores = format_trainers(_count_processes(options)), resources.cores
        return resources, [
            f"CPU environment: --gpus {_count_processes(options)} means {trainers}{per_node} on {cores} cores"
        ]
    fix = f"use --gpus {len(resources.gpus)}, or request more GPUs"
    return with_gpus(resources, _count_processes(options), "--gpus", fix, options.dry_run, options.nodes)


def _choose_recipe(options: argparse.Namespace, device: str) -> str | None:
    """Return the recipe's path: of the command line, the variable CONFIG, the file ``USUAL``, or the device's default.

    For a resumed run, return the recipe of the command line, or None if it has none. Raise ConfigError if the recipe is
    not found.
    """
    name = recipe_name(options)
    if options.resume is not None:
        return name
    if (
        not name
        and not os.environ.get("CONFIG")
        and any((folder / USUAL).is_file() for folder in (Path(), find_code_root()))
    ):
        name = USUAL
    task = requested_task(os.environ, options.task).task or GRPO
    with translate_errors(ConfigError, lambda error: with_flags_of(error, {}, _OPTION_NAMES)):
        return display_path(choose_recipe(name, {**os.environ, DEFAULT_RECIPE: "1"}, task, device))


def _launch(request: ColocatedLaunch) -> int:
    """Print the notes, launch the run and wait for its end; return its exit code."""
    request.announce()
    keys = {key: value for key, value in request.options.keys.items() if value.source != PROGRAM}
    with translate_errors(ConfigError, lambda error: with_flags_of(error, keys, _OPTION_NAMES)):
        return launch(request.options, request.resources)


@contextlib.contextmanager
def _redirect_output(file: str | None) -> Iterator[None]:
    """Append stdout and stderr of this process and its children to ``file`` during the ``with`` block.

    Both are restored at the end, also after an error. None changes nothing. Raise ConfigError if the file can't be
    written.
    """
    if file is None:
        yield
        return
    try:
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        problem = f"can't write '{file}' ({error.strerror})"
        raise config_error("--redirect-output", problem, "use a file that you may write") from error
    say(f"the output goes to {display_path(file)}")
    _flush_output()
    copies = [(fd, os.dup(fd)) for fd in (1, 2)]
    for fd, _ in copies:
        os.dup2(target, fd)
    os.close(target)
    try:
        yield
    finally:
        _flush_output()
        for fd, copy in copies:
            os.dup2(copy, fd)
            os.close(copy)


def _flush_output() -> None:
    """Flush the buffers of stdout and stderr; call this before their target changes."""
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # launch.log shows this as the command
    raise SystemExit(main())
