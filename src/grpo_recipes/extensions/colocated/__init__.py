"""The co-located launcher: translate its flags and YAML to a launch with vLLM inside the trainers.

So a run accepts the command line and the YAML of a co-located trainer (docs/migrate.md).
"""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension("colocated", converters="grpo_recipes.extensions.colocated.keys:CONVERTERS")
