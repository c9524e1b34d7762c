"""The registry of extensions: folders and packages that add keys, rules, processes, commands and rollout sources.

The core asks this registry and never imports an extension. An extension is a folder under ``extensions/``, the folder
``console/``, or an installed package with an entry point in the group ``grpo_recipes.extensions``. Each has one object,
``EXTENSION``, that names its parts as texts ``module:name``. A part is imported when it is first needed, so that
`grpo check` takes less than half a second:

    EXTENSION = Extension("dice", keys="dice.keys:DiceArguments", rollouts="dice.rollouts:DiceRollouts")
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error

GROUP = "grpo_recipes.extensions"
_PACKAGE = Path(__file__).parents[1]
_CONSOLE = "console"  # the folder of the commands that training does not need


@dataclass(frozen=True)
class Extension:
    """The parts that an extension adds to the core. Each text is ``module:name``, and an empty one adds nothing."""

    name: str
    # The recipe.
    keys: str = ""  # a dataclass of recipe keys, made with recipe.fields.key; imports no torch
    nested: Mapping[str, str] = field(default_factory=dict)  # path of a mapping in a key -> the dataclass of its keys
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variable -> the key that it sets
    # Key of a port -> a function (lookup) that returns its default, or None if the recipe needs no such port.
    ports: Mapping[str, str] = field(default_factory=dict)
    search_words: Mapping[str, str] = field(default_factory=dict)  # key -> more search words of `grpo keys`
    rules: str = ""  # a tuple of recipe.rules.Rule
    serves: tuple[str, ...] = ()  # keys of the core that need this extension, e.g. push_to_hub
    checks: str = ""  # a tuple of functions (recipe, environment) -> problems
    idle: str = ""  # a tuple of recipe.rules.Idle: keys that do nothing without another
    notes: str = ""  # a function (recipe) -> lines about a valid recipe
    prompt_source: str = ""  # a recipe.sources.PromptSource: replaces datasets
    datasets: str = ""  # a tuple of recipe.generated.GeneratedData: datasets that need no download
    rewards: str = ""  # a tuple of recipe.registry.Reward
    benchmarks: str = ""  # a mapping: name -> recipe.registry.Benchmark
    converters: str = ""  # a tuple of recipe.converters.files.FileConverter: YAML of other tools
    # A function (source, target) -> recipe.converters.TranslatedRecipe or None, for `grpo new --from`.
    translate: str = ""
    # The run.
    task: str = ""  # a recipe.tasks.AddedTask: a training without sampling, which a recipe selects by ``task: NAME``
    assets: str = ""  # a function (lookup) -> (key, id, configuration, split) of each dataset that it reads
    roles: str = ""  # a plan.roles.Roles: processes in addition to the server and the trainers
    # Option of `grpo logs` -> the beginning of the roles that it selects, and its help line.
    logs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    run_hooks: str = ""  # a launch.hooks.RunHooks: called before, during and after an attempt
    server_routes: str = ""  # a fastapi.APIRouter that the vLLM server includes
    rollouts: str = ""  # a subclass of rollouts.source.Source
    folders: str = ""  # a subclass of runs.groups.RunGroup: folders of several runs, e.g. of a sweep
    deep_check: str = ""  # a function (trainers.deep_check.DeepCheck) -> lines, for `grpo check --deep`
    # The console.
    commands: Mapping[str, str] = field(default_factory=dict)  # command of `grpo` -> its cli.Command
    sweeps: str = ""  # a cli.sweeps.Sweeper: runs the sweeps that another extension translates
    metrics: str = ""  # a mapping: metric -> runs.metric.Metric, how the report draws it
    advice: str = ""  # a mapping: pattern of a log line -> what to do

    def load(self, part: str) -> Any:
        """Import a part, for example ``rules``, and return its object; None if the extension lacks this part.

        Errors of the import are raised unchanged.
        """
        reference = getattr(self, part)
        return load(reference) if reference else None


@functools.cache
def load(reference: str) -> Any:
    """Import and return the object of a text ``module:name``; cached."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def extensions() -> tuple[Extension, ...]:
    """Return the extensions of this installation: the package's folders by name, then installed packages; cached.

    Raise ConfigError if an installed package is broken.
    """
    package = _PACKAGE.name
    folders = sorted(module.name for module in pkgutil.iter_modules([str(_PACKAGE / "extensions")]))
    names = [f"{package}.extensions.{folder}" for folder in folders]
    if (_PACKAGE / _CONSOLE).is_dir():
        names.append(f"{package}.{_CONSOLE}")
    registered = [importlib.import_module(name).EXTENSION for name in names]
    for entry_point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.name):
        registered.append(_load_installed(entry_point))
    return tuple(registered)


def _load_installed(entry_point: importlib.metadata.EntryPoint) -> Extension:
    """Return the extension of an installed package.

    Raise a ConfigError that names the package if it cannot be imported or does not provide an ``Extension``.
    """
    package = entry_point.dist.name if entry_point.dist else entry_point.value
    fix = f"upgrade {package}, or run pip uninstall {package}"
    try:
        extension = entry_point.load()
    except Exception as error:
        raise config_error("extensions", f"{entry_point.value} of {package} fails to import ({error})", fix) from error
    if not isinstance(extension, Extension):
        message = f"{entry_point.value} of {package} must be an Extension, got {type(extension).__name__}"
        raise config_error("extensions", message, fix)
    return extension


def parts(part: str) -> Iterator[Any]:
    """Yield one part, a field of ``Extension``, of every extension that has it, e.g. ``parts("rules")``."""
    for extension in extensions():
        loaded = extension.load(part)
        if loaded is not None:
            yield loaded


def entries(part: str) -> Iterator[Any]:
    """Yield the entries of a part that is a tuple in every extension, e.g. ``entries("rules")``."""
    for group in parts(part):
        yield from group


def merged(part: str) -> dict[str, Any]:
    """Return the mappings of all extensions under one name, for example ``merged("commands")``, as one mapping.

    A later extension replaces an entry with the same name.
    """
    together: dict[str, Any] = {}
    for extension in extensions():
        together |= getattr(extension, part)
    return together


def is_served(key: str) -> bool:
    """Return whether an extension of this installation serves a key of the core."""
    return any(key in extension.serves for extension in extensions())
