"""Environments: multi-turn episodes of your own classes and of TextArena, reasoning-gym, verifiers and OpenEnv."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension(
    "environments",
    keys="grpo_recipes.extensions.environments.arguments:EnvironmentArguments",
    search_words={"environment": "tools multi-turn game agent"},
    rules="grpo_recipes.extensions.environments.rules:RULES",
    checks="grpo_recipes.extensions.environments.rules:CHECKS",
    idle="grpo_recipes.extensions.environments.rules:IDLE",
    prompt_source="grpo_recipes.extensions.environments.rules:SOURCE",
    roles="grpo_recipes.extensions.environments.roles:ROLES",
    commands={"play": "grpo_recipes.extensions.environments.play:play"},
    nested={
        "environment_mixture": "grpo_recipes.extensions.environments.arguments:EnvironmentMixtureConfig",
        "environment_mixture.environments": "grpo_recipes.extensions.environments.arguments:EnvironmentConfig",
    },
)
