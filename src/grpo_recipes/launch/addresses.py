"""Choose the addresses with which the nodes of a run connect to each other.

addresses = choose_addresses(reports, os.environ)
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.slurm.client import read_node_address

# Variables with the network interface, by precedence; the last two belong to NCCL and gloo.
INTERFACE_VARIABLES = ("NETWORK_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def choose_addresses(reports: Sequence[Mapping[str, Any]], environment: Mapping[str, str]) -> list[str]:
    """Choose the address of each node for connections between the nodes, in the order of ``reports``.

    If all nodes have the interface in NETWORK_INTERFACE or a similar variable, use its addresses. Otherwise, use the
    address in each report, or query Slurm and resolve the answer. If the first address is a loopback, replace it by the
    address on the route to the second node. Raise ConfigError if a node lacks the interface in NETWORK_INTERFACE, or if
    no address or route is found.
    """
    variable = next((name for name in INTERFACE_VARIABLES if environment.get(name)), "")
    # NCCL and gloo accept a list, and NCCL also a prefix "=".
    interface = environment.get(variable, "").split(",")[0].removeprefix("=")
    lacking = [report for report in reports if not report["interfaces"].get(interface)]
    if not lacking:
        return [report["interfaces"][interface][0] for report in reports]
    if variable == INTERFACE_VARIABLES[0]:
        names = ", ".join(name for name, local in lacking[0]["interfaces"].items() if local)
        problem = f"node {lacking[0]['host']} has no address on interface '{interface}' (it has {names})"
        raise config_error(variable, problem, "set it to the interface between the nodes, or unset it")
    addresses = [report["address"] or resolve_node_address(report["host"]) for report in reports]
    if addresses[0].startswith("127."):  # on its own node, a host name may mean the loopback
        no_route = translate_errors(
            OSError, lambda error: make_network_error(f"the first node has no route to {addresses[1]}: {error}")
        )
        with no_route, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((addresses[1], 9))  # sends nothing
            addresses[0] = probe.getsockname()[0]
    return addresses


def resolve_node_address(name: str) -> str:
    """Query Slurm for the node ``name``, and resolve its IPv4 address by DNS; raise ConfigError if it is unknown."""
    host = read_node_address(name)  # an address or a host name
    if host is None:
        raise make_network_error(f"scontrol shows no address of node {name}")
    unresolved = translate_errors(
        (OSError, UnicodeError), lambda error: make_network_error(f"Slurm's address {host} of node {name}: {error}")
    )
    with unresolved:
        return socket.gethostbyname(host)


def make_network_error(problem: str) -> ConfigError:
    """Return a ConfigError for a ``problem`` of the network between the nodes, with a fix."""
    fix = "set NETWORK_INTERFACE to the interface that joins them, or open the firewall between them"
    return config_error("network of the nodes", problem, fix)
