"""The co-located launcher: translate its flags and YAML to a launch with vLLM inside the trainers."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension("colocated", converters="grpo_recipes.extensions.colocated.keys:CONVERTERS")
