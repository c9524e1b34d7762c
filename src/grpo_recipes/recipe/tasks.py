"""Decide the task of a run: GRPO, MaxEnt-GRPO, or the task of an extension. No torch.

``task: NAME`` in the recipe selects the task of an extension. Otherwise ``--task``, ``MAXENT`` or ``TRAIN_ENTRYPOINT``
can request GRPO or MaxEnt. Without a request, a recipe that sets ``maxent_objective`` is a MaxEnt recipe, and any other
a GRPO recipe. ``with_task`` applies a request: for MaxEnt, it adds an objective if there is none. For GRPO, an
objective in the recipe is a problem. So the frozen recipe of a run contains its task.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe import DEFAULT_SOURCE, BrokenKey, Recipe
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.keys import environment_keys
from grpo_recipes.recipe.registry import OBJECTIVES

GRPO, MAXENT = "grpo", "maxent"
TASK_KEY = "task"  # an extension's key that selects its task
SWITCHED_OBJECTIVE = "listwise"  # the objective that MAXENT=1 selects if the recipe sets none
ENTRIES = {GRPO: "src/grpo.py", MAXENT: "src/maxent-grpo.py"}
_NAMES = {GRPO: "GRPO", MAXENT: "MaxEnt"}
_VARIABLES = ("MAXENT", "TRAIN_ENTRYPOINT")
_SWITCH = {"": None, "0": GRPO, "false": GRPO, "no": GRPO, "1": MAXENT, "true": MAXENT, "yes": MAXENT}


@dataclass(frozen=True)
class AddedTask:
    """A task of an extension: a training on rows, without sampling. ``task: NAME`` in a recipe selects it."""

    name: str
    entry: str  # entry script of the trainers
    length_key: str  # recipe key with the most tokens of a row; longer rows are dropped


@dataclass(frozen=True)
class RequestedTask:
    """The task that the command line and the environment request."""

    task: str | None = None  # grpo, maxent, or None if the recipe decides
    source: str = ""  # --task, MAXENT or TRAIN_ENTRYPOINT
    entry: str | None = None  # the user's entry script; None for the script of the task


def requested_task(environment: Mapping[str, str], option: str | None = None) -> RequestedTask:
    """Return the task that ``--task`` (``option``), ``MAXENT`` or ``TRAIN_ENTRYPOINT`` requests.

    Raise ConfigError if two of them request different tasks, a variable has an invalid value, the entry script does not
    exist, or GRPO_HOME is not the repository.
    """
    if not (find_code_root() / ENTRIES[GRPO]).is_file():
        fix = "unset GRPO_HOME, or name the repository"
        raise config_error("GRPO_HOME", f"there is no repository in {find_code_root()}", fix)
    switch, entry = environment.get("MAXENT", ""), environment.get("TRAIN_ENTRYPOINT") or None
    problems = []
    if switch.lower() not in _SWITCH:
        fix = "unset MAXENT, or set MAXENT=1 for MaxEnt-GRPO, or set MAXENT=0 for GRPO"
        problems.append(Problem("MAXENT", f"is '{switch}'", fix))
    if entry and not (find_code_root() / entry).is_file():
        message, fix = f"there is no entry script {entry}", f"use {', '.join(ENTRIES.values())}"
        problems.append(Problem("TRAIN_ENTRYPOINT", message, fix))
    if problems:
        raise ConfigError(*problems)
    # Resolving the paths recognizes our own scripts in every spelling.
    scripts = {(find_code_root() / script).resolve(): task for task, script in ENTRIES.items()}
    entry_task = scripts.get((find_code_root() / entry).resolve()) if entry else None
    entry = ENTRIES[entry_task] if entry_task else entry
    candidates = [("--task", option), ("MAXENT", _SWITCH[switch.lower()]), ("TRAIN_ENTRYPOINT", entry_task)]
    requests = [(source, task) for source, task in candidates if task]
    first_source, first_task = requests[0] if requests else ("", None)
    for source, task in requests:
        if task != first_task:
            value = entry if source == "TRAIN_ENTRYPOINT" else switch
            message = f"'{value}' contradicts {first_source} ({first_task})"
            other = f"unset {first_source}" if first_source in _VARIABLES else f"remove {first_source}"
            raise config_error(source, message, f"unset {source}, or {other}")
    return RequestedTask(first_task, first_source, entry)


def added_task(recipe: Recipe) -> AddedTask | None:
    """Return the task of an extension that a recipe selects; None for GRPO and MaxEnt-GRPO."""
    name = recipe[TASK_KEY] if TASK_KEY in recipe.values else None
    return next((task for task in parts("task") if task.name == name), None)


def entry_of(recipe: Recipe) -> str:
    """Return the entry script of the trainers: the user's, or the script of the task."""
    added = added_task(recipe)
    return recipe.entry or (added.entry if added else ENTRIES[task_of(recipe)])


def task_of(recipe: Recipe) -> str:
    """Return the task of a recipe from ``with_task``: an extension's, "maxent" if it sets an objective, else "grpo"."""
    if added := added_task(recipe):
        return added.name
    return MAXENT if recipe.is_set("maxent_objective") else GRPO


def with_task(recipe: Recipe, request: RequestedTask) -> tuple[Recipe, list[Problem]]:
    """Return the recipe with its task and entry script, and a problem for each setting that contradicts the task.

    If MaxEnt is requested and the recipe sets no objective, the recipe gets ``SWITCHED_OBJECTIVE`` and a note. A recipe
    of an extension's task ignores the variables, which may be meant for the next recipe of the launch.
    """
    if TASK_KEY not in recipe.broken and (added := added_task(recipe)):
        conflict = Problem(
            "--task", f"requests {request.task}, but the recipe sets task: {added.name}", "remove --task"
        )
        return recipe, [conflict] if request.source == "--task" else []
    recipe = replace(recipe, entry=request.entry)
    key, objective = "maxent_objective", recipe.values["maxent_objective"]
    if request.task == MAXENT and objective.value is None and key not in recipe.broken:
        # The objective fixes some keys of the loss. Values in a file are replaced, each with a note. A contradicting
        # flag or variable stays, and ``recipe.maxent`` rejects it.
        source, switched = request.source, SWITCHED_OBJECTIVE
        recipe = recipe.with_value(key, Value(switched, source))
        notes = [f"{source}: selects {key}: {switched}; the evidence recommends no objective (docs/maxent.md)"]
        with contextlib.suppress(BrokenKey):  # the problem of a broken key is reported already
            for name, value in OBJECTIVES[switched].fixed_keys(recipe.__getitem__).items():
                old = recipe.values[name]
                in_file = not (old.from_flag or old.source in environment_keys())
                if recipe.is_set(name) and in_file and recipe[name] != value:
                    notes.append(f"{old.source}: {name}: {value} replaces {recipe[name]}; {switched} fixes it")
                    recipe = recipe.with_value(name, Value(value, source))
        return replace(recipe, notes=[*recipe.notes, *notes]), []
    if request.task == GRPO and recipe.is_set(key):
        where = objective.shadowed or objective.source
        other = f"unset {where}" if where in environment_keys() else f"remove {where}" if where.startswith("--") else ""
        message = f"requests GRPO, but {where} requests MaxEnt-GRPO (maxent_objective)"
        first = f"unset {request.source}" if request.source in _VARIABLES else f"remove {request.source}"
        return recipe, [Problem(request.source, message, f"{first}, or {other or 'use a GRPO recipe'}")]
    if request.task is None and objective.source in environment_keys() and not objective.shadowed:
        # A shell variable applies to every run, so it can't select the algorithm without MAXENT=1.
        message, fix = f"'{key}' changes nothing in a GRPO run", f"set MAXENT=1 too, or unset {objective.source}"
        return recipe.with_value(key, Value(None, DEFAULT_SOURCE)), [Problem(objective.source, message, fix)]
    return recipe, []


def require_same_task(recipe: Recipe, request: RequestedTask, task: str) -> None:
    """Raise ConfigError if ``request``, or ``maxent_objective`` in ``recipe``, would change a resumed run's ``task``.

    If an extension trains the task, only ``--task`` is an error.
    """
    if task not in ENTRIES:
        if request.source == "--task":
            raise config_error("--task", f"requests {request.task}, but this run is {task}", "remove --task")
        return
    if request.task not in (None, task):
        message = f"requests {_NAMES[request.task]}, but this run is {_NAMES[task]}"
        raise config_error(request.source, message, f"leave out {request.source}: a resumed run keeps its task")
    if task_of(recipe) != task:
        source = recipe.source("maxent_objective")
        raise config_error(source, "'maxent_objective' would turn this run into a MaxEnt run", f"leave out {source}")
