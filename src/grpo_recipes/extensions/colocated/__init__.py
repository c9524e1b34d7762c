"""The co-located launcher: flags and YAML of a trainer with vLLM inside its processes become a launch."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension("colocated", converters="grpo_recipes.extensions.colocated.keys:CONVERTERS")
