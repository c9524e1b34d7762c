"""The plan of a run as data: every process with its devices, ports, argv and environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_recipes.plan.batch import Batch
from grpo_recipes.plan.ports import Ports


@dataclass(frozen=True)
class Share:
    """The trainers of one node.

    Attributes:
        node: index of the node.
        count: processes on it, at least one.
        gpus: their GPUs; none on CPU.
    """

    node: int
    count: int
    gpus: tuple[str, ...]


Ready = Literal["started", "serving"]
OnLoss = Literal["fail", "restart", "restart with trainers"]


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


@dataclass(frozen=True)
class Names:
    """What one attempt is called.

    Attributes:
        run_dir: ``<run_root>/<run_name>-<timestamp>``.
        run: the run name.
        served: the server's ``--served-model-name``.
        timestamp: of this attempt, in log names.
    """

    run_dir: Path
    run: str
    served: str
    timestamp: str


@dataclass(frozen=True)
class Weighting:
    """What a MaxEnt run optimises.

    Attributes:
        objective: a key of ``objectives.OBJECTIVES``.
        tau: temperature of its weights, the first one where a controller moves it; may be infinite.
        beta: pull of its target to the reference, ``maxent_beta``; None where the objective has no such target.
        loss_type: TRL's loss, which the objective fixes.
    """

    objective: str
    tau: float
    beta: float | None
    loss_type: str

    def __str__(self) -> str:
        beta = "" if self.beta is None else f", maxent_beta {self.beta:g}"
        return f"{self.objective}, tau {self.tau:g}{beta}, loss_type {self.loss_type}"


@dataclass(frozen=True)
class Plan:
    """Everything a launch will do.

    Attributes:
        recipe: path of the recipe.
        task: ``grpo`` or ``maxent``.
        entry: entry script of the trainers.
        maxent: what a MaxEnt run optimises, None for GRPO.
        flavour: ``cpu`` or ``cuda``.
        mode: ``server``, ``colocate`` or ``transformers`` (no vLLM).
        bridge: how weights reach the server, None without one.
        why_bridge: why that bridge.
        model: folder or hub id trained and served.
        dataset: file, folder or hub id, None with a mixture.
        eval_dataset: the same of the evaluation, None where the recipe names none.
        batch: the arithmetic of a step.
        eval_batch: completions of one evaluation batch on one process, None without evaluation.
        ports: ports used.
        nodes: address of each node, by its index; the loopback where there is one.
        server_host: where the server listens and is asked.
        server_apart: whether rank 0 is on another node than the server: they share no memory.
        processes: in the order they are started: the server, then the trainers, one process a node.
        unused_gpus: GPUs of the job that nothing uses.
        accelerator: how the trainers share the model: single, ddp, zero2, zero3, fsdp2, or custom by CONFIG_FILE.
        dtype: dtype of the trained weights.
        smoke: whether this is the built-in smoke task, not an experiment.
        threads: CPU threads of one training process; on CPU results depend on it in the last bits.
        notes: what the user should know.
    """

    recipe: str
    task: str
    entry: str
    maxent: Weighting | None
    flavour: str
    mode: str
    bridge: str | None
    why_bridge: str
    model: str
    dataset: str | None
    eval_dataset: str | None
    batch: Batch
    eval_batch: int | None
    ports: Ports
    nodes: tuple[str, ...]
    server_host: str
    server_apart: bool
    processes: list[Process]
    unused_gpus: tuple[str, ...]
    accelerator: str
    dtype: str
    smoke: bool
    threads: int
    notes: list[str] = field(default_factory=list)

    def process(self, role: str) -> Process | None:
        """The first process of that role, or None."""
        return next((process for process in self.processes if process.role == role), None)

    def trainers(self) -> list[Process]:
        """The trainers' processes, one a node that trains; the first holds rank 0."""
        return [process for process in self.processes if process.role == "trainer"]

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data; argv and environment of a plan never hold a secret, an infinite tau is "inf"."""
        plain = asdict(self)
        if self.maxent is not None and math.isinf(self.maxent.tau):
            plain["maxent"]["tau"] = "inf"
        return plain
