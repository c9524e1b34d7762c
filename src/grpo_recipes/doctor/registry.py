"""Every check there is, in the order they are shown. A check is called what its function is called."""

from __future__ import annotations

from collections.abc import Callable

from grpo_recipes.doctor import (
    access,
    cluster,
    deep,
    devices,
    limits,
    packages,
    recipes,
    shell,
    storage,
    training,
)
from grpo_recipes.doctor.machine import Machine
from grpo_recipes.doctor.recipes import Case
from grpo_recipes.runs import endings
from grpo_recipes.runs.find import RunFiles
from grpo_recipes.runs.finding import Finding

MACHINE: tuple[Callable[[Machine], Finding], ...] = (
    packages.environment,
    packages.python,
    packages.versions,
    packages.modules,
    packages.user_packages,
    packages.documentation,
    devices.driver,
    devices.gpus,
    devices.gpu_memory,
    devices.gpu_health,
    storage.disk,
    storage.home_folder,
    storage.quota,
    storage.shared_memory,
    storage.leftovers,
    storage.clock,
    limits.open_files,
    limits.processes,
    limits.locked_memory,
    limits.core_files,
    limits.other_limits,
    limits.socket_paths,
    limits.cores,
    limits.memory,
    access.hub_token,
    access.wandb_login,
    access.proxies,
    access.hub,
    access.wandb_host,
    access.ports,
    access.host_name,
    cluster.slurm,
    cluster.nodes,
    cluster.time_limit,
    cluster.job,
    shell.login_shell,
    shell.old_variables,
    shell.vllm_variables,
    shell.libraries,
    shell.encoding,
    shell.code,
)
DEEP: tuple[Callable[[Machine], Finding], ...] = (deep.torch, deep.trl, deep.vllm)
RECIPE: tuple[Callable[[Case], Finding], ...] = (
    recipes.gpu_plan,
    recipes.model,
    recipes.datasets,
    recipes.gated,
    recipes.checkpoint_space,
    recipes.weights_way,
    recipes.training_memory,
)
RUN: tuple[Callable[[RunFiles], Finding], ...] = (
    endings.ending,
    endings.server_log,
    endings.out_of_memory,
    endings.weights_guard,
    endings.known_messages,
    endings.checkpoints,
    training.reward,
    training.truncated,
    training.no_verdict,
    training.kl,
    training.entropy,
    training.gradients,
    training.server_agreement,
    training.phases,
    training.start,
)
