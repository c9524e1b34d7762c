"""What is wrong on a machine, in a recipe on it, or in a run that ended badly: one small function a check.

A check looks at one thing and returns a ``Finding``: ok, warning or problem, the value found, and what to do about it.
Its name is the function's with spaces, its description the first line of the docstring. ``examine`` runs checks side by
side within a time limit. None imports torch: ``--deep`` does so in a child process.
"""

from grpo_recipes.console.doctor import environment, hardware, recipes, training
from grpo_recipes.runs import endings

# In the order in which they are shown.
MACHINE = (
    environment.environment, environment.versions, environment.user_packages,
    hardware.gpus, hardware.slurm, hardware.disk, hardware.shared_memory,
    hardware.leftovers, hardware.limits, hardware.socket_paths, hardware.cores_and_memory,
    hardware.compiler, environment.hub_token, environment.hub, environment.wandb, environment.proxies,
    environment.ports, environment.host_name, environment.unread_variables, environment.libraries,
    environment.encoding, environment.code,
)  # fmt: skip
DEEP = (environment.imports,)
RECIPE = (recipes.gpu_plan, recipes.assets, recipes.space, recipes.training_memory)
RUN = (
    endings.ending, endings.server_log, endings.out_of_memory, endings.weights_guard, endings.known_messages,
    endings.checkpoints, *training.LEVELS, training.no_verdict, training.server_agreement, training.phases,
    training.start,
)  # fmt: skip
