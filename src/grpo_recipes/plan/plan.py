"""The plan of a run: devices, batch, bridge and ports, then every process. Pure; `launch` executes this plan."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import ConfigError, config_error, translate
from grpo_recipes.fetch.assets import Assets
from grpo_recipes.plan import devices
from grpo_recipes.plan.commands import gpu_share, with_processes
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.estimates import DEFAULT_SEQUENCES, GIB, UnknownShape, Workload, needs
from grpo_recipes.plan.ports import plan_ports
from grpo_recipes.plan.roles import data_of, roles
from grpo_recipes.plan.types import Names, Plan, Weighting
from grpo_recipes.recipe import Recipe, maxent
from grpo_recipes.recipe.converters import UNREAD_VARIABLES
from grpo_recipes.recipe.model_kind import check_unused_weights
from grpo_recipes.recipe.overlap import OFF_POLICY
from grpo_recipes.recipe.registry import COLOCATE, EXTERNAL, OBJECTIVES
from grpo_recipes.recipe.rules import uses_external_server
from grpo_recipes.recipe.tasks import ENTRIES, MAXENT, task_of
from grpo_recipes.recipe.weight_sync import accelerator_of, sync_problem
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_folder

# TRL's packaged file of accelerate for each way of sharing the model.
ACCELERATE_FILES = {
    "single": "single_gpu", "ddp": "multi_gpu", "zero2": "zero2", "zero3": "zero3", "fsdp2": "fsdp2"
}  # fmt: skip
# vLLM needs at least one token of its scheduler's batch for each sequence: 2,048 is its smallest default batch.
_MOST_SEQUENCES = 2048
_SEQUENCES_SHARE = 10  # the sequences' logits may take one part in so many of the memory left for the KV cache
_OF_GUIDE = ("GPUS_PER_NODE", "MAX_PROMPT_CHARS")  # variables that change nothing here


def make_plan(
    recipe: Recipe,
    resources: Resources,
    environment: Mapping[str, str],
    names: Names | None = None,
    sources: Assets | None = None,
) -> Plan:
    """Plan a run of a checked recipe; ConfigError where that contradicts the environment or the resources.

    Without ``names`` the plan has no processes yet: a launch looks at its ports, fetches its sources and makes its run
    directory first, then fills them in by ``with_sources`` and ``with_processes``. CONFIG_FILE and the caches come
    from the user's ``environment``.
    """
    mode = _mode(recipe, resources)
    server_gpus, left = devices.split_gpus(recipe, resources, mode)
    most = devices.trainer_count(recipe, resources, left)
    batch = devices.derive_batch(recipe, most)
    trainers = devices.place_trainers(recipe, resources, mode, left, batch.world_size)
    if mode == "colocate":
        _need_equal_groups(recipe, batch.world_size)
    apart = mode == "server" and trainers[0].node != 0
    accelerator = accelerator_of(recipe, batch.world_size, environment)
    check_unused_weights(recipe, environment, accelerator, batch.world_size)
    bridge, why = _bridge(recipe, resources, mode, apart or (mode == "colocate" and len(trainers) > 1), accelerator)
    devices.need_shareable_gpu(recipe, resources, mode, bridge)
    nodes, task, model = resources.all_nodes(), task_of(recipe), recipe["model_name_or_path"]
    if devices.share_gpu(recipe, resources, mode) and bridge == "shared":
        devices.need_exportable_memory(environment)
    # The same on every node, since results on CPU depend on it; one core is for the server, where there may be one.
    cores = min((nodes[one.node].cores - (mode != "colocate")) // one.count for one in trainers)
    own_host = recipe.is_set("vllm_server_host") or not resources.nodes
    plan = Plan(
        recipe=str(recipe.path),
        task=task,
        entry=recipe.entry or ENTRIES[task],
        maxent=_weighting(recipe) if task == MAXENT else None,
        device=resources.device,
        mode=mode,
        bridge=bridge,
        why_bridge=why,
        model=_smoke_path(model, "model", environment),
        dataset=_smoke_path(recipe["dataset_name"] or "", "train.jsonl", environment) or None,
        eval_dataset=_smoke_path(recipe["eval_dataset_name"] or "", "test.jsonl", environment) or None,
        data=None,
        batch=batch,
        eval_batch=devices.derive_eval_batch(recipe, batch),
        ports=plan_ports(recipe, resources.job),
        nodes=tuple(node.address for node in nodes),
        server_host=recipe["vllm_server_host"] if own_host else nodes[0].address,
        server_gpus=server_gpus,
        placement=trainers,
        server_apart=apart,
        gpu_shared=devices.share_gpu(recipe, resources, mode),
        unused_gpus=devices.unused(resources, devices.used_gpus(server_gpus, trainers)),
        accelerator=accelerator,
        accelerate_file=accelerate_file(accelerator, environment),
        dtype=recipe["dtype"],
        smoke=model.startswith(SMOKE_SCHEME),
        threads=1 if resources.device == "cuda" else max(1, cores),
        notes=list(recipe.notes),
    )
    if problems := [problem for part in roles() for problem in part.problems(recipe, plan)]:
        raise ConfigError(*problems)
    plan = replace(plan, data=data_of(recipe, plan))
    plan = replace(plan, max_num_seqs=max_num_seqs(recipe, plan, resources.gpu_gib))
    plan.notes.extend(_notes(plan, recipe, resources, environment, most))
    plan = with_sources(plan, recipe, resources, sources) if sources else plan
    return with_processes(plan, recipe, resources, environment, names, sources) if names else plan


def _need_equal_groups(recipe: Recipe, trainers: int) -> None:
    """Refuse trainers that cannot be divided into groups which each share one vLLM."""
    parallel = recipe["vllm_tensor_parallel_size"]
    if trainers % parallel:
        what = f"vllm_tensor_parallel_size {parallel} does not divide the {devices.some_trainers(trainers)}"
        fix = f"write {math.gcd(trainers, parallel)}, or another num_processes"
        raise config_error(recipe.source("vllm_tensor_parallel_size"), f"{what} that would share one vLLM", fix)


def _notes(
    plan: Plan, recipe: Recipe, resources: Resources, environment: Mapping[str, str], most: int
) -> Iterator[str]:
    """Yield what is worth knowing of a plan, of which ``most`` trainers could be part."""
    used, job = devices.used_gpus(plan.server_gpus, plan.placement), resources.job
    if len(used) > 1 and any(gpu.startswith("MIG-") for _, gpu in used):
        yield "NCCL between MIG slices is untested: name one, with vllm_mode: colocate, or take whole GPUs"
    yield from (f"{name} is not read: {UNREAD_VARIABLES[name]}" for name in _OF_GUIDE if environment.get(name))
    if plan.batch.world_size < most:
        note = f"{plan.batch.world_size} of {most} trainers are used: the batch divides by no larger number"
        yield note + _prompts_for_all(recipe, most)
    if resources.device == "cuda" and job and job.gpus_on_node not in (None, len(resources.gpus)):
        yield f"Slurm says {job.gpus_on_node} GPUs, the driver shows {len(resources.gpus)}; the driver counts"
    if devices.share_gpu(recipe, resources, plan.mode):
        fraction = f"{gpu_share(recipe, 'server'):g} of GPU {', '.join(plan.server_gpus)} (vllm_gpu_memory_utilization)"
        yield f"vLLM takes {fraction}, and the trainers there use the remaining memory"
    for part in roles():
        yield from part.notes(recipe, plan)
    if recipe["overlap_generation"]:
        yield OFF_POLICY
    if limit := maxent.limit_note(recipe):
        yield limit
    if plan.unused_gpus:
        yield f"nothing uses GPU {', '.join(plan.unused_gpus)}"


def _prompts_for_all(recipe: Recipe, trainers: int) -> str:
    """Return the ``prompts_per_step`` nearest to the recipe's by which the batch divides among all trainers."""
    now = recipe["prompts_per_step"]
    if now is None:
        return ""
    least = trainers // math.gcd(trainers, recipe["num_generations"])
    return f"; prompts_per_step: {max(1, round(now / least)) * least} (now {now}) uses all"


def with_sources(plan: Plan, recipe: Recipe, resources: Resources, sources: Assets) -> Plan:
    """Return the plan with what was found of its sources: the folder of a fetched model, and notes.

    The folder stands for one commit in all processes, though TRL gives its colocated vLLM no revision.
    """
    found = sources.model
    model = found.path if found is not None and found.from_hub else plan.model
    if plan.mode != "transformers" and os.path.isdir(model) and re.search(r"[][*?]", model):
        fix = "move it, or set CACHE_ROOT, to a folder without [ ] * ?"
        raise config_error("model_name_or_path", f"vLLM takes '{model}' for a pattern and finds nothing", fix)
    plan = replace(plan, model=model, notes=[*plan.notes, *sources.notes()])
    return replace(plan, max_num_seqs=max_num_seqs(recipe, plan, resources.gpu_gib))


def max_num_seqs(recipe: Recipe, plan: Plan, gpu_gib: float | None) -> int | None:
    """Return the most completions that a vLLM engine of the run generates at the same time; None without vLLM.

    By default this is the largest number that the run requests at the same time. Above vLLM's own default, the logits
    of so many sequences take at most a tenth of the memory that remains for the KV cache.
    """
    if plan.mode in ("transformers", EXTERNAL):
        return None
    if recipe["vllm_max_num_seqs"] is not None:
        return int(recipe["vllm_max_num_seqs"])
    default = DEFAULT_SEQUENCES[plan.device]
    requested = min(_requested_completions(recipe, plan, default), _MOST_SEQUENCES)
    if plan.device == "cuda" and gpu_gib is None:
        return requested
    try:
        work = Workload({**Workload.of(recipe, plan), "vllm_max_num_seqs": 1})
    except UnknownShape:
        return requested
    parts = needs(work, None if gpu_gib is None else int(gpu_gib * GIB))["server"].parts
    room = parts["KV cache"] // (_SEQUENCES_SHARE * max(1, parts["output layer"]))
    return min(requested, max(room, default))


def _requested_completions(recipe: Recipe, plan: Plan, default: int) -> int:
    """Return the most completions that the run requests from one vLLM engine at the same time."""
    world_size = plan.batch.world_size
    requested = max(devices.rows_of_generation(recipe, plan.batch), (plan.eval_batch or 0) * world_size)
    if recipe["benchmarks"]:
        requested = max(requested, recipe["max_concurrent_requests"] * recipe["benchmark_samples"])
    if plan.mode == "colocate":
        return -(-requested * recipe["vllm_tensor_parallel_size"] // world_size)
    return max(requested, default) if any(part.samples_by_itself(recipe) for part in roles()) else requested


def _weighting(recipe: Recipe) -> Weighting:
    """Return what a MaxEnt recipe optimises."""
    name, tau, beta = (recipe[key] for key in ("maxent_objective", "maxent_tau", "maxent_beta"))
    objective = OBJECTIVES[name]
    weight = maxent.format_ratio(maxent.weight_ratio(recipe))
    pull, loss_type = beta if objective.targets_q else None, objective.loss_type(recipe.__getitem__)
    return Weighting(name, objective.tau_or_default(tau), pull, loss_type, weight)


def _mode(recipe: Recipe, resources: Resources) -> str:
    """Return where completions come from: a vLLM server, vLLM in the trainers, or transformers."""
    nodes = resources.all_nodes()
    bare = next((index for index, node in enumerate(nodes) if not node.gpus), None)
    if resources.device == "cuda" and bare is not None:
        where = f" on node {bare}" if len(nodes) > 1 else ""
        what = f"no GPU is visible{where} and this is a CUDA environment"
        raise config_error("devices", what, "submit with sbatch --gres=gpu:8 training.sh, or set up with DEVICE=cpu")
    if not recipe["use_vllm"]:
        return "transformers"
    if uses_external_server(recipe):
        return EXTERNAL
    mode, where = str(recipe["vllm_mode"]), recipe.source("vllm_mode")
    if resources.device == "cpu":
        if mode == "colocate" and recipe["vllm_enable_sleep_mode"]:
            what = "vLLM cannot sleep on CPU, where weights and cache have no other place to go"
            raise config_error(recipe.source("vllm_enable_sleep_mode"), what, "remove vllm_enable_sleep_mode")
        return mode
    if len(nodes) == len(resources.gpus) == 1 and mode == "server" and not devices.share_gpu(recipe, resources, mode):
        if need := next(filter(None, (part.needs_server(recipe) for part in roles())), None):
            what = f"{need[0]} a vLLM server next to the trainer, and one GPU is visible"
            raise config_error(where, what, f"ask for more GPUs, or set vllm_gpu: shared (one GPU for both){need[1]}")
        if recipe["overlap_generation"]:
            what = "overlap_generation needs a GPU for the server beside the trainer's, and one is visible"
            raise config_error(recipe.source("overlap_generation"), what, "remove it, or ask for more GPUs")
        if recipe.is_set("vllm_mode"):
            what = "vllm_mode: server needs two GPUs, one is visible"
            fix = "write vllm_mode: colocate, or vllm_gpu: shared (one GPU for both), or ask for more GPUs"
            raise config_error(where, what, fix)
        return "colocate"
    return mode


def _bridge(recipe: Recipe, resources: Resources, mode: str, apart: bool, accelerator: str) -> tuple[str | None, str]:
    """Choose the weight bridge of a run with a server, and say why; refuse what cannot get weights to vLLM."""
    bridge, why = _chosen_bridge(recipe, resources, mode, apart)
    way = COLOCATE if mode == "colocate" else bridge
    if way and (problem := sync_problem(recipe, way, accelerator, apart, resources.device)):
        raise ConfigError(problem)
    return bridge, why


def _chosen_bridge(recipe: Recipe, resources: Resources, mode: str, apart: bool) -> tuple[str | None, str]:
    if mode == EXTERNAL:
        return None, f"{recipe['server_backend']} at {recipe['vllm_server_base_url']}, weights as files"
    if mode != "server":
        return None, "no server: " + ("vLLM is inside the trainers" if mode == "colocate" else "use_vllm is false")
    if recipe["weight_sync"] != "auto":
        return str(recipe["weight_sync"]), f"asked for by {recipe.source('weight_sync')}"
    if resources.device == "cpu":
        return "file", f"no GPU: safetensors in {'the run directory' if apart else 'shared memory'}"
    if devices.share_gpu(recipe, resources, mode):
        return "file", "server and rank 0 are on one GPU: safetensors in shared memory"
    return "nccl", "server and trainers are on GPUs"


def _smoke_path(name: str, part: str, environment: Mapping[str, str]) -> str:
    """Return where that part of ``smoke:sums`` is; any other name as it is."""
    return str(smoke_folder(name, environment) / part) if name.startswith(SMOKE_SCHEME) else name


def _sizes_in(content: Any) -> Iterator[tuple[str, int]]:
    """Yield the whole numbers in an accelerate file, with their keys."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, int):
            yield str(name), value
        yield from _sizes_in(value)


def accelerate_file(accelerator: str, environment: Mapping[str, str]) -> str:
    """Return the file of CONFIG_FILE, which must exist, or TRL's packaged accelerate file."""
    if given := environment.get("CONFIG_FILE"):
        if not Path(given).is_file():
            what = f"there is no accelerate file '{given}'"
            raise config_error("CONFIG_FILE", what, "unset it, or name an existing file")
        fix = "name a file that accelerate config wrote"
        with translate(yaml.YAMLError, lambda _: config_error("CONFIG_FILE", f"'{given}' is not YAML", fix)):
            content = yaml.safe_load(Path(given).read_text(errors="replace"))
        for name, size in _sizes_in(content):
            if name.endswith(("cp_size", "sp_size", "context_parallel_size", "sequence_parallel_size")) and size > 1:
                what = f"{name} {size} in '{given}' splits sequences, while GRPO's loss needs whole completions"
                raise config_error("CONFIG_FILE", what, f"remove {name}; accelerator: zero3 saves memory too")
        return str(Path(given).absolute())
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        raise config_error("environment", "trl is not installed", "run make setup")
    return str(Path(trl.origin).with_name("accelerate_configs") / f"{ACCELERATE_FILES[accelerator]}.yaml")


def gpu_map(plan: Plan) -> list[str]:
    """Return a line for each node that says which processes use which of its GPUs; none for a plan on CPU."""
    uses: dict[int, dict[str, str]] = {}
    for gpu in plan.server_gpus:
        uses.setdefault(0, {})[gpu] = "vLLM server"
    for place in plan.placement:
        for gpu in place.gpus:
            trainer = "trainer with vLLM" if plan.mode == "colocate" else "trainer"
            server = uses.setdefault(place.node, {}).get(gpu)
            uses[place.node][gpu] = f"{server} and {trainer}" if server else trainer
    for name in plan.unused_gpus:
        gpu, _, unused_node = name.partition(" of node ")
        uses.setdefault(int(unused_node or 0), {})[gpu] = "unused"
    lines = []
    for node, use_of_gpu in sorted(uses.items()):
        where = f"node {node}: " if len(plan.nodes) > 1 else ""
        groups = itertools.groupby(use_of_gpu, use_of_gpu.__getitem__)
        lines.append(f"gpus       {where}{', '.join(f'{_gpu_range([*gpus])} {role}' for role, gpus in groups)}")
    return lines


def _gpu_range(gpus: list[str]) -> str:
    """Return ``1-7`` for GPUs with consecutive indices, else their ids."""
    if len(gpus) > 2 and all(gpu.isdecimal() for gpu in gpus) and int(gpus[-1]) - int(gpus[0]) == len(gpus) - 1:
        return f"{gpus[0]}-{gpus[-1]}"
    return " ".join(gpus)


def describe(
    plan: Plan,
    environment_differences: Mapping[str, Mapping[str, str]] | None = None,
    estimates: Sequence[str] = (),
    argv: bool = True,
) -> str:
    """Return the plan for a person: a line for each fact and those of ``estimates``, and a block for each process.

    Without ``argv`` a process has one line, of its place and its log.
    """
    several = len(plan.nodes) > 1
    server = f"server {plan.ports.server}, weights {plan.ports.group}, " if plan.mode == "server" else ""
    server += "".join(f"{process.role} {process.port}, " for process in plan.processes if process.port)
    kind, text = (plan.data.kind, plan.data.text) if plan.data else ("dataset", plan.dataset or "mixture")
    lines = [
        f"recipe     {plan.recipe} ({plan.task}, {plan.entry})",
        *([f"objective  {plan.maxent}"] if plan.maxent else []),
        f"flavour    {plan.device}" + (" (smoke test, not an experiment)" if plan.smoke else ""),
        f"model      {plan.model} ({plan.dtype})",
        f"{kind:<10} {text}",
        f"batch      {plan.batch}",
        *([f"evaluation {plan.eval_batch} completions a batch and trainer"] if plan.eval_batch else []),
        f"vllm       {plan.vllm}",
        f"ports      {server}trainers {plan.ports.main_process}",
        *([f"nodes      {len(plan.nodes)}: {', '.join(plan.nodes)}"] if several else []),
        *gpu_map(plan),
        *estimates,
        *(f"note       {note}" for note in plan.notes),
    ]
    for process in plan.processes:
        name = f"{process.name:<10} "
        if argv:
            lines.append(f"{name}{json.dumps(process.argv)}")
            shown = (environment_differences or {}).get(process.name, process.environment)
            lines += [f"           {variable}={value}" for variable, value in sorted(shown.items())]
            name = " " * len(name)
        where = f"node {process.node}{', GPU ' if process.gpus else ''}{', '.join(process.gpus)}; " if several else ""
        lines.append(f"{name}{where}log {process.log}")
    return "\n".join(lines)
