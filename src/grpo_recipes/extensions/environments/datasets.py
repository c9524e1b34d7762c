"""The dataset ``trl:reset``: empty prompts, for TRL environments that make the prompt in ``reset``.

TRL trains on such placeholders if it has no dataset. This module imports no torch.
"""

from grpo_recipes.recipe.generated import GeneratedData, Lookup, Row

RESET = "trl:reset"


def _make_rows(lookup: Lookup, split: str) -> list[Row]:
    """Return the empty prompts of a split, one per episode."""
    count = lookup("environment_episodes" if split == "train" else "environment_eval_episodes")
    return [{"problem": ""} for _ in range(count)]


DATASETS = (
    GeneratedData(
        RESET,
        ("problem",),
        _make_rows,
        lambda _: RESET,
        size_keys=("environment_episodes", "environment_eval_episodes"),
    ),
)
