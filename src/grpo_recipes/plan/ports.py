"""Choose and reserve the ports of a run, and find their listeners.

A chosen port stays reserved by a bound socket of this process until the run's own process listens there.
"""

import contextlib
import errno
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import psutil

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.process.listeners import has_closing_connections
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.extensions import load, merged
from grpo_recipes.recipe.rules import starts_server
from grpo_recipes.slurm.client import SlurmJob

# Default ports outside Slurm. A Slurm job gets a block of ten below the ephemeral range, chosen by its id, so that two
# jobs on one node have different ports.
DEFAULT_PORTS = {"vllm_server_port": 8000, "vllm_group_port": 51216, "main_process_port": 29525}
LOOPBACK = "127.0.0.1"  # processes of extensions listen only here, because they check no token
_REPLICAS_PORT = 29550  # vLLM's default
_BLOCK_BASE, _BLOCKS, _BLOCK_SIZE = 20000, 1200, 10
_MOST_TRIES = 100  # ports to try instead of a busy port
_RESERVED: dict[int, socket.socket] = {}  # bound sockets by their port


@dataclass(frozen=True)
class Ports:
    """The ports of one run."""

    server: int  # the vLLM server
    group: int  # the NCCL group for weight transfers
    main_process: int  # the trainers' rendezvous
    # First of vLLM's internal ports, None if vLLM chooses them. Replicas would all choose the same port from it.
    vllm_internal: int | None
    extensions: dict[str, int] = field(default_factory=dict)  # processes of extensions, by the recipe key of the port
    replicas: int | None = None  # where replicas on other nodes join the server; None if all are on one node

    def by_key(self, server: bool = True) -> dict[str, int]:
        """Return the ports by their recipe keys; without a ``server``, only the port of the trainers."""
        if not server:
            return {"main_process_port": self.main_process}
        ports = zip(DEFAULT_PORTS, (self.server, self.group, self.main_process), strict=True)
        return {**dict(ports), **self.extensions}


def port_keys() -> tuple[str, ...]:
    """Return the recipe keys of all ports, including ports of extensions."""
    return (*DEFAULT_PORTS, *merged("ports"))


def plan_ports(recipe: Recipe, job: SlurmJob | None) -> Ports:
    """Return the ports of the recipe; a port that the recipe does not set gets a default. Nothing is reserved.

    Outside Slurm, the defaults are fixed numbers. In a job, they are a block of numbers that depends on the job's id,
    so that jobs on one node rarely collide.
    """
    added = {key: load(default)(recipe.__getitem__) for key, default in merged("ports").items()}
    numbers, internal = {**DEFAULT_PORTS, **{key: port for key, port in added.items() if port is not None}}, None
    replicas = _REPLICAS_PORT
    if job is not None:
        base = _BLOCK_BASE + job.id % _BLOCKS * _BLOCK_SIZE
        extension_keys = [key for key in numbers if key not in DEFAULT_PORTS]
        last = base + _BLOCK_SIZE - 1
        numbers = dict(zip(DEFAULT_PORTS, range(base, base + 3), strict=True))
        numbers |= {key: last - index for index, key in enumerate(extension_keys)}
        internal, replicas = base + 3 if recipe.server.replicas == 1 else None, base + 3
    ports = _make_ports({key: recipe[key] if recipe.is_set(key) else port for key, port in numbers.items()}, internal)
    return replace(ports, replicas=replicas) if recipe.server.nodes > 1 else ports


def _make_ports(numbers: Mapping[str, int], internal: int | None) -> Ports:
    """Return a run's ``Ports`` from its port numbers by recipe key.

    ``numbers`` has every key of ``DEFAULT_PORTS``; its other keys belong to processes of extensions. ``internal`` is
    the first of vLLM's internal ports, or None if vLLM chooses them.
    """
    server, group, main_process = (numbers[key] for key in DEFAULT_PORTS)
    extensions = {key: port for key, port in numbers.items() if key not in DEFAULT_PORTS}
    return Ports(server, group, main_process, internal, extensions)


def choose_free_ports(
    recipe: Recipe, ports: Ports, host: str, free_there: Callable[[int], bool] | None = None, server: bool = True
) -> tuple[Ports, list[str]]:
    """Reserve the ports, or the next free port instead of a busy port; return them and notes about the changes.

    Raise ConfigError if a port that the user has set is busy, if no port is free, or if ``host`` is not an IPv4
    address of this machine. The vLLM server listens on ``host``, and processes of extensions listen on the
    loopback. Rank 0 opens the other two ports. If rank 0 is on another node, ``free_there`` checks and reserves a
    port on that node. Without a ``server``, only the port of the trainers is reserved.
    """
    chosen: dict[str, int] = {}
    notes = []
    # The user's ports come first, so that no default takes one of them.
    for key, planned in sorted(ports.by_key(server).items(), key=lambda pair: not recipe.is_set(pair[0])):
        reserve_remote = None if key == "vllm_server_port" or key in ports.extensions else free_there
        address = LOOPBACK if key in ports.extensions else host
        is_usable = partial(_reserve_if_free, chosen.values(), address, reserve_remote)
        if recipe.is_set(key) and not is_usable(planned):
            raise make_busy_port_error(recipe, key, None if reserve_remote else find_listener(planned))
        port = planned if recipe.is_set(key) else next(filter(is_usable, _list_candidate_ports(planned)), None)
        if port is None:
            raise _make_no_free_port_error(key, planned)
        if port != planned:
            users = [f"the run's {other}" for other in chosen if chosen[other] == planned]
            user = (users or ["in use by another process"])[0]
            notes.append(f"port {planned} ({key}) is {user}; using {port}")
        chosen[key] = port
    replicas: int | None = None
    if ports.replicas is not None:
        is_usable = partial(_reserve_if_free, chosen.values(), host, None)
        if (replicas := next(filter(is_usable, _list_candidate_ports(ports.replicas)), None)) is None:
            raise _make_no_free_port_error("port of the replicas", ports.replicas)
    return replace(_make_ports(ports.by_key() | chosen, ports.vllm_internal), replicas=replicas), notes


def require_named_ports(recipe: Recipe) -> None:
    """Raise ConfigError if a port that the recipe sets is in use by another process. Nothing is reserved.

    Without a server, only the port of the trainers is checked. A sweep checks this before its first run.
    """
    for key in port_keys():
        needed = key == "main_process_port" or starts_server(recipe)
        host = LOOPBACK if key not in DEFAULT_PORTS else recipe.server.host
        if needed and recipe.is_set(key) and not is_port_free(host, recipe[key]):
            raise make_busy_port_error(recipe, key, find_listener(recipe[key]))


def make_busy_port_error(recipe: Recipe, key: str, owner: int | None) -> ConfigError:
    """Return the ConfigError for the user's port ``key``, which another process uses; ``owner`` is its pid or None."""
    problem = f"port {recipe[key]} is in use by another process{f' (pid {owner})' if owner else ''}"
    return config_error(recipe.source(key), problem, f"free it, or remove {key} and let the launcher choose")


def _reserve_if_free(
    chosen: Collection[int], address: str, reserve_remote: Callable[[int], bool] | None, port: int
) -> bool:
    """Reserve a port if it is free and not in ``chosen``; return whether this succeeded.

    ``address`` is the listening address. ``reserve_remote`` reserves the port on another node instead of this node.
    """
    if port in chosen:
        return False
    return reserve_remote(port) if reserve_remote else is_port_free(address, port) and reserve_port(port)


def _list_candidate_ports(first: int) -> Iterator[int]:
    """Yield a port and up to 99 alternatives in steps of ten, in the order in which they are tried."""
    port = first
    for _ in range(_MOST_TRIES):
        yield port
        port = port + _BLOCK_SIZE if port + _BLOCK_SIZE <= 65535 else _BLOCK_BASE


def _make_no_free_port_error(key: str, first: int) -> ConfigError:
    """Return the ConfigError for the port of ``key`` if ``first`` and all its alternatives are in use.

    ``key`` is a recipe key, or a phrase for a port without a key.
    """
    problem = f"no free port found: {_MOST_TRIES} ports from {first} on are in use by other processes"
    change = f"set {key} to a free port" if key in port_keys() else "end processes that use them"
    return config_error(key, problem, f"{change} (ss -ltn lists the ports in use)")


def reserve_other_port(host: str, old_port: int) -> int:
    """Reserve a free port other than ``old_port`` for the vLLM server, and return it.

    Up to 99 ports are tried, in steps of ten from ``old_port``. A reservation of ``old_port`` stays. Raise ConfigError
    if none is free, or if the server's listening address ``host`` is not an IPv4 address of this machine.
    """
    for port in _list_candidate_ports(old_port):
        if port != old_port and is_port_free(host, port) and reserve_port(port):
            return port
    raise _make_no_free_port_error("vllm_server_port", old_port)


def reserve_port(port: int) -> bool:
    """Reserve a port by binding a socket to it until this process ends; return whether the port was free or is ours.

    A run's processes listen on their ports only seconds after the choice. Until then, and between two servers, the
    socket keeps other launches away. The socket is bound without SO_REUSEADDR, so that this fails if any process has
    the port. Only if closed connections of an earlier run block the port, the socket is bound with SO_REUSEADDR. The
    bound socket gets SO_REUSEADDR in any case, because the run's own processes bind with it. Lock files would not be
    safe: another user could create them in advance.
    """
    if port in _RESERVED:
        return True
    with contextlib.ExitStack() as abandoned:
        holder = abandoned.enter_context(socket.socket())
        for reuse in (0, 1) if has_closing_connections(port) else (0,):  # ignore closed connections of an earlier run
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with contextlib.suppress(OSError):
                holder.bind(("0.0.0.0", port))
                break
        else:
            return False
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        abandoned.pop_all()
    _RESERVED[port] = holder
    return True


def is_port_free(host: str, port: int) -> bool:
    """Return whether a server could now bind ``host:port`` and the port on all interfaces, by trying both.

    Raise ConfigError if ``host`` is not an address of this machine.
    """
    for address in (host, "0.0.0.0"):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                problem = f"'{address}' is not an IPv4 address of this machine ({error.strerror})"
                raise config_error("vllm_server_host", problem, "set vllm_server_host: 127.0.0.1") from None
    return True


def find_listener(port: int) -> int | None:
    """Return the process id of the listener on ``port`` of this machine, or None without a listener.

    The result is 0 if the listener belongs to another user.
    """
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return connection.pid or 0
    return None
