"""Supervised fine-tuning before GRPO: ``task: sft`` trains on the solutions of a dataset with TRL's SFTTrainer."""

from grpo_recipes.recipe.extensions import Extension

_FOLDER = "grpo_recipes.extensions.sft"
EXTENSION = Extension(
    "sft",
    keys=f"{_FOLDER}.arguments:SFTArguments",
    rules=f"{_FOLDER}.rules:RULES",
    idle=f"{_FOLDER}.rules:IDLE",
    task=f"{_FOLDER}.rules:TASK",
    metrics=f"{_FOLDER}.metrics:METRICS",
    search_words={"task": "sft supervised fine-tuning warm start cold start"},
)
