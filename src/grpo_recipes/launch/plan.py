"""The plan of a run: every process with its devices, ports, argv and environment. Pure; `launch` executes this plan."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes import smoke
from grpo_recipes.check import SMOKE_SCHEME, check
from grpo_recipes.errors import Refused, refuse
from grpo_recipes.launch.batch import Batch, derive_batch, derive_eval_batch
from grpo_recipes.launch.commands import Process, server_process, trainer_process
from grpo_recipes.launch.ports import Ports, plan_ports
from grpo_recipes.launch.resources import Resources
from grpo_recipes.objectives import OBJECTIVES
from grpo_recipes.paths import cache_root, home
from grpo_recipes.recipe import Recipe
from grpo_recipes.tasks import ENTRIES, MAXENT, task_of

if TYPE_CHECKING:
    from grpo_recipes.fetch.sources import Sources
_DEFAULT_RECIPES = {"cpu": "recipes/smoke/{task}.yaml", "cuda": "recipes/Qwen2.5-1.5B-Instruct/{task}/config_math.yaml"}


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
        processes: in the order they are started.
        unused_gpus: visible GPUs that nothing uses.
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
    processes: list[Process]
    unused_gpus: tuple[str, ...]
    accelerator: str
    dtype: str
    smoke: bool
    threads: int
    notes: list[str] = field(default_factory=list)

    def process(self, role: str) -> Process | None:
        """The process of that role, or None."""
        return next((process for process in self.processes if process.role == role), None)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data; argv and environment of a plan never hold a secret, an infinite tau is "inf"."""
        plain = asdict(self)
        if self.maxent is not None and math.isinf(self.maxent.tau):
            plain["maxent"]["tau"] = "inf"
        return plain


def choose_recipe(given: str | None, environment: Mapping[str, str], task: str, flavour: str) -> Path:
    """The recipe named on the command line, by CONFIG, or the flavour's default.

    Raises:
        Refused: the file does not exist.
    """
    where, name = ("RECIPE", given) if given else ("CONFIG", environment.get("CONFIG"))
    if not name:
        where, name = "default recipe", str(home() / _DEFAULT_RECIPES[flavour].format(task=task))
    path = Path(name)
    if not os.path.isfile(path) and os.path.isfile(home() / path):  # of Path itself a name too long raises OSError
        path = home() / path
    if not os.path.isfile(path):
        raise refuse(where, f"there is no recipe '{name}'", "name an existing .yaml file under recipes/")
    return path


def make_plan(
    recipe: Recipe,
    resources: Resources,
    environment: Mapping[str, str],
    names: Names,
    entry: str | None = None,
    ports: Ports | None = None,
    sources: Sources | None = None,
) -> Plan:
    """Plan a run.

    Args:
        recipe: the merged recipe, its task settled.
        resources: what this machine offers.
        environment: variables of the user, for CONFIG_FILE, VLLM_MODEL and the caches.
        names: names of the attempt.
        entry: entry script of the trainers; the task's own by default.
        ports: ports to use instead of the planned ones (the launcher's, after looking at the sockets).
        sources: what was looked for on this machine: the model is then served and trained from its folder.

    Raises:
        Refused: the recipe contradicts itself, the environment, or the resources.
    """
    if problems := check(recipe, environment):
        raise Refused(*problems)
    _one_node(resources)
    mode = _mode(recipe, resources)
    server_gpus, trainer_gpus = _split(recipe, resources, mode)
    trainers = _trainer_count(recipe, resources, trainer_gpus)
    batch = derive_batch(recipe, trainers)
    used = trainer_gpus[: batch.world_size]
    ports = ports or plan_ports(recipe, resources.job)
    bridge, why = _bridge(recipe, resources, mode)
    plan = Plan(
        recipe=str(recipe.path),
        task=task_of(recipe),
        entry=entry or ENTRIES[task_of(recipe)],
        maxent=_weighting(recipe),
        flavour=resources.flavour,
        mode=mode,
        bridge=bridge,
        why_bridge=why,
        model=_model_path(recipe, environment, sources),
        dataset=_smoke_path(recipe["dataset_name"] or "", "train.jsonl", environment) or None,
        eval_dataset=_smoke_path(recipe["eval_dataset_name"] or "", "test.jsonl", environment) or None,
        batch=batch,
        eval_batch=derive_eval_batch(recipe, batch),
        ports=ports,
        processes=[],
        unused_gpus=tuple(gpu for gpu in resources.gpus if gpu not in (*server_gpus, *used)),
        accelerator="custom" if environment.get("CONFIG_FILE") else _accelerator(recipe, batch.world_size),
        dtype=recipe["dtype"],
        smoke=recipe["model_name_or_path"].startswith(SMOKE_SCHEME),
        threads=max(1, (resources.cores - 1) // batch.world_size) if resources.flavour == "cpu" else 1,
        notes=[*recipe.notes, *_notes(resources, batch, trainers, server_gpus, used)],
    )
    server = [server_process(recipe, plan, environment, names, server_gpus)] if mode == "server" else []
    plan = replace(plan, processes=[*server, trainer_process(recipe, plan, environment, names, used)])
    return _offline(plan, sources, environment) if sources else plan


def _offline(plan: Plan, sources: Sources, environment: Mapping[str, str]) -> Plan:
    """The plan with what was found of the sources: notes, and variables that keep its processes from the hub."""
    offline = sources.offline_variables(environment)
    processes = [replace(one, environment={**one.environment, **offline}) for one in plan.processes]
    return replace(plan, processes=processes, notes=[*plan.notes, *sources.notes()])


def _weighting(recipe: Recipe) -> Weighting | None:
    if task_of(recipe) != MAXENT:
        return None
    name = recipe["maxent_objective"]
    objective = OBJECTIVES[name]
    return Weighting(
        objective=name,
        tau=objective.tau_or_default(recipe["maxent_tau"]),
        beta=recipe["maxent_beta"] if objective.targets_q else None,
        loss_type=objective.loss_type(recipe["maxent_length_normalize_policy"]),
    )


def _one_node(resources: Resources) -> None:
    if resources.job is not None and resources.job.nodes > 1:
        what = f"the job has {resources.job.nodes} nodes, this version runs on one"
        raise refuse("sbatch --nodes", what, "submit with --nodes=1")


def _mode(recipe: Recipe, resources: Resources) -> str:
    if resources.flavour == "cuda" and not resources.gpus:
        what = "no GPU is visible and this is a CUDA environment"
        raise refuse("devices", what, "submit with sbatch --gres=gpu:8 training.sh, or set up with DEVICE=cpu")
    if not recipe["use_vllm"]:
        return "transformers"
    if resources.flavour == "cpu":
        if recipe["vllm_mode"] == "colocate":
            raise refuse(
                recipe.origin("vllm_mode"), "colocated vLLM cannot take weights on CPU", "write vllm_mode: server"
            )
        return "server"
    if len(resources.gpus) == 1 and recipe["vllm_mode"] == "server":
        if recipe.given("vllm_mode"):
            what = "vllm_mode: server needs two GPUs, one is visible"
            raise refuse(recipe.origin("vllm_mode"), what, "write vllm_mode: colocate, or ask for more GPUs")
        return "colocate"
    return str(recipe["vllm_mode"])


def _split(recipe: Recipe, resources: Resources, mode: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """GPUs of the server (the first ones) and of the trainers (the rest)."""
    if mode != "server" or resources.flavour == "cpu":
        return (), resources.gpus
    parallel = recipe["vllm_tensor_parallel_size"]
    if parallel >= len(resources.gpus):
        what = f"vllm_tensor_parallel_size {parallel} leaves no GPU to train on ({len(resources.gpus)} visible)"
        fix = f"write at most {len(resources.gpus) - 1}, or ask for more GPUs"
        raise refuse(recipe.origin("vllm_tensor_parallel_size"), what, fix)
    return resources.gpus[:parallel], resources.gpus[parallel:]


def _trainer_count(recipe: Recipe, resources: Resources, gpus: tuple[str, ...]) -> int:
    wanted = recipe["num_processes"]
    available = len(gpus) if resources.flavour == "cuda" else wanted or 1
    if wanted is not None and wanted > available:
        what = f"num_processes {wanted} exceeds the {available} GPUs left to train on"
        raise refuse(recipe.origin("num_processes"), what, f"write at most {available}, or remove num_processes")
    count = wanted or available
    if recipe["accelerator"] == "single" and count > 1:
        if wanted is not None:
            what = f"accelerator: single runs one process, num_processes is {wanted}"
            raise refuse(recipe.origin("accelerator"), what, "write accelerator: ddp, or remove num_processes")
        count = 1
    return count


def _bridge(recipe: Recipe, resources: Resources, mode: str) -> tuple[str | None, str]:
    """The weight bridge of a run with a server, and why."""
    if mode != "server":
        return None, "no server: " + ("vLLM shares the trainers' GPUs" if mode == "colocate" else "use_vllm is false")
    wanted = recipe["weight_sync"]
    if wanted == "nccl" and resources.flavour == "cpu":
        raise refuse(
            recipe.origin("weight_sync"), "nccl needs GPUs, this is a CPU environment", "write weight_sync: file"
        )
    if wanted != "auto":
        return str(wanted), f"asked for by {recipe.origin('weight_sync')}"
    if resources.flavour == "cpu":
        return "file", "no GPU: safetensors in shared memory"
    return "nccl", "server and trainers are on GPUs"


def _model_path(recipe: Recipe, environment: Mapping[str, str], sources: Sources | None) -> str:
    """The folder of a fetched model: one commit for all, though TRL gives its colocated vLLM no revision."""
    if sources is not None and sources.model is not None and sources.model.from_hub:
        return sources.model.path
    return _smoke_path(recipe["model_name_or_path"], "model", environment)


def _smoke_path(name: str, part: str, environment: Mapping[str, str]) -> str:
    """Where ``smoke:sums`` is, or ``name`` itself."""
    if not name.startswith(SMOKE_SCHEME):
        return name
    return str(smoke_folder(name, environment) / part)


def smoke_folder(name: str, environment: Mapping[str, str]) -> Path:
    """The cache folder of a built-in smoke task, e.g. ``smoke:sums`` or ``smoke:sums-tied``.

    Raises:
        Refused: there is no such task.
    """
    task = name.removeprefix(SMOKE_SCHEME)
    if task not in ("sums", "sums-tied"):
        raise refuse("model_name_or_path", f"there is no built-in '{name}'", "write smoke:sums or smoke:sums-tied")
    return cache_root(environment) / "smoke" / f"{task}-{smoke.fingerprint(tied=task.endswith('-tied'))}"


def _notes(
    resources: Resources, batch: Batch, trainers: int, server_gpus: tuple[str, ...], used: tuple[str, ...]
) -> list[str]:
    notes = []
    if batch.world_size < trainers:
        notes.append(f"{batch.world_size} of {trainers} trainers are used: the batch divides by no larger number")
    job = resources.job
    if resources.flavour == "cuda" and job and job.gpus_on_node not in (None, len(resources.gpus)):
        notes.append(f"Slurm says {job.gpus_on_node} GPUs, the driver shows {len(resources.gpus)}; the driver counts")
    idle = [gpu for gpu in resources.gpus if gpu not in (*server_gpus, *used)]
    if idle:
        notes.append(f"nothing uses GPU {', '.join(idle)}")
    return notes


def _accelerator(recipe: Recipe, world_size: int) -> str:
    wanted = recipe["accelerator"]
    if wanted == "auto":
        return "ddp" if world_size > 1 else "single"
    if wanted == "ddp" and world_size == 1:
        return "single"  # accelerate refuses --multi_gpu with one process
    return str(wanted)


def describe(plan: Plan, environment_differences: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """The plan for a person: one line a fact, one block a process."""
    lines = [
        f"recipe     {plan.recipe} ({plan.task}, {plan.entry})",
        *([f"objective  {plan.maxent}"] if plan.maxent else []),
        f"flavour    {plan.flavour}" + (" (smoke test, not an experiment)" if plan.smoke else ""),
        f"model      {plan.model} ({plan.dtype})",
        f"dataset    {plan.dataset or 'mixture'}",
        f"batch      {plan.batch}",
        *([f"evaluation {plan.eval_batch} completions a batch and trainer"] if plan.eval_batch else []),
        f"vllm       {plan.mode}, weights by {plan.bridge or 'none'} ({plan.why_bridge})",
        f"ports      server {plan.ports.server}, weights {plan.ports.group}, trainers {plan.ports.main_process}",
        *(f"note       {note}" for note in plan.notes),
    ]
    for process in plan.processes:
        lines.append(f"{process.role:<10} {json.dumps(process.argv)}")
        shown = (environment_differences or {}).get(process.role, process.environment)
        lines += [f"           {name}={value}" for name, value in sorted(shown.items())]
        lines.append(f"           log {process.log}")
    return "\n".join(lines)
