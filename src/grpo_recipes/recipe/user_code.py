"""The user's own functions and classes, named in a recipe as ``module:name`` or ``file.py:name``.

Paths are relative to the folder of the launch, whose modules are found too. Only ``load_object`` runs the user's code;
what ``grpo check`` needs is read from the source. No torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_recipes.errors import ConfigError, Problem


def split_spec(spec: str) -> tuple[str, str]:
    """Return ``file.py`` or module, and the name in it, empty where there is none."""
    place, _, name = spec.rpartition(":")
    return (place, name) if place else (spec, "")


def problem_with(spec: str, where: str) -> Problem | None:
    """Return what keeps ``module:name`` or ``file.py:name``, written at ``where``, from being loaded.

    Only its source is read, not run.
    """
    place, name = split_spec(spec)
    if not name.isidentifier():
        return Problem(where, f"'{spec}' names nothing in a module", "write module:name or file.py:name")
    path = _find_source(place)
    if path is None:
        return _not_found(place, where)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return Problem(where, f"'{path.name}{line}' is not valid Python ({error.args[0]})", "correct it there")
    except (RecursionError, MemoryError):  # as Python's own parser says it
        return Problem(where, f"'{path.name}' is not valid Python (too deeply nested)", "correct it there")
    except OSError as error:
        return Problem(where, f"'{path}' cannot be read ({error.strerror})", "make it readable")
    names = set(_names(tree.body))
    if name in names or "*" in names:
        return None
    own = sorted(found for found in names if not found.startswith("_"))
    fix = f"write one of {', '.join(own[:8])}" if own else f"define {name} there"
    return Problem(where, f"'{path.name}' has no '{name}'", fix)


def source_path(spec: str) -> Path | None:
    """Return the file that ``spec`` names something in, or None."""
    return _find_source(split_spec(spec)[0])


def source_file(spec: str) -> Path:
    """Return the file that ``spec`` names something in; a ConfigError where there is none."""
    path = source_path(spec)
    if path is None:
        raise ConfigError(_not_found(split_spec(spec)[0], spec))
    return path


def copy_path(spec: str, folder: Path) -> Path:
    """Return where ``copy_source`` keeps the spec's file: ``my/rewards.py`` as ``my__rewards.py``."""
    place = split_spec(spec)[0].removesuffix(".py")
    parts = [part for part in place.split("/") if part not in ("", ".", "~")]
    return folder / ("__".join("up" if part == ".." else part for part in parts) + ".py")


def copy_source(spec: str, folder: Path) -> Path:
    """Copy the spec's file into the run directory unless it is there, so that a resumed run goes on with that code."""
    copy = copy_path(spec, folder)
    if not copy.exists():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(source_file(spec), copy)
    return copy


def load_object(spec: str, copies: Path | None = None) -> Any:
    """Import what ``spec`` names; a ConfigError where it is not there, while what the code itself raises passes.

    A file that ``copy_source`` copied to ``copies`` is run in place of the original. Modules are imported by name:
    they may be part of a package.
    """
    place, name = split_spec(spec)
    if place.endswith(".py"):
        module = _load_file(spec, copies)
    else:
        source_file(spec)  # refuse a missing one in our words
        _let_import_from(Path.cwd())
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise ConfigError(Problem(spec, f"'{place}' has no '{name}'", "name a function or class of it"))
    return getattr(module, name)


def _load_file(spec: str, copies: Path | None) -> ModuleType:
    copy = copy_path(spec, copies) if copies else None
    path = copy if copy is not None and copy.exists() else source_file(spec)
    original = Path(os.path.expanduser(split_spec(spec)[0])).absolute()
    # The name is one that pickle finds again, and that neither an installed module nor another file has.
    alias = f"grpo_user_{original.stem}_{hashlib.sha256(os.fsencode(original)).hexdigest()[:8]}"
    if alias in sys.modules:
        return sys.modules[alias]
    _let_import_from(original.parent)
    found = importlib.util.spec_from_file_location(alias, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    if original.is_file():
        module.__file__ = str(original)  # by which code finds the data beside it
    sys.modules[alias] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module


def _let_import_from(folder: Path) -> None:
    # At the end: a user's random.py must not take the place of Python's.
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _not_found(place: str, where: str) -> Problem:
    if place.endswith(".py"):
        return Problem(where, f"no file '{place}'", "name an existing file, relative to the folder of the launch")
    return Problem(where, f"no module '{place}'", "install it into the environment, or write file.py:name")


def _find_source(place: str) -> Path | None:
    """Return the source file of a ``.py`` path or module, without importing the module's parents."""
    if place.endswith(".py"):
        path = Path(os.path.expanduser(place)).absolute()
        return path if os.path.isfile(path) else None  # False too for a name that is too long
    search: list[str] | None = [*sys.path, os.getcwd()]
    found: ModuleSpec | None = None
    full = ""
    for part in place.split("."):
        full = f"{full}.{part}" if full else part
        if not part or search is None:
            return None
        found = PathFinder.find_spec(full, search)
        if found is None:
            return None
        search = list(found.submodule_search_locations) if found.submodule_search_locations else None
    origin = found.origin if found else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _names(body: Iterable[ast.AST]) -> Iterator[str]:
    """Yield names that a module's statements bind at its top level, ``*`` for a star import."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in statement.names)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        elif isinstance(statement, ast.stmt | ast.ExceptHandler):  # what if, try, with and for hold
            yield from _names(ast.iter_child_nodes(statement))
