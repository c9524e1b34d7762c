"""Keys of supervised fine-tuning. No torch."""

from dataclasses import dataclass

from grpo_recipes.recipe.fields import MOST_TOKENS, key
from grpo_recipes.recipe.sections import Key, Section


# fmt: off
@dataclass
class SFTArguments:
    """Keys of supervised fine-tuning."""

    task: str | None = key(None,
        "sft trains on the dataset's solutions with TRL's SFTTrainer, without rewards, sampling and server. Otherwise "
        "the recipe trains with GRPO.", ["sft"])
    sft_max_length: int | None = key(None,
        "task: sft: longest prompt with its solution in tokens; longer rows are dropped.", min=1, max=MOST_TOKENS)
# fmt: on


class SFTKeys(Section):
    """The keys of supervised fine-tuning that code reads, with their types."""

    task = Key[str | None]("task")
