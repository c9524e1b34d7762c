"""Which trainer a run uses: GRPO's or MaxEnt-GRPO's. Pure: no torch.

``--task``, ``MAXENT`` or ``TRAIN_ENTRYPOINT`` ask for one; without them a recipe that names a ``maxent_objective`` is a
MaxEnt recipe. ``with_task`` decides once: from then on a recipe is MaxEnt's exactly when it gives the objective, so a
frozen recipe says by itself what it is.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import home
from grpo_recipes.recipe import DEFAULT_SOURCE, BrokenKey, Recipe, Value
from grpo_recipes.recipe.keys import environment_keys
from grpo_recipes.recipe.registry import OBJECTIVES

GRPO, MAXENT = "grpo", "maxent"
SWITCHED_OBJECTIVE = "listwise"  # what MAXENT=1 selects if the recipe gives no objective
ENTRIES = {GRPO: "src/grpo.py", MAXENT: "src/maxent-grpo.py"}
_NAMES = {GRPO: "GRPO", MAXENT: "MaxEnt"}
_VARIABLES = ("MAXENT", "TRAIN_ENTRYPOINT")
_SWITCH = {"": None, "0": GRPO, "false": GRPO, "no": GRPO, "1": MAXENT, "true": MAXENT, "yes": MAXENT}


@dataclass(frozen=True)
class RequestedTask:
    """What the command line and the environment ask for."""

    task: str | None = None  # grpo, maxent, or None where they leave it to the recipe
    source: str = ""  # --task, MAXENT or TRAIN_ENTRYPOINT
    entry: str | None = None  # the user's entry script, None for the task's own


def requested_task(environment: Mapping[str, str], option: str | None = None) -> RequestedTask:
    """Return the task that ``--task`` (``option``), ``MAXENT`` and ``TRAIN_ENTRYPOINT`` name; refuse two tasks."""
    if not (home() / ENTRIES[GRPO]).is_file():
        fix = "unset GRPO_HOME, or name the repository"
        raise config_error("GRPO_HOME", f"there is no repository in {home()}", fix)
    switch, entry = environment.get("MAXENT", ""), environment.get("TRAIN_ENTRYPOINT") or None
    problems = []
    if switch.lower() not in _SWITCH:
        fix = "unset MAXENT, or set MAXENT=1 for MaxEnt-GRPO, or set MAXENT=0 for GRPO"
        problems.append(Problem("MAXENT", f"is '{switch}'", fix))
    if entry and not (home() / entry).is_file():
        what, fix = f"there is no entry script {entry}", f"use {', '.join(ENTRIES.values())}"
        problems.append(Problem("TRAIN_ENTRYPOINT", what, fix))
    if problems:
        raise ConfigError(*problems)
    # A script of ours is the same however its path is written.
    scripts = {(home() / script).resolve(): task for task, script in ENTRIES.items()}
    own = scripts.get((home() / entry).resolve()) if entry else None
    entry = ENTRIES[own] if own else entry
    answers = [("--task", option), ("MAXENT", _SWITCH[switch.lower()]), ("TRAIN_ENTRYPOINT", own)]
    given = [(source, task) for source, task in answers if task]
    first, wanted = given[0] if given else ("", None)
    for source, task in given:
        if task != wanted:
            written = f"'{entry if source == 'TRAIN_ENTRYPOINT' else switch}' contradicts {first} ({wanted})"
            other = f"unset {first}" if first in _VARIABLES else f"remove {first}"
            raise config_error(source, written, f"unset {source}, or {other}")
    return RequestedTask(wanted, first, entry)


def task_of(recipe: Recipe) -> str:
    """Return the task of a recipe that ``with_task`` returned: MaxEnt's names its objective."""
    return MAXENT if recipe.is_set("maxent_objective") else GRPO


def with_task(recipe: Recipe, asked: RequestedTask) -> tuple[Recipe, list[Problem]]:
    """Return the recipe with its task, and what contradicts that.

    If MaxEnt is requested and the recipe gives no objective, the recipe gets ``SWITCHED_OBJECTIVE`` and a note.
    """
    recipe = replace(recipe, entry=asked.entry)
    key, objective = "maxent_objective", recipe.values["maxent_objective"]
    if asked.task == MAXENT and objective.value is None and key not in recipe.broken:
        return _switched(recipe, asked.source), []
    if asked.task == GRPO and recipe.is_set(key):
        where = objective.shadowed or objective.source
        other = f"unset {where}" if where in environment_keys() else f"remove {where}" if where.startswith("--") else ""
        what = f"asks for GRPO, {where} for MaxEnt-GRPO (maxent_objective)"
        first = f"unset {asked.source}" if asked.source in _VARIABLES else f"remove {asked.source}"
        return recipe, [Problem(asked.source, what, f"{first}, or {other or 'use a GRPO recipe'}")]
    if asked.task is None and objective.source in environment_keys() and not objective.shadowed:
        # A variable of the shell is there for every run: alone it does not choose the algorithm.
        what, fix = f"'{key}' changes nothing in a GRPO run", f"set MAXENT=1 too, or unset {objective.source}"
        return recipe.with_value(key, Value(None, DEFAULT_SOURCE)), [Problem(objective.source, what, fix)]
    return recipe, []


def _switched(recipe: Recipe, source: str) -> Recipe:
    """Return a recipe without an objective as a MaxEnt recipe; ``source`` is the flag or variable that requests it.

    The objective fixes some keys of the loss. Values that a file gives for GRPO are replaced, each with a note; a
    contradicting flag or variable stays, and ``recipe.maxent`` rejects it.
    """
    key, objective = "maxent_objective", OBJECTIVES[SWITCHED_OBJECTIVE]
    recipe = recipe.with_value(key, Value(SWITCHED_OBJECTIVE, source))
    said = [f"{source}: selects {key}: {SWITCHED_OBJECTIVE}; the evidence recommends no objective (docs/maxent.md)"]
    with contextlib.suppress(BrokenKey):  # the problem of a broken key is reported already
        for name, value in objective.fixed_keys(recipe.__getitem__).items():
            given = recipe.values[name]
            of_file = not (given.from_flag or given.source in environment_keys())
            if recipe.is_set(name) and of_file and recipe[name] != value:
                said.append(f"{given.source}: {name}: {value} replaces {recipe[name]}; {SWITCHED_OBJECTIVE} fixes it")
                recipe = recipe.with_value(name, Value(value, source))
    return replace(recipe, notes=[*recipe.notes, *said])


def same_task(recipe: Recipe, asked: RequestedTask, task: str) -> None:
    """Refuse another task than the resumed run's, asked for now or through what overrides its recipe."""
    if asked.task not in (None, task):
        what = f"asks for {_NAMES[asked.task]}, but this run is {_NAMES[task]}"
        raise config_error(asked.source, what, f"leave out {asked.source}: a resumed run goes on as it began")
    if task_of(recipe) != task:
        source = recipe.source("maxent_objective")
        raise config_error(source, "'maxent_objective' would turn this run into a MaxEnt run", f"leave out {source}")
