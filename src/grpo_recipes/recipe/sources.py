"""Sources of prompts that replace datasets, as the recipe sees them. No torch.

A recipe reads prompts from datasets, or one source of an extension brings prompts, completions and their reward:

    source = source_of(recipe.__getitem__)  # None for a recipe with datasets
"""

from collections.abc import Callable
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.extensions import Extension, extensions, parts

Lookup = Callable[[str], Any]  # returns the value of a recipe key


class PromptSource:
    """A source of prompts and completions; an extension subclasses it and names one object as ``prompt_source``."""

    title = ""  # what it is called in messages, with its article, e.g. "an environment"
    keys: tuple[str, ...] = ()  # the recipe keys of which one chooses it; the first is offered in messages
    # Why `grpo check-rewards` has no rows to try, and what to run instead.
    unchecked_rewards: tuple[str, str] = ("", "")

    def chosen(self, lookup: Lookup) -> bool:
        """Return whether a checked recipe uses this source."""
        return any(lookup(key) is not None for key in self.keys)

    def requested(self, recipe: Recipe) -> bool:
        """Return whether a recipe that is being checked means to use this source."""
        return self.chosen(recipe.__getitem__)

    def user_code(self, lookup: Lookup) -> list[str]:
        """Return the user's code that it runs, as ``module:name`` or ``file.py:name``; a run keeps a copy of files."""
        return []

    def uses_reward_variables(self, lookup: Lookup) -> bool:
        """Return whether its processes get the variables that ``reward_environment`` lists."""
        return True

    def benchmarks(self, lookup: Lookup) -> list[str]:
        """Return the names in ``benchmarks`` that it runs itself."""
        return []

    def benchmark_problem(self, name: str, where: str, lookup: Lookup) -> Problem | None:
        """Return what is wrong with a benchmark that could be one of this source's; None if it can't be one."""
        return None


def extension_of(lookup: Lookup) -> Extension | None:
    """Return the extension whose source a checked recipe uses; None if it reads datasets."""
    for extension in extensions():
        source = extension.load("prompt_source")
        if source is not None and source.chosen(lookup):
            return extension
    return None


def source_of(lookup: Lookup) -> PromptSource | None:
    """Return the source that a checked recipe uses; None if it reads datasets."""
    extension = extension_of(lookup)
    source: PromptSource | None = extension.load("prompt_source") if extension else None
    return source


def rollout_class(lookup: Lookup) -> Any:
    """Return the ``rollouts.source.Source`` class of the recipe's source; None if it reads datasets."""
    extension = extension_of(lookup)
    return extension.load("rollouts") if extension else None


def requested_source(recipe: Recipe) -> PromptSource | None:
    """Return the source that a recipe means to use while it is being checked; None if it reads datasets."""
    return next((source for source in parts("prompt_source") if source.requested(recipe)), None)


def source_keys() -> list[str]:
    """Return a key that chooses a source, for every installed source."""
    return [source.keys[0] for source in parts("prompt_source")]


def user_code(lookup: Lookup) -> list[str]:
    """Return the rewards and the other code of the user that a recipe names, of which a run keeps the files."""
    source = source_of(lookup)
    return [*lookup("reward_funcs"), *(source.user_code(lookup) if source else ())]
