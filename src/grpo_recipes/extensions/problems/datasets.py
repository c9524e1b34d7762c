"""The datasets, rewards and benchmarks that this extension registers.

The tables connect names of recipes, such as ``modebench:countdown``, with functions that make rows and score
completions.
"""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from grpo_recipes.extensions.problems import seeded
from grpo_recipes.extensions.problems.modebench import dataset
from grpo_recipes.extensions.problems.modebench.baselines import baselines
from grpo_recipes.recipe.generated import GeneratedData, Lookup, Row, Scoring
from grpo_recipes.recipe.registry import Benchmark, Reward

_REWARDS = "grpo_recipes.extensions.problems.rewards"
_SEED_KEYS = ("problem_seed_start", "problem_seeds")
_EVAL_SEED_KEYS = ("eval_problem_seed_start", "eval_problem_seeds", "eval_problem_ids")


def _make_rows(module: ModuleType, name: str, keys: Lookup, split: str) -> list[Row]:
    """Return the rows of a dataset of ``dataset`` or ``seeded`` for a split: "train" or "test"."""
    rows: list[Row] = module.make_rows(name, split, module.Settings.read(keys))
    return rows


def _hash_settings(module: ModuleType, name: str, keys: Lookup) -> str:
    """Return a short hash of the dataset's name and the recipe keys that affect it; equal hashes mean equal rows."""
    return str(module.Settings.read(keys).fingerprint(name))


def _compute_mode_scores(modes: Sequence[Sequence[str | None]], answers: Sequence[str]) -> dict[str, Any]:
    """Return ModeBench's scores mean@k, distinct@k and coverage@k of a benchmark, each with its 95 % interval.

    ``modes`` (problems, samples) has the correct answer (mode) of each completion, None if it is incorrect, and
    ``answers`` the problems as JSON.
    """
    return dataset.compute_mode_scores(modes, [dataset.parse_problem(answer)["modes"] for answer in answers])


_MODEBENCH = tuple(
    GeneratedData(
        task,
        dataset.COLUMNS,
        partial(_make_rows, dataset, task),
        partial(_hash_settings, dataset, task),
        size_keys=("modebench_prompts", "modebench_test_prompts"),
        reward="modebench",
        scoring=Scoring("modes", dataset.find_mode, _compute_mode_scores, baselines),
    )
    for task in dataset.TASKS
)
_SEEDED = tuple(
    GeneratedData(
        name,
        generator.columns,
        partial(_make_rows, seeded, name),
        partial(_hash_settings, seeded, name),
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
