"""Give Atropos environments in other terminals access to a run: a token, and settings for ``ENVIRONMENT.py serve``.

The launch writes both files into the run directory, readable only by the user, and removes them when it ends. The token
only permits sampling (see ``server.middleware``). The settings are a file because other users can read command lines.

    python ENVIRONMENT.py serve --config runs/NAME/atropos_serve.yaml
"""

import os
import secrets
from pathlib import Path

import yaml

from grpo_recipes.extensions.atropos.arguments import AtroposKeys
from grpo_recipes.extensions.atropos.recipe import ENVIRONMENT_TOKEN, admits_environments, find_trajectory_limit
from grpo_recipes.paths import shell_path
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import ADAPTER

SETTINGS = "atropos_serve.yaml"
# total_steps of an environment, so that it runs until the training ends. max_steps would end it too early: run-api also
# counts the batches that the trainer drops.
ENDLESS = 10**12
_HEADER = """\
# Settings for Atropos environments that you start yourself: python ENVIRONMENT.py serve --config THIS_FILE
# This file contains a secret and is removed when the launch ends. --env.* flags override it.
# The server is listed twice: with a single server, most environments of atroposlib 0.4.0 ignore its address.
"""


def grant_access(recipe: Recipe, plan: Plan, names: Names) -> str | None:
    """Write the token and the settings into the run directory; return the shell command that starts an environment.

    Do nothing and return None if the recipe does not use Atropos, or the launch starts run-api and the environments
    itself.
    """
    if not admits_environments(recipe.__getitem__):
        return None
    token = secrets.token_hex(16)
    _write_private(names.run_dir / ENVIRONMENT_TOKEN, token)
    server = {
        "server_type": "vllm",
        "base_url": f"http://{plan.server_host}:{plan.ports.server}/v1",
        "api_key": token,
        "model_name": ADAPTER if plan.bridge == "lora" else names.served,
        "tokenizer_name": plan.model,
    }
    # Fields of the environment's configuration that it shares with the trainer.
    environment = {
        "tokenizer_name": plan.model,
        "group_size": recipe.batch.num_generations,
        "max_token_length": find_trajectory_limit(recipe.__getitem__),
        "rollout_server_url": str(AtroposKeys(recipe).api_url).rstrip("/"),
        "total_steps": ENDLESS,
    }
    settings = {
        "env": {name: value for name, value in environment.items() if value is not None},
        "openai": [server] * 2,
    }
    file = names.run_dir / SETTINGS
    _write_private(file, _HEADER + yaml.safe_dump(settings, sort_keys=False))
    return f"python ENVIRONMENT.py serve --config {shell_path(file)}"


def revoke_access(run_dir: Path) -> None:
    """Remove the token and the settings of ``grant_access`` from the run directory, if they exist."""
    for name in (ENVIRONMENT_TOKEN, SETTINGS):
        (run_dir / name).unlink(missing_ok=True)


def _write_private(path: Path, text: str) -> None:
    """Write a text to a new file that only the user can read, then rename it to ``path``, replacing an older file."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
