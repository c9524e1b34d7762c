"""Environments: multi-turn episodes of your own classes and of TextArena, reasoning-gym, verifiers and OpenEnv."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension(
    "environments",
    keys="grpo_recipes.extensions.environments.arguments:EnvironmentArguments",
    search_words={"environment": "tools multi-turn game agent"},
    commands={"play": "grpo_recipes.extensions.environments.play:play"},
    nested={
        "environment_mixture": "grpo_recipes.extensions.environments.arguments:EnvironmentMixtureConfig",
        "environment_mixture.environments": "grpo_recipes.extensions.environments.arguments:EnvironmentConfig",
    },
)
