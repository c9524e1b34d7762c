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
    """``file.py`` or module, and the name in it; the name is empty when there is none."""
    place, _, name = spec.rpartition(":")
    return (place, name) if place else (spec, "")


def problem_with(spec: str, where: str) -> Problem | None:
    """What keeps ``spec`` from being loaded, as far as its source tells.

    Args:
        spec: ``module:name`` or ``file.py:name``.
        where: where the user wrote it, for the message.
    """
    place, name = split_spec(spec)
    if not name.isidentifier():
        return Problem(where, f"'{spec}' names nothing in a module", "write module:name or file.py:name")
    path = _find_source(place)
    if path is None:
        what, fix = _not_found(place)
        return Problem(where, what, fix)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return Problem(where, f"'{path.name}{line}' is not valid Python ({error.args[0]})", "mend it there")
    except (RecursionError, MemoryError):  # as Python's own parser says it
        return Problem(where, f"'{path.name}' is not valid Python (too deeply nested)", "mend it there")
    except OSError as error:
        return Problem(where, f"'{path}' cannot be read ({error.strerror})", "make it readable")
    names = set(_names(tree.body))
    if name in names or "*" in names:
        return None
    own = sorted(found for found in names if not found.startswith("_"))
    fix = f"write one of {', '.join(own[:8])}" if own else f"define {name} there"
    return Problem(where, f"'{path.name}' has no '{name}'", fix)


def source_file(spec: str) -> Path:
    """The file that ``spec`` names something in.

    Raises:
        ConfigError: there is none.
    """
    place, _ = split_spec(spec)
    path = _find_source(place)
    if path is None:
        raise ConfigError(Problem(spec, *_not_found(place)))
    return path


def source_path(spec: str) -> Path | None:
    """The file that ``spec`` names something in, or None."""
    return _find_source(split_spec(spec)[0])


def copy_path(spec: str, folder: Path) -> Path:
    """Where ``copy_source`` keeps the spec's file."""
    return folder / _copy_name(spec)


def copy_source(spec: str, folder: Path) -> Path:
    """Keep a copy of the spec's file in the run directory; one that is there already stays.

    A resumed run so goes on with the code it began with, whatever became of the file.
    """
    copy = folder / _copy_name(spec)
    if not copy.exists():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(source_file(spec), copy)
    return copy


def load_object(spec: str, copies: Path | None = None) -> Any:
    """Import what ``spec`` names.

    Args:
        spec: ``module:name`` or ``file.py:name``.
        copies: folder of ``copy_source``; a copied file is run in place of the one it was copied from. Modules are
            imported by name, since they may be part of a package.

    Raises:
        ConfigError: there is no such file, module or name. What the code itself raises is not caught.
    """
    place, name = split_spec(spec)
    module = _load_file(spec, copies) if place.endswith(".py") else _load_module(spec)
    if not hasattr(module, name):
        raise ConfigError(Problem(spec, f"'{place}' has no '{name}'", "name a function or class of it"))
    return getattr(module, name)


def _load_file(spec: str, copies: Path | None) -> ModuleType:
    copy = copies / _copy_name(spec) if copies else None
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


def _load_module(spec: str) -> ModuleType:
    source_file(spec)  # refused with our words when it is not there
    _let_import_from(Path.cwd())
    return importlib.import_module(split_spec(spec)[0])


def _let_import_from(folder: Path) -> None:
    # At the end: a user's random.py must not take the place of Python's.
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _copy_name(spec: str) -> str:
    """A name for the copy, one for each place: ``my/rewards.py`` -> ``my__rewards.py``."""
    place = split_spec(spec)[0].removesuffix(".py")
    parts = [part for part in place.split("/") if part not in ("", ".", "~")]
    return "__".join("up" if part == ".." else part for part in parts) + ".py"


def _not_found(place: str) -> tuple[str, str]:
    if place.endswith(".py"):
        return f"no file '{place}'", "name an existing file, relative to the folder of the launch"
    return f"no module '{place}'", "install it into the environment, or write file.py:name"


def _find_source(place: str) -> Path | None:
    """The source file of a ``.py`` path or module; parents of a module are not imported."""
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
    """Names that a module's statements bind at its top level, ``*`` for a star import."""
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
