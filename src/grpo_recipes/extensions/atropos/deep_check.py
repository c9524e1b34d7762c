"""Load the Atropos environments of a recipe, for `grpo check --deep`.

This imports the user's code and reads datasets, which the usual check of a recipe avoids.
"""

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos.recipe import atropos_environments
from grpo_recipes.extensions.atropos.rules import locate_environment
from grpo_recipes.extensions.atropos.serve import environment_problems, preview_changes
from grpo_recipes.trainers.deep_check import DeepCheck


def load_environments(check: DeepCheck) -> list[str]:
    """Import each Atropos environment of the recipe and read its dataset, without sampling a group.

    Return output lines. The lines also list the values that a run changes. ConfigError has the problems of all
    environments.
    """
    recipe = check.recipe
    environments = atropos_environments(recipe.__getitem__)
    problems = []
    for index, environment in enumerate(environments):
        where = locate_environment(recipe, index)
        problems += environment_problems(environment.id, environment.args, where, fetched=check.sources.lookup)
    if problems:
        raise ConfigError(*problems)
    lines = []
    for index, environment in enumerate(environments):
        lines.append(f"groups     {environment.id} loads and accepts its arguments")
        lines += [
            f"groups     the run changes {change} ({environment.id})" for change in preview_changes(recipe, index)
        ]
    return lines
