"""The offline trainer: translate its Hydra keys and iterations to a launch or a sweep.

So a run accepts the command line of an offline trainer, and writes its result files (docs/migrate.md).
"""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension("offline")
