"""The datasets, rewards and benchmarks that this extension registers.

The tables connect names of recipes, such as ``modebench:countdown``, with functions that make rows and score
completions.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from grpo_recipes.extensions.problems import seeded
from grpo_recipes.extensions.problems.modebench import dataset
from grpo_recipes.extensions.problems.modebench.baselines import baselines
from grpo_recipes.recipe.generated import GeneratedData, Lookup, Row, Scoring
from grpo_recipes.recipe.registry import Benchmark, Reward

_REWARDS = "grpo_recipes.extensions.problems.rewards"
_SEED_KEYS = ("problem_seed_start", "problem_seeds")
_EVAL_SEED_KEYS = ("eval_problem_seed_start", "eval_problem_seeds", "eval_problem_ids")


def _modebench_rows(task: str, keys: Lookup, split: str) -> list[Row]:
    """Return the problems of a ModeBench task and split, as the recipe keys request."""
    return dataset.rows(task, split, dataset.Settings.read(keys))


def _modebench_fingerprint(task: str, keys: Lookup) -> str:
    """Return a short hash of the settings that affect the rows of a ModeBench task."""
    return dataset.Settings.read(keys).fingerprint(task)


def _mode_scores(modes: Sequence[Sequence[str | None]], answers: Sequence[str]) -> dict[str, Any]:
    """Return ModeBench's scores of a benchmark.

    ``modes`` (problems, samples) has each completion's mode, None if wrong.
    """
    return dataset.mode_scores(modes, [dataset.problem_of(answer)["modes"] for answer in answers])


def _seeded_rows(generator: str, keys: Lookup, split: str) -> list[Row]:
    """Return the problems of a generator and split, as the recipe keys request."""
    return seeded.rows(generator, split, seeded.Settings.read(keys))


def _seeded_fingerprint(generator: str, keys: Lookup) -> str:
    """Return a short hash of the settings that affect the rows of a generator."""
    return seeded.Settings.read(keys).fingerprint(generator)


_MODEBENCH = tuple(
    GeneratedData(
        task,
        dataset.COLUMNS,
        partial(_modebench_rows, task),
        partial(_modebench_fingerprint, task),
        size_keys=("modebench_prompts", "modebench_test_prompts"),
        reward="modebench",
        scoring=Scoring("modes", dataset.mode_of, _mode_scores, baselines),
    )
    for task in dataset.TASKS
)
_SEEDED = tuple(
    GeneratedData(
        name,
        generator.columns,
        partial(_seeded_rows, name),
        partial(_seeded_fingerprint, name),
        size_keys=("problem_seeds", "eval_problem_seeds"),
        reward="modebench" if generator.task else "satisfiability" if name == seeded.SAT else None,
        ordered=True,
        order_keys=_SEED_KEYS,
        eval_keys=_EVAL_SEED_KEYS,
        recorded={seeded.SEED_COLUMN: "problem_seeds"},
    )
    for name, generator in seeded.GENERATORS.items()
)
DATASETS = (*_MODEBENCH, *_SEEDED)
REWARDS = (
    Reward("modebench", f"{_REWARDS}:modebench", accuracy=True, judges=dataset.TASKS, writings=(r"\boxed{%s}",),
        answers=f"{_REWARDS}:modebench_answers"),
    Reward("satisfiability", f"{_REWARDS}:satisfiability", accuracy=True, judges=(seeded.SAT,), tagged=True,
        writings=("<answer>%s</answer>",), answers=f"{_REWARDS}:satisfiability_answers"),
)  # fmt: skip
_SCORES = "pass@k, mean@k, distinct@k, coverage@k; needs no network"
BENCHMARKS = {
    "modebench:countdown": Benchmark(
        f"test split: make a target from three or four numbers: {_SCORES}", "modebench:countdown", "test"),
    "modebench:graph_coloring": Benchmark(
        f"test split: complete the coloring of a graph: {_SCORES}", "modebench:graph_coloring", "test"),
}  # fmt: skip
