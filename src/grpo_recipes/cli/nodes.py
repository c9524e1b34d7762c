"""The flags of a run on several nodes: in a Slurm job, or started by hand with one command per node.

``read_nodes`` checks them before anything is started. Outside Slurm they become a ``Meeting``; inside a job, one launch
on its first node starts the processes of all nodes, and only the network interface is left to set.
"""

import argparse
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from grpo_recipes.cli import option
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.launch.nodes import INTERFACE_VARIABLES
from grpo_recipes.launch.rendezvous import MASTER_PORT, MEETING_LIMIT, Meeting
from grpo_recipes.recipe.document import Value
from grpo_recipes.slurm.client import SlurmJob

NETWORK = INTERFACE_VARIABLES[0]
MOST_NODES = 10_000
NODE_OPTIONS = (
    option("--nodes", type=int, metavar="N", help="nodes of the run, one command each outside Slurm (default 1)"),
    option("--node-rank", type=int, metavar="N", help="with --nodes: number of this node, 0 to N-1"),
    option("--master-addr", metavar="ADDRESS", help="with --nodes: address of node 0, which the other nodes reach"),
    option("--master-port", type=int, metavar="PORT",
        help=f"port at which the nodes meet (default {MASTER_PORT}); on one node, the training processes"),
    option("--node-timeout", type=float, metavar="SECONDS",
        help=f"with --nodes, outside Slurm: limit of the wait for the other nodes (default {MEETING_LIMIT:.0f})"),
)  # fmt: skip


@dataclass(frozen=True)
class NodeFlags:
    """The meaning of the flags for a launch."""

    meeting: Meeting | None = None  # of nodes that are started by hand
    variables: dict[str, str] = field(default_factory=dict)  # to set for the launch
    keys: dict[str, Value] = field(default_factory=dict)  # recipe keys


def read_nodes(options: argparse.Namespace, job: SlurmJob | None) -> NodeFlags:
    """Return the meaning of the flags; a ConfigError lists everything that is wrong with them."""
    count, rank = 1 if options.nodes is None else options.nodes, options.node_rank
    problems = _number_problems(options, count)
    if problems:
        raise ConfigError(*problems)
    several_in_job = job is not None and job.nodes > 1
    if job is not None and job.nodes != count and (options.nodes is not None or rank is not None):
        example = " --node-rank 0 --master-addr ADDRESS_OF_THIS_NODE" if several_in_job else ""
        what, fix = f"is {count}, the Slurm job has {job.nodes}", f"write --nodes {job.nodes}{example}"
        problems.append(Problem("--nodes", what, fix))
    interface = None
    if count == 1 and not several_in_job:
        problems += _single_node_problems(options)
    elif count > 1:
        interface = _interface_of_node_0(options.master_addr, here=not rank)
        if isinstance(interface, Problem):
            problems.append(interface)
    if job is not None and not problems and rank:
        what = f"the launch on node 0 starts the processes of node {rank} too"
        problems.append(Problem("--node-rank", what, "run this once, on the first node of the job, without srun"))
    variables = {}
    if job is not None and not problems and isinstance(interface, str):
        set_by = next((name for name in INTERFACE_VARIABLES if os.environ.get(name)), "")
        if set_by and os.environ[set_by] != interface:
            what = f"is {os.environ[set_by]}, and --master-addr is on {interface}"
            problems.append(Problem(set_by, what, f"unset it, or set it to {interface}"))
        variables = {} if set_by else {NETWORK: interface}
    if problems:
        raise ConfigError(*problems)
    if count > 1 and job is None:
        limit = MEETING_LIMIT if options.node_timeout is None else options.node_timeout
        return NodeFlags(Meeting(count, rank, options.master_addr, options.master_port or MASTER_PORT, limit))
    port = options.master_port
    keys = {} if port is None else {"main_process_port": Value(port, "--master-port")}
    return NodeFlags(None, variables, keys)


def reject_other_launchers(command: str, environment: Mapping[str, str]) -> None:
    """Reject a launch that torchrun, accelerate or mpirun has started several times; ``command`` replaces it.

    ``command`` ends with the flag for the training processes of a node, whose number follows.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher, count = "torchrun", int(environment.get("LOCAL_WORLD_SIZE", "1"))
    elif (count := int(environment.get("OMPI_COMM_WORLD_SIZE", "1"))) > 1:
        launcher = "mpirun"
    else:
        return
    nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
    several = f" --nodes {nodes} --node-rank {environment.get('GROUP_RANK', '0')} --master-addr ADDRESS_OF_NODE_0"
    what = f"has started this command in {count} processes, but the launch starts the training processes itself"
    fix = f"run without {launcher}: {command} {count}{several if nodes > 1 else ''}"
    raise config_error(launcher, what, fix)


def _number_problems(options: argparse.Namespace, count: int) -> list[Problem]:
    problems = []
    if not 1 <= count <= MOST_NODES:
        problems.append(Problem("--nodes", f"is {count}", "write --nodes 1 or more"))
    elif options.node_rank is None and count > 1:
        problems.append(Problem("--node-rank", "is missing", "write --node-rank 0 on the first node, 1 on the next"))
    elif not 0 <= (options.node_rank or 0) < count:
        fix = f"write a number from 0, below {count}, or more --nodes"
        problems.append(Problem("--node-rank", f"is {options.node_rank}, with --nodes {count}", fix))
    if count > 1 and options.master_port is not None and not 1024 <= options.master_port <= 65535:
        problems.append(Problem("--master-port", f"is {options.master_port}", f"write --master-port {MASTER_PORT}"))
    if options.node_timeout is not None and not 0 < options.node_timeout < float("inf"):
        fix = f"write --node-timeout {MEETING_LIMIT:.0f}"
        problems.append(Problem("--node-timeout", f"is {options.node_timeout:g}", fix))
    return problems


def _single_node_problems(options: argparse.Namespace) -> list[Problem]:
    problems = []
    if options.master_addr not in (None, "localhost", "127.0.0.1"):
        what = f"'{options.master_addr}': the processes of one node meet at its loopback"
        problems.append(Problem("--master-addr", what, "leave it out, or write --nodes"))
    if options.node_timeout is not None:
        problems.append(Problem("--node-timeout", "changes nothing on one node", "leave it out, or write --nodes"))
    return problems


def _interface_of_node_0(address: str | None, here: bool) -> str | Problem | None:
    """Return the network interface with the address of node 0 if it is ``here``, or why it cannot be node 0's."""
    addresses = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }
    own = f"write one of node 0: here {', '.join(addresses) or 'is none but the loopback'}"
    fix = own if here else "write the address of node 0, the same as in the command on node 0"
    if not address:
        return Problem("--master-addr", "is missing", fix)
    try:
        resolved = socket.gethostbyname(address)
    except (OSError, UnicodeError):
        return Problem("--master-addr", f"'{address}' is no address that this node knows", fix)
    if resolved.startswith("127."):
        return Problem("--master-addr", f"'{address}' is the loopback, which no other node reaches", fix)
    if here and resolved not in addresses:
        return Problem("--master-addr", f"'{address}' is not an address of this node, which is node 0", fix)
    return addresses.get(resolved) if here else None
