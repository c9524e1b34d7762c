"""Prompts as the model sees them: the chat template, and the length in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_recipes.data.problems import Batch, Counts, chosen
from grpo_recipes.data.values import Message
from grpo_recipes.errors import config_error


def use_template(template: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer the recipe's chat template. TRL renders with it, and it is saved with the model.

    Raises:
        ConfigError: there is no template at all.
    """
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.chat_template is None:
        raise config_error("chat_template", "the tokenizer has no chat template", "add chat_template to the recipe")


@dataclass(frozen=True)
class Renderer:
    """Renders as TRL's trainer does, which sends the server token ids and no messages.

    Attributes:
        tokenizer: with its chat template.
        template_kwargs: the recipe's ``chat_template_kwargs``.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def text(self, prompt: list[Message]) -> str:
        """A prompt as text."""
        return str(self._render(prompt, tokenize=False))

    def lengths(self, prompts: list[list[Message]]) -> list[int]:
        """Tokens of each prompt."""
        if not prompts:
            return []
        return [len(ids) for ids in self._render(prompts, tokenize=True, return_dict=True)["input_ids"]]

    def fitting(self, batches: Iterable[Batch], limit: int | None, counts: Counts) -> Iterator[Batch]:
        """Drop prompts of more than ``limit`` tokens."""
        for batch in batches:
            lengths = self.lengths(batch["prompt"])
            kept = [index for index, length in enumerate(lengths) if limit is None or length <= limit]
            counts.too_long += len(lengths) - len(kept)
            counts.longest = max([counts.longest, *(lengths[index] for index in kept)])
            yield chosen(batch, kept)

    def _render(self, prompts: Any, **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, **how, **self.template_kwargs
            )
        except TemplateError as error:
            fix = "write a chat_template that can, or leave out what it cannot (a system prompt, the roles of a chat)"
            raise config_error("chat_template", f"the template cannot render a prompt: {error}", fix) from error
