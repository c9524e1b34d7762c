"""What the nodes of a job offer, and whether they reach each other and W&B; found out before anything heavy starts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import replace

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.launch.nodes import START_SECONDS, NodeWorkers
from grpo_recipes.plan.devices import Node, Resources
from grpo_recipes.process.network import address_reachable
from grpo_recipes.recipe import Recipe
from grpo_recipes.slurm.client import address_of_node

# The first of these that is set names the interface; the last two are NCCL's and gloo's own.
INTERFACE_VARIABLES = ("NETWORK_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_CONNECT_SECONDS = 20.0


def preflight_nodes(workers: NodeWorkers, resources: Resources, environment: Mapping[str, str]) -> Resources:
    """Start the node workers, and return the resources with the nodes as they report them; unchanged on one node.

    Every two nodes are tried for a connection. Until then the other nodes are taken to be like this one.

    Raises:
        ConfigError: a node is silent, lacks the address that is wanted, or does not reach another one.
    """
    if not resources.nodes:
        return resources
    workers.start(environment)
    reports = workers.ask("describe", START_SECONDS)
    addresses = _addresses(workers, reports, environment)
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
    _need_connections(workers, nodes)
    return replace(resources, nodes=tuple(nodes))


def _addresses(workers: NodeWorkers, reports: list[dict], environment: Mapping[str, str]) -> list[str]:
    """Return each node's address: of the interface that is named, else the one by which Slurm knows the node."""
    variable = next((name for name in INTERFACE_VARIABLES if environment.get(name)), None)
    if variable is not None:
        wanted = environment[variable].split(",")[0].removeprefix("=")  # NCCL and gloo take a list, NCCL also "=name"
        lacking = [report for report in reports if not report["interfaces"].get(wanted)]
        if not lacking:
            return [report["interfaces"][wanted][0] for report in reports]
        if variable == INTERFACE_VARIABLES[0]:
            known = ", ".join(name for name, own in lacking[0]["interfaces"].items() if own)
            what = f"node {lacking[0]['host']} has no address on '{wanted}' (it has {known})"
            raise config_error(variable, what, "name the interface that joins the nodes, or unset it")
    named = [node_address(report["host"]) for report in reports]
    if all(map(_is_address, named)):
        return named
    # A name may mean the loopback on its own node, so each node is asked for its side of the way to another.
    peers = {str(node): named[1 if node == 0 else 0] for node in range(len(named))}
    answers = workers.ask("route", peers=peers)
    for report, answer in zip(reports, answers, strict=True):
        if answer["address"] is None:
            raise _no_way(f"node {report['host']} finds no way to {answer['peer']} ({answer['error']})")
    return [answer["address"] for answer in answers]


def node_address(name: str) -> str:
    """Return the address or name of a node as Slurm has it, or refuse the job."""
    if address := address_of_node(name):
        return address
    raise _no_way(f"scontrol shows no address of node {name}")


def _is_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).version == 4
    except ValueError:
        return False


def _need_connections(workers: NodeWorkers, nodes: list[Node]) -> None:
    """Have every node open a connection to every other one; name the first pair for which that fails."""
    firewall = ", or have the firewall between them opened"
    listening = workers.ask("listen", addresses={str(index): node.address for index, node in enumerate(nodes)})
    for node, report in zip(nodes, listening, strict=True):
        if report["port"] is None:
            raise _no_way(f"node {node.name} cannot listen on {node.address} ({report['error']})", firewall)
    peers = [[index, node.address, listening[index]["port"]] for index, node in enumerate(nodes)]
    tried = workers.ask("connect", peers=peers, limit=_CONNECT_SECONDS)
    for node, report in zip(nodes, tried, strict=True):
        for other, error in report["failed"].items():
            to = nodes[int(other)]
            what = f"node {node.name} ({node.address}) does not reach node {to.name} ({to.address}): {error}"
            raise _no_way(what, firewall)


def _no_way(what: str, further: str = "") -> ConfigError:
    fix = f"name the interface that joins them with NETWORK_INTERFACE{further}"
    return config_error("network of the nodes", what, fix)


WANDB_ADDRESS = "https://api.wandb.ai"


def needs_wandb(recipe: Recipe, environment: Mapping[str, str]) -> bool:
    """Return whether a run would talk to W&B while it runs."""
    if environment.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return False
    return "wandb" in (recipe["report_to"] or []) and not environment.get("WANDB_MODE")


def need_wandb_route(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Refuse a run that reports to W&B from a machine that does not reach it.

    W&B itself waits for minutes, and ends the trainer when the model is long loaded.
    """
    address = environment.get("WANDB_BASE_URL") or WANDB_ADDRESS
    if needs_wandb(recipe, environment) and not address_reachable(address, environment):
        what = f"W&B does not answer at {address} from this machine"
        raise config_error(
            recipe.source("report_to"), what, "export WANDB_MODE=offline and run wandb sync later, or report_to: none"
        )
