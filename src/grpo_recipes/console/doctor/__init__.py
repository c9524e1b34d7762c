"""Checks of a machine, of a recipe on this machine, or of a failed run; each check is a small function.

A check returns a ``Finding``: status (ok, warning or problem), the value, and a fix. The name of a check is the name of
its function with spaces, and its description is the first line of the docstring. This file lists the checks, and
``examine.examine`` runs them in parallel within a time limit. No check imports torch; ``--deep`` imports it in a child
process.
"""

from grpo_recipes.console.doctor import environment, hardware, recipes, training
from grpo_recipes.runs import endings

# In the order of the output.
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
