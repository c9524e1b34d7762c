"""What `grpo check` says of evaluation, benchmarks and callbacks. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.benchmark_names import benchmark_columns, benchmark_problem, is_file
from grpo_recipes.recipe.user_code import copy_path, problem_with, split_spec


def evaluation(recipe: Recipe) -> list[Problem]:
    """Keys of evaluation that contradict ``eval_strategy``, or do nothing without it."""
    strategy = recipe["eval_strategy"]
    if strategy == "no":
        return [
            Problem(recipe.origin(key), f"'{key}' does nothing without eval_strategy", f"add eval_strategy: {fix}")
            for key, fix in {"eval_steps": "steps", "eval_on_start": "steps", "num_generations_eval": "steps"}.items()
            if key not in recipe.broken and recipe.given(key) and recipe[key]
        ]
    problems = []
    steps, scheduler = recipe["eval_steps"], recipe["lr_scheduler_type"]
    if strategy == "steps" and not steps:
        what = "eval_strategy: steps without eval_steps evaluates after every optimizer step"
        problems.append(Problem(recipe.origin("eval_strategy"), what, "add eval_steps, e.g. eval_steps: 50"))
    elif strategy == "steps" and steps > 1 and steps % 1:
        what = f"eval_steps {steps:g} is no whole number of steps, nor a share below 1"
        problems.append(Problem(recipe.origin("eval_steps"), what, f"write eval_steps: {round(steps)}"))
    if scheduler in ("reduce_lr_on_plateau", "greedy"):
        what = f"lr_scheduler_type {scheduler} follows eval_loss, which is near zero whatever the model does"
        problems.append(Problem(recipe.origin("lr_scheduler_type"), what, "write lr_scheduler_type: cosine"))
    if recipe["use_transformers_continuous_batching"]:
        what = "use_transformers_continuous_batching puts the model back into training in an evaluation"
        fix = "remove it, or write eval_strategy: 'no'"
        problems.append(Problem(recipe.origin("use_transformers_continuous_batching"), what, fix))
    return problems


def benchmarks(recipe: Recipe) -> list[Problem]:
    """Unknown benchmarks, files without the columns, and a number of samples that the temperature makes pointless."""
    names = recipe["benchmarks"]
    where = recipe.origin("benchmarks")
    problems = [problem for name in names for problem in [benchmark_problem(name, where)] if problem]
    problems += [Problem(where, f"'{name}' is listed twice", "keep one") for name in {*names} if names.count(name) > 1]
    for name in names:
        path = Path(os.path.expanduser(name))
        if is_file(name) and path.is_file():
            problems += _columns(recipe, path)
    samples = recipe["benchmark_samples"]
    if recipe["benchmark_temperature"] == 0 and samples > 1:
        what = f"benchmark_samples {samples} at benchmark_temperature 0 are {samples} times the same completion"
        fix = "write benchmark_samples: 1, or a benchmark_temperature above 0, e.g. 0.6"
        problems.append(Problem(recipe.origin("benchmark_samples"), what, fix))
    return problems


def _columns(recipe: Recipe, path: Path) -> list[Problem]:
    where = recipe.origin("benchmarks")
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
    try:
        names = list(dict(json.loads(first)))
    except (ValueError, TypeError):
        return [Problem(where, f"'{path}' does not begin with a JSON object", "write one a line")]
    columns = (recipe["dataset_prompt_column"], recipe["dataset_solution_column"])
    if benchmark_columns(names, columns) is None:
        what = f"'{path.name}' has the columns {', '.join(names)}, not problem and answer"
        return [Problem(where, what, "rename them, or name them as dataset_prompt_column and dataset_solution_column")]
    return []


def callbacks(recipe: Recipe) -> list[Problem]:
    """Callbacks that cannot be loaded, as far as their source tells; a run has copies of the files it began with."""
    where, run = recipe.origin("callbacks"), recipe.path.parent
    copied = [
        spec
        for spec in recipe["callbacks"]
        if split_spec(spec)[0].endswith(".py")
        and (run / "run.json").exists()
        and copy_path(spec, run / "callbacks").exists()
    ]
    rest = [spec for spec in recipe["callbacks"] if spec not in copied]
    return [problem for spec in rest for problem in [problem_with(spec, where)] if problem]
