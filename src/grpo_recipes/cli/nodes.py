"""The flags of a run on several nodes: in a Slurm job, or started by hand with one command per node.

``read_nodes`` checks them before anything starts. Outside Slurm they become a ``Meeting``, the rendezvous of the nodes.
Inside a job, one launch on the first node starts the processes of all nodes. There, ``--master-addr`` only chooses the
network interface, and ``--master-port`` is the port of the training processes.
"""

import argparse
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from grpo_recipes.cli import option
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.launch.addresses import INTERFACE_VARIABLES
from grpo_recipes.launch.rendezvous import MASTER_PORT, MEETING_LIMIT, Meeting
from grpo_recipes.recipe.document import Value
from grpo_recipes.slurm.client import SlurmJob

NETWORK = INTERFACE_VARIABLES[0]
MOST_NODES = 10_000
NODE_OPTIONS = (
    option("--nodes", type=int, metavar="N", help="Number of nodes, with one command each outside Slurm (default 1)"),
    option("--node-rank", type=int, metavar="N", help="With --nodes: number of this node, from 0 to N-1"),
    option("--master-addr", metavar="ADDRESS", help="With --nodes: address of node 0 for the other nodes"),
    option("--master-port", type=int, metavar="PORT",
        help=f"Port of the nodes' rendezvous (default {MASTER_PORT}); on one node, of the training processes"),
    option("--node-timeout", type=float, metavar="SECONDS",
        help=f"With --nodes, outside Slurm: longest wait for the other nodes (default {MEETING_LIMIT:.0f})"),
)  # fmt: skip


@dataclass(frozen=True)
class NodeFlags:
    """The effect of the flags on a launch."""

    meeting: Meeting | None = None  # rendezvous of nodes that are started by hand
    variables: dict[str, str] = field(default_factory=dict)  # environment variables to set
    keys: dict[str, Value] = field(default_factory=dict)  # recipe keys to set


def read_nodes(options: argparse.Namespace, job: SlurmJob | None) -> NodeFlags:
    """Return the effect of the flags for nodes: a meeting of the nodes, or variables and recipe keys.

    There is a meeting only for several nodes outside Slurm. In a Slurm job, the network of ``--master-addr`` becomes a
    variable. Raise ConfigError with all problems of the numbers, or else with all other problems.
    """
    count, rank = 1 if options.nodes is None else options.nodes, options.node_rank
    problems = _find_number_problems(options, count)
    if problems:
        raise ConfigError(*problems)
    several_in_job = job is not None and job.nodes > 1
    if job is not None and job.nodes != count and (options.nodes is not None or rank is not None):
        example = " --node-rank 0 --master-addr ADDRESS_OF_THIS_NODE" if several_in_job else ""
        problem, fix = f"is {count}, but the Slurm job has {job.nodes}", f"use --nodes {job.nodes}{example}"
        problems.append(Problem("--nodes", problem, fix))
    interface = None
    if count == 1 and not several_in_job:
        problems += _find_single_node_problems(options)
    elif count > 1:
        interface = _find_interface_of_node_0(options.master_addr, is_node_0=not rank)
        if isinstance(interface, Problem):
            problems.append(interface)
    if job is not None and not problems and rank:
        problem = f"the launch on node 0 also starts the processes of node {rank}"
        problems.append(Problem("--node-rank", problem, "run this once, on the first node of the job, without srun"))
    variables = {}
    if job is not None and not problems and isinstance(interface, str):
        variable = next((name for name in INTERFACE_VARIABLES if os.environ.get(name)), "")
        if variable and os.environ[variable] != interface:
            problem = f"is {os.environ[variable]}, but --master-addr is on {interface}"
            problems.append(Problem(variable, problem, f"unset it, or set it to {interface}"))
        variables = {} if variable else {NETWORK: interface}
    if problems:
        raise ConfigError(*problems)
    if count > 1 and job is None:
        limit = MEETING_LIMIT if options.node_timeout is None else options.node_timeout
        return NodeFlags(Meeting(count, rank, options.master_addr, options.master_port or MASTER_PORT, limit))
    port = options.master_port
    keys = {} if port is None else {"main_process_port": Value(port, "--master-port")}
    return NodeFlags(None, variables, keys)


def reject_other_launchers(command: str, environment: Mapping[str, str]) -> None:
    """Raise a ConfigError if torchrun, or mpirun with several processes, has started this launch.

    torchrun is rejected even with one process. `accelerate launch` with several processes counts as torchrun, because
    it sets the same variables. The error's fix is to run ``command`` directly: it ends with the flag for the training
    processes of a node, and the error adds their number.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher, count = "torchrun", int(environment.get("LOCAL_WORLD_SIZE", "1"))
    elif (count := int(environment.get("OMPI_COMM_WORLD_SIZE", "1"))) > 1:
        launcher = "mpirun"
    else:
        return
    nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
    node_flags = f" --nodes {nodes} --node-rank {environment.get('GROUP_RANK', '0')} --master-addr ADDRESS_OF_NODE_0"
    problem = f"has started this command in {count} processes, but the launch starts the training processes itself"
    fix = f"run without {launcher}: {command} {count}{node_flags if nodes > 1 else ''}"
    raise config_error(launcher, problem, fix)


def _find_number_problems(options: argparse.Namespace, count: int) -> list[Problem]:
    """Return problems of the numbers in the flags for nodes: count, rank, port and timeout."""
    problems = []
    if not 1 <= count <= MOST_NODES:
        problem = f"expected 1 to {MOST_NODES}, got {count}"
        problems.append(Problem("--nodes", problem, "use --nodes 1 or more"))
    elif options.node_rank is None and count > 1:
        problems.append(Problem("--node-rank", "is missing", "add --node-rank 0 on the first node, 1 on the next"))
    elif not 0 <= (options.node_rank or 0) < count:
        fix = f"use a number from 0 to {count - 1}, or more --nodes"
        problems.append(Problem("--node-rank", f"is {options.node_rank}, with --nodes {count}", fix))
    if count > 1 and options.master_port is not None and not 1024 <= options.master_port <= 65535:
        problem = f"expected 1024 to 65535, got {options.master_port}"
        problems.append(Problem("--master-port", problem, f"use --master-port {MASTER_PORT}"))
    if options.node_timeout is not None and not 0 < options.node_timeout < float("inf"):
        problem = f"expected seconds above 0, got {options.node_timeout:g}"
        problems.append(Problem("--node-timeout", problem, f"use --node-timeout {MEETING_LIMIT:.0f}"))
    return problems


def _find_single_node_problems(options: argparse.Namespace) -> list[Problem]:
    """Return problems of flags that have no effect on one node: an address that is not local, and a timeout."""
    problems = []
    if options.master_addr not in (None, "localhost", "127.0.0.1"):
        problem = f"is '{options.master_addr}', but the processes of one node meet at its loopback"
        problems.append(Problem("--master-addr", problem, "remove it, or add --nodes"))
    if options.node_timeout is not None:
        problems.append(Problem("--node-timeout", "has no effect on one node", "remove it, or add --nodes"))
    return problems


def _find_interface_of_node_0(address: str | None, is_node_0: bool) -> str | Problem | None:
    """Return the name of this node's network interface with the address of node 0, or the problem with the address.

    The address is resolved by DNS. On other nodes (``is_node_0`` false), only check the address, and return None
    instead of a name.
    """
    addresses = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }
    fix = "use the address of node 0, the same as in the command on node 0"
    if is_node_0:
        fix = f"use an address of this node ({', '.join(addresses) or 'it only has the loopback'})"
    if not address:
        return Problem("--master-addr", "is missing", fix)
    try:
        resolved = socket.gethostbyname(address)
    except (OSError, UnicodeError):
        return Problem("--master-addr", f"'{address}' can't be resolved on this node", fix)
    if resolved.startswith("127."):
        return Problem("--master-addr", f"'{address}' is the loopback, which other nodes can't reach", fix)
    if is_node_0 and resolved not in addresses:
        return Problem("--master-addr", f"'{address}' is not an address of this node, which is node 0", fix)
    return addresses.get(resolved) if is_node_0 else None
