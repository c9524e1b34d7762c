"""Generated problems: ModeBench, whose problems have many right answers, and problems drawn by seeds."""

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
