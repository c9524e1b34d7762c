"""Sources of prompts that replace datasets, as the recipe sees them. No torch.

A recipe reads prompts from datasets, or one source of an extension brings prompts, completions and their reward:

    source = source_of(recipe.__getitem__)  # None for a recipe with datasets
"""

from collections.abc import Callable
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.extensions import Extension, extensions, load, parts

Lookup = Callable[[str], Any]  # returns the value of a recipe key


class PromptSource:
    """A source of prompts and completions; an extension subclasses it and names one object as ``prompt_source``."""

    title = ""  # its name in messages, with the article, e.g. "an environment"
    keys: tuple[str, ...] = ()  # recipe keys that select it; messages suggest the first
    # Why `grpo check-rewards` has no rows for it, and the command to use instead.
    unchecked_rewards: tuple[str, str] = ("", "")

    def chosen(self, lookup: Lookup) -> bool:
        """Return whether a checked recipe uses this source."""
        return any(lookup(key) is not None for key in self.keys)

    def reads_datasets(self, lookup: Lookup) -> bool:
        """Return whether the source only samples: the prompts and rewards are the recipe's, as without a source."""
        return False

    def starts_from_rows(self, lookup: Lookup) -> bool:
        """Return whether each row of the dataset starts an episode that may give its reward.

        Then equal rows are kept, and rewards get the column ``environments``.
        """
        return False

    def rollouts(self, lookup: Lookup) -> str:
        """Return ``module:name`` of the class that samples; an empty text means the extension's ``rollouts``."""
        return ""

    def requested(self, recipe: Recipe) -> bool:
        """Return whether a recipe requests this source, before the recipe is checked."""
        return self.chosen(recipe.__getitem__)

    def user_code(self, lookup: Lookup) -> list[str]:
        """Return the user's code that the source runs, as ``module:name`` or ``file.py:name``; [] if there is none."""
        return []

    def uses_reward_variables(self, lookup: Lookup) -> bool:
        """Return whether the processes of the source get the variables in ``reward_environment``."""
        return True

    def benchmarks(self, lookup: Lookup) -> list[str]:
        """Return the names in ``benchmarks`` that the source runs itself."""
        return []

    def benchmark_problem(self, name: str, where: str, lookup: Lookup) -> Problem | None:
        """Return the problem of the benchmark ``name``; None if it has none, or does not belong to the source.

        ``where`` is its place in the recipe, for the message.
        """
        return None


def extension_of(lookup: Lookup) -> Extension | None:
    """Return the extension with the source that samples the completions of a checked recipe; None if TRL does."""
    for extension in extensions():
        source = extension.load("prompt_source")
        if source is not None and source.chosen(lookup):
            return extension
    return None


def sampler_of(lookup: Lookup) -> PromptSource | None:
    """Return the source that samples the completions of a checked recipe; None if TRL does."""
    extension = extension_of(lookup)
    source: PromptSource | None = extension.load("prompt_source") if extension else None
    return source


def source_of(lookup: Lookup) -> PromptSource | None:
    """Return the source of a checked recipe's prompts; None if it reads datasets."""
    source = sampler_of(lookup)
    return None if source is None or source.reads_datasets(lookup) else source


def starts_from_rows(lookup: Lookup) -> bool:
    """Return whether each row of a recipe's dataset starts an episode that may give its reward."""
    source = sampler_of(lookup)
    return source is not None and source.starts_from_rows(lookup)


def rollout_class(lookup: Lookup) -> Any:
    """Return the ``rollouts.source.Source`` class that samples the completions of a recipe; None if TRL does."""
    extension, source = extension_of(lookup), sampler_of(lookup)
    return load(source.rollouts(lookup) or extension.rollouts) if extension and source else None


def requested_sampler(recipe: Recipe) -> PromptSource | None:
    """Return the source that a recipe requests to sample, before the recipe is checked; None if TRL samples."""
    return next((source for source in parts("prompt_source") if source.requested(recipe)), None)


def requested_source(recipe: Recipe) -> PromptSource | None:
    """Return the source of prompts that a recipe requests, before it is checked; None if it reads datasets."""
    source = requested_sampler(recipe)
    return None if source is None or source.reads_datasets(recipe.__getitem__) else source


def source_keys() -> list[str]:
    """Return one key that selects the source, for each installed source."""
    return [source.keys[0] for source in parts("prompt_source")]


def user_code(lookup: Lookup) -> list[str]:
    """Return the user's rewards and other user code of a recipe. A run keeps copies of the files."""
    source = sampler_of(lookup)
    return [*lookup("reward_funcs"), *(source.user_code(lookup) if source else ())]
