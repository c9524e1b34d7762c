"""Rules of the keys of generated problems.

Training and evaluations must use different seeds, and the ``modebench_*`` keys must allow enough different problems.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.extensions.problems import seeded
from grpo_recipes.extensions.problems.arguments import ProblemKeys
from grpo_recipes.extensions.problems.modebench import dataset
from grpo_recipes.extensions.problems.modebench.dataset import TASK_KEYS, TASKS
from grpo_recipes.extensions.problems.seeded import GENERATORS, is_seeded
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.rules import Condition, Idle, Rule, evaluates, evaluation_set, set_by_user

_LARGEST_OF_FOUR = 14  # listing all problems of four larger numbers takes minutes


def list_modebench_tasks(recipe: Recipe) -> list[str]:
    """Return the ModeBench tasks (``modebench:...``) that a recipe uses as dataset, evaluation set or benchmark."""
    return [task for task in TASKS if task in (recipe.data.name, evaluation_set(recipe), *recipe.evaluation.benchmarks)]


def list_seeded_sets(recipe: Recipe) -> list[str]:
    """Return the names (``seeded:...``) of the generators that a recipe uses as dataset or evaluation set."""
    return [name for name in GENERATORS if name in (recipe.data.name, evaluation_set(recipe))]


def list_puzzle_tasks(recipe: Recipe) -> set[str]:
    """Return the ModeBench tasks that a recipe uses, also by generators: ``seeded:countdown`` counts as countdown."""
    seeded_tasks = {GENERATORS[name].task for name in list_seeded_sets(recipe)} - {None}
    return {*list_modebench_tasks(recipe), *map(str, seeded_tasks)}


def _evaluates_on_seeds(recipe: Recipe) -> bool:
    """Return whether a recipe evaluates during training on problems that are generated from seeds."""
    uses_training_set = is_seeded(recipe.data.name) and not recipe.evaluation.dataset_name
    return evaluates(recipe) and (uses_training_set or is_seeded(evaluation_set(recipe)))


def _find_shared_seeds(recipe: Recipe) -> list[int]:
    """Return the seeds that a recipe uses for training and for evaluations; [] if their generators differ."""
    name = recipe.data.name
    same_set = _evaluates_on_seeds(recipe) and is_seeded(name) and (recipe.evaluation.dataset_name or name) == name
    return seeded.Settings.read(recipe.__getitem__).shared if same_set else []


def _describe_shared_seeds(recipe: Recipe, _: str) -> str:
    """Return the message about seeds that training and evaluations share."""
    keys, seeds = ProblemKeys(recipe), _find_shared_seeds(recipe)
    listed = f"seed {seeds[0]}" if len(seeds) == 1 else f"the seeds {seeds[0]} to {seeds[-1]}"
    return (
        f"{listed} would be used in training and evaluations: "
        f"problem_seed_start {keys.problem_seed_start} with problem_seeds {keys.problem_seeds}, "
        f"eval_problem_seed_start {keys.eval_problem_seed_start} with eval_problem_seeds {keys.eval_problem_seeds}"
    )


def _make_missing_task_condition(task: str) -> Condition:
    """Return a condition for a rule: a function that returns whether a recipe does not use the ModeBench task."""
    return lambda recipe: task not in list_puzzle_tasks(recipe)


def _check_problem_count(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Generate the problems of a recipe; yield a problem if the ``modebench_*`` keys allow too few or none.

    Yield nothing if a rule rejects one of these keys already.
    """
    if any(rule.key.startswith("modebench_") and rule.broken(recipe) for rule in RULES):
        return
    settings, seed_settings = dataset.Settings.read(recipe.__getitem__), seeded.Settings.read(recipe.__getitem__)
    generators: dict[str, Callable[[], Any]]
    generators = {task: partial(dataset.make_rows, task, "test", settings) for task in list_modebench_tasks(recipe)}
    first = seed_settings.problem_seed_start
    generators |= {name: partial(seeded.make_row, name, first, seed_settings) for name in list_seeded_sets(recipe)}
    for name, generate in generators.items():
        try:
            generate()
        except ConfigError as error:
            (problem,) = error.problems
            yield recipe.problem(problem.where, f"{name}: {problem.what}", problem.fix)


CHECKS = (_check_problem_count,)

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("{item}", lambda r: is_seeded(r.data.name) and set_by_user(r, "max_train_prompts", any_value=False),
        "'{item}' has no effect with {dataset_name}, because problem_seeds sets the number of problems",
        "{removal}, or write problem_seeds"),
    Rule("{item}", lambda r: _evaluates_on_seeds(r)
        and [key for key in set_by_user(r, "eval_subsample eval_max_prompts") if r[key] != catalogue()[key]["default"]],
        "'{item}' has no effect with a seeded evaluation set, because every seed is used",
        "{removal}, or write eval_problem_seeds"),
    Rule("{item}",
        lambda r: ProblemKeys(r).eval_problem_ids and set_by_user(r, "eval_problem_seed_start eval_problem_seeds"),
        "'{item}' and eval_problem_ids can't be combined: both choose the seeds",
        "{removal}, or remove eval_problem_ids"),
    Rule("eval_problem_ids", lambda r: [seed for seed in ProblemKeys(r).eval_problem_ids or () if seed < 0],
        "{item} can't be a seed", "write whole numbers of 0 or more"),
    Rule("eval_problem_ids", lambda r: bool(ProblemKeys(r).eval_problem_ids) and _find_shared_seeds(r),
        "{item} is also a training seed: problem_seed_start {problem_seed_start} with problem_seeds {problem_seeds}",
        "write other seeds"),
    Rule("eval_problem_seed_start", lambda r: not ProblemKeys(r).eval_problem_ids and bool(_find_shared_seeds(r)),
        _describe_shared_seeds,
        lambda r, _: f"set eval_problem_seed_start: {ProblemKeys(r).problem_seed_start + ProblemKeys(r).problem_seeds}"
            " or more"),
    Rule("modebench_min_modes",
        lambda r: list_puzzle_tasks(r) and ProblemKeys(r).modebench_min_modes > ProblemKeys(r).modebench_max_modes,
        "modebench_min_modes {modebench_min_modes} exceeds modebench_max_modes {modebench_max_modes}",
        "set modebench_min_modes: {modebench_max_modes} or less"),
    Rule("modebench_largest_number", lambda r: "modebench:countdown" in list_puzzle_tasks(r)
        and ProblemKeys(r).modebench_numbers == 4 and (ProblemKeys(r).modebench_largest_number or 0) > _LARGEST_OF_FOUR,
        "modebench_largest_number {modebench_largest_number} with 4 numbers has too many problems to list quickly",
        f"set modebench_largest_number: {_LARGEST_OF_FOUR} or less"),
    Rule("modebench_hidden",
        lambda r: "modebench:graph_coloring" in list_puzzle_tasks(r)
        and ProblemKeys(r).modebench_hidden > ProblemKeys(r).modebench_vertices,
        "modebench_hidden {modebench_hidden} exceeds modebench_vertices {modebench_vertices}",
        "set modebench_hidden: {modebench_vertices} or less"),
)
_BOTH = f"the dataset or benchmark {' or '.join(TASKS)}"
IDLE: tuple[Idle, ...] = (
    Idle("problem_seed_start problem_seeds", lambda r: not list_seeded_sets(r), f"a dataset {seeded.SCHEME}..."),
    Idle("eval_problem_seed_start eval_problem_seeds eval_problem_ids",
        lambda r: evaluates(r) and not list_seeded_sets(r), f"a dataset {seeded.SCHEME}..."),
    *(Idle(" ".join(keys), _make_missing_task_condition(task), f"the dataset or benchmark {task}")
        for task, keys in TASK_KEYS.items()),
    Idle("modebench_min_modes modebench_max_modes", lambda r: not list_puzzle_tasks(r), _BOTH),
    # Seeded datasets do not read these keys.
    Idle("modebench_prompts modebench_test_prompts modebench_seed", lambda r: not list_modebench_tasks(r), _BOTH),
)
# fmt: on
