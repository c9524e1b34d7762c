"""The key ``environment_python``: another virtual environment with the Python that runs the environments. No torch.

A run records the packages that are installed there at its first start. A resume with other packages is rejected. They
are compared by version and, if pip or uv wrote one, by the list of their files (RECORD). Edits of a package after its
installation are not noticed.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from grpo_recipes.errors import Problem
from grpo_recipes.extensions.environments.arguments import EnvironmentKeys
from grpo_recipes.extensions.environments.libraries import LIBRARIES
from grpo_recipes.paths import display_path
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.user_code import REWARD_COPIES
from grpo_recipes.runs.rundir import write_json

_RECORD = "environment_packages.json"  # in the run's folder of copies
_NEW_VERIFIERS = Version("0.4.dev0")  # from here on, tasksets and harnesses replace environments and rollouts
_MOST_NAMES = 4  # packages in a message


def find_python(recipe: Callable[[str], Any]) -> Path | None:
    """Return the interpreter of ``environment_python``, absolute, or None without this key; ``recipe`` looks up a key.

    The interpreter may not exist. A link is not followed, because Python finds the virtual environment next to it.
    """
    text = recipe("environment_python")
    if text is None:
        return None
    path = Path(os.path.expanduser(text)).absolute()
    return path / "bin/python" if path.is_dir() else path


def find_library(python: Path, spec: str) -> str:
    """Return NAME-VERSION of the library of an environment, e.g. "verifiers-0.4.0" for verifiers:NAME.

    Return "" if it is not installed, or ``spec`` is the user's own class.
    """
    module = LIBRARIES.get(spec.partition(":")[0])
    names = (f"{module}-", f"{module}_core-")  # the package of openenv is openenv-core
    folders = python.parents[1].glob("lib/python*/site-packages/*.dist-info")
    packages = sorted(folder.name.removesuffix(".dist-info") for folder in folders)
    return next((package for package in packages if package.startswith(names)), "")


def find_missing_library(python: Path, spec: str) -> list[Problem]:
    """Return a problem if the interpreter exists, but an environment's library is missing or too new; [] otherwise."""
    kind, library = spec.partition(":")[0], find_library(python, spec)
    is_new = kind == "verifiers" and bool(library) and Version(library.partition("-")[2]) >= _NEW_VERIFIERS
    if not python.is_file() or (library and not is_new):
        return []
    package = "'verifiers<0.4'" if kind == "verifiers" else kind.replace("_", "-")
    fix = f"install it with: uv pip install --python {display_path(python)} {package}"
    message = f"'{kind}' is not installed in environment_python"
    if is_new:
        message = f"{library} in environment_python has only tasksets and harnesses (supported: 0.1.10 to 0.3)"
    return [Problem("environment", message, fix)]


def fingerprint_packages(python: Path) -> list[str]:
    """Return the installed packages of a virtual environment as "NAME-VERSION HASH", sorted.

    The hash covers the names and hashes of the package's files in its RECORD. It does not depend on the installer.
    """
    packages = python.parents[1].glob("lib/python*/site-packages/*.dist-info")
    return sorted(f"{folder.name.removesuffix('.dist-info')} {_hash_files(folder)}" for folder in packages)


def _hash_files(package: Path) -> str:
    """Return a short hash of the lines of a RECORD, without scripts and files that the installer makes."""
    record = package / "RECORD"
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    files = [line for line in lines if not line.startswith(("..", package.name)) and "__pycache__" not in line]
    return hashlib.sha256("\n".join(sorted(files)).encode()).hexdigest()[:12]


def record_packages(python: Path, copies: Path) -> None:
    """Write the packages of ``python`` to the run's folder ``copies``, unless an earlier start has done it."""
    if not (copies / _RECORD).exists():
        copies.mkdir(exist_ok=True)
        write_json(copies / _RECORD, fingerprint_packages(python))


def check_python(recipe: Recipe, environment: Any) -> Iterator[Problem]:
    """Yield a problem if the interpreter is missing, or its packages differ from those at the start of a resumed run.

    A new run with the recipe of another run may use other packages.
    """
    python, key = find_python(recipe.__getitem__), "environment_python"
    keys = EnvironmentKeys(recipe)
    if python is None or not (keys.environment or keys.mixture):
        return
    if not (python.is_file() and os.access(python, os.X_OK)):
        folder = python.parents[1] if python.parent.name == "bin" else python
        fix = f"make it with: python3 -m venv {display_path(folder)}"
        yield recipe.problem(key, f"environment_python: no Python at '{display_path(python)}'", fix)
        return
    record = recipe.path.parent / REWARD_COPIES / _RECORD
    if recipe.frozen and record.exists():
        changed = set(fingerprint_packages(python)) ^ set(json.loads(record.read_text()))
        names = sorted({package.partition(" ")[0] for package in changed})
        if names:
            listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
            message = f"versions or files of packages in environment_python changed since the run started ({listed})"
            fix = f"install the earlier packages, or delete {display_path(record)} to continue with the new ones"
            yield recipe.problem(key, message, fix)
