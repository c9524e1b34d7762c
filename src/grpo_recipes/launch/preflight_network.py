"""What the nodes of a job offer, and whether they reach each other; asked before anything heavy is started."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from grpo_recipes.errors import config_error
from grpo_recipes.launch.nodes import START_SECONDS, Agents
from grpo_recipes.plan.devices import Node, Resources
from grpo_recipes.process.network import address_reachable
from grpo_recipes.recipe import Recipe

# The first of these that is set names the interface; the last two are NCCL's and gloo's own.
INTERFACE_VARIABLES = ("NETWORK_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_CONNECT_SECONDS = 20.0


def survey(agents: Agents, resources: Resources, environment: Mapping[str, str]) -> Resources:
    """Start the agents, ask each what its node has, and try the way between every two nodes.

    Args:
        agents: of the job's nodes, not started.
        resources: this node's, the others taken to be like it.
        environment: the user's.

    Returns:
        The resources with the nodes as they are; unchanged on one node.

    Raises:
        ConfigError: a node is silent, has no address that is asked for, or does not reach another one.
    """
    if not resources.nodes:
        return resources
    agents.start(environment)
    reports = agents.ask("survey", START_SECONDS)
    addresses = _addresses(agents, reports, environment)
    nodes = [
        Node(
            # This node's processes are ours to start: what we see counts, not what a step of the job may use.
            gpus=tuple(report["gpus"]) if index else resources.gpus,
            cores=report["cores"] if index else resources.cores,
            address=address,
            interface=next((name for name, own in report["interfaces"].items() if address in own), None),
            name=report["host"],
        )
        for index, (report, address) in enumerate(zip(reports, addresses, strict=True))
    ]
    _need_ways(agents, nodes)
    return replace(resources, nodes=tuple(nodes))


def _addresses(agents: Agents, reports: list[dict], environment: Mapping[str, str]) -> list[str]:
    """Each node's address: of the interface that is named, else what Slurm calls it."""
    variable = next((name for name in INTERFACE_VARIABLES if environment.get(name)), None)
    if variable is not None and (found := _of_interface(reports, environment[variable])):
        return found
    if variable == INTERFACE_VARIABLES[0]:
        wanted = _interface_name(environment[variable])
        lacking = next(report for report in reports if not report["interfaces"].get(wanted))
        known = ", ".join(name for name, own in lacking["interfaces"].items() if own)
        what = f"node {lacking['host']} has no address on '{wanted}' (it has {known})"
        raise config_error(variable, what, "name the interface that joins the nodes, or unset it")
    named = [node_address(report["host"]) for report in reports]
    if all(_is_address(name) for name in named):
        return named
    # A name may mean the loopback on its own node, so each node is asked for its side of the way to another.
    peers = {str(node): named[1 if node == 0 else 0] for node in range(len(named))}
    answers = agents.ask("route", peers=peers)
    for node, answer in enumerate(answers):
        if answer["address"] is None:
            what = f"node {reports[node]['host']} finds no way to {answer['peer']} ({answer['error']})"
            raise config_error(
                "network of the nodes", what, "name the interface that joins them with NETWORK_INTERFACE"
            )
    return [answer["address"] for answer in answers]


def _of_interface(reports: list[dict], wanted: str) -> list[str] | None:
    """The address of that interface on every node, or None."""
    found = [report["interfaces"].get(_interface_name(wanted)) for report in reports]
    return [own[0] for own in found if own] if all(found) else None


def _interface_name(wanted: str) -> str:
    """The first that is wanted: NCCL and gloo take a list, NCCL also ``=name``."""
    return wanted.split(",")[0].removeprefix("=")


def node_address(name: str) -> str:
    """``NodeAddr`` of a node as Slurm has it: an address, or a name.

    Raises:
        ConfigError: Slurm does not tell.
    """
    try:
        done = subprocess.run(
            ["scontrol", "show", "node", name, "-o"], capture_output=True, text=True, timeout=60, check=False
        )
        told = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        told = None
    if told is None:
        what = f"scontrol tells no address of node {name}"
        raise config_error("network of the nodes", what, "name the interface that joins them with NETWORK_INTERFACE")
    return told[1]


def _is_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).version == 4
    except ValueError:
        return False


def _need_ways(agents: Agents, nodes: list[Node]) -> None:
    """Have every node open a connection to every other one.

    Raises:
        ConfigError: one does not; the pair is named.
    """
    fix = "name the interface that joins them with NETWORK_INTERFACE, or have the firewall between them opened"
    own = {str(index): node.address for index, node in enumerate(nodes)}
    listening = agents.ask("listen", addresses=own)
    for node, report in zip(nodes, listening, strict=True):
        if report["port"] is None:
            what = f"node {node.name} cannot listen on {node.address} ({report['error']})"
            raise config_error("network of the nodes", what, fix)
    peers = [[index, node.address, listening[index]["port"]] for index, node in enumerate(nodes)]
    tried = agents.ask("connect", peers=peers, limit=_CONNECT_SECONDS)
    for node, report in zip(nodes, tried, strict=True):
        for other, error in report["failed"].items():
            to = nodes[int(other)]
            what = f"node {node.name} ({node.address}) does not reach node {to.name} ({to.address}): {error}"
            raise config_error("network of the nodes", what, fix)


WANDB_ADDRESS = "https://api.wandb.ai"


def needs_wandb(recipe: Recipe, environment: Mapping[str, str]) -> bool:
    """Whether a run would talk to W&B while it runs."""
    if environment.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return False
    return "wandb" in (recipe["report_to"] or []) and not environment.get("WANDB_MODE")


def need_wandb_route(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Refuse a run that reports to W&B from a machine that does not reach it.

    W&B itself waits for minutes, and ends the trainer when the model is long loaded.

    Raises:
        ConfigError: WANDB_MODE is not set and no connection opens.
    """
    if not needs_wandb(recipe, environment):
        return
    address = environment.get("WANDB_BASE_URL") or WANDB_ADDRESS
    if not address_reachable(address, environment):
        what = f"W&B does not answer at {address} from this machine"
        raise config_error(
            recipe.origin("report_to"), what, "export WANDB_MODE=offline and run wandb sync later, or report_to: none"
        )
