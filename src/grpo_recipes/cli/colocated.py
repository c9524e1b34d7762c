"""The flags of ``run_colocated_grpo.py``, which become one `grpo launch` with vLLM inside the training processes."""

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from grpo_recipes.cli import Parser, answer, load, option, recipe_name
from grpo_recipes.cli.doors import in_words_of, launch_words, strange, with_gpus
from grpo_recipes.cli.runs import launch_options
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.launch.nodes import INTERFACE_VARIABLES
from grpo_recipes.launch.resolve import Options
from grpo_recipes.launch.run import launch
from grpo_recipes.paths import home, shown
from grpo_recipes.plan.devices import Resources, find_resources, some_trainers
from grpo_recipes.process.reports import say
from grpo_recipes.process.terminal import OUTPUT
from grpo_recipes.recipe.check import choose_recipe
from grpo_recipes.recipe.keys import DEFAULT_RECIPE
from grpo_recipes.recipe.tasks import GRPO, requested_task

PROGRAM = "run_colocated_grpo.py"
USUAL = "training_configs/dr_grpo_config.yaml"  # taken where it exists and no recipe is named
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
OPTIONS = (
    option("--gpus", type=int, metavar="N",
        help="training processes of a node, each with a GPU and a vLLM; processes in a CPU environment (default 1)"),
    option("--nodes", type=int, default=1, metavar="N", help="nodes of the Slurm job (default 1)"),
    option("--node-rank", type=int, metavar="N", help="with --nodes: 0, the node whose launch starts all of them"),
    option("--master-addr", metavar="ADDRESS",
        help="with --nodes: address of node 0, on the network by which the nodes reach each other"),
    option("--master-port", type=int, metavar="PORT", help="the port at which the training processes meet"),
    option("--log-level", type=str.upper, choices=LEVELS, help="what each training process logs"),
    option("--redirect-output", metavar="FILE", help="add stdout and stderr to FILE"),
)  # fmt: skip
_NAMES = [name for names, _ in OPTIONS for name in names]
DETAILS = "TORCH_DISTRIBUTED_DEBUG"
# Of torch 2.13. With DETAIL its DistributedDataParallel takes the wrapped gloo for gloo, and dies of signal 11.
_MOST_DETAILS = {"cuda": "DETAIL", "cpu": "INFO"}
NETWORK = INTERFACE_VARIABLES[0]
# Flags of the launch that stand for ours, in messages.
_OURS = {
    "RECIPE": "--config", "--num_processes": "--gpus", "--main_process_port": "--master-port",
    "--log_level": "--log-level", "--log_level_replica": "--log-level",
}  # fmt: skip


@dataclass(frozen=True)
class Door:
    """One launch, as the flags ask for it."""

    options: Options
    resources: Resources
    variables: dict[str, str]  # that are set for it
    notes: list[str]
    file: str | None  # of --redirect-output


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code of the launch; 2 with a line for each thing that is wrong, before anything is started."""

    def run() -> int:
        door = read(list(sys.argv[1:] if argv is None else argv))
        with _output_to(door.file):
            code = answer(lambda: _launch(door))
        if door.file is not None and code:
            print(f"grpo: exit code {code}, see {shown(door.file)}", file=sys.stderr)
        return code

    return answer(run)


def read(arguments: list[str]) -> Door:
    """Return the launch that the flags ask for; a ConfigError names everything that is wrong with them."""
    options, flags = _parser().parse_known_args(arguments)
    ours = _flags(options)
    problems = [*_wrong_numbers(options), *strange(flags, _NAMES, PROGRAM), *_given_twice(flags, ours)]
    if problems:
        raise ConfigError(*problems)
    resources = find_resources(os.environ)
    asked = launch_options(options, _recipe(options, resources.device), [*ours, *flags])
    detailed = options.log_level == "DEBUG" and not os.environ.get(DETAILS)
    variables = {DETAILS: _MOST_DETAILS[resources.device]} if detailed else {}
    if problems := _nodes(options, resources, variables, asked):
        raise ConfigError(*problems)
    resources, notes = _devices(options, resources)
    return Door(asked, resources, variables, notes, options.redirect_output)


def _parser() -> Parser:
    """Return the parser of our options and of those of `grpo launch`."""
    epilog = "Any recipe key is a flag too, e.g. --max_steps 10; see docs/colocated.md."
    about = "Train with vLLM inside the training processes: one grpo launch."
    parser = Parser(prog=PROGRAM, description=about, epilog=epilog, allow_abbrev=False)
    parser.set_defaults(recipe=None)
    for names, settings in (*OPTIONS, *load("launch").all_options()):
        parser.add_argument(*names, **settings)
    return parser


def _flags(options: argparse.Namespace) -> list[str]:
    """Return the recipe flags that our options stand for; a resumed run goes on as it began but for what is given."""
    keys: dict[str, object] = {"use_vllm": "true", "vllm_mode": "colocate"} if options.resume is None else {}
    if options.resume is None or options.gpus is not None:
        keys["num_processes"] = _gpus(options) * options.nodes
    if options.master_port is not None:
        keys["main_process_port"] = options.master_port
    if options.log_level is not None:
        keys |= dict.fromkeys(("log_level", "log_level_replica"), options.log_level.lower())
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def _gpus(options: argparse.Namespace) -> int:
    return 1 if options.gpus is None else int(options.gpus)


def _wrong_numbers(options: argparse.Namespace) -> Iterator[Problem]:
    for flag, number in (("--gpus", _gpus(options)), ("--nodes", options.nodes)):
        if number < 1:
            yield Problem(flag, f"is {number}", f"write {flag} 1 or more")


def _given_twice(flags: list[str], ours: list[str]) -> Iterator[Problem]:
    """Yield the flags of recipe keys that our options decide."""
    keys = {word.removeprefix("--") for word in ours[::2]}
    for flag in flags:
        key = flag.partition("=")[0].removeprefix("--").replace("-", "_")
        if flag.startswith("--") and key.removeprefix("no_") in keys:
            decided = _OURS.get(f"--{key}")
            fix = f"keep {decided}" if decided else "leave it out, or use grpo launch"
            yield Problem(flag.partition("=")[0], f"{decided or PROGRAM} decides {key}", fix)


def _nodes(
    options: argparse.Namespace, resources: Resources, variables: dict[str, str], asked: Options
) -> list[Problem]:
    """Return what is wrong with the flags of several nodes, else add the variable that names their interface."""
    nodes, rank, address, job = options.nodes, options.node_rank, options.master_addr, resources.job
    problems: list[Problem] = []
    if rank is None and nodes > 1:
        problems.append(Problem("--node-rank", "is missing", "write --node-rank 0 on the first node"))
    elif not 0 <= (rank or 0) < nodes:
        what, fix = f"is {rank}, with --nodes {nodes}", f"write a number from 0, below {nodes}, or more --nodes"
        problems.append(Problem("--node-rank", what, fix))
    if nodes == 1 and address not in (None, "localhost", "127.0.0.1"):
        what = f"'{address}': the processes of one node meet at its loopback"
        problems.append(Problem("--master-addr", what, "leave it out, or write --nodes"))
    elif nodes > 1:
        found = _interface(address)
        if isinstance(found, Problem):
            problems.append(found)
        elif set_by := next((name for name in INTERFACE_VARIABLES if os.environ.get(name)), ""):
            if os.environ[set_by] != found:
                what = f"{set_by} names another interface than that of --master-addr, {found}"
                problems.append(Problem(set_by, what, "unset it, or leave it to name the interface"))
        else:
            variables[NETWORK] = found
    if nodes > 1 and job is None:
        gpus = [f"--gres=gpu:{_gpus(options)}"] if resources.device == "cuda" else []
        start = ["sbatch", f"--nodes={nodes}", *gpus, "training.sh"]
        what = f"{nodes} nodes, and this is no Slurm job: nothing here starts processes on another machine"
        given = {name: text for name, text in variables.items() if name != NETWORK}  # which is this machine's
        fix = f"submit {launch_words(start, replace(asked, dry_run=False), given)}"
        problems.append(Problem("--nodes", what, fix))
    elif job is not None and job.nodes != nodes:
        several = " --node-rank 0 --master-addr ADDRESS_OF_THIS_NODE" if job.nodes > 1 else ""
        what = f"is {nodes}, the Slurm job has {job.nodes}"
        problems.append(Problem("--nodes", what, f"write --nodes {job.nodes}{several}"))
    elif not problems and rank:
        what = f"the launch on node 0 starts the processes of node {rank} too"
        problems.append(Problem("--node-rank", what, "run this once, on the first node of the job, without srun"))
    return problems


def _interface(address: str | None) -> str | Problem:
    """Return the network interface of this node that has an address, or why it cannot be node 0's."""
    where = "--master-addr"
    own = {
        one.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    }
    fix = f"write one of node 0: here {', '.join(own) or 'is none but the loopback'}"
    if not address:
        return Problem(where, "is missing", fix)
    try:
        found = socket.gethostbyname(address)
    except (OSError, UnicodeError):
        return Problem(where, f"'{address}' is no address that this node knows", fix)
    if found.startswith("127."):
        return Problem(where, f"'{address}' is the loopback, which no other node reaches", fix)
    return own.get(found) or Problem(where, f"'{address}' is not an address of this node", fix)


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
    with translate(ConfigError, _in_our_words):
        return shown(choose_recipe(named, {**os.environ, DEFAULT_RECIPE: "1"}, task, device))


def _in_our_words(error: ConfigError) -> ConfigError:
    return in_words_of(error, _OURS)


def _launch(door: Door) -> int:
    say(launch_words(["grpo", "launch"], door.options, door.variables))
    for note in door.notes:
        say(f"note: {note}")
    os.environ.update(door.variables)
    with translate(ConfigError, _in_our_words):
        return launch(door.options, door.resources)


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
    say(f"the output goes to {shown(file)}")
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
    OUTPUT.drain()
    sys.stdout.flush()
    sys.stderr.flush()


if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # as launch.log names the command
    raise SystemExit(main())
