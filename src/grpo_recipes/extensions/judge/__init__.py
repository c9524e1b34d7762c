"""The reward ``llm_judge``: a language model on another server grades each completion."""

from grpo_recipes.recipe.extensions import Extension

_FOLDER = "grpo_recipes.extensions.judge"
EXTENSION = Extension(
    "judge",
    keys=f"{_FOLDER}.arguments:JudgeArguments",
    rules=f"{_FOLDER}.rules:RULES",
    idle=f"{_FOLDER}.rules:IDLE",
    rewards=f"{_FOLDER}.rules:REWARDS",
    search_words={"judge_model": "llm as a judge grader rubric reward model"},
)
