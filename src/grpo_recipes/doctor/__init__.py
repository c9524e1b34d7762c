"""What is wrong on a machine, in a recipe on it, or in a run that ended badly: one small function a check.

A check looks at one thing and returns a ``Finding``: ok, warning or problem, the value found, and what to do about it.
Its name is the function's with spaces, its description the first line of the docstring. ``examine`` runs checks side by
side within a time limit. None imports torch: ``--deep`` does so in a child process.
"""

from __future__ import annotations

from grpo_recipes.doctor import access, devices, environment, limits, recipes, training
from grpo_recipes.runs import endings

# In the order in which they are shown.
MACHINE = (
    environment.environment, environment.python, environment.versions, environment.modules, environment.user_packages,
    environment.documentation,
    devices.driver, devices.gpus, devices.gpu_memory, devices.gpu_health,
    limits.disk, limits.home_folder, limits.quota, limits.shared_memory, limits.leftovers, limits.clock,
    limits.open_files, limits.processes, limits.locked_memory, limits.core_files, limits.other_limits,
    limits.socket_paths, limits.cores, limits.memory,
    access.hub_token, access.wandb_login, access.proxies, access.hub, access.wandb_host, access.ports,
    access.host_name,
    devices.slurm, devices.nodes, devices.time_limit, devices.job,
    environment.login_shell, environment.old_variables, environment.vllm_variables, environment.libraries,
    environment.encoding, environment.code,
)  # fmt: skip
DEEP = (environment.torch, environment.trl, environment.vllm)
RECIPE = (
    recipes.gpu_plan, recipes.model, recipes.datasets, recipes.gated, recipes.checkpoint_space, recipes.weights_way,
    recipes.training_memory,
)  # fmt: skip
RUN = (
    endings.ending, endings.server_log, endings.out_of_memory, endings.weights_guard, endings.known_messages,
    endings.checkpoints,
    training.reward, training.truncated, training.no_verdict, training.kl, training.entropy, training.gradients,
    training.server_agreement, training.phases, training.start,
)  # fmt: skip
