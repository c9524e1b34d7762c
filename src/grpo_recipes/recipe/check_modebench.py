"""What `grpo check` says of ModeBench: sizes that cannot be, and rewards that cannot judge it. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_recipes.errors import Problem
from grpo_recipes.modebench.dataset import SCHEME, TASKS, Settings, TooFew, rows
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.reward_names import ONE_ANSWER

REWARD = "modebench"
_LARGEST_OF_FOUR = 14  # listing all problems of four larger numbers takes minutes


def named_tasks(recipe: Recipe) -> list[str]:
    """The ModeBench tasks that a recipe reads."""
    sets = [recipe["dataset_name"], recipe["eval_dataset_name"] if recipe["eval_strategy"] != "no" else None]
    return [task for task in TASKS if task in (*sets, *recipe["benchmarks"])]


def sizes(recipe: Recipe) -> list[Problem]:
    """Keys ``modebench_*`` by which there are no problems, or too few."""
    tasks = named_tasks(recipe)
    if not tasks:
        return []
    settings = Settings.read(recipe.__getitem__)
    problems = list(_contradictions(recipe, settings, tasks))
    for task in () if problems else tasks:
        try:
            rows(task, "test", settings)
        except TooFew as error:
            key, what, fix = too_few(settings, error.found)
            problems.append(Problem(recipe.place(key), f"{task}: {what}", fix))
    return problems


def _contradictions(recipe: Recipe, settings: Settings, tasks: list[str]) -> Iterator[Problem]:
    if settings.min_modes > settings.max_modes:
        what = f"modebench_min_modes {settings.min_modes} exceeds modebench_max_modes {settings.max_modes}"
        yield Problem(recipe.place("modebench_min_modes"), what, f"write at most {settings.max_modes}")
    if "modebench:countdown" in tasks and settings.numbers == 4 and settings.largest > _LARGEST_OF_FOUR:
        what = f"modebench_largest_number {settings.largest} with 4 numbers takes minutes to list"
        yield Problem(recipe.place("modebench_largest_number"), what, f"write at most {_LARGEST_OF_FOUR}")
    if "modebench:graph_coloring" in tasks and settings.hidden > settings.vertices:
        what = f"modebench_hidden {settings.hidden} exceeds modebench_vertices {settings.vertices}"
        yield Problem(recipe.place("modebench_hidden"), what, f"write at most {settings.vertices}")


def too_few(settings: Settings, found: int) -> tuple[str, str, str]:
    """What is wrong where there are ``found`` problems alone: key, what, fix."""
    wanted = settings.prompts + settings.test_prompts
    what = f"{wanted} problems are asked for (modebench_prompts and modebench_test_prompts), there are {found}"
    left = found - settings.test_prompts
    if left > 0:
        return "modebench_prompts", what, f"write modebench_prompts: {left} or less, or ask for easier ones"
    fix = f"write modebench_test_prompts: {found // 4} and modebench_prompts: {found - found // 4}"
    return "modebench_test_prompts", what, fix if found > 1 else "widen modebench_min_modes to modebench_max_modes"


def rewards(recipe: Recipe) -> list[Problem]:
    """Rewards that cannot judge the data: one reference answer for many, or a verifier of other data."""
    where, named = recipe.place("reward_funcs"), recipe["reward_funcs"]
    trained = (recipe["dataset_name"] or "").startswith(SCHEME)
    evaluated = recipe["eval_dataset_name"] if recipe["eval_strategy"] != "no" else None
    problems = []
    if REWARD in named and not trained:
        what = f"reward '{REWARD}' judges the problems of {' and '.join(TASKS)} alone"
        problems.append(Problem(where, what, f"write dataset_name: {TASKS[0]}, or remove it"))
    wrong = [name for name in named if name in ONE_ANSWER]
    if trained and wrong:
        what = f"reward '{wrong[0]}' compares with one answer, a problem of {recipe['dataset_name']} has several"
        problems.append(Problem(where, what, f"write reward_funcs: [{REWARD}]"))
    if evaluated and evaluated.startswith(SCHEME) != trained:
        what = f"the rewards of '{recipe['dataset_name'] or 'dataset_mixture'}' cannot judge '{evaluated}'"
        fix = "evaluate on data of the same kind, or name the other one in benchmarks"
        problems.append(Problem(recipe.place("eval_dataset_name"), what, fix))
    return problems
