"""Atropos: scored groups from environments that sample and score by themselves, taken from its run-api."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension(
    "atropos",
    keys="grpo_recipes.extensions.atropos.arguments:AtroposArguments",
    variables={"ATROPOS_API_URL": "atropos_api_url"},
    search_words={"atropos_environment": "tools"},
    converters="grpo_recipes.extensions.atropos.verl:CONVERTERS",
    commands={"atropos": "grpo_recipes.extensions.atropos.replay_command:atropos"},
    nested={
        "atropos_mixture": "grpo_recipes.extensions.atropos.arguments:AtroposMixtureConfig",
        "atropos_mixture.environments": "grpo_recipes.extensions.atropos.arguments:AtroposEnvironmentConfig",
    },
)
