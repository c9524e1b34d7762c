"""Plan a run: devices, batch, weight sync method and ports, then every process. Pure: ``launch`` executes the plan.

    plan = make_plan(recipe, find_resources(os.environ), os.environ, names)
    print(format_plan(plan))

If one GPU is visible and the recipe does not choose, vLLM runs inside the trainer. Otherwise it is a server on the
first GPUs. The weight sync method follows from the devices (``_choose_sync_method``). Keys in the recipe win over both.
"""

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

from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.fetch.assets import Assets
from grpo_recipes.plan import devices
from grpo_recipes.plan.commands import requested_kv_cache, vllm_memory_fraction, with_processes
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.estimates import find_needs
from grpo_recipes.plan.models import UnknownShape
from grpo_recipes.plan.needs import GIB
from grpo_recipes.plan.ports import plan_ports
from grpo_recipes.plan.replicas import choose_replicas
from grpo_recipes.plan.roles import describe_data, load_roles
from grpo_recipes.plan.types import Names, Plan, Weighting
from grpo_recipes.plan.workload import DEFAULT_SEQUENCES, Workload
from grpo_recipes.recipe import Recipe, maxent
from grpo_recipes.recipe.converters import UNREAD_VARIABLES
from grpo_recipes.recipe.model_kind import check_unused_weights
from grpo_recipes.recipe.overlap import OFF_POLICY
from grpo_recipes.recipe.registry import COLOCATE, EXTERNAL, OBJECTIVES, list_reward_models
from grpo_recipes.recipe.rules import uses_external_server
from grpo_recipes.recipe.tasks import MAXENT, added_task, entry_of, task_of
from grpo_recipes.recipe.weight_sync import accelerator_of, sync_problem
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_folder

# TRL's packaged file of accelerate for each way of sharing the model.
ACCELERATE_FILES = {
    "single": "single_gpu", "ddp": "multi_gpu", "zero2": "zero2", "zero3": "zero3", "fsdp2": "fsdp2"
}  # fmt: skip
# vLLM needs at least one token of its scheduler's batch for each sequence: 2,048 is its smallest default batch.
_MOST_SEQUENCES = 2048
# KV cache of a server on CPU. vLLM fills it with zeros at its start, which takes a second for each GiB.
_LEAST_CPU_CACHE, _MOST_CPU_CACHE = 64 * 2**20, GIB
_CPU_BLOCK = 128  # tokens for which vLLM reserves KV cache at a time
_SEQUENCES_SHARE = 10  # the logits of all sequences may take 1/10 of the memory left for the KV cache
_IGNORED_VARIABLES = ("GPUS_PER_NODE", "MAX_PROMPT_CHARS")  # variables of the training guide that have no effect


def make_plan(
    recipe: Recipe,
    resources: Resources,
    environment: Mapping[str, str],
    names: Names | None = None,
    sources: Assets | None = None,
) -> Plan:
    """Plan a run of a checked recipe; raise ConfigError if the recipe contradicts the environment or the resources.

    CONFIG_FILE and the caches come from the user's ``environment``. Without ``names``, the plan has no processes. With
    ``sources``, the plan uses the folder of a downloaded model. A launch first reserves ports, downloads its sources
    and makes its run directory, and then calls ``with_sources`` and ``with_processes``. With
    ``vllm_data_parallel_size: auto``, earlier runs in run_root decide the plan's ``replicas``.
    """
    recipe = choose_replicas(recipe, resources, lambda candidate: make_plan(candidate, resources, environment))
    plan = _lay_out(recipe, resources, environment)
    if problems := [problem for part in load_roles() for problem in part.problems(recipe, plan)]:
        raise ConfigError(*problems)
    plan = _with_engine_sizes(plan, recipe, resources.gpu_gib)
    plan = replace(plan, data=describe_data(recipe, plan))
    plan.notes.extend(_list_notes(plan, recipe, resources, environment))
    plan = with_sources(plan, recipe, resources, sources) if sources else plan
    return with_processes(plan, recipe, resources, environment, names, sources) if names else plan


def _lay_out(recipe: Recipe, resources: Resources, environment: Mapping[str, str]) -> Plan:
    """Return the devices, batch, weight sync method and ports of a run as a plan without data and processes.

    Raise ConfigError if the recipe contradicts the environment or the resources.
    """
    mode = _choose_mode(recipe, resources)
    server_gpus, training_gpus = devices.split_gpus(recipe, resources, mode)
    batch = devices.derive_batch(recipe, devices.count_trainers(recipe, resources, training_gpus))
    placement = devices.place_trainers(recipe, resources, mode, training_gpus, batch.world_size)
    server_apart = mode == "server" and placement[0].node != 0
    server_nodes = recipe.server.nodes if mode == "server" else 1
    spans_nodes = server_apart or server_nodes > 1 or (mode == "colocate" and len(placement) > 1)
    accelerator = accelerator_of(recipe, batch.world_size, environment)
    check_unused_weights(recipe, environment, accelerator, batch.world_size)
    bridge, why_bridge = _choose_sync_method(recipe, resources, mode, spans_nodes)
    method = COLOCATE if mode == "colocate" else bridge
    if method and (problem := sync_problem(recipe, method, accelerator, spans_nodes, resources.device)):
        raise ConfigError(problem)
    devices.require_shareable_gpu(recipe, resources, mode, bridge)
    nodes, task, model = resources.all_nodes(), task_of(recipe), recipe.model.name
    if (gpu_shared := devices.shares_gpu(recipe, resources, mode)) and bridge == "shared":
        devices.require_exportable_memory(environment)
    # All nodes use the same number of threads, because it changes results on CPU. One core is left for the server.
    cores = min((nodes[trainers.node].cores - (mode != "colocate")) // trainers.count for trainers in placement)
    return Plan(
        recipe=str(recipe.path),
        task=task,
        entry=entry_of(recipe),
        maxent=_describe_objective(recipe) if task == MAXENT else None,
        device=resources.device,
        mode=mode,
        bridge=bridge,
        why_bridge=why_bridge,
        model=_resolve_smoke_path(model, "model", environment),
        teacher=recipe.loss.teacher_model_name_or_path,
        dataset=_resolve_smoke_path(recipe.data.name or "", "train.jsonl", environment) or None,
        eval_dataset=_resolve_smoke_path(recipe.evaluation.dataset_name or "", "test.jsonl", environment) or None,
        data=None,
        batch=batch,
        eval_batch=devices.derive_eval_batch(recipe, batch),
        ports=plan_ports(recipe, resources.job),
        nodes=tuple(node.address for node in nodes),
        server_host=recipe.server.host if recipe.is_set("vllm_server_host") or len(nodes) == 1 else nodes[0].address,
        server_gpus=server_gpus,
        placement=placement,
        server_apart=server_apart,
        gpu_shared=gpu_shared,
        replicas=recipe.server.replicas if mode == "server" else 1,
        server_nodes=server_nodes,
        unused_gpus=devices.find_unused_gpus(resources, devices.list_used_gpus(server_gpus, placement, server_nodes)),
        accelerator=accelerator,
        accelerate_file=find_accelerate_file(accelerator, environment),
        dtype=recipe.model.dtype or "auto",
        smoke=model.startswith(SMOKE_SCHEME),
        # With fsdp_cpu_offload, the optimizer computes on the CPU.
        threads=max(1, cores) if resources.device == "cpu" or recipe.processes.fsdp_cpu_offload else 1,
        notes=list(recipe.notes),
    )


def _list_notes(plan: Plan, recipe: Recipe, resources: Resources, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences that warn the user about a plan: ignored variables, unused GPUs, idle trainers, a shared GPU."""
    job = resources.job
    trains_on_slices = any(gpu.startswith("MIG-") for trainers in plan.placement for gpu in trainers.gpus)
    if plan.batch.world_size > 1 and trains_on_slices:
        yield "NCCL does not connect trainers on MIG slices of one GPU: use one slice for training, or whole GPUs"
    yield from (f"{name} is not read: {UNREAD_VARIABLES[name]}" for name in _IGNORED_VARIABLES if environment.get(name))
    most_trainers = devices.count_trainers(recipe, resources, devices.split_gpus(recipe, resources, plan.mode)[1])
    if plan.batch.world_size < most_trainers:
        used_count, suggestion = f"{plan.batch.world_size} of {most_trainers} trainers", ""
        if prompts := recipe.batch.prompts_per_step:
            least = most_trainers // math.gcd(most_trainers, recipe.batch.num_generations)
            suggestion = f"; prompts_per_step: {max(1, round(prompts / least)) * least} (now {prompts}) uses all"
        yield f"{used_count} are used: no larger number divides the batch{suggestion}"
    if resources.device == "cuda" and job and job.gpus_on_node not in (None, len(resources.gpus)):
        counts = f"Slurm reports {job.gpus_on_node} GPUs, but the driver shows {len(resources.gpus)}"
        yield f"{counts}: the plan uses the driver's number"
    if devices.shares_gpu(recipe, resources, plan.mode):
        fraction = f"{vllm_memory_fraction(recipe, 'server'):g} of GPU {', '.join(plan.server_gpus)}"
        yield f"vLLM uses {fraction} (vllm_gpu_memory_utilization), and the trainers on it use the remaining memory"
    for part in load_roles():
        yield from part.notes(recipe, plan)
    if recipe.sampling.overlap_generation:
        yield OFF_POLICY
    if limit := maxent.limit_note(recipe):
        yield limit
    if plan.unused_gpus:
        yield f"GPU {', '.join(plan.unused_gpus)} is unused"


def with_sources(plan: Plan, recipe: Recipe, resources: Resources, sources: Assets) -> Plan:
    """Return a copy of the plan that uses the folders of downloaded models, with notes about models and datasets.

    This includes teacher and reward models. Other models keep their names. ``max_num_seqs`` is chosen again. With a
    folder, all processes use the same commit, because TRL passes no revision to a co-located vLLM. Raise
    ConfigError if vLLM would read the folder as a pattern.
    """
    asset = sources.model
    model = asset.path if asset is not None and asset.from_hub else plan.model
    if plan.mode != "transformers" and os.path.isdir(model) and re.search(r"[][*?]", model):
        fix = "move it, or set CACHE_ROOT, to a folder without [ ] * ?"
        raise config_error("model_name_or_path", f"vLLM reads '{model}' as a pattern and finds no files", fix)

    def find_folder(name: str | None) -> str | None:
        """Return the folder of a model that is here, else its name; None for None."""
        return local.path if (local := sources.find_model(name)) else name

    reward_models = tuple(filter(None, map(find_folder, list_reward_models(recipe.rewards.funcs))))
    notes = [*plan.notes, *sources.notes(recipe)]
    plan = replace(plan, model=model, teacher=find_folder(plan.teacher), reward_models=reward_models, notes=notes)
    return _with_engine_sizes(plan, recipe, resources.gpu_gib)


def _with_engine_sizes(plan: Plan, recipe: Recipe, gpu_gib: float | None) -> Plan:
    """Return the plan with ``max_num_seqs`` and ``kv_cache_bytes``, chosen for its model."""
    plan = replace(plan, max_num_seqs=choose_max_num_seqs(recipe, plan, gpu_gib))
    return replace(plan, kv_cache_bytes=choose_kv_cache_bytes(recipe, plan))


def choose_kv_cache_bytes(recipe: Recipe, plan: Plan) -> int | None:
    """Return the bytes of the KV cache of a server's engine on CPU.

    The recipe's flag in ``vllm_args`` decides if it is set. By default, the cache has room for twice as many sequences
    of maximal length as the engine generates at the same time, between 64 MiB and 1 GiB, and 1 GiB if the model's
    shape is unknown. Return None if vLLM itself decides: on GPUs, and inside trainers.
    """
    if plan.device != "cpu" or plan.mode != "server":
        return None
    if (size := requested_kv_cache(recipe)) is not None:
        return size
    try:
        work = Workload.of(recipe, plan)
    except UnknownShape:
        return _MOST_CPU_CACHE
    block = (recipe.server.args or {}).get("block_size") or _CPU_BLOCK
    length = -(-work["vllm_max_model_length"] // block) * block
    sequences = plan.max_num_seqs or DEFAULT_SEQUENCES[plan.device]
    return min(max(2 * sequences * work.sequence_cache(length), _LEAST_CPU_CACHE), _MOST_CPU_CACHE)


def choose_max_num_seqs(recipe: Recipe, plan: Plan, gpu_gib: float | None) -> int | None:
    """Return the most completions that a vLLM engine of the run generates at the same time.

    The recipe's ``vllm_max_num_seqs`` decides if it is set. By default, this is the largest number that the run
    requests at the same time. Above vLLM's own default, the logits of all sequences take at most a tenth of the memory
    that remains for the KV cache. Return None if the run starts no vLLM.
    """
    if plan.mode in ("transformers", EXTERNAL):
        return None
    if recipe.server.max_num_seqs is not None:
        return recipe.server.max_num_seqs
    default = DEFAULT_SEQUENCES[plan.device]
    requested = min(_count_requested_completions(recipe, plan, default), _MOST_SEQUENCES)
    if plan.device == "cuda" and gpu_gib is None:
        return requested
    try:
        largest_cache = requested_kv_cache(recipe) or _MOST_CPU_CACHE
        work = Workload({**Workload.of(recipe, plan), "vllm_max_num_seqs": 1, "cpu_kv_cache": largest_cache})
    except UnknownShape:
        return requested
    parts = find_needs(work, None if gpu_gib is None else int(gpu_gib * GIB))["server"].parts
    limit = parts["KV cache"] // (_SEQUENCES_SHARE * max(1, parts["output layer"]))
    return min(requested, max(limit, default))


def _count_requested_completions(recipe: Recipe, plan: Plan, default: int) -> int:
    """Return the most completions that the run requests from one vLLM engine at the same time.

    Training, evaluation and benchmarks count. It is at least vLLM's own ``default`` if an extension samples by itself
    on a server.
    """
    world_size = plan.batch.world_size
    requested: int = max(devices.count_generation_completions(recipe, plan.batch), (plan.eval_batch or 0) * world_size)
    if recipe.evaluation.benchmarks:
        most_benchmark = recipe.server.max_concurrent_requests * recipe.evaluation.benchmark_samples
        requested = max(requested, most_benchmark)
    if plan.mode == "colocate":
        return -(-requested * recipe.server.tensor_parallel_size // world_size)
    requested = -(-requested // plan.replicas)
    return max(requested, default) if any(part.samples_by_itself(recipe) for part in load_roles()) else requested


def _describe_objective(recipe: Recipe) -> Weighting:
    """Return the objective of a MaxEnt recipe with its temperature, pull, loss and weight ratio for the plan."""
    name, tau, beta = (recipe[key] for key in ("maxent_objective", "maxent_tau", "maxent_beta"))
    objective = OBJECTIVES[name]
    weight = maxent.format_ratio(maxent.weight_ratio(recipe))
    pull, loss_type = beta if objective.targets_q else None, objective.loss_type(recipe.__getitem__)
    return Weighting(name, objective.tau_or_default(tau), pull, loss_type, weight)


def _choose_mode(recipe: Recipe, resources: Resources) -> str:
    """Return the source of completions: ``server``, ``colocate`` (vLLM in the trainers), ``transformers`` or EXTERNAL.

    With a single GPU, ``colocate`` replaces a server that the recipe does not set explicitly. Raise ConfigError if a
    server is needed but has no GPU, if a node has no GPU in a CUDA environment, or if a setting can't work on CPU.
    """
    nodes = resources.all_nodes()
    node_without_gpu = next((index for index, node in enumerate(nodes) if not node.gpus), None)
    if resources.device == "cuda" and node_without_gpu is not None:
        on_node = f" on node {node_without_gpu}" if len(nodes) > 1 else ""
        problem = f"no GPU is visible{on_node}, but this is a CUDA environment"
        raise config_error("devices", problem, "submit with sbatch --gres=gpu:8 training.sh, or set up with DEVICE=cpu")
    if not recipe.server.use_vllm:
        return "transformers"
    if uses_external_server(recipe):
        return EXTERNAL
    mode, source = recipe.server.mode, recipe.source("vllm_mode")
    if resources.device == "cpu":
        if mode == "colocate" and recipe.server.enable_sleep_mode:
            problem = "vLLM can't sleep on CPU: weights and cache are already in the machine's memory"
            raise config_error(recipe.source("vllm_enable_sleep_mode"), problem, "remove vllm_enable_sleep_mode")
        if (recipe.server.args or {}).get("enable_chunked_prefill"):
            problem = "vllm_args: enable_chunked_prefill crashes vLLM on CPU: its random generators can't step back"
            raise config_error(recipe.source("vllm_args"), problem, "remove enable_chunked_prefill from vllm_args")
        return mode
    if len(nodes) == len(resources.gpus) == 1 and mode == "server" and not devices.shares_gpu(recipe, resources, mode):
        if need := next(filter(None, (part.needs_server(recipe) for part in load_roles())), None):
            problem = f"{need[0]} a vLLM server next to the trainer, but only one GPU is visible"
            fix = f"request more GPUs, or set vllm_gpu: shared (one GPU for both){need[1]}"
            raise config_error(source, problem, fix)
        if recipe.sampling.overlap_generation:
            problem = "overlap_generation needs a second GPU for the server, but only one is visible"
            raise config_error(recipe.source("overlap_generation"), problem, "remove it, or request more GPUs")
        if recipe.server.replicas > 1:
            problem = "vllm_data_parallel_size needs a GPU for each replica, but only one is visible"
            fix = "remove it, or request more GPUs"
            raise config_error(recipe.source("vllm_data_parallel_size"), problem, fix)
        if recipe.server.args:
            problem = "vllm_args needs a vLLM server next to the trainer, but only one GPU is visible"
            fix = "remove it, or request more GPUs, or set vllm_gpu: shared (one GPU for both)"
            raise config_error(recipe.source("vllm_args"), problem, fix)
        if recipe.is_set("vllm_mode"):
            problem = "vllm_mode: server needs two GPUs, but only one is visible"
            fix = "set vllm_mode: colocate, or set vllm_gpu: shared (one GPU for both), or request more GPUs"
            raise config_error(source, problem, fix)
        return "colocate"
    return mode


def _choose_sync_method(recipe: Recipe, resources: Resources, mode: str, spans_nodes: bool) -> tuple[str | None, str]:
    """Return the weight sync method, and the reason for the choice as text.

    The method is None without a vLLM server of the run. ``spans_nodes`` means that a part of the server is on another
    node than rank 0.
    """
    if mode == EXTERNAL:
        return None, f"{recipe.server.backend} at {recipe.server.base_url}, weights as files"
    if added := added_task(recipe):
        return None, f"task: {added.name} samples nothing"
    if mode != "server":
        return None, "no server: " + ("vLLM is inside the trainers" if mode == "colocate" else "use_vllm is false")
    if recipe.server.weight_sync != "auto":
        return recipe.server.weight_sync, f"set by {recipe.source('weight_sync')}"
    if resources.device == "cpu":
        return "file", f"no GPU: safetensors in {'the run directory' if spans_nodes else 'shared memory'}"
    if devices.shares_gpu(recipe, resources, mode):
        return "file", "server and rank 0 are on one GPU: safetensors in shared memory"
    if any(gpu.startswith("MIG-") for gpu in resources.gpus):
        return "file", "NCCL does not connect MIG slices of one GPU: safetensors in shared memory"
    return "nccl", "server and trainers are on GPUs"


def _resolve_smoke_path(name: str, part: str, environment: Mapping[str, str]) -> str:
    """Return the path of the file or folder ``part`` of a built-in smoke task; return any other name unchanged."""
    return str(smoke_folder(name, environment) / part) if name.startswith(SMOKE_SCHEME) else name


def _find_integers(content: Any) -> Iterator[tuple[str, int]]:
    """Yield (key, integer) for each integer in the nested mappings of an accelerate file."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, int):
            yield str(name), value
        yield from _find_integers(value)


def find_accelerate_file(accelerator: str, environment: Mapping[str, str]) -> str:
    """Return the path of CONFIG_FILE, or of the accelerate file in TRL's package for this accelerator.

    Raise ConfigError if CONFIG_FILE does not exist, is not YAML, or splits sequences over processes. Without
    CONFIG_FILE, raise ConfigError if TRL is not installed.
    """
    if path := environment.get("CONFIG_FILE"):
        if not Path(path).is_file():
            raise config_error(
                "CONFIG_FILE", f"accelerate file '{path}' not found", "unset it, or use an existing file"
            )
        fix = "use a file that accelerate config wrote"
        with translate_errors(yaml.YAMLError, lambda _: config_error("CONFIG_FILE", f"'{path}' is not YAML", fix)):
            content = yaml.safe_load(Path(path).read_text(errors="replace"))
        for name, size in _find_integers(content):
            if name.endswith(("cp_size", "sp_size", "context_parallel_size", "sequence_parallel_size")) and size > 1:
                problem = f"{name} {size} in '{path}' splits sequences, but GRPO's loss needs whole completions"
                raise config_error("CONFIG_FILE", problem, f"remove {name}; accelerator: zero3 saves memory too")
        return str(Path(path).absolute())
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        raise config_error("environment", "trl is not installed", "run make setup")
    return str(Path(trl.origin).with_name("accelerate_configs") / f"{ACCELERATE_FILES[accelerator]}.yaml")


def format_gpu_map(plan: Plan) -> list[str]:
    """Return a line for each node with the processes on its GPUs; no line for a plan on CPU."""
    uses: dict[int, dict[str, str]] = {}
    size = len(plan.server_gpus) // plan.replicas
    for index, gpu in enumerate(plan.server_gpus):
        replica = f" (replica {index // size})" if plan.replicas > 1 else ""
        uses.setdefault(index * plan.server_nodes // len(plan.server_gpus), {})[gpu] = f"vLLM server{replica}"
    for placement in plan.placement:
        for gpu in placement.gpus:
            trainer = "trainer with vLLM" if plan.mode == "colocate" else "trainer"
            server = uses.setdefault(placement.node, {}).get(gpu)
            uses[placement.node][gpu] = f"{server} and {trainer}" if server else trainer
    for name in plan.unused_gpus:
        gpu, _, unused_node = name.partition(" of node ")
        uses.setdefault(int(unused_node or 0), {})[gpu] = "unused"
    lines = []
    for node, use_of_gpu in sorted(uses.items()):
        on_node = f"node {node}: " if len(plan.nodes) > 1 else ""
        uses_on_node = []
        for role, group in itertools.groupby(use_of_gpu, use_of_gpu.__getitem__):
            gpus = [*group]
            listed = " ".join(gpus)
            if len(gpus) > 2 and all(gpu.isdecimal() for gpu in gpus) and int(gpus[-1]) - int(gpus[0]) == len(gpus) - 1:
                listed = f"{gpus[0]}-{gpus[-1]}"  # consecutive indices
            uses_on_node.append(f"{listed} {role}")
        lines.append(f"gpus       {on_node}{', '.join(uses_on_node)}")
    return lines


def format_plan(
    plan: Plan,
    environment_differences: Mapping[str, Mapping[str, str]] | None = None,
    estimates: Sequence[str] = (),
    argv: bool = True,
) -> str:
    """Format the plan for a person: a line for each fact, the lines of ``estimates``, and a block for each process.

    The first line of ``estimates``, the verdict, comes first, and then the map of the GPUs.

    A block has the process's argv and environment. ``environment_differences`` has the variables to show instead, by
    the name of the process. Without ``argv``, a process has one line with its devices and its log.
    """
    several = len(plan.nodes) > 1
    server = f"server {plan.ports.server}, weights {plan.ports.group}, " if plan.mode == "server" else ""
    server += f"replicas {plan.ports.replicas}, " if plan.ports.replicas else ""
    server += "".join(f"{process.role} {process.port}, " for process in plan.processes if process.port)
    kind, text = (plan.data.kind, plan.data.text) if plan.data else ("dataset", plan.dataset or "mixture")
    lines = [
        *estimates[:1],
        *format_gpu_map(plan),
        f"recipe     {plan.recipe} ({plan.task}, {plan.entry})",
        *([f"objective  {plan.maxent}"] if plan.maxent else []),
        f"device     {plan.device}" + (" (smoke test, not an experiment)" if plan.smoke else ""),
        f"model      {plan.model} ({plan.dtype})",
        *([f"teacher    {plan.teacher}"] if plan.teacher else []),
        *(f"reward     {model} (model)" for model in plan.reward_models),
        f"{kind:<10} {text}",
        f"batch      {plan.batch}",
        *([f"evaluation {plan.eval_batch} completions per batch and trainer"] if plan.eval_batch else []),
        f"vllm       {plan.vllm}",
        f"ports      {server}trainers {plan.ports.main_process}",
        *([f"nodes      {len(plan.nodes)}: {', '.join(plan.nodes)}"] if several else []),
        *estimates[1:],
        *(f"note       {note}" for note in plan.notes),
    ]
    for process in plan.processes:
        name = f"{process.name:<10} "
        if argv:
            lines.append(f"{name}{json.dumps(process.argv)}")
            variables = (environment_differences or {}).get(process.name, process.environment)
            lines += [f"           {variable}={value}" for variable, value in sorted(variables.items())]
            name = " " * len(name)
        gpus = f", GPU {', '.join(process.gpus)}" if process.gpus else ""
        lines.append(f"{name}{f'node {process.node}{gpus}; ' if several else ''}log {process.log}")
    return "\n".join(lines)
