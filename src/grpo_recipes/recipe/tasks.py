"""Which trainer a run uses: GRPO's or MaxEnt-GRPO's. Pure: no torch.

``--task``, ``MAXENT`` or ``TRAIN_ENTRYPOINT`` ask for one; without them a recipe that names a ``maxent_objective`` is a
MaxEnt recipe. ``with_task`` settles it once: from then on a recipe is MaxEnt's exactly when it gives the objective, so
that a frozen recipe says by itself what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import home
from grpo_recipes.recipe import DEFAULT_ORIGIN, Recipe, Value
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS
from grpo_recipes.recipe.registry import DEFAULT_OBJECTIVE

GRPO, MAXENT = "grpo", "maxent"
ENTRIES = {GRPO: "src/grpo.py", MAXENT: "src/maxent-grpo.py"}
_NAMES = {GRPO: "GRPO", MAXENT: "MaxEnt"}
_SWITCH = {"": None, "0": GRPO, "false": GRPO, "no": GRPO, "1": MAXENT, "true": MAXENT, "yes": MAXENT}


@dataclass(frozen=True)
class RequestedTask:
    """What the command line and the environment ask for.

    Attributes:
        task: ``grpo``, ``maxent``, or None where they leave it to the recipe.
        source: ``--task``, ``MAXENT`` or ``TRAIN_ENTRYPOINT``: who asks.
        entry: the user's entry script, None for the task's own.
    """

    task: str | None = None
    source: str = ""
    entry: str | None = None


def requested_task(environment: Mapping[str, str], option: str | None = None) -> RequestedTask:
    """The task that ``--task``, ``MAXENT`` and ``TRAIN_ENTRYPOINT`` ask for.

    Args:
        environment: variables of the user.
        option: value of ``--task``.

    Raises:
        ConfigError: they contradict each other, or the entry script does not exist.
    """
    if not (home() / ENTRIES[GRPO]).is_file():
        raise config_error(
            "GRPO_HOME", f"there is no repository in {home()}", "unset GRPO_HOME, or name the repository"
        )
    switch, entry = environment.get("MAXENT", ""), environment.get("TRAIN_ENTRYPOINT") or None
    problems = []
    if switch.lower() not in _SWITCH:
        fix = "write MAXENT=1 for MaxEnt-GRPO, MAXENT=0 for GRPO, or unset it"
        problems.append(Problem("MAXENT", f"is '{switch}'", fix))
    if entry and not (home() / entry).is_file():
        fix = f"use {', '.join(ENTRIES.values())}"
        problems.append(Problem("TRAIN_ENTRYPOINT", f"there is no entry script {entry}", fix))
    if problems:
        raise ConfigError(*problems)
    own = _task_of_script(entry)
    entry = ENTRIES[own] if own else entry
    answers = [("--task", option), ("MAXENT", _SWITCH[switch.lower()]), ("TRAIN_ENTRYPOINT", own)]
    given = [(source, task) for source, task in answers if task]
    for source, task in given[1:]:
        first, wanted = given[0]
        if task != wanted:
            written = f"'{entry if source == 'TRAIN_ENTRYPOINT' else switch}' contradicts {first} ({wanted})"
            raise config_error(source, written, "unset one of the two")
    return RequestedTask(given[0][1], given[0][0], entry) if given else RequestedTask(entry=entry)


def _task_of_script(entry: str | None) -> str | None:
    """The task of an entry script of ours, however its path is written; None of another."""
    scripts = {(home() / script).resolve(): task for task, script in ENTRIES.items()}
    return scripts.get((home() / entry).resolve()) if entry else None


def task_of(recipe: Recipe) -> str:
    """The task of a settled recipe: MaxEnt's names its objective."""
    return MAXENT if recipe.given("maxent_objective") else GRPO


def entry_of(recipe: Recipe, asked: RequestedTask) -> str:
    """The entry script of a settled recipe."""
    return asked.entry or ENTRIES[task_of(recipe)]


def with_task(recipe: Recipe, asked: RequestedTask) -> tuple[Recipe, list[Problem]]:
    """The recipe with its task settled, and what contradicts that.

    RequestedTask for MaxEnt, a recipe without an objective is given the default one, with who asked as its origin.
    """
    objective = recipe.values["maxent_objective"]
    if asked.task == MAXENT and not recipe.given("maxent_objective"):
        settled = {**recipe.values, "maxent_objective": replace(objective, origin=asked.source)}
        return replace(recipe, values=settled), []
    if asked.task == GRPO and recipe.given("maxent_objective"):
        where = objective.over or objective.origin
        what = f"asks for GRPO, {where} for MaxEnt-GRPO (maxent_objective)"
        other = f"leave out {where}" if where.startswith("--") or where in ENVIRONMENT_KEYS else "take a GRPO recipe"
        return recipe, [Problem(asked.source, what, f"leave out {asked.source}, or {other}")]
    if asked.task is None and objective.origin in ENVIRONMENT_KEYS and not objective.over:
        # A variable of the shell is there for every run: alone it does not choose the algorithm.
        what, fix = "changes nothing in a GRPO run", f"set MAXENT=1 too, or unset {objective.origin}"
        settled = {**recipe.values, "maxent_objective": Value(DEFAULT_OBJECTIVE, DEFAULT_ORIGIN)}
        return replace(recipe, values=settled), [Problem(objective.origin, f"'maxent_objective' {what}", fix)]
    return recipe, []


def same_task(recipe: Recipe, asked: RequestedTask, task: str) -> None:
    """A resumed run keeps its task.

    Args:
        recipe: the run's own, with what overrides it now.
        asked: what is asked for now.
        task: that of the run.

    Raises:
        ConfigError: another task is asked for.
    """
    if asked.task not in (None, task):
        what = f"asks for {_NAMES[asked.task]}, the run is one of {_NAMES[task]}"
        raise config_error(asked.source, what, f"leave out {asked.source}: a resumed run goes on as it began")
    if task_of(recipe) != task:
        origin = recipe.origin("maxent_objective")
        raise config_error(origin, "'maxent_objective' would make this GRPO run one of MaxEnt", f"leave out {origin}")
