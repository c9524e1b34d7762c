"""The reward ``code_tests``: it runs the program in a completion on test cases, in a sandbox."""

from grpo_recipes.recipe.extensions import Extension

_FOLDER = "grpo_recipes.extensions.code"
EXTENSION = Extension(
    "code",
    keys=f"{_FOLDER}.arguments:CodeArguments",
    rules=f"{_FOLDER}.rules:RULES",
    checks=f"{_FOLDER}.rules:CHECKS",
    rewards=f"{_FOLDER}.rules:REWARDS",
    search_words={"code_sandbox": "code_reward execute programs unit tests bubblewrap e2b"},
)
