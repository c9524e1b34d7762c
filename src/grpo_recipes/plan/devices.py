"""What this machine and job offer: the environment's flavour, the visible GPUs, the Slurm job."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.recipe.keys import catalogue_trl
from grpo_recipes.slurm.job import SlurmJob, slurm_job


@dataclass(frozen=True)
class Node:
    """One node of a job on several.

    Attributes:
        gpus: GPU ids as CUDA_VISIBLE_DEVICES takes them there, in order.
        cores: CPU cores a process may run on.
        address: where the other nodes reach it; in a plan made without the nodes a word in place of it.
        interface: the network interface with that address, None where nobody looked.
        name: what Slurm calls it, for messages.
    """

    gpus: tuple[str, ...]
    cores: int
    address: str
    interface: str | None = None
    name: str = ""


@dataclass(frozen=True)
class Resources:
    """What a plan may use.

    Attributes:
        flavour: ``cpu`` or ``cuda``, by the packages installed.
        gpus: GPU ids of this node as CUDA_VISIBLE_DEVICES takes them, in order.
        cores: CPU cores this process may run on.
        job: the Slurm job, or None outside Slurm.
        nodes: all nodes in Slurm's order, this one first; empty where there is this one alone.
    """

    flavour: str
    gpus: tuple[str, ...]
    cores: int
    job: SlurmJob | None = None
    nodes: tuple[Node, ...] = ()

    def on_nodes(self, count: int) -> Resources:
        """The same on ``count`` nodes like this one, for a plan made without them."""
        if count == 1:
            return replace(self, nodes=())
        return replace(
            self, nodes=tuple(Node(self.gpus, self.cores, f"ADDRESS_OF_NODE_{index}") for index in range(count))
        )

    def facts(self) -> dict[str, Any]:
        """Return what the identity of a run says of its machine and job."""
        job = f"{self.job.cluster}-{self.job.id}" if self.job else None
        return {"job": job, "flavour": self.flavour, "cores": self.cores}

    def all_nodes(self) -> tuple[Node, ...]:
        """Every node; one that is alone needs no address but the loopback."""
        return self.nodes or (Node(self.gpus, self.cores, "127.0.0.1"),)


def find_resources(environment: Mapping[str, str]) -> Resources:
    """Look at the packages, the driver and Slurm's variables; other nodes of the job are taken to be like this one.

    Raises:
        ConfigError: the environment has no torch, or another TRL than the catalogue's.
    """
    flavour = environment_flavour()
    gpus = visible_gpus(environment) if flavour == "cuda" else ()
    job = slurm_job(environment)
    here = Resources(flavour, gpus, len(os.sched_getaffinity(0)), job)
    return here.on_nodes(job.nodes) if job else here


def environment_flavour() -> str:
    """``cpu`` or ``cuda``: the build of torch that is installed."""
    try:
        torch = importlib.metadata.version("torch")
        trl = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError as error:
        raise config_error("environment", f"{error.name} is not installed", "run make setup") from None
    if trl != catalogue_trl():
        what = f"trl {trl} is installed, the recipe keys are those of trl {catalogue_trl()}"
        raise config_error("environment", what, "run make setup, or make keys after an upgrade")
    return "cpu" if torch.endswith("+cpu") else "cuda"


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """GPUs the driver lists, cut down to CUDA_VISIBLE_DEVICES (indices, UUIDs or MIG ids).

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names a GPU that the driver does not list.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False).stdout
    return select_gpus(listing, environment.get("CUDA_VISIBLE_DEVICES"))


def select_gpus(listing: str, visible: str | None) -> tuple[str, ...]:
    """The ids to use, given the output of ``nvidia-smi -L`` and the value of CUDA_VISIBLE_DEVICES."""
    by_index: dict[str, str] = {}
    known: list[str] = []
    for line in listing.splitlines():
        name, _, uuid = line.strip().rpartition("(UUID: ")
        uuid = uuid.rstrip(")")
        if line.startswith("GPU "):
            by_index[line.split(":")[0].removeprefix("GPU ").strip()] = uuid
            known.append(uuid)
        elif name.startswith("MIG"):
            known.append(uuid)
    if visible is None:
        return tuple(by_index)
    wanted = [item.strip() for item in visible.split(",") if item.strip()]
    for item in wanted:
        if item not in by_index and not any(uuid.startswith(item) for uuid in known):
            what = f"'{item}' is no GPU of this machine (nvidia-smi -L lists {len(by_index)})"
            raise config_error("CUDA_VISIBLE_DEVICES", what, "unset it, or name GPUs that nvidia-smi -L lists")
    return tuple(wanted)
