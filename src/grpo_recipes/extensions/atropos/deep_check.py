"""Load the Atropos environments of a recipe, for `grpo check --deep`."""

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos.recipe import atropos_environments
from grpo_recipes.extensions.atropos.rules import place
from grpo_recipes.extensions.atropos.serve import changes_of, environment_problems
from grpo_recipes.trainers.deep_check import DeepCheck


def load_environments(check: DeepCheck) -> list[str]:
    """Load each environment of Atropos, with its arguments and its dataset; what it sends is seen in a run alone."""
    recipe, sources = check.recipe, check.sources
    found = atropos_environments(recipe.__getitem__)
    places = [place(recipe, index) for index in range(len(found))]
    checked = [
        environment_problems(one.id, one.args, where, fetched=sources.lookup)
        for one, where in zip(found, places, strict=True)
    ]
    if any(checked):
        raise ConfigError(*[problem for problems in checked for problem in problems])
    seen = []
    for index, one in enumerate(found):
        seen.append(f"groups     of {one.id}: it loads, and takes its arguments")
        seen += [f"groups     of {one.id}: the run changes {change}" for change in changes_of(recipe, index)]
    return seen
