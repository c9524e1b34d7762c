"""The plan of a run as data: its processes, their names, and what each fact of it means. `launch` executes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_recipes.plan.devices import Batch, Placement
from grpo_recipes.plan.ports import Ports
from grpo_recipes.secrets import secret_name

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
    environment: dict[str, str]  # beyond the cleaned environment that all processes share
    gpus: tuple[str, ...]  # ids as CUDA_VISIBLE_DEVICES takes them
    log: str
    node: int = 0  # index of the node it runs on
    after: tuple[str, ...] = ()  # roles whose processes must be ready before this one starts
    beside: tuple[str, ...] = ()  # those of ``after`` that need only have been started: it waits for them itself
    # When it is ready: as soon as it has started, once it serves this run's model at the plan's address, or once a GET
    # of ``ready_url``, where it listens itself, is answered with 200.
    ready: Ready = "started"
    ready_url: str = ""
    # What its loss means: the end of the run, a restart of it alone, or one of it and the trainers from the newest
    # checkpoint. Restarts are limited by the recipe's server_restarts.
    on_loss: OnLoss = "fail"
    with_trainers: bool = False  # whether it is started anew whenever trainers are, since it remembers those before
    until_trained: bool = False  # whether it is ended once the trainers have trained: benchmarks do not need it
    renewed: bool = False  # whether it is started again with each model that NEWEST_MODEL names, which replaces --model
    before_trainers: bool = False  # whether trainers start after it is ready
    port: int | None = None  # where it listens, for `grpo plan`; None for the server and the trainers
    title: str = ""  # what messages call it; empty for the server and the trainers
    # Whether it gets the variables of ``reward_environment`` and the hub's login.
    handed: bool = True
    keeps: tuple[str, ...] = ()  # variables with secrets of the user's that its role needs; "*" for all

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> Process:
        """Return the process that ``Plan.as_json`` wrote."""
        return cls(**{**plain, **{name: tuple(plain[name]) for name in _TUPLES}})

    def full_environment(self, shared: Mapping[str, str]) -> dict[str, str]:
        """Return its whole environment: its own and the ``shared`` one, without secrets that its role does not need."""
        kept = {name: value for name, value in shared.items() if {name, "*"} & {*self.keeps} or not secret_name(name)}
        return {**kept, **self.environment}

    @property
    def name(self) -> str:
        """``trainer``, or ``trainer_1`` on node 1: unique among the processes of a plan."""
        return f"{self.role}_{self.node}" if self.node else self.role

    @property
    def label(self) -> str:
        """What messages call its command."""
        return self.title or _LABELS.get(self.role, f"the {self.role} process")

    @property
    def called(self) -> str:
        """What messages call its part in the run: ``the server``, ``trainers``, or its title."""
        return self.title or {"trainer": "trainers"}.get(self.role, f"the {self.role}")

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
class Data:
    """Where prompts come from in a run that reads no dataset."""

    kind: str  # what one prompt belongs to, in the plural: "episodes", "groups"
    text: str  # names, sizes and addresses, for people


@dataclass(frozen=True)
class Weighting:
    """What a MaxEnt run optimises."""

    objective: str  # a key of ``registry.OBJECTIVES``
    tau: float | None  # temperature of its weights, the first one where a controller moves it; may be infinite
    beta: float | None  # maxent_beta, the pull of its target to the reference; None for an objective without it
    loss_type: str  # TRL's loss, which the objective fixes
    ratio: str  # weight of a right answer over that of a wrong one, with rewards of 0 and 1

    def __str__(self) -> str:
        tau = "" if self.tau is None else f", tau {self.tau:g}"
        beta = "" if self.beta is None else f", maxent_beta {self.beta:g}"
        weight = f"with rewards of 0 and 1 a right answer weighs {self.ratio} a wrong one"
        return f"{self.objective}{tau}{beta}, loss_type {self.loss_type}; {weight}"


@dataclass(frozen=True)
class Plan:
    """Everything a launch will do."""

    recipe: str  # its path
    task: str  # grpo or maxent
    entry: str  # entry script of the trainers
    maxent: Weighting | None  # None for GRPO
    device: str  # device of the environment: cpu or cuda
    mode: str  # server, external (one that somebody started), colocate or transformers (no vLLM)
    bridge: str | None  # how weights reach the server, None without one
    why_bridge: str
    model: str  # folder or hub id, trained and served
    dataset: str | None  # file, folder or hub id, None with a mixture
    eval_dataset: str | None
    data: Data | None  # where prompts come from if no dataset is read
    batch: Batch  # the arithmetic of a step
    eval_batch: int | None  # completions of one evaluation batch on one process, None without evaluation
    ports: Ports
    nodes: tuple[str, ...]  # address of each, by index; the loopback where there is one node
    server_host: str  # where the server listens and is asked
    server_gpus: tuple[str, ...]  # on the first node
    placement: tuple[Placement, ...]  # the trainers of each node that trains; the first holds rank 0
    server_apart: bool  # whether rank 0 is on another node than the server: they share no memory
    gpu_shared: bool  # whether the server and rank 0 use one GPU
    unused_gpus: tuple[str, ...]  # GPUs of the job that nothing uses
    accelerator: str  # how the trainers share the model: single, ddp, zero2, zero3, fsdp2, or custom by CONFIG_FILE
    accelerate_file: str
    dtype: str  # of the trained weights
    smoke: bool  # whether this is the built-in smoke task, not an experiment
    threads: int  # CPU threads of one training process; on CPU results depend on it in the last bits
    notes: list[str]  # what the user should know
    processes: list[Process] = field(default_factory=list)  # in the order they start; filled in by with_processes
    # Most completions that a vLLM engine generates at the same time; None: vLLM's default.
    max_num_seqs: int | None = None
    weight_bytes: int = 0  # of the model's files, where they are here; filled in by with_processes, as the next two
    server_timeout: float = 0.0  # seconds the server may take to be ready
    meeting_timeout: float = MEETING_SECONDS  # seconds the ranks may take to meet

    @property
    def vllm(self) -> str:
        """Where completions come from and how new weights get there, for a person."""
        return f"{self.mode}{f', weights by {self.bridge}' if self.bridge else ''} ({self.why_bridge})"

    def process(self, role: str) -> Process | None:
        """Return the first process of that role, or None."""
        return next((process for process in self.processes if process.role == role), None)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain data; argv and environment never hold a secret, an infinite tau is "inf".

        ``device`` keeps its old key ``flavour``, so that earlier runs can be read.
        """
        plain = {"flavour" if key == "device" else key: value for key, value in asdict(self).items()}
        plain["ports"] |= plain["ports"].pop("extensions")
        if self.maxent is not None and self.maxent.tau == math.inf:
            plain["maxent"]["tau"] = "inf"
        return plain
