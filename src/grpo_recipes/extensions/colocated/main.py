"""The entry point ``run_colocated_grpo.py``: its flags become one launch with vLLM inside the training processes."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.cli import Parser, answer, load_command, option, recipe_name
from grpo_recipes.cli.entry_points import LaunchRequest, unknown_flags, with_flags_of, with_gpus
from grpo_recipes.cli.nodes import NODE_OPTIONS, NodeFlags, read_nodes, reject_other_launchers
from grpo_recipes.cli.runs import launch_options
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.launch.run import launch
from grpo_recipes.paths import display_path, home
from grpo_recipes.plan.devices import Resources, find_resources, some_trainers
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.check import choose_recipe
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import DEFAULT_RECIPE
from grpo_recipes.recipe.tasks import GRPO, requested_task

PROGRAM = "run_colocated_grpo.py"
USUAL = "training_configs/dr_grpo_config.yaml"  # taken where it exists and no recipe is named
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
OPTIONS = (
    option("--gpus", type=int, metavar="N",
        help="training processes of a node, each with a GPU and a vLLM; processes in a CPU environment (default 1)"),
    option("--log-level", type=str.upper, choices=LEVELS, help="what each training process logs"),
    option("--redirect-output", metavar="FILE", help="add stdout and stderr to FILE"),
)  # fmt: skip
_NAMES = [name for names, _ in (*OPTIONS, *NODE_OPTIONS) for name in names]
DETAILS = "TORCH_DISTRIBUTED_DEBUG"
# Of torch 2.13. With DETAIL its DistributedDataParallel takes the wrapped gloo for gloo, and dies of signal 11.
_MOST_DETAILS = {"cuda": "DETAIL", "cpu": "INFO"}
_OURS = {"RECIPE": "--config"}  # option of `grpo launch` -> ours, in messages


@dataclass(frozen=True)
class ColocatedLaunch(LaunchRequest):
    """The launch that the flags request."""

    file: str | None = None  # of --redirect-output


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the launch; 2 with a line for each thing that is wrong, before anything is started."""

    def run() -> int:
        request = read(list(sys.argv[1:] if argv is None else argv))
        with _output_to(request.file):
            code = answer(lambda: _launch(request))
        if request.file is not None and code:
            print(f"grpo: exit code {code}, see {display_path(request.file)}", file=sys.stderr)
        return code

    return answer(run)


def read(arguments: list[str]) -> ColocatedLaunch:
    """Return the launch that the flags request; a ConfigError lists everything that is wrong with them."""
    reject_other_launchers(f"python {PROGRAM} --gpus", os.environ)
    options, flags = _parser().parse_known_args(arguments)
    resources = find_resources(os.environ)
    problems, nodes = list(_wrong_numbers(options)), NodeFlags()
    try:
        nodes = read_nodes(options, resources.job)
    except ConfigError as error:
        problems += error.problems
    keys = {**_keys(options), **nodes.keys}
    problems += [*unknown_flags(flags, _NAMES, PROGRAM), *_set_twice(flags, keys)]
    if problems:
        raise ConfigError(*problems)
    launching = launch_options(options, _recipe(options, resources.device), flags, nodes.meeting, keys)
    detailed = options.log_level == "DEBUG" and not os.environ.get(DETAILS)
    variables = {**nodes.variables, **({DETAILS: _MOST_DETAILS[resources.device]} if detailed else {})}
    resources, notes = _devices(options, resources)
    return ColocatedLaunch(launching, resources, variables, notes, options.redirect_output)


def _parser() -> Parser:
    """Return the parser of our options and of those of `grpo launch`."""
    epilog = "Any recipe key is a flag too, e.g. --max_steps 10; see docs/colocated.md."
    about = "Train with vLLM inside the training processes: one grpo launch."
    parser = Parser(prog=PROGRAM, description=about, epilog=epilog, allow_abbrev=False)
    parser.set_defaults(recipe=None)
    for names, settings in (*OPTIONS, *load_command("launch").all_options()):
        parser.add_argument(*names, **settings)
    parser.set_defaults(nodes=1)  # --gpus counts the processes of a node
    return parser


def _keys(options: argparse.Namespace) -> dict[str, Value]:
    """Return the recipe keys that our options set; a resumed run keeps the keys that no option sets."""
    keys: dict[str, Value] = {}
    if options.resume is None:
        keys = {"use_vllm": Value(True, PROGRAM), "vllm_mode": Value("colocate", PROGRAM)}
    if options.resume is None or options.gpus is not None:
        keys["num_processes"] = Value(_gpus(options) * options.nodes, "--gpus")
    if options.log_level is not None:
        level = Value(options.log_level.lower(), "--log-level")
        keys |= {"log_level": level, "log_level_replica": level}
    return keys


def _gpus(options: argparse.Namespace) -> int:
    return 1 if options.gpus is None else int(options.gpus)


def _wrong_numbers(options: argparse.Namespace) -> Iterator[Problem]:
    if _gpus(options) < 1:
        yield Problem("--gpus", f"is {options.gpus}", "write --gpus 1 or more")


def _set_twice(flags: list[str], keys: Mapping[str, Value]) -> Iterator[Problem]:
    """Yield the flags for recipe keys that our options set."""
    for flag in flags:
        key = flag.partition("=")[0].removeprefix("--").replace("-", "_")
        if flag.startswith("--") and key.removeprefix("no_") in keys:
            source = keys[key.removeprefix("no_")].source
            fix = f"keep {source}" if source != PROGRAM else "leave it out, or use grpo launch"
            yield Problem(flag.partition("=")[0], f"{source} decides {key}", fix)


def _devices(options: argparse.Namespace, resources: Resources) -> tuple[Resources, list[str]]:
    """Return the devices of the launch, those that a dry run imagines too, and what there is to say of them."""
    if options.resume is not None and options.gpus is None:
        return resources, []  # as many as the run began with
    if resources.device == "cpu":
        each = " a node" if options.nodes > 1 else ""
        trainers, cores = some_trainers(_gpus(options)), resources.cores
        return resources, [f"this is a CPU environment: --gpus {_gpus(options)} is {trainers}{each} on {cores} cores"]
    fix = f"write --gpus {len(resources.gpus)}, or ask for more GPUs"
    return with_gpus(resources, _gpus(options), "--gpus", fix, options.dry_run, options.nodes)


def _recipe(options: argparse.Namespace, device: str) -> str | None:
    """Return the recipe: the named one, that of the variable CONFIG, ``USUAL``, or the default one of the device."""
    named = recipe_name(options)
    if options.resume is not None:
        return named
    if not named and not os.environ.get("CONFIG") and any((folder / USUAL).is_file() for folder in (Path(), home())):
        named = USUAL
    task = requested_task(os.environ, options.task).task or GRPO
    with translate(ConfigError, lambda error: with_flags_of(error, {}, _OURS)):
        return display_path(choose_recipe(named, {**os.environ, DEFAULT_RECIPE: "1"}, task, device))


def _launch(request: ColocatedLaunch) -> int:
    request.announce()
    keys = {key: value for key, value in request.options.keys.items() if value.source != PROGRAM}
    with translate(ConfigError, lambda error: with_flags_of(error, keys, _OURS)):
        return launch(request.options, request.resources)


@contextlib.contextmanager
def _output_to(file: str | None) -> Iterator[None]:
    """Send the output of this process and of those that it starts to the end of a file, if one is named."""
    if file is None:
        yield
        return

    def unwritable(error: OSError) -> ConfigError:
        what = f"cannot write '{file}' ({error.strerror})"
        return config_error("--redirect-output", what, "name a file you may write")

    with translate(OSError, unwritable):
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    say(f"the output goes to {display_path(file)}")
    _flush()
    before = [(fd, os.dup(fd)) for fd in (1, 2)]
    for fd, _ in before:
        os.dup2(target, fd)
    os.close(target)
    try:
        yield
    finally:
        _flush()
        for fd, copy in before:
            os.dup2(copy, fd)
            os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # as launch.log names the command
    raise SystemExit(main())
