"""Read the fields of an Atropos environment's configuration from the source of its class, without running code.

    read_configuration("dataset")  # ("DatasetEnvConfig", {"dataset_name", "seed", ...})

If a class builds its configuration in another way, e.g. in its own ``config_init``, only ``grpo check --deep`` can
check the fields, because it imports the class.
"""

import ast
import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.keys import nearest_of
from grpo_recipes.recipe.user_code import source_path, split_spec

ARGS = "atropos_environment_args"
# Field that the launch sets -> the recipe key to use instead.
OWNED_FIELDS = {
    "batch_size": "prompts_per_step",
    "chat_template": "chat_template",
    "chat_template_kwargs": "chat_template_kwargs",
    "inference_weight": "the weight of an entry of atropos_mixture",
    "max_token_length": "max_prompt_length and max_completion_length",
    "min_batch_allocation": "the min_allocation of an entry of atropos_mixture",
    "rollout_server_url": "atropos_api_url or atropos_port",
    "temperature": "temperature",
    "tokenizer_name": "model_name_or_path",
}
_PACKAGE = Path(__file__).parents[1]
_SHIPPED = {"arithmetic": "ArithmeticEnv", "dataset": "DatasetEnv"}
_CONFIG_ATTRIBUTE = "env_config_cls"  # attribute of an environment class: the class of its configuration
_MAX_DEPTH = 20  # base classes and imports that are followed


def find_argument_problems(config: str, fields: Collection[str], args: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each argument in ``args`` that is not one of ``fields``, or that the launch sets itself.

    ``config`` is the name of the environment's configuration class, for messages.
    """
    for name in args:
        if name in OWNED_FIELDS:
            yield Problem(f"{ARGS}.{name}", "is set by the launch", f"remove it, and set {OWNED_FIELDS[name]}")
        elif name not in fields:
            near = nearest_of(name, [field for field in fields if field not in OWNED_FIELDS])
            fault = f"{config} has no field '{name}'"
            yield Problem(f"{ARGS}.{name}", fault, f"use '{near}'" if near else "remove it")


def read_configuration(spec: str) -> tuple[str, frozenset[str]] | None:
    """Parse an environment's source; return name and fields of its configuration class, or None if it hides them.

    ``spec`` is a shipped environment, ``module:Class`` or ``file.py:Class``. A source that is not found hides them too.
    """
    shipped = _SHIPPED.get(spec)
    path = _PACKAGE / "atropos/environments.py" if shipped else source_path(spec)
    with contextlib.suppress(_Unknown):
        file, name = _find_configuration(path, shipped or split_spec(spec)[1], _MAX_DEPTH)
        return name, frozenset(_read_fields(file, name, _MAX_DEPTH))
    return None


class _Unknown(Exception):
    """The source of a class does not show its fields."""


@functools.lru_cache(maxsize=64)
def _parse_names(path: Path, _: int) -> Mapping[str, ast.AST]:
    """Parse a Python file; return the syntax nodes of its top-level classes and ``from`` imports by name.

    The result is cached. The second argument is the modification time, so a changed file is parsed again. Raise the
    error of reading or parsing, e.g. OSError or SyntaxError.
    """
    names: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
    return names


def _find_class(path: Path | None, name: str, depth: int) -> tuple[Path, ast.ClassDef]:
    """Find the class ``name`` in a file, or in the file that it is imported from; return that file and the class node.

    At most ``depth`` imports are followed. Raise _Unknown if the class is not found, or a decorator or metaclass may
    change it.
    """
    try:
        node = _parse_names(path, path.stat().st_mtime_ns).get(name) if path and depth else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        raise _Unknown from None
    if isinstance(node, ast.ClassDef) and not node.decorator_list and not node.keywords:
        return path, node  # type: ignore[return-value]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        package, _, module = node.module.partition(".")
        is_own = package == _PACKAGE.name
        file = _PACKAGE / f"{module.replace('.', '/')}.py" if is_own else source_path(f"{node.module}:_")
        return _find_class(file, original, depth - 1)
    raise _Unknown


def _find_configuration(path: Path | None, name: str, depth: int) -> tuple[Path, str]:
    """Find the configuration class of an environment class; return a file that defines or imports it, and its name.

    A class without ``env_config_cls`` has the configuration of its base class. Raise _Unknown if ``config_init`` may
    build another one, or no class within ``depth`` base classes and imports shows it.
    """
    file, node = _find_class(path, name, depth)
    config_class = None
    for part in node.body:
        is_config_init = isinstance(part, ast.FunctionDef) and part.name == "config_init"
        if is_config_init and _CONFIG_ATTRIBUTE not in {getattr(inner, "attr", None) for inner in ast.walk(part)}:
            raise _Unknown
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == _CONFIG_ATTRIBUTE for target in targets):
            config_class = getattr(part, "value", None)
            if not isinstance(config_class, ast.Name):
                raise _Unknown
    if isinstance(config_class, ast.Name):
        return file, config_class.id
    (base,) = _list_base_names(node) if len(node.bases) == 1 else [""]
    return _find_configuration(file, base, depth - 1)


def _list_base_names(node: ast.ClassDef) -> list[str]:
    """Return the names of a class's base classes; raise _Unknown if one is not a plain name, e.g. ``module.Base``."""
    if not all(isinstance(base, ast.Name) for base in node.bases):
        raise _Unknown
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _read_fields(path: Path, name: str, depth: int) -> set[str]:
    """Parse a pydantic class and its bases; return the names of their fields.

    Raise _Unknown if an assignment or inner ``Config`` of the class may allow other names, or a class is not found
    within ``depth`` base classes and imports.
    """
    file, node = _find_class(path, name, depth)
    fields = set()
    for part in node.body:
        if isinstance(part, ast.Assign) or (isinstance(part, ast.ClassDef) and part.name == "Config"):
            raise _Unknown  # e.g. model_config, which may allow every name
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            fields.add(part.target.id)
    for base in _list_base_names(node):
        fields |= set() if base == "BaseModel" else _read_fields(file, base, depth - 1)
    return fields
