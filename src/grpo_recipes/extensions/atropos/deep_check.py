"""Load the Atropos environments of a recipe, for `grpo check --deep`.

This imports the user's code and reads datasets, which the usual check of a recipe avoids.
"""

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos.recipe import list_environments
from grpo_recipes.extensions.atropos.rules import locate_environment
from grpo_recipes.extensions.atropos.serve import find_environment_problems, preview_changes
from grpo_recipes.trainers.deep_check import DeepCheck


def load_environments(check: DeepCheck) -> list[str]:
    """Import each Atropos environment of the recipe and read its dataset, without sampling a group.

    Return lines to print: a confirmation for each environment, and the values that a run changes in its configuration.
    Raise ConfigError with the problems of all environments.
    """
    recipe = check.recipe
    environments = list_environments(recipe.__getitem__)
    problems = []
    for index, environment in enumerate(environments):
        where = locate_environment(recipe, index)
        problems += find_environment_problems(environment.id, environment.args, where, fetched=check.sources.lookup)
    if problems:
        raise ConfigError(*problems)
    lines = []
    for index, environment in enumerate(environments):
        lines.append(f"groups     {environment.id} loads and accepts its arguments")
        lines += [
            f"groups     the run changes {change} ({environment.id})" for change in preview_changes(recipe, index)
        ]
    return lines
