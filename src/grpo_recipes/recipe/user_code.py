"""Find, check and load the user's functions and classes, which a recipe names as ``module:name`` or ``file.py:name``.

Paths are relative to the folder of the launch, and modules in that folder are found too. Only ``load_object`` runs the
user's code. The checks of `grpo check` read the source. No torch.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import itertools
import os
import shutil
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import display_path
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import LIVE_OBJECTS, RESERVED_COLUMNS, solution_names

REWARD_COPIES = "rewards"  # folder of the run directory with copies of the user's rewards
_LIVE = ("completions", "prompts", "completion_ids", "answer")  # arguments that the trainer passes to every reward
# Functions that compare the items of a list.
_COMPARING_FUNCTIONS = (
    "min", "max", "sum", "sorted", "set", "Counter", "mean", "fmean", "median", "std", "stdev", "pstdev", "var",
    "argsort", "rankdata", "softmax",
)  # fmt: skip
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


def split_spec(spec: str) -> tuple[str, str]:
    """Split ``file.py:name`` or ``module:name`` at the colon; the name is empty without a colon."""
    module, _, name = spec.rpartition(":")
    return (module, name) if module else (spec, "")


def spec_problem(spec: str, where: str, installed_here: bool = True) -> Problem | None:
    """Return the problem if ``spec``, which ``where`` sets, can't be loaded; None if it can. Its code does not run.

    The file must exist, be valid Python, define or import the name, and import only installed packages at its top
    level. Packages are not checked if another Python than this one runs the code (``installed_here`` is False). Names
    are found in the source, so after ``import *`` any name is accepted.
    """
    module, name = split_spec(spec)
    if not name.isidentifier():
        return Problem(where, f"'{spec}' names no function or class", "write module:name or file.py:name")
    path = source_path(spec)
    if path is None:
        is_elsewhere = not installed_here and not module.endswith(".py")
        return None if is_elsewhere else _make_missing_problem(module, where)
    try:
        source = path.read_bytes()
        tree = ast.parse(source)
        symbols = symtable.symtable(source, str(path), "exec").get_symbols()  # type: ignore[arg-type]  # takes bytes too
    except OSError as error:
        return Problem(where, f"'{path}' cannot be read ({error.strerror})", "make it readable")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # deep nesting raises the last two
        reason = error.args[0] if isinstance(error, SyntaxError | ValueError) else "too deeply nested"
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        return Problem(where, f"'{display_path(path)}{line}' is not valid Python ({reason})", "correct it there")
    if missing := _find_missing_import(tree, path) if installed_here else None:
        package, number = missing
        fix = f"install {package} into this environment, or remove the import"
        return Problem(where, f"'{display_path(path)}:{number}' imports '{package}', which is not installed", fix)
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if name in names or any(node.names[0].name == "*" for node in imports):
        return None
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = sorted(node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_"))
    fix = f"write one of {', '.join(public[:8])}" if public else f"define {name} there"
    return Problem(where, f"'{display_path(path)}' has no '{name}'", fix)


def _find_missing_import(tree: ast.Module, path: Path) -> tuple[str, int] | None:
    """Return the first missing package that a file imports at its top level, with the line; None if there is none.

    Relative imports, and imports inside functions or blocks, are not checked.
    """
    search = [*sys.path, os.getcwd(), str(path.parent)]
    for node in tree.body:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            modules = [node.module]
        for name in (module.partition(".")[0] for module in modules):
            known = name in sys.builtin_module_names or name in sys.modules
            if not known and PathFinder.find_spec(name, search) is None and importlib.util.find_spec(name) is None:
                return name, node.lineno
    return None


def function_source(spec: str, path: Path | None = None) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the syntax tree of the function that ``spec`` names, from its file or from ``path``.

    Return None if the source does not show the function: it is missing, decorated, defined twice, or not a function.
    """
    node = _find_definition(spec, path)
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list else None


def class_methods(spec: str, path: Path | None = None) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef] | None:
    """Return the methods of the class that ``spec`` names, by name, from its file or from ``path``.

    Return None if the source does not show all of them: the class is missing, decorated, defined twice, or has bases.
    """
    node = _find_definition(spec, path)
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.bases or node.keywords:
        return None
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}


def _find_definition(spec: str, path: Path | None = None) -> ast.stmt | None:
    """Return the only statement of a file that defines the name in ``spec``; None if there are none or several.

    ``path`` is the file, by default the one that ``spec`` names. Return None too if it is missing or not valid Python.
    """
    path, name = path or source_path(spec), split_spec(spec)[1]
    if path is None:
        return None
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        status = path.stat()
        tree = _parse_file(path.absolute(), status.st_mtime_ns, status.st_size)
        (node,) = (node for node in tree.body if name in _list_defined_names(node))
        return node
    return None


@functools.lru_cache(maxsize=16)
def _parse_file(path: Path, changed_ns: int, size: int) -> ast.Module:
    """Return the syntax tree of a file with this time of its last change and this size; a check reads it many times."""
    return ast.parse(path.read_bytes())


def _list_defined_names(node: ast.AST) -> set[str]:
    """Return the names that a statement defines: a function or class, or variables that it assigns."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}


def required_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters without a default."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    names = [parameter.arg for parameter in positional[: len(positional) - len(arguments.defaults)]]
    keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return names + [parameter.arg for parameter, default in keyword_only if default is None]


def call_parameters(spec: str) -> dict[str, bool] | None:
    """Return the parameters of a user's class or function: name -> whether it is required.

    Return None if the source does not show all of them: a base class, a decorator or ``**kwargs`` may add others.
    """
    function: ast.AST | None = function_source(spec)
    node = _find_definition(spec)
    if isinstance(node, ast.ClassDef) and not node.decorator_list:
        methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        plain = not node.bases and not node.keywords and "__new__" not in methods
        function = methods.get("__init__") or (ast.parse("def f(self): ...").body[0] if plain else None)
    if not isinstance(function, ast.FunctionDef) or function.args.kwarg or function.decorator_list:
        return None
    arguments, required = function.args, required_parameters(function)
    names = [parameter.arg for parameter in (*arguments.args, *arguments.kwonlyargs)]
    names = names[1:] if function_source(spec) is None else names  # a class: without self
    return {parameter: parameter in required for parameter in names}


def names_read_by(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return a function's parameters and the constants in its body, since ``columns["answer"]`` also reads a column."""
    arguments = function.args
    parameters = {parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    return parameters | {str(node.value) for node in ast.walk(function) if isinstance(node, ast.Constant)}


def missing_argument_problems(
    recipe: Recipe, sets: Sequence[Mapping[str, str] | None], copies: Path, live: Sequence[str] | None
) -> Iterator[Problem]:
    """Yield the problem of each user's reward with a required argument that it does not get.

    Arguments:
        sets: for each dataset, its columns -> the reason why rewards do not get the column, or an empty string; None if
            the columns are unknown.
        copies: folder with the run's copies of the reward files; it need not exist.
        live: objects that the trainer passes to rewards; None without a trainer.
    """
    names = [recipe.data.solution_column, recipe.evaluation.dataset_solution_column]
    trainer_arguments = {*_LIVE, *(live or ()), *solution_names(names, recipe.data.mixture)}
    trainer_arguments |= {"source"} if recipe.data.mixture else set()
    for name in filter(lambda name: ":" in name, recipe.rewards.funcs):
        copy = copy_path(name, copies)
        function = function_source(name, copy if copy.exists() else None)
        required = required_parameters(function) if function else []
        from_columns = [parameter for parameter in required if parameter not in trainer_arguments]
        for parameter, columns in itertools.product(from_columns, sets):
            passed = {column for column, reason in (columns or {}).items() if not reason}
            passed -= {*RESERVED_COLUMNS, recipe.data.prompt_column}
            if columns is not None and parameter not in passed:
                available = [*_LIVE, "solution", *sorted(passed)]
                message = f"'{name}' needs '{parameter}', which no reward gets"
                fix = f"take one of {', '.join(dict.fromkeys(available))}, or give it a default"
                if parameter in LIVE_OBJECTS and live is None:
                    fix = "give it a default: an evaluation alone has no trainer"
                elif parameter in LIVE_OBJECTS:
                    fix = "write reward_isolation: none, under which the trainer's own objects are handed on"
                elif parameter == recipe.data.prompt_column:
                    fix = "take prompts: the prompt column comes under this name, as chat messages"
                elif parameter in columns:
                    reason = columns[parameter] or "reserved name"
                    message = f"'{name}' needs '{parameter}', a column that is not passed to rewards ({reason})"
                    fix = f"rename column '{parameter}' in the data and in the function, or give it a default"
                    fix = "give it a default" if reason == "media" else fix
                yield recipe.problem("reward_funcs", message, fix)
                break


def find_comparison(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, int] | None:
    """Return name and line of a reward's first call that compares completions, for example ``max``, or None.

    In such a call, an argument is a list with one value per completion.
    """
    lists = {"completions"}  # variables with one value per completion
    for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            parts = list(ast.walk(node.value))
            indexed = {id(part.value) for part in parts if isinstance(part, ast.Subscript)}
            uses = [part for part in parts if isinstance(part, ast.Name) and part.id in lists]
            if any(id(use) not in indexed for use in uses):  # it uses a list as a whole, not only an item of it
                lists.add(node.targets[0].id)
        callee = node.func if isinstance(node, ast.Call) else None
        name = callee.id if isinstance(callee, ast.Name) else getattr(callee, "attr", "")
        if isinstance(node, ast.Call) and name in _COMPARING_FUNCTIONS:
            arguments = [arg.generators[0].iter if isinstance(arg, _COMPREHENSIONS) else arg for arg in node.args]
            if any(isinstance(argument, ast.Name) and argument.id in lists for argument in arguments):
                return name, node.lineno
    return None


def source_path(spec: str) -> Path | None:
    """Return the file of the module or path in ``spec``, or None if it does not exist.

    Only Python source files count. The parents of a module are not imported.
    """
    module = split_spec(spec)[0]
    if module.endswith(".py"):
        path = Path(os.path.expanduser(module)).absolute()
        return path if os.path.isfile(path) else None  # isfile also returns False for a name that is too long
    search: list[str] | None = [*sys.path, os.getcwd()]
    module_spec: ModuleSpec | None = None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        module_spec = PathFinder.find_spec(name, search) if search and not name.endswith(".") and name else None
        if module_spec is None:
            return None
        search = module_spec.submodule_search_locations
    origin = (module_spec and module_spec.origin) or ""
    return Path(origin) if origin.endswith(".py") else None


def source_file(spec: str) -> Path:
    """Return the file of the module or path in ``spec``; raise ConfigError if there is none."""
    path = source_path(spec)
    if path is None:
        raise ConfigError(_make_missing_problem(split_spec(spec)[0], spec))
    return path


def copy_path(spec: str, folder: Path) -> Path:
    """Return the path of the copy that ``copy_source`` makes, e.g. ``my__rewards.py`` for ``my/rewards.py``."""
    module = split_spec(spec)[0].removesuffix(".py")
    parts = [part for part in module.split("/") if part not in ("", ".", "~")]
    return folder / ("__".join("up" if part == ".." else part for part in parts) + ".py")


def find_copy(spec: str, run: Path) -> Path | None:
    """Return the copy of the file in ``spec`` that the run in this folder uses.

    Return None for a module, which is imported by name, without a copy, and if the folder is not a run directory.
    """
    copy, is_file = copy_path(spec, run / REWARD_COPIES), split_spec(spec)[0].endswith(".py")
    return copy if is_file and (run / "run.json").is_file() and copy.is_file() else None


def find_run_copy(spec: str, lookup: Callable[[str], Any]) -> Path | None:
    """Return the copy of the file in ``spec`` that a recipe's run uses; None without a copy, as in ``find_copy``.

    The run is the folder of the recipe if ``lookup`` is its ``Recipe.__getitem__``, else the run of this process.
    """
    owner = getattr(lookup, "__self__", None)
    run = owner.path.parent if isinstance(owner, Recipe) else os.environ.get("GRPO_RUN_DIR")
    return find_copy(spec, Path(run)) if run else None


def copy_source(spec: str, folder: Path) -> Path:
    """Copy the file of ``spec`` to ``folder`` unless it has a copy there; return the path of the copy.

    An existing copy stays, so that a resumed run uses the same code. Raise ConfigError if the file does not exist.
    """
    copy = copy_path(spec, folder)
    if not copy.exists():
        folder.mkdir(exist_ok=True)
        shutil.copyfile(source_file(spec), copy)
    return copy


def changed_copies(specs: Iterable[str], folder: Path) -> list[str]:
    """Return the entries of ``specs`` with a file that differs from its copy in ``folder``.

    Specs of modules, missing files and missing copies are skipped.
    """
    pairs = [(spec, source_path(spec), copy_path(spec, folder)) for spec in specs if ".py:" in spec]
    present = [(spec, path, copy) for spec, path, copy in pairs if path is not None and copy.is_file()]
    return [spec for spec, path, copy in present if path.read_bytes() != copy.read_bytes()]


def load_object(spec: str, copies: Path | None = None) -> Any:
    """Import the object that ``spec`` names, and return it.

    If ``copies`` has a copy of the file, the copy runs instead of the original. Modules are imported by name,
    because they may be part of a package. The folder of the file, or for a module the working folder, is added to
    ``sys.path``. Raise ConfigError if the file or the object is missing. Errors of the user's code are not caught.
    """
    module_name, name = split_spec(spec)
    if module_name.endswith(".py"):
        copy = copy_path(spec, copies) if copies else None
        module = _load_file(module_name, copy if copy is not None and copy.exists() else source_file(spec))
    else:
        source_file(spec)  # raises a ConfigError if the module is missing
        _allow_imports_from(Path.cwd())
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise config_error(spec, f"'{module_name}' has no '{name}'", "name a function or class of it")
    return getattr(module, name)


def _load_file(user_path: str, path: Path) -> ModuleType:
    """Import ``path`` as a module: the user's file ``user_path`` or its copy.

    A file that was imported before is not executed again. The folder of the user's file is added to the end of
    ``sys.path``. An exception in the file is raised, and the module is forgotten.
    """
    original = Path(os.path.expanduser(user_path)).absolute()
    # This module name is unique, and pickle finds it again.
    alias = f"grpo_user_{original.stem}_{hashlib.sha256(os.fsencode(original)).hexdigest()[:8]}"
    if alias in sys.modules:
        return sys.modules[alias]
    _allow_imports_from(original.parent)
    source = path.read_bytes()
    module_spec = importlib.util.spec_from_file_location(alias, path)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    if original.is_file():
        module.__file__ = str(original)  # the code may read data next to its file
    # Tracebacks show the user's file if it equals the code that runs.
    traceback_path = original if original.is_file() and original.read_bytes() == source else path
    sys.modules[alias] = module
    try:
        exec(compile(source, str(traceback_path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[alias]
        raise
    return module


def _allow_imports_from(folder: Path) -> None:
    """Add a folder to the end of ``sys.path``, so that user code can import modules in it."""
    # The folder comes last, so that a user's random.py does not replace Python's module.
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))


def _make_missing_problem(module: str, where: str) -> Problem:
    """Return the problem at ``where`` that the user's file (``module`` ends with ``.py``) or module is missing."""
    if module.endswith(".py"):
        return Problem(where, f"no file '{module}'", "name an existing file, relative to the folder of the launch")
    return Problem(where, f"no module '{module}'", "install it into the environment, or write file.py:name")
