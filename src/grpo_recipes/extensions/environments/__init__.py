"""Train on multi-turn episodes: your own classes, TextArena, reasoning-gym, verifiers and OpenEnv."""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension(
    "environments",
    keys="grpo_recipes.extensions.environments.arguments:EnvironmentArguments",
    search_words={"environment": "multi-turn game agent", "tools": "function calling agent calculator search"},
    rules="grpo_recipes.extensions.environments.rules:RULES",
    checks="grpo_recipes.extensions.environments.rules:CHECKS",
    idle="grpo_recipes.extensions.environments.rules:IDLE",
    prompt_source="grpo_recipes.extensions.environments.rules:SOURCE",
    datasets="grpo_recipes.extensions.environments.datasets:DATASETS",
    roles="grpo_recipes.extensions.environments.roles:ROLES",
    metrics="grpo_recipes.extensions.environments.metrics:METRICS",
    advice="grpo_recipes.extensions.environments.advice:ADVICE",
    rollouts="grpo_recipes.extensions.environments.episodes:Episodes",
    deep_check="grpo_recipes.extensions.environments.deep_check:play_episodes",
    commands={"play": "grpo_recipes.extensions.environments.play:play"},
    nested={
        "environment_mixture": "grpo_recipes.extensions.environments.arguments:EnvironmentMixtureConfig",
        "environment_mixture.environments": "grpo_recipes.extensions.environments.arguments:EnvironmentConfig",
    },
)
