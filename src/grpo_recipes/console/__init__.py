"""The console: commands that look at runs, compare, evaluate and publish them. Training does not need it."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension(
    "console",
    serves=("push_to_hub",),
    run_hooks="grpo_recipes.console.hooks:ConsoleHooks",
    commands={
        "doctor": "grpo_recipes.cli.machine:doctor",
        "sweep": "grpo_recipes.cli.runs:sweep",
        "watch": "grpo_recipes.cli.follow:watch",
        "report": "grpo_recipes.cli.runs:report",
        "generate": "grpo_recipes.console.generate:generate",
        "chat": "grpo_recipes.console.chat:chat",
        "eval": "grpo_recipes.console.eval:eval",
    },
)
