"""The offline trainer: translate its Hydra keys and iterations to a launch or a sweep."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension("offline")
