"""Checks of the login shell, its variables, and the code."""

from __future__ import annotations

import importlib.util
import locale
import os
import re
from pathlib import Path

from grpo_recipes.doctor.machine import Machine
from grpo_recipes.paths import home
from grpo_recipes.plan.environment import base_environment
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, READ_VARIABLES, nearest_of
from grpo_recipes.runs.finding import Finding, ok, problem, warning
from grpo_recipes.runs.rundir import code_state

# Variables of older versions that nothing reads any more, with what to set today.
UNREAD_VARIABLES = {
    "TRANSFORMERS_CACHE": "set CACHE_ROOT or HF_HOME",
    "HF_HUB_ENABLE_HF_TRANSFER": "set HF_XET_HIGH_PERFORMANCE=1",
    "HF_HUB_REQUEST_TIMEOUT": "set HF_HUB_DOWNLOAD_TIMEOUT",
    "TORCH_LOAD_WEIGHTS_ONLY": "unset it",
    "TORCH_FORCE_FULL_STATE_DICT": "unset it",
    "FLASH_ATTENTION_FORCE_DISABLED": "write attn_implementation: sdpa",
    "TRANSFORMERS_NO_FLASH_ATTN": "write attn_implementation: sdpa",
}
_LIBRARIES = ("libcudart.so", "libcudnn.so", "libnccl.so", "libcublas.so")


def login_shell(machine: Machine) -> Finding:
    """Variables of the login shell that would reach into a run (PYTHONPATH, CONDA_*, PMI_*): they are removed."""
    kept = base_environment(machine.environment)
    # what stands for a key is taken out as well, once it was read
    ours = {*READ_VARIABLES, *ENVIRONMENT_KEYS}
    removed = sorted(name for name in machine.environment if name not in kept and name not in ours)
    return ok(f"{', '.join(removed)} (removed from a run's processes)" if removed else "nothing that would reach in")


def old_variables(machine: Machine) -> Finding:
    """Variables that older versions read and today's do not."""
    found = {name: fix for name, fix in UNREAD_VARIABLES.items() if name in machine.environment}
    if not found:
        return ok("none")
    return warning(f"nothing reads {', '.join(found)}", "; ".join(f"{name}: {fix}" for name, fix in found.items()))


def vllm_variables(machine: Machine) -> Finding:
    """VLLM_* variables that neither we nor vLLM know."""
    ours = {*READ_VARIABLES, *ENVIRONMENT_KEYS, "VLLM_API_KEY"}
    given = sorted(name for name in machine.environment if name.startswith("VLLM_"))
    known = ours | _known_to_vllm() if given else ours
    unknown = [name for name in given if name not in known]
    if not unknown:
        return ok(", ".join(given) or "none set")
    near = [nearest_of(name, sorted(known)) for name in unknown]
    fixes = [
        f"{name}: did you mean {match}?" if match else f"unset {name}"
        for name, match in zip(unknown, near, strict=True)
    ]
    return warning(f"nothing reads {', '.join(unknown)}", "; ".join(fixes))


def _known_to_vllm() -> set[str]:
    """The names in vLLM's own list, read from its file: importing it takes torch."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    return set(re.findall(r'"(VLLM_\w+)"', (Path(spec.origin).parent / "envs.py").read_text()))


def libraries(machine: Machine) -> Finding:
    """CUDA libraries in LD_LIBRARY_PATH that would come before those the packages bring, and LD_PRELOAD."""
    preloaded = machine.environment.get("LD_PRELOAD", "")
    folders = [name for name in machine.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if name]
    shadowing = [folder for folder in folders if any(list(Path(folder).glob(f"{name}*")) for name in _LIBRARIES)]
    if shadowing and machine.flavour == "cuda":
        fix = "unload that module, or unset LD_LIBRARY_PATH: torch brings its own and needs the driver alone"
        return warning(f"CUDA libraries in LD_LIBRARY_PATH: {', '.join(shadowing)}", fix)
    if preloaded:
        return warning(f"LD_PRELOAD={preloaded}", "unset it unless you know that every process needs it")
    return ok("nothing before the packages' own")


def encoding(machine: Machine) -> Finding:
    """The encoding of files and output, UTF-8."""
    used = locale.getpreferredencoding(False)
    if used.replace("-", "").lower() != "utf8":
        return problem(used, "export LC_ALL=C.UTF-8 (or PYTHONUTF8=1)")
    return ok("UTF-8")


def code(machine: Machine) -> Finding:
    """Commit of the code, and whether it has changes that are not committed."""
    state = code_state()
    if state["commit"] is None:
        return warning(f"{home()} is no git repository: runs cannot name their code", "use a git clone")
    changed = ", changed since (the patch is kept with each run)" if state["dirty"] else ""
    return ok(f"{state['commit'][:12]}{changed}")
