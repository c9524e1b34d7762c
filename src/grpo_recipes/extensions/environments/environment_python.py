"""The key ``environment_python``: another virtual environment, whose Python runs the environments. No torch.

A run records the packages that are installed there at its first start. A resume with other packages is rejected.
"""

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


def list_packages(python: Path) -> list[str]:
    """Return the installed packages of a virtual environment as NAME-VERSION, e.g. "verifiers-0.4.0", sorted."""
    folders = python.parents[1].glob("lib/python*/site-packages/*.dist-info")
    return sorted(folder.name.removesuffix(".dist-info") for folder in folders)


def find_library(python: Path, spec: str) -> str:
    """Return NAME-VERSION of the library of an environment, e.g. "verifiers-0.4.0" for verifiers:NAME.

    Return "" if it is not installed, or ``spec`` is the user's own class.
    """
    module = LIBRARIES.get(spec.partition(":")[0])
    names = (f"{module}-", f"{module}_core-")  # the package of openenv is openenv-core
    return next((package for package in list_packages(python) if package.startswith(names)), "")


def find_missing_library(python: Path, spec: str) -> list[Problem]:
    """Return a problem if the interpreter exists, but an environment's library is missing or too new; [] otherwise."""
    kind, library = spec.partition(":")[0], find_library(python, spec)
    is_new = kind == "verifiers" and bool(library) and Version(library.partition("-")[2]) >= _NEW_VERIFIERS
    if not python.is_file() or (library and not is_new):
        return []
    package = "'verifiers<0.4'" if kind == "verifiers" else kind.replace("_", "-")
    fix = f"install it with: uv pip install --python {display_path(python)} {package}"
    message = f"{library} in environment_python" if is_new else f"'{kind}' is not installed in environment_python"
    return [Problem("environment", f"{message}{' has another interface' if is_new else ''}", fix)]


def record_packages(python: Path, copies: Path) -> None:
    """Write the packages of ``python`` to the run's folder ``copies``, unless an earlier start has done it."""
    if not (copies / _RECORD).exists():
        copies.mkdir(exist_ok=True)
        write_json(copies / _RECORD, list_packages(python))


def check_python(recipe: Recipe, environment: Any) -> Iterator[Problem]:
    """Yield a problem if the interpreter is missing, or its packages differ from those at the start of this run."""
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
    if record.exists():
        changed = sorted(set(list_packages(python)) ^ set(json.loads(record.read_text())))
        if changed:
            names = ", ".join(changed[:_MOST_NAMES]) + (", ..." if len(changed) > _MOST_NAMES else "")
            message = f"packages of environment_python changed since the run started ({names})"
            yield recipe.problem(key, message, f"restore them, or delete {display_path(record)} to use the new ones")
