"""The user's own functions and classes, named in a recipe as ``module:name`` or ``file.py:name``.

Paths are relative to the folder of the launch, whose modules are found too. Only ``load_object`` runs the user's code;
what ``grpo check`` needs is read from the source. No torch.
"""

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import os
import shutil
import symtable
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import display_path
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import LIVE_OBJECTS, RESERVED_COLUMNS, solution_names

REWARD_COPIES = "rewards"  # folder of the run directory with copies of the user's rewards
_LIVE = ("completions", "prompts", "completion_ids", "answer")  # what the trainer hands every reward
# Functions of a whole list.
_OVER_ALL = (
    "min", "max", "sum", "sorted", "set", "Counter", "mean", "fmean", "median", "std", "stdev", "pstdev", "var",
    "argsort", "rankdata", "softmax",
)  # fmt: skip
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


def split_spec(spec: str) -> tuple[str, str]:
    """Return ``file.py`` or module, and the name in it, empty where there is none."""
    place, _, name = spec.rpartition(":")
    return (place, name) if place else (spec, "")


def spec_problem(spec: str, where: str) -> Problem | None:
    """Return what keeps ``module:name`` or ``file.py:name``, written at ``where``, from being loaded; do not run it."""
    place, name = split_spec(spec)
    if not name.isidentifier():
        return Problem(where, f"'{spec}' names no function or class", "write module:name or file.py:name")
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
        return Problem(where, f"'{display_path(path)}{line}' is not valid Python ({reason})", "correct it there")
    if missing := _missing_import(tree, path):
        package, number = missing
        fix = f"install {package} into this environment, or remove the import"
        return Problem(where, f"'{display_path(path)}:{number}' imports '{package}', which is not installed", fix)
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if name in names or any(node.names[0].name == "*" for node in imports):
        return None
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    own = sorted(node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_"))
    fix = f"write one of {', '.join(own[:8])}" if own else f"define {name} there"
    return Problem(where, f"'{display_path(path)}' has no '{name}'", fix)


def _missing_import(tree: ast.Module, path: Path) -> tuple[str, int] | None:
    """Return the first package that a file imports when it is loaded and that is not there, with the line."""
    search = [*sys.path, os.getcwd(), str(path.parent)]
    for node in tree.body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        for name in (one.partition(".")[0] for one in names):
            known = name in sys.builtin_module_names or name in sys.modules
            if not known and PathFinder.find_spec(name, search) is None and importlib.util.find_spec(name) is None:
                return name, node.lineno
    return None


def function_source(spec: str, path: Path | None = None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function that ``spec`` names as its file (or the one at ``path``) defines it, plainly and once."""
    path, name = path or source_path(spec), split_spec(spec)[1]
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        body = ast.parse(path.read_bytes()).body if path else []
        (found,) = (node for node in body if name in _names_given(node))
        return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and not found.decorator_list else None
    return None


def _names_given(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def required_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters without a default."""
    given = function.args
    places = [*given.posonlyargs, *given.args]
    names = [one.arg for one in places[: len(places) - len(given.defaults)]]
    return names + [one.arg for one, usual in zip(given.kwonlyargs, given.kw_defaults, strict=True) if usual is None]


def call_parameters(spec: str) -> dict[str, bool] | None:
    """Return the parameters of a user's class or function, each with whether it is required.

    Return None if the source does not show them: a base class, a decorator or ``**kwargs`` may add others.
    """
    path, name = source_path(spec), split_spec(spec)[1]
    function: ast.AST | None = function_source(spec)
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        classes = [node for node in ast.parse(path.read_bytes()).body if name in _names_given(node)] if path else []
        if len(classes) == 1 and isinstance(classes[0], ast.ClassDef) and not classes[0].decorator_list:
            methods = {node.name: node for node in classes[0].body if isinstance(node, ast.FunctionDef)}
            plain = not classes[0].bases and not classes[0].keywords and "__new__" not in methods
            function = methods.get("__init__") or (ast.parse("def f(self): ...").body[0] if plain else None)
    if not isinstance(function, ast.FunctionDef) or function.args.kwarg or function.decorator_list:
        return None
    arguments, required = function.args, required_parameters(function)
    names = [one.arg for one in (*arguments.args, *arguments.kwonlyargs)]
    names = names[1:] if function_source(spec) is None else names  # without self
    return {parameter: parameter in required for parameter in names}


def names_read_by(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of a function's parameters, and the texts in it: columns["answer"] reads a column too."""
    given = function.args
    parameters = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return parameters | {str(node.value) for node in ast.walk(function) if isinstance(node, ast.Constant)}


def missing_argument_problems(
    recipe: Recipe, sets: Sequence[Mapping[str, str] | None], copies: Path, live: Sequence[str] | None
) -> Iterator[Problem]:
    """Reject a reward of the user's that needs an argument which neither the trainer nor one of the datasets has.

    ``sets`` has the columns of each dataset with the reason why rewards do not get one, None if they are unknown;
    ``live`` the objects that a trainer passes, None without one; ``copies`` the run's copies of the files, if any.
    """
    names = [recipe["dataset_solution_column"], recipe["eval_dataset_solution_column"]]
    trainers = {*_LIVE, *(live or ())}
    trainers |= {*solution_names(names, recipe["dataset_mixture"]), *(["source"] if recipe["dataset_mixture"] else [])}
    for name in filter(lambda name: ":" in name, recipe["reward_funcs"]):
        copy = copy_path(name, copies)
        function = function_source(name, copy if copy.exists() else None)
        wanted = [one for one in required_parameters(function) if one not in trainers] if function else []
        for parameter, columns in ((one, columns) for one in wanted for columns in sets):
            known = {column for column, reason in (columns or {}).items() if not reason}
            known -= {*RESERVED_COLUMNS, recipe["dataset_prompt_column"]}
            if columns is not None and parameter not in known:
                here = [*_LIVE, "solution", *sorted(known)]
                what = f"'{name}' needs '{parameter}', which no reward gets"
                fix = f"take one of {', '.join(dict.fromkeys(here))}, or give it a default"
                if parameter in LIVE_OBJECTS and live is None:
                    fix = "give it a default: an evaluation alone has no trainer"
                elif parameter in LIVE_OBJECTS:
                    fix = "write reward_isolation: none, under which the trainer's own objects are handed on"
                elif parameter == recipe["dataset_prompt_column"]:
                    fix = "take prompts: the prompt column comes under this name, as chat messages"
                elif parameter in columns:
                    reason = columns[parameter] or "reserved name"
                    what = f"'{name}' needs '{parameter}', a column that is not passed to rewards ({reason})"
                    fix = f"rename column '{parameter}' in the data and in the function, or give it a default"
                    fix = "give it a default" if reason == "media" else fix
                yield recipe.problem("reward_funcs", what, fix)
                break


def find_comparison(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, int] | None:
    """Return the call, with its line, in which a reward looks at what it has of all completions at once, or None."""
    lists = {"completions"}  # and what is made of all of them

    def of_all(node: ast.AST) -> bool:
        picked = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Subscript)}
        return any(isinstance(one, ast.Name) and one.id in lists and id(one) not in picked for one in ast.walk(node))

    for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and of_all(node.value):
            lists.add(node.targets[0].id)
        called = node.func if isinstance(node, ast.Call) else None
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        if isinstance(node, ast.Call) and name in _OVER_ALL:
            sources = [one.generators[0].iter if isinstance(one, _COMPREHENSIONS) else one for one in node.args]
            if any(isinstance(one, ast.Name) and one.id in lists for one in sources):
                return name, node.lineno
    return None


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


def changed_copies(specs: Iterable[str], folder: Path) -> list[str]:
    """Return those of ``file.py:name`` whose file differs from its copy in ``folder``; a missing file does not."""
    pairs = [(spec, source_path(spec), copy_path(spec, folder)) for spec in specs if ".py:" in spec]
    present = [(spec, path, copy) for spec, path, copy in pairs if path is not None and copy.is_file()]
    return [spec for spec, path, copy in present if path.read_bytes() != copy.read_bytes()]


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
    named = original if original.is_file() and original.read_bytes() == source else path
    sys.modules[alias] = module
    try:
        exec(compile(source, str(named), "exec", dont_inherit=True), module.__dict__)
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
