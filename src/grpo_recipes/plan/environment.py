"""The environment of the processes a run starts: what is taken from the login shell, removed, and added."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from grpo_recipes.paths import CODE_VARIABLE, cache_root
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS

# A login shell's Python and MPI settings reach into ours: PMI_SIZE alone changes the world size of a CPU process.
_REMOVED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_REMOVED_PREFIXES = ("CONDA_", "PMI_", "PMIX_", "OMPI_")
# Ours; vLLM reads VLLM_PORT as the base of its internal ports and warns of names it does not know.
_LAUNCHER_ONLY = (
    "VLLM_MODEL", "VLLM_PORT", "VLLM_TP_SIZE", "VLLM_MAX_LEN", "VLLM_MEM_UTIL", "VLLM_MODE", "VLLM_GROUP_PORT",
    "VLLM_API_KEY",  # vLLM would want it of every request, beside the run's own token
    "MASTER_PORT", "RUN_NAME", "CONFIG", "CONFIG_FILE", "TRAIN_ENTRYPOINT", "MAXENT", "TRAIN_SEED", "ACCELERATOR",
    "MAXENT_OBJECTIVE", "MAXENT_TAU", "MAXENT_BETA", "MAXENT_Q_TEMPERATURE", "MAXENT_Q_EPS", "MAXENT_LENGTH_NORM_REF",
)  # fmt: skip


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the user's environment that children get."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in (*_REMOVED, *_LAUNCHER_ONLY) and not name.startswith(_REMOVED_PREFIXES)
    }
    if environment.get(CODE_VARIABLE):
        kept["PYTHONPATH"] = str(Path(environment[CODE_VARIABLE]) / "src")  # before the repository's of the environment
    # Tools of the environment, ninja above all, are found though nobody activated it.
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    for name in ("NO_PROXY", "no_proxy"):
        kept[name] = no_proxy(environment.get(name, ""))
    return kept


def run_environment(environment: Mapping[str, str], scratch: Scratch, run_dir: Path, mark: str) -> dict[str, str]:
    """Variables every process of the run gets beside its own.

    Args:
        environment: the user's.
        scratch: node-local folders of this attempt, removed at its end.
        run_dir: the run directory.
        mark: value of GRPO_RUN, by which every process of the run can be found.
    """
    cache = cache_root(environment)
    defaults = {
        **hub_environment(environment),
        "XDG_CACHE_HOME": str(cache),
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "WANDB_DIR": str(run_dir),
        "WANDB_CACHE_DIR": str(cache / "wandb"),
        "TENSORBOARD_LOGGING_DIR": str(run_dir / "tensorboard"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch.disk / "inductor"),
        "TRITON_CACHE_DIR": str(scratch.disk / "triton"),
        "TORCH_EXTENSIONS_DIR": str(scratch.disk / "extensions"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    added = {name: value for name, value in defaults.items() if name not in environment}
    return added | {
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch.disk),
        "GRPO_RUN": mark,
        "GRPO_RUN_DIR": str(run_dir),
        "GRPO_TOKEN_FILE": str(scratch.token),
        "GRPO_SYNC_DIR": str(scratch.memory),
    }


def wandb_environment(recipe: Recipe) -> dict[str, str]:
    """W&B's own variables for the recipe's keys; a variable the user exported has become the key's value."""
    keys = {name: key for name, key in ENVIRONMENT_KEYS.items() if name.startswith("WANDB_")}
    return {name: recipe[key] for name, key in keys.items() if recipe[key]}


def hub_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Where the hub's clients keep downloads and find the login, as far as the user did not say."""
    if "HF_HOME" in environment:
        return {}
    found = {"HF_HOME": str(cache_root(environment) / "huggingface")}
    login = Path(environment.get("HOME", "/")) / ".cache/huggingface/token"
    if login.is_file() and "HF_TOKEN_PATH" not in environment:
        found["HF_TOKEN_PATH"] = str(login)  # `hf auth login` outlives our choice of HF_HOME
    return found


def no_proxy(value: str, hosts: Iterable[str] = ()) -> str:
    """``NO_PROXY`` of the user with the loopback and ``hosts``: with a proxy our own server would never answer."""
    given = [host for host in value.split(",") if host]
    return ",".join(dict.fromkeys([*given, "localhost", "127.0.0.1", "::1", *hosts]))
