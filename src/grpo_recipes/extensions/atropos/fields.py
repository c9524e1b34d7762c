"""The fields of an Atropos environment's configuration, read from the source of its class. No code runs.

    configuration_of("dataset")  # ("DatasetEnvConfig", {"dataset_name", "seed", ...})

If a class takes its fields from elsewhere, e.g. from its own ``config_init``, only ``grpo check --deep`` can check
them: it imports the class.
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
# Fields that the launch sets -> the recipe's keys for them.
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
_OURS = {"arithmetic": "ArithmeticEnv", "dataset": "DatasetEnv"}
_CHOICE = "env_config_cls"  # the attribute of an environment that names its configuration
_DEEPEST = 20  # base classes and imports that are followed


def argument_problems(config: str, fields: Collection[str], args: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each argument without a field in the configuration, and for each that the launch sets."""
    for name in args:
        if name in OWNED_FIELDS:
            fix = f"write {OWNED_FIELDS[name]}, and remove it"
            yield Problem(f"{ARGS}.{name}", "the launch fills it in", fix)
        elif name not in fields:
            near = nearest_of(name, [field for field in fields if field not in OWNED_FIELDS])
            fault = f"{config} has no field '{name}'"
            yield Problem(f"{ARGS}.{name}", fault, f"write '{near}'" if near else "remove it")


def configuration_of(spec: str) -> tuple[str, frozenset[str]] | None:
    """Return name and fields of the configuration of an environment; None if its source does not show them."""
    shipped = _OURS.get(spec)
    path = _PACKAGE / "atropos/environments.py" if shipped else source_path(spec)
    with contextlib.suppress(_Unknown):
        place, name = _configuration(path, shipped or split_spec(spec)[1], _DEEPEST)
        return name, frozenset(_fields(place, name, _DEEPEST))
    return None


class _Unknown(Exception):
    """The source does not define the class plainly."""


@functools.lru_cache(maxsize=64)
def _parsed(path: Path, _: int) -> Mapping[str, ast.AST]:
    """Return the top-level classes and imports of a file by name; the second argument is the time of its change."""
    names: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
    return names


def _class(path: Path | None, name: str, depth: int) -> tuple[Path, ast.ClassDef]:
    """Return the file that defines the class ``name`` of a file, and the class."""
    try:
        node = _parsed(path, path.stat().st_mtime_ns).get(name) if path and depth else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        raise _Unknown from None
    if isinstance(node, ast.ClassDef) and not node.decorator_list and not node.keywords:
        return path, node  # type: ignore[return-value]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return _class(_module(node.module), original, depth - 1)
    raise _Unknown


def _module(name: str) -> Path | None:
    top, _, rest = name.partition(".")
    if top == _PACKAGE.name:
        return _PACKAGE / f"{rest.replace('.', '/')}.py"
    return source_path(f"{name}:_")


def _configuration(path: Path | None, name: str, depth: int) -> tuple[Path, str]:
    """Return the configuration class of an environment class: a file, and the name of the class in that file."""
    place, node = _class(path, name, depth)
    chosen = None
    for part in node.body:
        makes_it = isinstance(part, ast.FunctionDef) and part.name == "config_init"
        if makes_it and _CHOICE not in {getattr(inner, "attr", None) for inner in ast.walk(part)}:
            raise _Unknown
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == _CHOICE for target in targets):
            chosen = getattr(part, "value", None)
            if not isinstance(chosen, ast.Name):
                raise _Unknown
    if isinstance(chosen, ast.Name):
        return place, chosen.id
    (base,) = _bases(node) if len(node.bases) == 1 else [""]
    return _configuration(place, base, depth - 1)


def _bases(node: ast.ClassDef) -> list[str]:
    if not all(isinstance(base, ast.Name) for base in node.bases):
        raise _Unknown
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _fields(path: Path, name: str, depth: int) -> set[str]:
    """Return the fields of a class of pydantic, with those of its bases."""
    place, node = _class(path, name, depth)
    fields = set()
    for part in node.body:
        if isinstance(part, ast.Assign) or (isinstance(part, ast.ClassDef) and part.name == "Config"):
            raise _Unknown  # e.g. model_config, which may allow every name
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            fields.add(part.target.id)
    for base in _bases(node):
        fields |= set() if base == "BaseModel" else _fields(place, base, depth - 1)
    return fields
