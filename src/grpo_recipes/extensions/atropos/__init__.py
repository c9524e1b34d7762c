"""Atropos: scored groups from environments that sample and score by themselves.

run-api, a server of Atropos, collects the groups of all environments and hands them to the trainer.
"""

from grpo_recipes.recipe.extensions import Extension

EXTENSION = Extension(
    "atropos",
    keys="grpo_recipes.extensions.atropos.arguments:AtroposArguments",
    variables={"ATROPOS_API_URL": "atropos_api_url"},
    search_words={"atropos_environment": "tools"},
    rules="grpo_recipes.extensions.atropos.rules:RULES",
    checks="grpo_recipes.extensions.atropos.rules:CHECKS",
    notes="grpo_recipes.extensions.atropos.rules:find_unchecked_arguments",
    prompt_source="grpo_recipes.extensions.atropos.rules:SOURCE",
    ports={"atropos_port": "grpo_recipes.extensions.atropos.recipe:choose_run_api_port"},
    roles="grpo_recipes.extensions.atropos.processes:ROLES",
    logs={
        "run-api": ("run-api", "Print the log of Atropos' run-api"),
        "environments": ("environment-", "Print the logs of Atropos' environments"),
    },
    metrics="grpo_recipes.extensions.atropos.metrics:METRICS",
    advice="grpo_recipes.extensions.atropos.advice:ADVICE",
    assets="grpo_recipes.extensions.atropos.recipe:list_datasets",
    server_routes="grpo_recipes.extensions.atropos.generate_endpoint:router",
    rollouts="grpo_recipes.extensions.atropos.rollouts:AtroposRollouts",
    deep_check="grpo_recipes.extensions.atropos.deep_check:load_environments",
    converters="grpo_recipes.extensions.atropos.verl:CONVERTERS",
    nested={
        "atropos_mixture": "grpo_recipes.extensions.atropos.arguments:AtroposMixtureConfig",
        "atropos_mixture.environments": "grpo_recipes.extensions.atropos.arguments:AtroposEnvironmentConfig",
    },
)
