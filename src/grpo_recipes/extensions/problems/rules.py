"""Rules of generated problems: seeds that are trained and evaluated on, and keys of ModeBench that leave no problem."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.extensions.problems import seeded
from grpo_recipes.extensions.problems.modebench import dataset
from grpo_recipes.extensions.problems.modebench.dataset import TASK_KEYS, TASKS
from grpo_recipes.extensions.problems.seeded import GENERATORS, is_seeded
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.rules import Condition, Idle, Rule, evaluates, evaluation_set, set_by_user

_LARGEST_OF_FOUR = 14  # listing all problems of four larger numbers takes minutes


def modebench_tasks(recipe: Recipe) -> list[str]:
    """Return the ModeBench tasks that a recipe trains, evaluates or tests on."""
    return [task for task in TASKS if task in (recipe["dataset_name"], evaluation_set(recipe), *recipe["benchmarks"])]


def seeded_sets(recipe: Recipe) -> list[str]:
    """Return the generators whose problems a recipe trains or evaluates on."""
    return [name for name in GENERATORS if name in (recipe["dataset_name"], evaluation_set(recipe))]


def puzzles(recipe: Recipe) -> set[str]:
    """Return the ModeBench tasks whose problems a recipe has, drawn by seeds or not."""
    drawn = {GENERATORS[name].task for name in seeded_sets(recipe)} - {None}
    return {*modebench_tasks(recipe), *map(str, drawn)}


def _evaluates_on_seeds(recipe: Recipe) -> bool:
    """Return whether the evaluation set is made from seeds."""
    by_default = is_seeded(recipe["dataset_name"]) and not recipe["eval_dataset_name"]
    return evaluates(recipe) and (by_default or is_seeded(evaluation_set(recipe)))


def _shared_seeds(recipe: Recipe) -> list[int]:
    """Return the seeds of one generator that a recipe both trains and evaluates on."""
    name = recipe["dataset_name"]
    same = _evaluates_on_seeds(recipe) and is_seeded(name) and (recipe["eval_dataset_name"] or name) == name
    return seeded.Settings.read(recipe.__getitem__).shared if same else []


def _lacks(task: str) -> Condition:
    """Return the condition that a recipe has no problems of a ModeBench task."""
    return lambda recipe: task not in puzzles(recipe)


def _seeds(seeds: list[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"the seeds {seeds[0]} to {seeds[-1]}"


def _enough_problems(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Reject keys ``modebench_*`` that leave too few problems, or none for a seed."""
    if any(rule.key.startswith("modebench_") and rule.broken(recipe) for rule in RULES):
        return
    settings, of_seeds = dataset.Settings.read(recipe.__getitem__), seeded.Settings.read(recipe.__getitem__)
    makers: dict[str, Callable[[], Any]]
    makers = {task: partial(dataset.rows, task, "test", settings) for task in modebench_tasks(recipe)}
    first = of_seeds.problem_seed_start
    makers |= {name: partial(seeded.row, name, first, of_seeds) for name in seeded_sets(recipe)}
    for name, make in makers.items():
        try:
            make()
        except ConfigError as error:
            (problem,) = error.problems
            yield recipe.problem(problem.where, f"{name}: {problem.what}", problem.fix)


CHECKS = (_enough_problems,)

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("{item}", lambda r: is_seeded(r["dataset_name"]) and set_by_user(r, "max_train_prompts", any_value=False),
        "'{item}' does nothing with {dataset_name}, whose problems are those of its seeds",
        "{removal}, or write problem_seeds"),
    Rule("{item}", lambda r: _evaluates_on_seeds(r)
        and [key for key in set_by_user(r, "eval_subsample eval_max_prompts") if r[key] != catalogue()[key]["default"]],
        "'{item}' does nothing with a seeded evaluation set, of which every seed is used",
        "{removal}, or write eval_problem_seeds"),
    Rule("{item}",
        lambda r: bool(r["eval_problem_ids"]) and set_by_user(r, "eval_problem_seed_start eval_problem_seeds"),
        "'{item}' contradicts eval_problem_ids, which are the seeds themselves",
        "{removal}, or remove eval_problem_ids"),
    Rule("eval_problem_ids", lambda r: [seed for seed in r["eval_problem_ids"] or () if seed < 0],
        "{item} cannot be a seed", "write whole numbers of 0 or more"),
    Rule("eval_problem_ids", lambda r: bool(r["eval_problem_ids"]) and _shared_seeds(r),
        "{item} is trained on too: problem_seed_start {problem_seed_start} with problem_seeds {problem_seeds}",
        "write other seeds"),
    Rule("eval_problem_seed_start", lambda r: not r["eval_problem_ids"] and bool(_shared_seeds(r)),
        lambda r, _: f"{_seeds(_shared_seeds(r))} would be trained and evaluated on: problem_seed_start "
        f"{r['problem_seed_start']} with problem_seeds {r['problem_seeds']}, eval_problem_seed_start "
        f"{r['eval_problem_seed_start']} with eval_problem_seeds {r['eval_problem_seeds']}",
        lambda r, _: f"write eval_problem_seed_start: {r['problem_seed_start'] + r['problem_seeds']} or more"),
    Rule("modebench_min_modes", lambda r: puzzles(r) and r["modebench_min_modes"] > r["modebench_max_modes"],
        "modebench_min_modes {modebench_min_modes} exceeds modebench_max_modes {modebench_max_modes}",
        "write at most {modebench_max_modes}"),
    Rule("modebench_largest_number", lambda r: "modebench:countdown" in puzzles(r)
        and r["modebench_numbers"] == 4 and (r["modebench_largest_number"] or 0) > _LARGEST_OF_FOUR,
        "modebench_largest_number {modebench_largest_number} with 4 numbers takes minutes to list",
        f"write at most {_LARGEST_OF_FOUR}"),
    Rule("modebench_hidden",
        lambda r: "modebench:graph_coloring" in puzzles(r) and r["modebench_hidden"] > r["modebench_vertices"],
        "modebench_hidden {modebench_hidden} exceeds modebench_vertices {modebench_vertices}",
        "write at most {modebench_vertices}"),
)
_BOTH = f"the dataset or benchmark {' or '.join(TASKS)}"
IDLE: tuple[Idle, ...] = (
    Idle("problem_seed_start problem_seeds", lambda r: not seeded_sets(r), f"a dataset {seeded.SCHEME}..."),
    Idle("eval_problem_seed_start eval_problem_seeds eval_problem_ids",
        lambda r: evaluates(r) and not seeded_sets(r), f"a dataset {seeded.SCHEME}..."),
    *(Idle(" ".join(keys), _lacks(task), f"the dataset or benchmark {task}") for task, keys in TASK_KEYS.items()),
    Idle("modebench_min_modes modebench_max_modes", lambda r: not puzzles(r), _BOTH),
    # A dataset of seeds does not read these.
    Idle("modebench_prompts modebench_test_prompts modebench_seed", lambda r: not modebench_tasks(r), _BOTH),
)
# fmt: on
