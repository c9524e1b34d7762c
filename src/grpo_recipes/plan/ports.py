"""The ports of a run: their numbers, whether they are free, who listens on them, and when the server there is ready."""

import contextlib
import errno
import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

import psutil

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.process.answers import get
from grpo_recipes.process.listeners import ForeignListener, OwnListener, lingers
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.extensions import load, merged
from grpo_recipes.recipe.rules import starts_server
from grpo_recipes.server.middleware import ACTIVITY_PATH
from grpo_recipes.slurm.client import SlurmJob

# Outside Slurm the training guide's own numbers. Inside, a block of ten below the ephemeral range per job id, so that
# two jobs on one node do not meet.
DEFAULT_PORTS = {"vllm_server_port": 8000, "vllm_group_port": 51216, "main_process_port": 29525}
LOOPBACK = "127.0.0.1"  # where processes of extensions listen: they check no token
_BLOCK_BASE, _BLOCKS, _BLOCK_SIZE = 20000, 1200, 10
_MOST_TRIES = 100  # ports that are tried in the place of a busy one
_KEPT: dict[int, socket.socket] = {}


@dataclass(frozen=True)
class Ports:
    """Ports of one run."""

    server: int  # vLLM's
    group: int  # NCCL's, for the weights
    main_process: int  # the trainers' rendezvous
    vllm_internal: int | None  # the first of vLLM's own, None where it chooses
    extensions: dict[str, int] = field(default_factory=dict)  # of the processes of extensions, by the key of the port

    def by_key(self, server: bool = True) -> dict[str, int]:
        """Return those that have a key in the recipe, without a ``server`` the trainers' alone."""
        if not server:
            return {"main_process_port": self.main_process}
        ports = zip(DEFAULT_PORTS, (self.server, self.group, self.main_process), strict=True)
        return {**dict(ports), **self.extensions}


def port_keys() -> tuple[str, ...]:
    """Return the recipe keys of all ports, those of extensions included."""
    return (*DEFAULT_PORTS, *merged("ports"))


def plan_ports(recipe: Recipe, job: SlurmJob | None) -> Ports:
    """Return the ports the recipe names, else the defaults: outside Slurm fixed ones, inside a block of the job."""
    added = {key: load(default)(recipe.__getitem__) for key, default in merged("ports").items()}
    numbers, internal = {**DEFAULT_PORTS, **{key: port for key, port in added.items() if port is not None}}, None
    if job is not None:
        base = _BLOCK_BASE + job.id % _BLOCKS * _BLOCK_SIZE
        others = [key for key in numbers if key not in DEFAULT_PORTS]
        last = base + _BLOCK_SIZE - 1
        numbers = dict(zip(DEFAULT_PORTS, range(base, base + 3), strict=True))
        numbers |= {key: last - index for index, key in enumerate(others)}
        internal = base + 3
    return _ports({key: recipe[key] if recipe.is_set(key) else port for key, port in numbers.items()}, internal)


def _ports(numbers: Mapping[str, int], internal: int | None) -> Ports:
    """Return ports by their keys in the recipe."""
    server, group, main_process = (numbers[key] for key in DEFAULT_PORTS)
    added = {key: port for key, port in numbers.items() if key not in DEFAULT_PORTS}
    return Ports(server, group, main_process, internal, added)


def free_ports(
    recipe: Recipe, ports: Ports, host: str, free_there: Callable[[int], bool] | None = None, server: bool = True
) -> tuple[Ports, list[str]]:
    """Return the ports, each that is busy replaced by the next free one, with a note about it; keep them all.

    A busy port that the user gave is a ConfigError. The ``server``, if there is one, listens on ``host``, and processes
    of extensions next to it on the loopback. Rank 0 opens the other two, on a node that ``free_there`` asks if it is
    not this node.
    """
    chosen: dict[str, int] = {}
    notes = []
    # Ports of the user first, so that none of ours takes one.
    for key, wanted in sorted(ports.by_key(server).items(), key=lambda pair: not recipe.is_set(pair[0])):
        there = None if key == "vllm_server_port" or key in ports.extensions else free_there
        at = LOOPBACK if key in ports.extensions else host
        usable = partial(_is_usable, chosen.values(), at, there)
        if recipe.is_set(key) and not usable(wanted):
            raise busy_port(recipe, key, None if there else listener(wanted))
        port = wanted if recipe.is_set(key) else next(filter(usable, _candidates(wanted)), None)
        if port is None:
            raise _none_free(key, wanted)
        if port != wanted:
            holders = [f"the run's {other}" for other in chosen if chosen[other] == wanted]
            holder = (holders or ["in use by another process"])[0]
            notes.append(f"port {wanted} ({key}) is {holder}; using {port}")
        chosen[key] = port
    return _ports(ports.by_key() | chosen, ports.vllm_internal), notes


def need_named_ports(recipe: Recipe) -> None:
    """Refuse a port that the user gave and another process has, before the first of several runs begins."""
    for key in port_keys():
        needed = key == "main_process_port" or starts_server(recipe)
        host = LOOPBACK if key not in DEFAULT_PORTS else recipe["vllm_server_host"]
        if needed and recipe.is_set(key) and not is_free(host, recipe[key]):
            raise busy_port(recipe, key, listener(recipe[key]))


def busy_port(recipe: Recipe, key: str, owner: int | None) -> ConfigError:
    """Return the error of a port that the user named and another process, ``owner`` if it is known, has."""
    what = f"port {recipe[key]} is in use by another process{f' (pid {owner})' if owner else ''}"
    return config_error(recipe.source(key), what, f"free it, or remove {key} and let the launcher choose")


def _is_usable(chosen: Collection[int], at: str, there: Callable[[int], bool] | None, port: int) -> bool:
    return port not in chosen and (there(port) if there else is_free(at, port) and keep(port))


def _candidates(wanted: int) -> Iterator[int]:
    """Yield a port and those that are tried in its place."""
    port = wanted
    for _ in range(_MOST_TRIES):
        yield port
        port = port + _BLOCK_SIZE if port + _BLOCK_SIZE <= 65535 else _BLOCK_BASE


def _none_free(key: str, wanted: int) -> ConfigError:
    what = f"no free port found: {_MOST_TRIES} ports from {wanted} on are in use by other processes"
    return config_error(key, what, f"set {key} to a free port (ss -ltn lists the ports in use)")


def another_port(host: str, taken: int) -> int:
    """Return a free port for a server whose port another process took, and keep it; ConfigError without one."""
    for port in _candidates(taken):
        if port != taken and is_free(host, port) and keep(port):
            return port
    raise _none_free("vllm_server_port", taken)


def keep(port: int) -> bool:
    """Keep other launches off ``port`` for as long as this process lives; return False if another process has it.

    A run's processes listen on their ports only seconds after these were chosen. Until then, and between two servers,
    a socket of this process is bound there. It binds without SO_REUSEADDR, which fails if any process is bound to the
    port, and then allows SO_REUSEADDR, with which the run's own processes bind. The kernel's table of ports is the only
    list of names that another user cannot fill in advance.
    """
    if port in _KEPT:
        return True
    with contextlib.ExitStack() as abandoned:
        holder = abandoned.enter_context(socket.socket())
        for reuse in (0, 1) if lingers(port) else (0,):  # closed connections of an earlier run are not in the way
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with contextlib.suppress(OSError):
                holder.bind(("0.0.0.0", port))
                break
        else:
            return False
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        abandoned.pop_all()
    _KEPT[port] = holder
    return True


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on ``host:port`` now, on all interfaces too.

    A host that is not this machine is a ConfigError, since no port of it will ever be free.
    """
    for address in (host, "0.0.0.0"):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                what = f"'{address}' is not an IPv4 address of this machine ({error.strerror})"
                raise config_error("vllm_server_host", what, "write vllm_server_host: 127.0.0.1") from None
    return True


def listener(port: int) -> int | None:
    """Return the pid that listens on ``port``; 0 when another user's does; None when nobody listens."""
    for one in psutil.net_connections(kind="tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
            return one.pid or 0
    return None


class NotReady(Exception):
    """The server, or a process of an extension, did not become ready; the message says why."""


class PortTaken(NotReady):
    """Another process listens on the port."""


def wait_until_ready(
    alive: Callable[[], bool], root_pid: int, host: str, port: int, name: str, token: str, timeout: float
) -> float:
    """Wait for our own server, at most ``timeout`` seconds, and return the seconds waited.

    It is ready once a descendant of ``root_pid`` listens on the port and serves this run's ``name``. If it died, or the
    time is over, raise NotReady; if another process took the port, PortTaken. Nothing is sent to another process.
    """
    owner = OwnListener(host, port, lambda: root_pid)

    def serves() -> bool:
        return name in _served_models(host, port, token, owner)

    return _wait(alive, owner, port, serves, "the vLLM server", timeout, " s (vllm_server_timeout)")


def wait_until_answering(alive: Callable[[], bool], root_pid: int, url: str, who: str, timeout: float) -> float:
    """Wait as ``wait_until_ready`` for what answers a GET of ``url`` with 200; ``who`` is its name in messages."""
    parts = urlsplit(url)
    host, port = parts.hostname or LOOPBACK, parts.port or 80
    owner = OwnListener(host, port, lambda: root_pid)

    def answers() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return get(host, port, parts.path or "/", {}, owner)[0] == 200
        return False

    return _wait(alive, owner, port, answers, who, timeout)


def _wait(
    alive: Callable[[], bool], owner: OwnListener, port: int, ready: Callable[[], bool], who: str, timeout: float,
    unit: str = " s",
) -> float:  # fmt: skip
    start = time.monotonic()
    foreign = 0  # looks in a row: a process of ours may have begun to listen between the parts of one look
    while time.monotonic() - start < timeout:
        living = alive()
        with contextlib.suppress(ConnectionRefusedError):
            try:
                owner.sockets()
                foreign = 0
                if living and ready():
                    return time.monotonic() - start
            except ForeignListener:
                foreign += 1
        if foreign > 1 or (foreign and not living):
            holder = f"another process (pid {listener(port) or '?'})"
            raise PortTaken(f"port {port} was taken by {holder} while {who} started")
        if not living:
            raise NotReady(f"{who} died before it was ready")
        time.sleep(0.25)
    raise NotReady(f"{who} was not ready after {timeout:.0f}{unit}")


def _served_models(host: str, port: int, token: str, owner: OwnListener) -> list[str]:
    try:
        status, body = get(host, port, "/v1/models", _authorization(token), owner)
        if status == 401:
            raise NotReady("the vLLM server refuses the run's own token")
        return [model["id"] for model in json.loads(body)["data"]] if status == 200 else []
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return []


def _authorization(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@dataclass(frozen=True)
class Activity:
    """What a server has done and is asked to do."""

    tokens: float  # sampled since it started, as far as its engine reported them
    requests: int  # that it was given and has not answered: generations, weight loads, pauses


def generated_tokens(host: str, port: int, token: str, owner: OwnListener | None = None) -> Activity | None:
    """Ask a server what it is doing; return None if it does not answer within 10 seconds, or refuses to.

    Requests are counted where they come in, so that one which a hung engine never began is seen too. With ``owner``
    nothing is sent to another process.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        answers = [get(host, port, path, _authorization(token), owner) for path in ("/metrics", ACTIVITY_PATH)]
        if any(status != 200 for status, _ in answers):
            return None
        (_, metrics), (_, activity) = answers
        counters = re.findall(rb"^vllm:generation_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
        return Activity(sum(map(float, counters)), json.loads(activity)["requests"])
    return None
