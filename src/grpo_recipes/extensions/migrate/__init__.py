"""Recipes of open-r1, TRL, verl and others, translated by `grpo new --from FILE`."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension("migrate", translate="grpo_recipes.extensions.migrate.migrate:translate_recipe")
