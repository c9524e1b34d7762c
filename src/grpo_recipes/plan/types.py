"""The plan of a run as data: every process with its devices, ports, argv and environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_recipes.plan.ports import Ports


def some_trainers(count: int) -> str:
    """Return ``1 trainer``, or ``3 trainers``."""
    return f"{count} trainer{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class Batch:
    """One optimizer step."""

    completions: int  # of a step over all trainers: prompts x num_generations
    num_generations: int  # completions of one prompt
    world_size: int  # training processes
    per_device: int  # completions of one forward pass on one process
    accumulation: int  # forward passes of one process a step
    tokens: int | None = None  # most tokens of a step, prompts included; None when a length has no limit

    def __str__(self) -> str:
        prompts = self.completions // self.num_generations
        tokens = f", at most {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"{prompts} prompts x {self.num_generations} completions = {self.completions} a step = "
            f"{some_trainers(self.world_size)} x {self.per_device} per device x {self.accumulation} accumulated{tokens}"
        )


@dataclass(frozen=True)
class Placement:
    """The training processes of one node."""

    node: int  # its index
    count: int  # at least one
    gpus: tuple[str, ...]  # none on CPU


Ready = Literal["started", "serving"]
OnLoss = Literal["fail", "restart", "restart with trainers"]
_LABELS = {"server": "the vLLM API server", "trainer": "accelerate launch"}


@dataclass(frozen=True)
class Process:
    """One process the launcher starts."""

    role: str  # server or trainer
    argv: list[str]
    environment: dict[str, str]  # beyond the cleaned environment that all processes share
    gpus: tuple[str, ...]  # ids as CUDA_VISIBLE_DEVICES takes them
    log: str
    node: int = 0  # index of the node it runs on
    after: tuple[str, ...] = ()  # roles whose processes must be ready before this one starts
    # When it is ready: as soon as it has started, or once it serves this run's model at the plan's address.
    ready: Ready = "started"
    # What its loss means: the end of the run, a restart of it alone, or one of it and the trainers from the newest
    # checkpoint. Restarts are limited by the recipe's server_restarts.
    on_loss: OnLoss = "fail"

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> Process:
        """Return the process that ``Plan.as_json`` wrote."""
        return cls(**{**plain, "gpus": tuple(plain["gpus"]), "after": tuple(plain["after"])})

    @property
    def name(self) -> str:
        """``trainer``, or ``trainer_1`` on node 1: unique among the processes of a plan."""
        return f"{self.role}_{self.node}" if self.node else self.role

    @property
    def label(self) -> str:
        """What messages call its command."""
        return _LABELS.get(self.role, f"the {self.role} process")

    @property
    def trains(self) -> bool:
        """Whether it runs ranks: these save when the run is stopped, and when they are done the run is."""
        return self.role == "trainer"


@dataclass(frozen=True)
class Names:
    """What one attempt is called."""

    run_dir: Path  # <run_root>/<run_name>-<timestamp>
    run: str  # the run name
    served: str  # the server's --served-model-name
    timestamp: str  # of this attempt, in log names


@dataclass(frozen=True)
class Weighting:
    """What a MaxEnt run optimises."""

    objective: str  # a key of objectives.OBJECTIVES
    tau: float  # temperature of its weights, the first one where a controller moves it; may be infinite
    beta: float | None  # maxent_beta, the pull of its target to the reference; None for an objective without it
    loss_type: str  # TRL's loss, which the objective fixes

    def __str__(self) -> str:
        beta = "" if self.beta is None else f", maxent_beta {self.beta:g}"
        return f"{self.objective}, tau {self.tau:g}{beta}, loss_type {self.loss_type}"


@dataclass(frozen=True)
class Plan:
    """Everything a launch will do."""

    recipe: str  # its path
    task: str  # grpo or maxent
    entry: str  # entry script of the trainers
    maxent: Weighting | None  # None for GRPO
    device: str  # device of the environment: cpu or cuda
    mode: str  # server, colocate or transformers (no vLLM)
    bridge: str | None  # how weights reach the server, None without one
    why_bridge: str
    model: str  # folder or hub id, trained and served
    dataset: str | None  # file, folder or hub id, None with a mixture
    eval_dataset: str | None
    batch: Batch  # the arithmetic of a step
    eval_batch: int | None  # completions of one evaluation batch on one process, None without evaluation
    ports: Ports
    nodes: tuple[str, ...]  # address of each, by index; the loopback where there is one node
    server_host: str  # where the server listens and is asked
    server_gpus: tuple[str, ...]  # on the first node
    placement: tuple[Placement, ...]  # the trainers of each node that trains; the first holds rank 0
    server_apart: bool  # whether rank 0 is on another node than the server: they share no memory
    unused_gpus: tuple[str, ...]  # GPUs of the job that nothing uses
    accelerator: str  # how the trainers share the model: single, ddp, zero2, zero3, fsdp2, or custom by CONFIG_FILE
    accelerate_file: str
    dtype: str  # of the trained weights
    smoke: bool  # whether this is the built-in smoke task, not an experiment
    threads: int  # CPU threads of one training process; on CPU results depend on it in the last bits
    notes: list[str]  # what the user should know
    processes: list[Process] = field(default_factory=list)  # in the order they start; filled in by with_processes

    def process(self, role: str) -> Process | None:
        """Return the first process of that role, or None."""
        return next((process for process in self.processes if process.role == role), None)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data; argv and environment never hold a secret, an infinite tau is "inf".

        ``device`` keeps its old key ``flavour``, so that earlier runs can be read.
        """
        plain = {"flavour" if key == "device" else key: value for key, value in asdict(self).items()}
        if self.maxent is not None and math.isinf(self.maxent.tau):
            plain["maxent"]["tau"] = "inf"
        return plain
