"""The offline trainer: Hydra keys and iterations over seeded problems become one launch or one sweep."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension("offline")
