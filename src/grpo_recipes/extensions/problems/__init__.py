"""Generated problems: ModeBench (many right answers to each problem), and problems drawn from a seed."""

from grpo_recipes.recipe.extensions import Extension

_FOLDER = "grpo_recipes.extensions.problems"
EXTENSION = Extension(
    "problems",
    keys=f"{_FOLDER}.arguments:ProblemArguments",
    rules=f"{_FOLDER}.rules:RULES",
    checks=f"{_FOLDER}.rules:CHECKS",
    idle=f"{_FOLDER}.rules:IDLE",
    datasets=f"{_FOLDER}.datasets:DATASETS",
    rewards=f"{_FOLDER}.datasets:REWARDS",
    benchmarks=f"{_FOLDER}.datasets:BENCHMARKS",
)
