"""The console: commands that show, compare, evaluate and publish runs. Training works without it."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension(
    "console",
    sweeps="grpo_recipes.console.sweep.command:TranslatedSweep",
    folders="grpo_recipes.console.sweep.folder:Sweep",
    serves=("push_to_hub",),
    run_hooks="grpo_recipes.console.hooks:ConsoleHooks",
    commands={
        "doctor": "grpo_recipes.console.doctor.command:doctor",
        "sweep": "grpo_recipes.console.sweep.command:sweep",
        "watch": "grpo_recipes.console.watch:watch",
        "dashboard": "grpo_recipes.console.dashboard.command:dashboard",
        "report": "grpo_recipes.console.report.command:report",
        "generate": "grpo_recipes.console.generate:generate",
        "chat": "grpo_recipes.console.chat:chat",
        "eval": "grpo_recipes.console.eval:eval",
    },
)
