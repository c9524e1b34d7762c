"""The plan of a run as data: batch, devices, ports and processes. ``make_plan`` creates it, ``launch`` executes it.

``as_json`` writes it to plan.json, so field names are a file format: renaming one breaks earlier runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_recipes.plan.devices import Batch, Placement
from grpo_recipes.plan.ports import Ports
from grpo_recipes.secrets import is_secret_name

MEETING_SECONDS = 300.0  # for ranks to meet: imports from a cold shared file system take minutes

Ready = Literal["started", "serving", "answering"]
OnLoss = Literal["fail", "restart", "restart with trainers"]
_TUPLES = ("gpus", "after", "beside", "keeps")
_LABELS = {"server": "the vLLM API server", "trainer": "accelerate launch"}


@dataclass(frozen=True)
class Process:
    """One process the launcher starts."""

    role: str  # server, trainer, or a role of an extension
    argv: list[str]
    environment: dict[str, str]  # variables in addition to the cleaned environment of all processes
    gpus: tuple[str, ...]  # ids in the form of CUDA_VISIBLE_DEVICES
    log: str  # path of its log file
    node: int = 0  # index of its node
    after: tuple[str, ...] = ()  # roles that must be ready before this process starts
    beside: tuple[str, ...] = ()  # roles in ``after`` that need only be started: the process waits for them itself
    # "started": ready as soon as it has started. "serving": once it serves this run's model at the plan's address.
    # "answering": once it answers a GET of ``ready_url`` with 200.
    ready: Ready = "started"
    ready_url: str = ""
    # The reaction to its loss. "fail": the run ends. "restart": only this process restarts. "restart with trainers":
    # it and the trainers restart from the newest checkpoint. The recipe's server_restarts limits the restarts.
    on_loss: OnLoss = "fail"
    with_trainers: bool = False  # whether it restarts whenever the trainers do, because it keeps state about them
    until_trained: bool = False  # whether it stops after the training, because benchmarks do not need it
    renewed: bool = False  # whether it restarts with each model that NEWEST_MODEL names, which replaces --model
    before_trainers: bool = False  # whether trainers start after it is ready
    port: int | None = None  # its port in the printed plan; None for the server and the trainers
    title: str = ""  # its name in messages; empty for the server and the trainers
    handed: bool = True  # whether it gets the variables of ``reward_environment`` and the hub's login
    keeps: tuple[str, ...] = ()  # the user's variables with secrets that its role needs; "*" for all

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Process:
        """Return the process from the JSON mapping of ``dataclasses.asdict``, as plan.json stores it."""
        return cls(**{**data, **{name: tuple(data[name]) for name in _TUPLES}})

    def full_environment(self, shared: Mapping[str, str]) -> dict[str, str]:
        """Return all variables of this process: its own variables, and ``shared`` without secrets of other roles."""
        variables = {
            name: value for name, value in shared.items() if {name, "*"} & {*self.keeps} or not is_secret_name(name)
        }
        return {**variables, **self.environment}

    @property
    def name(self) -> str:
        """The unique name of this process in the plan: ``trainer``, or ``trainer_1`` on node 1."""
        return f"{self.role}_{self.node}" if self.node else self.role

    @property
    def label(self) -> str:
        """The name of its command in messages, for example ``accelerate launch``."""
        if self.ready == "serving" and self.node:
            return "vllm serve --headless"
        return self.title or _LABELS.get(self.role, f"the {self.role} process")

    @property
    def called(self) -> str:
        """The name of its role in messages: ``the server``, ``trainers``, or its title."""
        return self.title or {"trainer": "trainers"}.get(self.role, f"the {self.role}")

    @property
    def track(self) -> str:
        """The name of its role in the trace: ``server``, ``trainers``, or its title."""
        return self.called.removeprefix("the ")

    @property
    def trains(self) -> bool:
        """Whether it runs ranks. They save if the run is stopped, and the run ends when they end."""
        return self.role == "trainer"


@dataclass(frozen=True)
class Names:
    """The names of one attempt of a run."""

    run_dir: Path  # <run_root>/<run_name>-<timestamp>
    run: str  # the run name
    served: str  # the server's --served-model-name
    timestamp: str  # start of this attempt, in names of logs


@dataclass(frozen=True)
class Data:
    """The source of prompts in a run without a dataset."""

    kind: str  # the unit of the source, in the plural: "episodes", "groups"
    text: str  # names, sizes and addresses for the printed plan


@dataclass(frozen=True)
class Weighting:
    """The objective of a MaxEnt run."""

    objective: str  # a key of ``registry.OBJECTIVES``
    tau: float | None  # temperature of the weights, may be infinite; the first value if a controller changes it
    beta: float | None  # maxent_beta, the pull of the target to the reference; None if the objective has no target
    loss_type: str  # TRL's loss, which the objective fixes
    ratio: str  # weight of a correct answer relative to an incorrect one, as text, with rewards of 0 and 1

    def __str__(self) -> str:
        """Return objective, temperature, beta, loss and weight of a correct answer in one line."""
        tau = "" if self.tau is None else f", tau {self.tau:g}"
        beta = "" if self.beta is None else f", maxent_beta {self.beta:g}"
        weight = f"with rewards of 0 and 1, a correct answer weighs {self.ratio} an incorrect one"
        return f"{self.objective}{tau}{beta}, loss_type {self.loss_type}; {weight}"


@dataclass(frozen=True)
class Plan:
    """Everything a launch will do."""

    recipe: str  # path of the recipe
    task: str  # grpo or maxent
    entry: str  # entry script of the trainers
    maxent: Weighting | None  # None for GRPO
    device: str  # device of the environment: cpu or cuda
    mode: str  # source of completions: server, external (another server), colocate, or transformers (no vLLM)
    bridge: str | None  # weight sync method, None without a server
    why_bridge: str  # reason for the weight sync method
    model: str  # folder or hub id, trained and served
    dataset: str | None  # file, folder or hub id, None with a mixture
    eval_dataset: str | None  # file, folder or hub id, None without one
    data: Data | None  # source of prompts if no dataset is read
    batch: Batch  # sizes of an optimizer step
    eval_batch: int | None  # completions of one evaluation batch on one process, None without evaluation
    ports: Ports  # port numbers of all processes
    nodes: tuple[str, ...]  # address of each node, by index; the loopback for a single node
    server_host: str  # address of the server
    server_gpus: tuple[str, ...]  # the server's GPUs, on the first ``server_nodes`` nodes, equally many on each
    placement: tuple[Placement, ...]  # trainers of each training node; the first entry has rank 0
    server_apart: bool  # whether rank 0 and the server are on different nodes and share no memory
    gpu_shared: bool  # whether the server and rank 0 use one GPU
    unused_gpus: tuple[str, ...]  # GPUs of the job without a process
    accelerator: str  # how the trainers share the model: single, ddp, zero2, zero3, fsdp2, or custom by CONFIG_FILE
    accelerate_file: str  # path of accelerate's configuration
    dtype: str  # type of the trained weights
    smoke: bool  # whether this is the built-in smoke task, not an experiment
    threads: int  # CPU threads of one training process; on CPU, they change results in the last bits
    notes: list[str]  # notes for the user
    processes: list[Process] = field(default_factory=list)  # in the order of their start; set by with_processes
    replicas: int = 1  # engines of the server, each on an equal part of server_gpus
    server_nodes: int = 1  # nodes with engines of the server
    # Most completions that a vLLM engine generates at the same time; None: vLLM's default.
    max_num_seqs: int | None = None
    kv_cache_bytes: int | None = None  # KV cache of a server's engine on CPU; None: as much as vLLM chooses
    teacher: str | None = None  # folder or hub id of the teacher, None without one
    reward_models: tuple[str, ...] = ()  # folders or hub ids
    weight_bytes: int = 0  # size of the model's files on this machine; set by with_processes
    server_timeout: float = 0.0  # seconds until the server must be ready; set by with_processes
    meeting_timeout: float = MEETING_SECONDS  # seconds until the ranks must have met; set by with_processes

    @property
    def vllm(self) -> str:
        """The source of completions and the weight sync method, for the printed plan."""
        if self.batch.num_generations == 1:
            return f"none ({self.why_bridge})"
        replicas = f" of {self.replicas} replicas" if self.replicas > 1 else ""
        replicas += f" on {self.server_nodes} nodes" if self.server_nodes > 1 else ""
        return f"{self.mode}{replicas}{f', weights by {self.bridge}' if self.bridge else ''} ({self.why_bridge})"

    def process(self, role: str) -> Process | None:
        """Return the first process of a role, or None."""
        return next((process for process in self.processes if process.role == role), None)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON data without secrets; an infinite tau is "inf".

        ``device`` keeps its old key ``flavour``, so that earlier runs stay readable.
        """
        data = {"flavour" if key == "device" else key: value for key, value in asdict(self).items()}
        data["ports"] |= data["ports"].pop("extensions")
        if self.maxent is not None and self.maxent.tau == math.inf:
            data["maxent"]["tau"] = "inf"
        return data
