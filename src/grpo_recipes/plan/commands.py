"""Build the argv and environment of a plan's processes: the vLLM server, the trainers, and processes of extensions.

* A process gets the user's environment (``base_environment``), the run's variables (``run_environment``) and its own.
* The launcher decides paths, ports and batch sizes, and passes them as flags. The trainer reads all other keys from the
  frozen recipe in the run directory.
* Only processes that need a secret get it (``Process.keeps``).

    plan = with_processes(plan, recipe, resources, os.environ, names)
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.assets import Assets
from grpo_recipes.paths import CODE_VARIABLE, cache_root, find_code_root, module_command
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.preflight import FLASHINFER_SAMPLER
from grpo_recipes.plan.roles import describe_data, load_roles
from grpo_recipes.plan.server_nodes import split_server
from grpo_recipes.plan.time_limits import choose_collective_timeout, with_time_limits
from grpo_recipes.plan.types import Names, OnLoss, Plan, Process
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.process.startup import HIDDEN_PACKAGES
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import environment_keys
from grpo_recipes.recipe.learning import mixed_precision, served_dtype
from grpo_recipes.recipe.registry import EXTERNAL, LORA_RANKS, SYNC_METHODS
from grpo_recipes.recipe.rules import longest_completion
from grpo_recipes.recipe.trackers import SHARED_FOLDERS, TRACKERS
from grpo_recipes.recipe.vllm_flags import flag_words
from grpo_recipes.runs.rundir import SYNC_FOLDER

LOGS = "logs"  # folder of the logs if the variable LOGDIR is not set
_CPU_KV_CACHE_GIB = 1  # without a size in the plan
_HUB_LOGIN = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
_KEEP_ALIVE_SECONDS = 30 * 24 * 3600
_COLOCATED_SHARE = 0.3  # default fraction of a GPU's memory for vLLM if a trainer uses the same GPU
# Python and MPI settings of a login shell would change our processes, for example PMI_SIZE the CPU world size.
_REMOVED_PREFIXES = ("CONDA_", "PMI_", "PMIX_", "OMPI_")
_REMOVED = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
    # Our own variables. vLLM reads VLLM_PORT as the base of its internal ports and warns about unknown VLLM_ names.
    *(name for name in environment_keys() if name != "RUN_ROOT" and not name.startswith("WANDB_")),
    "VLLM_MODEL", "CONFIG", "CONFIG_FILE", "TRAIN_ENTRYPOINT", "MAXENT",
    HIDDEN_PACKAGES,  # with co-located vLLM, the trainer needs what another launch hid
    "VLLM_API_KEY",  # vLLM would require it in every request, in addition to the run's token
)  # fmt: skip


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the user's environment as every process of a run gets it.

    Variables of Python, conda, MPI and this project are removed. PATH starts with the folder of this Python, NO_PROXY
    contains the loopback, and a frozen copy of the code is set as PYTHONPATH.
    """
    variables = {
        name: value
        for name, value in environment.items()
        if name not in _REMOVED and not name.startswith(_REMOVED_PREFIXES)
    }
    if environment.get(CODE_VARIABLE):
        variables["PYTHONPATH"] = str(Path(environment[CODE_VARIABLE]) / "src")  # wins over the installed repository
    # Processes find the tools of the environment, for example ninja, although it is not activated.
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return variables | _make_no_proxy_variables(environment)


def run_environment(environment: Mapping[str, str], scratch: Scratch, run_dir: Path, mark: str) -> dict[str, str]:
    """Return the variables that a run adds to the user's ``environment`` for all its processes.

    Folders and settings that the user has exported are left out, except TMPDIR. ``scratch`` has the node-local folders,
    which are removed at the end of the attempt. ``mark`` is the value of GRPO_RUN, which identifies every process.
    """
    cache = cache_root(environment)
    defaults = {
        **hub_environment(environment),
        "XDG_CACHE_HOME": cache,
        "FLASHINFER_WORKSPACE_BASE": cache,
        "VLLM_CACHE_ROOT": cache / "vllm",
        "WANDB_DIR": run_dir,
        "WANDB_CACHE_DIR": cache / "wandb",
        "TENSORBOARD_LOGGING_DIR": run_dir / "tensorboard",
        "TRACKIO_DIR": run_dir.parent.absolute() / SHARED_FOLDERS["trackio"],
        "MLFLOW_TRACKING_URI": (run_dir.parent.absolute() / SHARED_FOLDERS["mlflow"]).as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",  # MLflow would require a database
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "SWANLAB_LOG_DIR": run_dir / "swanlab",
        "COMET_OFFLINE_DIRECTORY": run_dir / "comet",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the plan has the indices of nvidia-smi; CUDA counts the fastest GPU first
        "TORCHINDUCTOR_CACHE_DIR": scratch.disk / "inductor",
        "TRITON_CACHE_DIR": scratch.disk / "triton",
        "TORCH_EXTENSIONS_DIR": scratch.disk / "extensions",
        "TOKENIZERS_PARALLELISM": "false",
    }
    always = {
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": scratch.disk,
        "GRPO_RUN": mark,
        "GRPO_RUN_DIR": run_dir,
        "GRPO_TOKEN_FILE": scratch.token_file,
        "GRPO_SYNC_DIR": scratch.memory,
    }
    added = {name: value for name, value in defaults.items() if name not in environment}
    return {name: str(value) for name, value in {**added, **always}.items()}


def tracker_environment(recipe: Recipe, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which trackers get the recipe's names of project, team and group.

    W&B's variables get the values of the recipe's keys. Variables of other trackers are left out if exported.
    """
    names = {name: recipe[key] for name, key in environment_keys().items() if name.startswith("WANDB_")}
    if recipe.is_set("project"):
        names["WANDB_PROJECT"] = names["WANDB_PROJECT"] or recipe.run.project
    for tracker in (TRACKERS[name] for name in recipe.run.report_to or [] if name in TRACKERS):
        if tracker.project and not environment.keys() & {*tracker.project}:
            names[tracker.project[0]] = recipe.run.project
    return {name: value for name, value in names.items() if value}


def hub_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the hub's downloads and login, below the cache folder.

    The result is empty if the user has set HF_HOME. A login in the default folder stays valid.
    """
    if "HF_HOME" in environment:
        return {}
    variables = {"HF_HOME": str(cache_root(environment) / "huggingface")}
    login = Path(environment.get("HOME", "/")) / ".cache/huggingface/token"
    if login.is_file() and "HF_TOKEN_PATH" not in environment:
        variables["HF_TOKEN_PATH"] = str(login)  # the login stays valid although HF_HOME is another folder
    return variables


def _make_no_proxy_variables(environment: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return NO_PROXY and no_proxy with the user's hosts, the loopback and ``hosts``, which a proxy can't reach."""
    user_hosts = {name: environment.get(name, "").split(",") for name in ("NO_PROXY", "no_proxy")}
    direct = ("localhost", "127.0.0.1", "::1", *hosts)
    return {name: ",".join(dict.fromkeys([*filter(None, names), *direct])) for name, names in user_hosts.items()}


def _make_network_variables(
    plan: Plan, resources: Resources, environment: Mapping[str, str], node: int
) -> dict[str, str]:
    """Return the variables that a process on node ``node`` needs to reach the server and other nodes.

    The user's exported variables are kept, except VLLM_HOST_IP on several nodes. On a single node, only
    VLLM_HOST_IP is set, and only if there is a server.
    """
    variables = {}
    if plan.mode == "server":
        # Rank 0 opens the NCCL group at this address. By default, vLLM would choose the interface of the default route.
        # An exported address is used only on a single node, because it can't be right on several nodes.
        exported = environment.get("VLLM_HOST_IP", plan.server_host)
        variables["VLLM_HOST_IP"] = plan.nodes[node] if resources.nodes else exported
    if not resources.nodes:
        return variables
    variables |= _make_no_proxy_variables(environment, plan.nodes)
    interface = resources.nodes[node].interface
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if interface is not None and name not in environment:
            # By default, gloo uses the interface of the host name and NCCL uses the first interface. NCCL reads a name
            # without = as the beginning of a name.
            variables[name] = f"={interface}" if name.startswith("NCCL") else interface
    return variables


def _format_flags(values: Mapping[str, object]) -> list[str]:
    """Convert flags -> values to a list of argv words. True is a flag without a value, None and False omit the flag."""
    words = []
    for flag, value in values.items():
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def with_processes(
    plan: Plan, recipe: Recipe, resources: Resources, environment: Mapping[str, str], names: Names,
    sources: Assets | None = None,
) -> Plan:  # fmt: skip
    """Return a copy of the plan with its timeouts and ``processes``: argv, environment and log of every process.

    The processes work offline if all ``sources`` are on this machine. A large model lengthens the timeouts, except a
    ``vllm_server_timeout`` that the recipe sets. Each process gets only the secrets that its role needs.
    """
    plan = with_time_limits(plan, recipe, measure_weights(plan.model))
    plan = replace(plan, data=describe_data(recipe, plan))
    processes = [_plan_trainer(recipe, plan, environment, names, machine) for machine in range(len(plan.placement))]
    if plan.mode == "server":
        processes = [*split_server(_plan_server(recipe, plan, environment, names), plan), *processes]
    added = [process for part in load_roles() for process in part.processes(recipe, plan, names)]
    early = [process for process in added if process.before_trainers]
    processes = [*early, *processes, *(process for process in added if not process.before_trainers)]
    early_roles = tuple(process.role for process in early)
    offline = sources.offline_variables(environment) if sources else {}
    login = () if offline else _HUB_LOGIN
    trackers = [TRACKERS[name] for name in recipe.run.report_to or [] if name in TRACKERS]
    tracker_secrets = [secret for tracker in trackers for secret in tracker.secrets]
    reward_secrets = (*login, *recipe.rewards.environment)
    reward_secrets += ("OPENAI_API_KEY",) if plan.mode == EXTERNAL else ()  # the key of an external server
    # Callbacks are the user's code inside the trainer and may need any variable.
    secrets = {"server": login, "trainer": ("*",) if recipe.run.callbacks else (*reward_secrets, *tracker_secrets)}
    # If the server can't read this node's shared memory, weight files are in the run directory, not in scratch folders.
    is_remote = plan.bridge in ("file", "lora", "restart") and (plan.server_apart or plan.server_nodes > 1)
    if plan.mode == EXTERNAL:
        is_remote = urlsplit(recipe.server.base_url).hostname not in ("localhost", "127.0.0.1")
    sync_variables = {"GRPO_SYNC_DIR": str(names.run_dir / SYNC_FOLDER)} if is_remote else {}
    completed = []
    for process in processes:
        network = _make_network_variables(plan, resources, environment, process.node)
        variables = {**process.environment, **network, **sync_variables, **offline}
        log = process.log
        if log.startswith(f"{LOGS}/"):
            log = str(log_folder(environment) / Path(log).name)
        keeps = secrets.get(process.role, reward_secrets if process.handed else ())
        waits_for = (*process.after, *early_roles) if process.trains else process.after
        completed.append(replace(process, environment=variables, keeps=keeps, log=log, after=waits_for))
    return replace(plan, processes=completed)


def log_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the processes' logs: the variable LOGDIR with ~ expanded, otherwise ``logs``."""
    return Path(os.path.expanduser(environment.get("LOGDIR") or LOGS))


def _plan_server(recipe: Recipe, plan: Plan, environment: Mapping[str, str], names: Names) -> Process:
    """Build the ``Process`` of the vLLM server, all on the first node: argv, variables, log, the reaction to its loss.

    If the weight sync method can connect to a new server and no trainer shares its GPU, only a lost server
    restarts. Otherwise the trainers restart, too.
    """
    plugins = _make_plugin_variables(environment)
    variables = server_environment(plan.device, plan.ports.vllm_internal, environment) | plugins
    for part in load_roles():
        variables |= part.server_variables(recipe, names)
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(plan.server_gpus)
    if plan.device == "cpu" and recipe.server.tensor_parallel_size * plan.replicas > 1:
        # By default vLLM requires a NUMA node for each worker.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = environment.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if plan.device == "cpu" and plan.replicas > 1:
        # By default each replica starts a thread per core. The number of threads changes results in the last bits.
        variables["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", "1")
    host, port = plan.server_host, plan.ports.server
    argv = server_command(recipe, plan.model, names.served, host, port, plan.device, plan.max_num_seqs)
    if plan.replicas > 1:
        # A second API server would neither see the first one's requests nor load adapters.
        argv += ["--data-parallel-size", str(plan.replicas), "--api-server-count", "1"]
    if plan.kv_cache_bytes and requested_kv_cache(recipe) is None:
        argv += ["--kv-cache-memory-bytes", str(plan.kv_cache_bytes)]
    if not seeds_sampling(recipe.sampling.seed_server, plan.device == "cpu"):
        argv += ["--seed", str(recipe.batch.seed)]
    if plan.bridge == "lora":
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        argv += ["--enable-lora", "--max-lora-rank", str(next(rank for rank in LORA_RANKS if rank >= recipe.lora.r))]
    log = environment.get("SERVER_LOG") or f"logs/liv_vllm_{names.run}_{names.timestamp}.log"
    # On a GPU with a trainer, a restarted vLLM would find less free memory than planned.
    reconnects = plan.bridge is not None and plan.device in SYNC_METHODS[plan.bridge].reconnects and not plan.gpu_shared
    on_loss: OnLoss = "restart" if reconnects else "restart with trainers"
    return Process(
        "server", argv, variables, plan.server_gpus, log, ready="serving", on_loss=on_loss,
        renewed=plan.bridge == "restart", with_trainers=not reconnects,
    )  # fmt: skip


def requested_kv_cache(recipe: Recipe) -> int | None:
    """Return the bytes of vLLM's KV cache that the recipe's ``vllm_args`` request, or None."""
    size = (recipe.server.args or {}).get("kv_cache_memory_bytes")
    return None if size is None else int(size)


def measure_weights(model: str) -> int:
    """Return the bytes of the weights in a model's folder; 0 for a hub id or a folder without weights."""
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        if sizes := [path.stat().st_size for path in Path(model).glob(pattern)]:
            return sum(sizes)
    return 0


def _make_plugin_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return VLLM_PLUGINS with our plug-in added to the user's list; {} if it is not set: vLLM then loads all."""
    plugins = environment.get("VLLM_PLUGINS")
    return {"VLLM_PLUGINS": f"{plugins},grpo_recipes"} if plugins else {}


def vllm_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables to set in every process that contains vLLM: the server, or trainers with a co-located vLLM.

    They override exported variables, except VLLM_USE_FLASHINFER_SAMPLER, which keeps its exported value.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if device == "cuda":
        # FlashInfer's sampler returns no log-probs, so training never uses it, but vLLM's warm-up compiles it with
        # nvcc, which many machines lack. The user's environment wins. preflight.py checks for nvcc.
        variables[FLASHINFER_SAMPLER] = environment.get(FLASHINFER_SAMPLER, "0")
    if device == "cpu":
        # Compiling the sampler takes longer than all generations of a smoke run.
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(_CPU_KV_CACHE_GIB), "TORCHDYNAMO_DISABLE": "1"}
    return variables


def server_environment(device: str, internal_port: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the server gets in addition to the variables of every process.

    ``internal_port`` is the first of vLLM's internal ports, or None if vLLM chooses them.
    """
    variables = {
        **vllm_environment(device, environment),
        "VLLM_SERVER_DEV_MODE": "1",
        "GRPO_SERVER": "1",  # tells our plug-in, which co-located ranks load too, that it runs in a server
        # By default the server closes a connection after 5 s without a request, maybe just as a request arrives.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(_KEEP_ALIVE_SECONDS),
        "PYTHONSAFEPATH": "1",  # the engine processes import nothing from the working folder either
        "SPT_NOENV": "1",  # vLLM renames its processes. Without this, the new name overwrites their environ.
    }
    return variables if internal_port is None else {**variables, "VLLM_PORT": str(internal_port)}


def server_command(
    recipe: Recipe, model: str, name: str, host: str, port: int, device: str, max_num_seqs: int | None = None
) -> list[str]:
    """Return the argv of a vLLM server for ``model``, a folder or hub id, which requests address as ``name``.

    It runs ``vllm serve``: on GPUs by ``trl vllm-serve`` if that works here, otherwise by this project's module
    ``server.serve``. Without ``max_num_seqs``, the recipe's ``vllm_max_num_seqs`` or vLLM's default is used.
    """
    on_cpu = device == "cpu"
    program = module_command("grpo_recipes.server.serve")
    if not on_cpu and has_trl_serve():  # on CPU, only the module lets the plan set the KV cache
        program = [str(Path(sys.executable).with_name("trl")), "vllm-serve"]
    parallel, revision = recipe.server.tensor_parallel_size, recipe.model.revision
    # The last layer handles a request first.
    middleware = ("completions.AddServerEndpoints", "middleware.ReportActivity", "middleware.RequireToken")
    flags = {
        "--served-model-name": name,
        "--host": host,
        "--port": port,
        "--dtype": served_dtype(recipe.model.dtype, mixed_precision(recipe), recipe.server.weight_sync == "shared"),
        "--worker-extension-cls": "grpo_recipes.server.plugin.WeightReport",
        "--max-model-len": longest_sequence(recipe),
        "--max-num-seqs": max_num_seqs or recipe.server.max_num_seqs,
        "--tensor-parallel-size": parallel if parallel > 1 else None,
        "--trust-remote-code": recipe.model.trust_remote_code,
        # The server schedules prompts in their order, not in the order of their arrival.
        "--scheduling-policy": "priority" if seeds_sampling(recipe.sampling.seed_server, on_cpu) else None,
        "--gpu-memory-utilization": None if on_cpu else vllm_memory_fraction(recipe, "server"),
        "--enforce-eager": on_cpu or recipe.server.enforce_eager,
        # Prefilling a seeded prompt in parts crashes vLLM's CPU worker, because its random generators can't step back.
        # It happens as soon as the waiting prompts exceed one batch of the scheduler.
        "--no-enable-chunked-prefill": on_cpu,
        "--revision": revision if revision != "main" else None,
        "--model-impl": recipe.server.model_impl,
        # TRL's trainer needs these flags. `trl vllm-serve` adds them too, and vLLM uses the last value of a flag.
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1",
        "--enable-scale-out": True,  # the endpoint for prompts with images
        "--weight-transfer-config": None if on_cpu else json.dumps({"backend": "nccl"}),
    }
    layers = [text for layer in middleware for text in ("--middleware", f"grpo_recipes.server.{layer}")]
    return [*program, "--model", model, *layers, *_format_flags(flags), *flag_words(recipe.server.args)]


def has_trl_serve() -> bool:
    """Return whether ``trl vllm-serve`` works here: it needs TRL 1.x and a distribution named vllm."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return int(importlib.metadata.version("trl").split(".")[0]) < 2
    return False


def seeds_sampling(seed_server: bool | None, on_cpu: bool) -> bool:
    """Return whether each prompt gets its own sampling seed: ``seed_server``, or if that is None, only on CPU."""
    return on_cpu if seed_server is None else seed_server


def longest_sequence(recipe: Recipe) -> int | None:
    """Return the most tokens of a sequence: ``vllm_max_model_length``, or the recipe's limits of prompt and completion.

    None if one of these limits is missing. Then vLLM reserves KV cache for the model's longest sequence.
    """
    length = recipe.server.max_model_length
    prompt, completion = recipe.data.max_prompt_length, longest_completion(recipe)
    return length if length is not None or prompt is None or completion is None else int(prompt + completion)


def vllm_memory_fraction(recipe: Recipe, mode: str) -> float:
    """Return the fraction of a GPU's memory for vLLM: the key ``vllm_gpu_memory_utilization`` or a default.

    The default is smaller if a trainer uses the same GPU. ``mode`` is the mode of the plan.
    """
    shares = mode == "colocate" or "shared" in (recipe.server.weight_sync, recipe.server.gpu)
    if shares and not recipe.is_set("vllm_gpu_memory_utilization"):
        return _COLOCATED_SHARE
    return recipe.server.gpu_memory_utilization


def read_tee(environment: Mapping[str, str]) -> str | None:
    """Return ACC_TEE, the setting of accelerate that puts a rank's name before each line; None if it is not set.

    Raise ConfigError for a value that accelerate does not accept.
    """
    value = environment.get("ACC_TEE") or None
    if value not in (None, "0", "1", "2", "3"):
        raise config_error("ACC_TEE", f"expected 0, 1, 2 or 3, got '{value}'", "set 1 (stdout), 2 (stderr) or 3 (both)")
    return value


def _make_trainer_environment(recipe: Recipe, plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the trainers that are equal on every node, for example those of a co-located vLLM."""
    variables = {}
    if plan.device == "cpu":
        # The flag --use_cpu keeps accelerate on the CPU. ACCELERATE_USE_CPU would also make it ignore DeepSpeed, and
        # `accelerate launch --cpu` would ignore --num_processes.
        variables["DS_ACCELERATOR"] = "cpu"
    if plan.mode == "colocate":
        variables |= vllm_environment(plan.device, environment) | _make_plugin_variables(environment)
        if recipe.processes.torch_compile:
            variables.pop("TORCHDYNAMO_DISABLE", None)  # it would also disable compilation of the training
    elif plan.bridge != "nccl":
        variables[HIDDEN_PACKAGES] = "vllm"
    return variables


def _plan_trainer(recipe: Recipe, plan: Plan, environment: Mapping[str, str], names: Names, machine: int) -> Process:
    """Build the ``Process`` that runs ``accelerate launch`` for the trainers of one node.

    ``machine`` is the index of the node in the plan's placement. Sizes, paths and ports of the plan become flags of the
    entry script.
    """
    placed, machines = plan.placement[machine], len(plan.placement)
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(placed.gpus), "GRPO_NODE": str(placed.node)}
    variables["OMP_NUM_THREADS"] = str(plan.threads)  # as accelerate sets it, but before torch is imported
    variables |= _make_trainer_environment(recipe, plan, environment)
    flags = {
        "--config_file": plan.accelerate_file,
        # accelerate starts num_processes // num_machines processes here. Nodes may have different numbers of them.
        "--num_processes": placed.count * machines,
        "--num_machines": machines,
        "--machine_rank": machine,
        "--mixed_precision": mixed_precision(recipe),
        "--dynamo_backend": "no",
        "--fsdp_offload_params": "true" if recipe.processes.fsdp_cpu_offload else None,
        "--num_cpu_threads_per_process": plan.threads,
        "--tee": read_tee(environment),
        "--main_process_ip": plan.nodes[plan.placement[0].node] if machines > 1 else "127.0.0.1",
        "--main_process_port": plan.ports.main_process,
    }
    launch = module_command("grpo_recipes.launch.accelerate", *_format_flags(flags), str(find_code_root() / plan.entry))
    named = Path(environment.get("TRAINING_LOG") or f"logs/liv_train_{names.run}_{names.timestamp}.log")
    log = str(named.with_stem(named.stem + (f"_node{placed.node}" if placed.node else "")))
    after = ("server",) if plan.mode == "server" else ()
    decided: dict[str, object] = {  # flags of the entry script, which win over the frozen recipe
        "--config": names.run_dir / "recipe.yaml",
        "--output_dir": names.run_dir / "checkpoints",
        "--model_name_or_path": plan.model,
        "--teacher_model_name_or_path": plan.teacher,
        "--run_name": names.run_dir.name,
        "--per_device_train_batch_size": plan.batch.per_device,
        "--gradient_accumulation_steps": plan.batch.accumulation,
        "--use_cpu": str(plan.device == "cpu").lower(),
        "--ddp_timeout": choose_collective_timeout(recipe, plan),
        # The launcher publishes the model at the end. transformers would push with every save.
        "--push_to_hub": "false" if recipe.run.push_to_hub else None,
        "--per_device_eval_batch_size": plan.eval_batch,
        "--dataset_name": plan.dataset,
        "--eval_dataset_name": plan.eval_dataset,
    }
    if plan.mode == "server":
        decided |= {
            "--vllm_mode": "server",
            "--vllm_server_host": plan.server_host,
            "--vllm_server_port": plan.ports.server,
            "--vllm_group_port": plan.ports.group,
            "--weight_sync": plan.bridge,
            "--vllm_server_timeout": plan.server_timeout,
        }
    elif plan.mode == "colocate":
        decided |= {
            "--vllm_mode": "colocate",
            "--vllm_gpu_memory_utilization": vllm_memory_fraction(recipe, plan.mode),
            "--vllm_max_model_length": longest_sequence(recipe),
            "--vllm_max_num_seqs": plan.max_num_seqs,
        }
    for part in load_roles():
        decided |= part.trainer_flags(recipe, plan)
    argv = [*launch, *_format_flags(decided)]
    # Trainers need not wait for the server, unless both use one GPU: vLLM must measure the free memory first.
    beside = after if not plan.gpu_shared else ()
    return Process("trainer", argv, variables, placed.gpus, log, placed.node, after, beside)
