"""The argv and environment of a plan's processes: the vLLM server, and the trainers."""

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
from grpo_recipes.paths import CODE_VARIABLE, cache_root, home, python_module
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.preflight import FLASHINFER_SAMPLER
from grpo_recipes.plan.roles import data_of, roles
from grpo_recipes.plan.types import MEETING_SECONDS, Names, OnLoss, Plan, Process
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import environment_keys
from grpo_recipes.recipe.learning import mixed_precision, served_dtype
from grpo_recipes.recipe.registry import EXTERNAL, LORA_RANKS, SYNC_METHODS
from grpo_recipes.recipe.rules import longest_completion
from grpo_recipes.runs.rundir import SYNC_FOLDER

LOGS = "logs"  # folder of the logs, where the variable LOGDIR names none
CPU_KV_CACHE_GIB = 1
_SECONDS_A_GB = 30.0  # more for each GB of weights: read at 50 MB/s, with time to compile and capture what is larger
_HUB_LOGIN = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
_SERVER_PORT_FLAGS = ("--port", "--vllm_server_port")  # of the server, of trainers
_KEEP_ALIVE_SECONDS = 30 * 24 * 3600
_COLOCATED_SHARE = 0.3  # of a GPU's memory for a vLLM that shares it with a trainer, unless the recipe says another
# A login shell's Python and MPI settings reach into ours: PMI_SIZE alone changes the world size of a CPU process.
_REMOVED_PREFIXES = ("CONDA_", "PMI_", "PMIX_", "OMPI_")
_REMOVED = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV",
    # Ours; vLLM reads VLLM_PORT as the base of its internal ports and warns of names it does not know.
    *(name for name in environment_keys() if name != "RUN_ROOT" and not name.startswith("WANDB_")),
    "VLLM_MODEL", "CONFIG", "CONFIG_FILE", "TRAIN_ENTRYPOINT", "MAXENT",
    "VLLM_API_KEY",  # vLLM would want it of every request, beside the run's own token
)  # fmt: skip


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the user's environment that every process of a run gets."""
    removed = {name for name in environment if name in _REMOVED or name.startswith(_REMOVED_PREFIXES)}
    kept = {name: value for name, value in environment.items() if name not in removed}
    if environment.get(CODE_VARIABLE):
        kept["PYTHONPATH"] = str(Path(environment[CODE_VARIABLE]) / "src")  # before the repository's of the environment
    # Tools of the environment, ninja above all, are found though nobody activated it.
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return kept | _no_proxy(environment)


def run_environment(environment: Mapping[str, str], scratch: Scratch, run_dir: Path, mark: str) -> dict[str, str]:
    """Return the variables every process of an attempt gets beside its own and those of the user's ``environment``.

    ``scratch`` has the node-local folders that are removed at the attempt's end; by ``mark``, the value of GRPO_RUN,
    every process of the run can be found.
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
        "GRPO_TOKEN_FILE": scratch.token,
        "GRPO_SYNC_DIR": scratch.memory,
    }
    added = {name: value for name, value in defaults.items() if name not in environment}
    return {name: str(value) for name, value in {**added, **always}.items()}


def wandb_environment(recipe: Recipe) -> dict[str, str]:
    """Return W&B's own variables for the recipe's keys; a variable the user exported has become the key's value."""
    return {name: recipe[key] for name, key in environment_keys().items() if name.startswith("WANDB_") and recipe[key]}


def hub_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return where the hub's clients keep downloads and find the login, as far as the user did not say."""
    if "HF_HOME" in environment:
        return {}
    found = {"HF_HOME": str(cache_root(environment) / "huggingface")}
    login = Path(environment.get("HOME", "/")) / ".cache/huggingface/token"
    if login.is_file() and "HF_TOKEN_PATH" not in environment:
        found["HF_TOKEN_PATH"] = str(login)  # `hf auth login` outlives our choice of HF_HOME
    return found


def _no_proxy(environment: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """Return NO_PROXY with the loopback and ``hosts``: through a proxy our own server would never answer."""
    given = {name: environment.get(name, "").split(",") for name in ("NO_PROXY", "no_proxy")}
    direct = ("localhost", "127.0.0.1", "::1", *hosts)
    return {name: ",".join(dict.fromkeys([*filter(None, user), *direct])) for name, user in given.items()}


def _network(
    plan: Plan, resources: Resources, environment: Mapping[str, str], names: Names, node: int
) -> dict[str, str]:
    """Return what a process of a node needs to reach the server, and the processes of other nodes."""
    variables = {}
    if plan.mode == "server":
        # Where rank 0 offers the NCCL group: TRL asks vLLM, which would take the interface of the default route. What
        # the user exported can be right on one node alone.
        exported = environment.get("VLLM_HOST_IP", plan.server_host)
        variables["VLLM_HOST_IP"] = plan.nodes[node] if resources.nodes else exported
    if not resources.nodes:
        return variables
    variables |= _no_proxy(environment, plan.nodes)
    interface = resources.nodes[node].interface
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if interface is not None and name not in environment:
            variables[name] = interface  # left alone, gloo takes that of the host's name, NCCL the first it finds
    return variables


def _sync_folder(recipe: Recipe, plan: Plan, names: Names) -> dict[str, str]:
    """Return the folder of the weights where a server on another machine reads them: shared memory ends at the node."""
    apart = plan.bridge in ("file", "lora", "restart") and plan.server_apart
    if plan.mode == EXTERNAL:
        apart = urlsplit(recipe["vllm_server_base_url"]).hostname not in ("localhost", "127.0.0.1")
    return {"GRPO_SYNC_DIR": str(names.run_dir / SYNC_FOLDER)} if apart else {}


def _flags(values: Mapping[str, object]) -> list[str]:
    """Return flags with their values: True is a flag without one, None or False leaves the flag out."""
    given = {flag: value for flag, value in values.items() if value is not None and value is not False}
    return [text for flag, value in given.items() for text in ([flag] if value is True else [flag, str(value)])]


def with_processes(
    plan: Plan, recipe: Recipe, resources: Resources, environment: Mapping[str, str], names: Names,
    sources: Assets | None = None,
) -> Plan:  # fmt: skip
    """Return the plan with its processes, which stay off the hub once all ``sources`` are here."""
    size = weight_bytes(plan.model)
    more = round(_SECONDS_A_GB * size / 1e9)
    ready = recipe["vllm_server_timeout"] + (0 if recipe.is_set("vllm_server_timeout") else more)
    plan = replace(plan, weight_bytes=size, server_timeout=ready, meeting_timeout=MEETING_SECONDS + more)
    plan = replace(plan, data=data_of(recipe, plan))
    processes = [_trainer(recipe, plan, environment, names, machine) for machine in range(len(plan.placement))]
    if plan.mode == "server":
        processes = [_server(recipe, plan, environment, names), *processes]
    added = [process for part in roles() for process in part.processes(recipe, plan, names)]
    early = [process for process in added if process.before_trainers]
    processes = [*early, *processes, *(process for process in added if not process.before_trainers)]
    after = tuple(process.role for process in early)
    offline = sources.offline_variables(environment) if sources else {}
    login = () if offline else _HUB_LOGIN
    wandb = ("WANDB_API_KEY",) if "wandb" in (recipe["report_to"] or []) else ()
    handed = (*login, *recipe["reward_environment"])
    handed += ("OPENAI_API_KEY",) if plan.mode == EXTERNAL else ()  # of a server that somebody started
    # Callbacks are the user's code in the trainer's own process: nobody knows what they need.
    kept = {"server": login, "trainer": ("*",) if recipe["callbacks"] else (*handed, *wandb)}

    def complete(one: Process) -> Process:
        network = _network(plan, resources, environment, names, one.node) | _sync_folder(recipe, plan, names)
        variables = {**one.environment, **network, **offline}
        log = one.log if not one.log.startswith(f"{LOGS}/") else str(log_folder(environment) / Path(one.log).name)
        keeps = kept.get(one.role, handed if one.handed else ())
        waits_for = (*one.after, *after) if one.trains else one.after
        return replace(one, environment=variables, keeps=keeps, log=log, after=waits_for)

    return replace(plan, processes=[complete(one) for one in processes])


def log_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the logs that no variable names."""
    return Path(os.path.expanduser(environment.get("LOGDIR") or LOGS))


def _server(recipe: Recipe, plan: Plan, environment: Mapping[str, str], names: Names) -> Process:
    """Return the vLLM server, on the first node."""
    variables = server_environment(plan.device, plan.ports.vllm_internal, environment) | _plugins(environment)
    for part in roles():
        variables |= part.server_variables(recipe, names)
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(plan.server_gpus)
    if plan.device == "cpu" and recipe["vllm_tensor_parallel_size"] > 1:
        # By itself vLLM wants a NUMA node for each worker, and ends where there are fewer.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = environment.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    host, port = plan.server_host, plan.ports.server
    argv = server_command(recipe, plan.model, names.served, host, port, plan.device, plan.max_num_seqs)
    if plan.bridge == "lora":
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        argv += ["--enable-lora", "--max-lora-rank", str(next(one for one in LORA_RANKS if one >= recipe["lora_r"]))]
    log = environment.get("SERVER_LOG") or f"logs/liv_vllm_{names.run}_{names.timestamp}.log"
    # On a GPU that a trainer uses, vLLM would start again with less free memory than it was planned for.
    alone = plan.bridge is not None and plan.device in SYNC_METHODS[plan.bridge].reconnects and not plan.gpu_shared
    on_loss: OnLoss = "restart" if alone else "restart with trainers"
    renewed = plan.bridge == "restart"
    return Process(
        "server", argv, variables, plan.server_gpus, log, ready="serving", on_loss=on_loss, renewed=renewed,
        with_trainers=not alone,
    )  # fmt: skip


def weight_bytes(model: str) -> int:
    """Return the bytes of the weights in a model's folder, 0 where it is not here."""
    kinds = ("*.safetensors", "pytorch_model*.bin")
    found = ([path.stat().st_size for path in Path(model).glob(kind)] for kind in kinds)
    return sum(next(filter(None, found), []))


def _plugins(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the user's VLLM_PLUGINS with ours; unset, vLLM loads every plug-in that is installed, ours too."""
    given = environment.get("VLLM_PLUGINS")
    return {"VLLM_PLUGINS": f"{given},grpo_recipes"} if given else {}


def vllm_environment(device: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process with vLLM inside, a server's or a trainer's."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if device == "cuda":
        # FlashInfer's sampler returns no log-probs, so training never uses it, but vLLM's warm-up compiles it with
        # nvcc, which many machines lack. A value of the user's environment wins; see preflight.py.
        variables[FLASHINFER_SAMPLER] = environment.get(FLASHINFER_SAMPLER, "0")
    if device == "cpu":
        # The sampler is compiled with the first batch, which takes longer than a smoke run samples in all.
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GIB), "TORCHDYNAMO_DISABLE": "1"}
    return variables


def server_environment(device: str, internal_port: int | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server beyond the run's own; vLLM numbers its own ports from ``internal_port``."""
    variables = {
        **vllm_environment(device, environment),
        "VLLM_SERVER_DEV_MODE": "1",
        "GRPO_SERVER": "1",  # to our plug-in, which vLLM loads inside colocated ranks too
        # By default the server closes a connection after 5 s without a request; the next may come at that moment.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(_KEEP_ALIVE_SECONDS),
        "PYTHONSAFEPATH": "1",  # its engine processes, too, import nothing from the working folder
        "SPT_NOENV": "1",  # vLLM renames its processes; without this the new name overwrites their environ
    }
    return variables if internal_port is None else {**variables, "VLLM_PORT": str(internal_port)}


def server_command(
    recipe: Recipe, model: str, name: str, host: str, port: int, device: str, max_num_seqs: int | None = None
) -> list[str]:
    """Return the argv of a server of ``model``, a folder or hub id, under the run's own ``name``.

    ``max_num_seqs`` comes from the plan. Without a plan it is the recipe's ``vllm_max_num_seqs``, or vLLM's default.
    vLLM for CPU is the distribution vllm-cpu. There `vllm serve` (and so `trl vllm-serve`, which runs it) does not find
    its own version. The module behind both accepts the same flags.
    """
    on_cpu, implementation = device == "cpu", recipe["vllm_model_impl"]
    program = python_module("grpo_recipes.server.serve", "--model", model)
    needed = {  # by TRL's trainer; `trl vllm-serve` adds these itself
        "--model-impl": implementation,
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": "-1",
        "--weight-transfer-config": None if on_cpu else json.dumps({"backend": "nccl"}),
    }
    if has_trl_serve():
        trl = str(Path(sys.executable).with_name("trl"))
        program, needed = [trl, "vllm-serve", "--model", model, "--vllm-model-impl", implementation], {}
    parallel, revision = recipe["vllm_tensor_parallel_size"], recipe["model_revision"]
    # The last is the first that a request meets.
    middleware = ("completions.AnswerInArrays", "middleware.ReportActivity", "middleware.RequireToken")
    flags = {
        "--served-model-name": name,
        "--host": host,
        "--port": port,
        "--dtype": served_dtype(recipe["dtype"], mixed_precision(recipe), recipe["weight_sync"] == "shared"),
        "--worker-extension-cls": "grpo_recipes.server.plugin.WeightReport",
        "--max-model-len": longest_sequence(recipe),
        "--max-num-seqs": max_num_seqs or recipe["vllm_max_num_seqs"],
        "--tensor-parallel-size": parallel if parallel > 1 else None,
        "--trust-remote-code": recipe["trust_remote_code"],
        # The order of prompts, not that of their arrival.
        "--scheduling-policy": "priority" if seeds_sampling(recipe["seed_server"], on_cpu) else None,
        "--gpu-memory-utilization": None if on_cpu else gpu_share(recipe, "server"),
        "--enforce-eager": on_cpu or recipe["vllm_enforce_eager"],
        # A prompt prefilled in parts ends vLLM's CPU worker where its request has a seed (its generators cannot step
        # back), and that happens as soon as the prompts of a moment exceed one batch of the scheduler.
        "--no-enable-chunked-prefill": on_cpu,
        "--revision": revision if revision != "main" else None,
        **needed,
    }
    layers = [text for layer in middleware for text in ("--middleware", f"grpo_recipes.server.{layer}")]
    return [*program, *layers, *_flags(flags)]


def with_server_port(process: Process, host: str, before: int, port: int) -> Process:
    """Return a process whose argv has the server on ``port`` in the place of the port ``before``."""

    def changed(flag: str, word: str) -> str:
        if word == f"http://{host}:{before}":
            return f"http://{host}:{port}"
        return str(port) if flag in _SERVER_PORT_FLAGS and word == str(before) else word

    words = zip(["", *process.argv], process.argv, strict=False)
    return replace(process, argv=[changed(flag, word) for flag, word in words])


def has_trl_serve() -> bool:
    """Return whether ``trl vllm-serve`` works here: with TRL 1.x, and a distribution that is named vllm."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return int(importlib.metadata.version("trl").split(".")[0]) < 2
    return False


def seeds_sampling(seed_server: bool | None, on_cpu: bool) -> bool:
    """Return whether every prompt has a sampling seed of its own: what the recipe says, by default on CPU only."""
    return on_cpu if seed_server is None else seed_server


def longest_sequence(recipe: Recipe) -> int | None:
    """Return the tokens the server must take: vllm_max_model_length, else the sum of the recipe's own limits, if any.

    Left to the model's configuration, vLLM would reserve KV cache for sequences that cannot come.
    """
    given, prompt, completion = recipe["vllm_max_model_length"], recipe["max_prompt_length"], longest_completion(recipe)
    return given if given is not None or prompt is None or completion is None else int(prompt + completion)


def gpu_share(recipe: Recipe, mode: str) -> float:
    """Return the fraction of a GPU's memory that vLLM may take: less of a GPU that trains too."""
    shares = mode == "colocate" or "shared" in (recipe["weight_sync"], recipe["vllm_gpu"])
    if shares and not recipe.is_set("vllm_gpu_memory_utilization"):
        return _COLOCATED_SHARE
    return float(recipe["vllm_gpu_memory_utilization"])


def tee(environment: Mapping[str, str]) -> str | None:
    """Return ACC_TEE, by which accelerate puts a rank's name before each of its lines; None where it is unset."""
    given = environment.get("ACC_TEE") or None
    if given not in (None, "0", "1", "2", "3"):
        raise config_error(
            "ACC_TEE", f"'{given}' names no output", "write 1 (output), 2 (errors), 3 (both), or unset it"
        )
    return given


def _trainer_environment(recipe: Recipe, plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of trainers on every node."""
    variables = {}
    if plan.device == "cpu":
        # use_cpu alone keeps accelerate on the CPU: ACCELERATE_USE_CPU would also make it ignore DeepSpeed, and
        # `accelerate launch --cpu` start one process whatever --num_processes says.
        variables["DS_ACCELERATOR"] = "cpu"
    if plan.mode == "colocate":
        variables |= vllm_environment(plan.device, environment) | _plugins(environment)
        if recipe["torch_compile"]:
            variables.pop("TORCHDYNAMO_DISABLE", None)  # it would leave the training uncompiled too
    return variables


def _trainer(recipe: Recipe, plan: Plan, environment: Mapping[str, str], names: Names, machine: int) -> Process:
    """Return the trainers of one node, the ``machine``-th of those that train: one ``accelerate launch``."""
    placed, machines = plan.placement[machine], len(plan.placement)
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(placed.gpus), "GRPO_NODE": str(placed.node)}
    variables |= _trainer_environment(recipe, plan, environment)
    flags = {
        "--config_file": plan.accelerate_file,
        # accelerate starts num_processes // num_machines here, and torch adds the machines up: they may be unequal.
        "--num_processes": placed.count * machines,
        "--num_machines": machines,
        "--machine_rank": machine,
        "--mixed_precision": mixed_precision(recipe),
        "--dynamo_backend": "no",
        "--fsdp_offload_params": "true" if recipe["fsdp_cpu_offload"] else None,
        "--num_cpu_threads_per_process": plan.threads,
        "--tee": tee(environment),
        "--main_process_ip": plan.nodes[plan.placement[0].node] if machines > 1 else "127.0.0.1",
        "--main_process_port": plan.ports.main_process,
    }
    launch = python_module("grpo_recipes.launch.accelerate", *_flags(flags), str(home() / plan.entry))
    named = Path(environment.get("TRAINING_LOG") or f"logs/liv_train_{names.run}_{names.timestamp}.log")
    log = str(named.with_stem(named.stem + (f"_node{placed.node}" if placed.node else "")))
    after = ("server",) if plan.mode == "server" else ()
    decided: dict[str, object] = {  # by the launcher: flags of the entry script beside the frozen recipe
        "--config": names.run_dir / "recipe.yaml",
        "--output_dir": names.run_dir / "checkpoints",
        "--model_name_or_path": plan.model,
        "--run_name": names.run_dir.name,
        "--per_device_train_batch_size": plan.batch.per_device,
        "--gradient_accumulation_steps": plan.batch.accumulation,
        "--use_cpu": str(plan.device == "cpu").lower(),
        # The launcher publishes at the end: transformers would push with every save.
        "--push_to_hub": "false" if recipe["push_to_hub"] else None,
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
            "--vllm_gpu_memory_utilization": gpu_share(recipe, plan.mode),
            "--vllm_max_model_length": longest_sequence(recipe),
            "--vllm_max_num_seqs": plan.max_num_seqs,
        }
    for part in roles():
        decided |= part.trainer_flags(recipe, plan)
    argv = [*launch, *_flags(decided)]
    return Process("trainer", argv, variables, placed.gpus, log, placed.node, after, _beside(plan))


def _beside(plan: Plan) -> tuple[str, ...]:
    """Return the roles that trainers start next to; on the server's GPU they would change the memory it measures."""
    return ("server",) if plan.mode == "server" and not plan.gpu_shared else ()
