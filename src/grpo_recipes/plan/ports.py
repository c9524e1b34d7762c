"""Which ports a run uses, whether they are free, and keeping them until its processes listen on them."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from grpo_recipes.errors import config_error
from grpo_recipes.recipe import Recipe
from grpo_recipes.slurm.client import SlurmJob

# Outside Slurm the training guide's own numbers. Inside, a block of ten below the ephemeral range per job id, so that
# two jobs on one node do not meet.
DEFAULT_PORTS = {"vllm_server_port": 8000, "vllm_group_port": 51216, "main_process_port": 29525}
_BLOCK_BASE, _BLOCKS, _BLOCK_SIZE = 20000, 1200, 10
_KEPT: dict[int, socket.socket] = {}


@dataclass(frozen=True)
class Ports:
    """Ports of one run: the vLLM server, its NCCL weight group, the trainers' rendezvous, vLLM's own base."""

    server: int
    group: int
    main_process: int
    vllm_internal: int | None


def plan_ports(recipe: Recipe, job: SlurmJob | None) -> Ports:
    """The recipe's ports where it names them, else the defaults: a block of the job inside Slurm. Pure."""
    numbers = dict(DEFAULT_PORTS)
    base = None
    if job is not None:
        base = _BLOCK_BASE + job.id % _BLOCKS * _BLOCK_SIZE
        numbers = {key: base + offset for offset, key in enumerate(DEFAULT_PORTS)}
    for key in numbers:
        if recipe.given(key) and recipe[key] is not None:
            numbers[key] = recipe[key]
    return Ports(
        numbers["vllm_server_port"],
        numbers["vllm_group_port"],
        numbers["main_process_port"],
        base + len(DEFAULT_PORTS) if base is not None else None,
    )


def free_ports(recipe: Recipe, ports: Ports, host: str) -> tuple[Ports, list[str]]:
    """``ports`` with every busy one of our choosing replaced by the next free one; all are then kept for this process.

    Raises:
        ConfigError: a port that the user gave is busy.
    """
    keys = {"server": "vllm_server_port", "group": "vllm_group_port", "main_process": "main_process_port"}
    chosen: dict[str, int] = {}
    notes = []
    for name, key in keys.items():
        wanted = getattr(ports, name)
        port = wanted
        while port in chosen.values() or not (is_free(host, port) and keep(port)):
            if recipe.given(key):
                what = f"port {wanted} is in use by another process"
                raise config_error(recipe.source(key), what, f"free it, or remove {key} and let the launcher choose")
            port = port + _BLOCK_SIZE if port + _BLOCK_SIZE <= 65535 else _BLOCK_BASE
        if port != wanted:
            notes.append(f"port {wanted} ({key}) is in use by another process; using {port}")
        chosen[name] = port
    return Ports(chosen["server"], chosen["group"], chosen["main_process"], ports.vllm_internal), notes


def keep(port: int) -> bool:
    """Keep other launches off ``port`` for as long as this process lives; False when one of them has it.

    A run's processes listen on their ports only seconds after these were chosen. Meanwhile the choice is held by a
    socket in Linux's abstract namespace: it is seen where the port is (one network namespace), by every user, and
    goes with the process however that ends.
    """
    if port in _KEPT:
        return True
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0grpo-recipes-port-{port}")
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    _KEPT[port] = holder
    return True


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on ``host:port`` now, on all interfaces too.

    Raises:
        ConfigError: the host is not this machine, so that no port of it will ever be free.
    """
    for address in (host, "0.0.0.0"):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    return False
                what = f"'{address}' is no IPv4 address of this machine ({error.strerror})"
                raise config_error("vllm_server_host", what, "write vllm_server_host: 127.0.0.1") from None
    return True
