"""The user's own functions and classes, named in a recipe as ``module:name`` or ``file.py:name``.

Paths are relative to the folder of the launch, whose modules are found too. Only ``load_object`` runs the user's code;
what ``grpo check`` needs is read from the source. No torch.
"""

import ast
import hashlib
import importlib
import importlib.util
import itertools
import os
import shutil
import symtable
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error


def split_spec(spec: str) -> tuple[str, str]:
    """Return ``file.py`` or module, and the name in it, empty where there is none."""
    place, _, name = spec.rpartition(":")
    return (place, name) if place else (spec, "")


def problem_with(spec: str, where: str) -> Problem | None:
    """Return what keeps ``module:name`` or ``file.py:name``, written at ``where``, from being loaded; do not run it."""
    place, name = split_spec(spec)
    if not name.isidentifier():
        return Problem(where, f"'{spec}' names nothing in a module", "write module:name or file.py:name")
    path = source_path(spec)
    if path is None:
        return _not_found(place, where)
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()  # type: ignore[arg-type]  # takes bytes too
    except OSError as error:
        return Problem(where, f"'{path}' cannot be read ({error.strerror})", "make it readable")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two of what is nested too deeply
        reason = error.args[0] if isinstance(error, SyntaxError | ValueError) else "too deeply nested"
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return Problem(where, f"'{path.name}{line}' is not valid Python ({reason})", "correct it there")
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if name in names or any(node.names[0].name == "*" for node in imports):
        return None
    own = sorted(found for found in names if not found.startswith("_"))
    fix = f"write one of {', '.join(own[:8])}" if own else f"define {name} there"
    return Problem(where, f"'{path.name}' has no '{name}'", fix)


def source_path(spec: str) -> Path | None:
    """Return the file that ``spec`` names something in, or None; the parents of a module are not imported."""
    place = split_spec(spec)[0]
    if place.endswith(".py"):
        path = Path(os.path.expanduser(place)).absolute()
        return path if os.path.isfile(path) else None  # False too for a name that is too long
    search: list[str] | None = [*sys.path, os.getcwd()]
    found: ModuleSpec | None = None
    for name in itertools.accumulate(place.split("."), "{}.{}".format):
        found = PathFinder.find_spec(name, search) if search and not name.endswith(".") and name else None
        if found is None:
            return None
        search = found.submodule_search_locations
    origin = (found and found.origin) or ""
    return Path(origin) if origin.endswith(".py") else None


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
        copy = copy_path(spec, copies) if copies else None
        module = _load_file(place, copy if copy is not None and copy.exists() else source_file(spec))
    else:
        source_file(spec)  # refuse a missing one in our words
        _let_import_from(Path.cwd())
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise config_error(spec, f"'{place}' has no '{name}'", "name a function or class of it")
    return getattr(module, name)


def _load_file(place: str, path: Path) -> ModuleType:
    """Import the file at ``path``, the copy of ``place`` or that file itself."""
    original = Path(os.path.expanduser(place)).absolute()
    # The name is one that pickle finds again, and that neither an installed module nor another file has.
    alias = f"grpo_user_{original.stem}_{hashlib.sha256(os.fsencode(original)).hexdigest()[:8]}"
    if alias in sys.modules:
        return sys.modules[alias]
    _let_import_from(original.parent)
    source = path.read_bytes()
    found = importlib.util.spec_from_file_location(alias, path)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    if original.is_file():
        module.__file__ = str(original)  # by which code finds the data beside it
    # Tracebacks name the user's own file while it is the one that runs.
    shown = original if original.is_file() and original.read_bytes() == source else path
    sys.modules[alias] = module
    try:
        exec(compile(source, str(shown), "exec", dont_inherit=True), module.__dict__)
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
