"""Import the modules that a server (or a trainer) of a run imports, so that Python compiles them during the set-up.

    python scripts/compile_imports.py server|trainer

Compiling all packages takes four times as long, and a run imports a quarter of their modules. A module that can't be
imported here, for example without a GPU, is left out: its first use compiles it.

The set-up runs both at the same time. So that they don't compile the same modules twice, the trainer's begins with
packages that the server's imports late, or never.
"""

import contextlib
import importlib
import sys

MODULES = {
    "server": (
        "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.gpu_worker", "grpo_recipes.server.serve",
    ),
    "trainer": (
        "sympy", "pandas", "networkx", "datasets", "wandb", "openai", "transformers",
        "grpo_recipes.trainers.entry", "grpo_recipes.cli", "transformers.models.qwen2.modeling_qwen2",
    ),
}  # fmt: skip

if __name__ == "__main__":
    for name in MODULES[sys.argv[1]]:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
