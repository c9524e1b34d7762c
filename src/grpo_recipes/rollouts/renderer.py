"""Between messages and the token ids that the policy reads and writes. No torch.

The token ids of each of the policy's turns stay as they were sampled: what is said between them is rendered alone.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_recipes.errors import config_error, translate
from grpo_recipes.rollouts.turns import Message, Turn

Tokens = list[int]
DUMMY: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
_OTHER: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


class Renderer:
    """Render what an environment says into the tokens that the policy reads.

    ``stops`` are the tokens at which sampling ends a turn, beside the tokenizer's own.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None, stops: Iterable[int] = ()
    ):
        self._tokenizer, self._kwargs = tokenizer, template_kwargs or {}
        self._stops = {tokenizer.eos_token_id, *stops}

    def text(self, ids: Tokens) -> str:
        """Return what a sampled turn says, without the token that ended it."""
        said = ids[:-1] if ids and ids[-1] in self._stops else ids
        return str(self._tokenizer.decode(said, skip_special_tokens=True))

    def prompt(self, turn: Turn) -> Tokens:
        """Return the tokens of an environment's first turn, with the tools that the policy may call."""
        ids = self._render(turn.messages, True, tools=turn.tools or None)
        if turn.tools and ids == self._render(turn.messages, True):
            what = "the template leaves out the tools of the environment"
            raise config_error("chat_template", what, "add a chat_template that shows tools, or take another model")
        return ids

    def between(self, messages: list[Message], said: Tokens) -> Tokens:
        """Return the tokens between a turn of the policy, ``said``, and its next one.

        They begin with the template's end of a turn where the turn does not end with it, since it was cut. ConfigError
        where the template renders what came before in another way once more follows.
        """
        before, end = self._turn
        after = self._render([*DUMMY, *messages], True)
        if after[: len(before)] != before:
            what = "the template changes earlier turns once more messages follow, so sampled tokens would not be kept"
            raise config_error("chat_template", what, "add a chat_template that only appends")
        return ([] if said[-1:] == [end] else [end]) + after[len(before) :]

    def end(self) -> int:
        """Return the token that ends a turn in the template; ConfigError where sampling does not stop at it."""
        return self._turn[1]

    @cached_property
    def _turn(self) -> tuple[Tokens, int]:
        """A turn of the policy as the template renders it, up to and with the token that ends it, and that token."""
        turn, other = self._render(DUMMY, False), self._render(_OTHER, False)
        tail = _common_end(turn, other)  # what comes after the text
        if not tail:
            return turn, self._tokenizer.eos_token_id
        place = next((place for place, token in enumerate(tail) if token in self._stops), None)
        if place is None:
            what = f"the template ends a turn with {self._tokenizer.decode(tail)!r}, at which sampling does not stop"
            fix = (
                f"add a chat_template that ends it with {self._tokenizer.eos_token}, or name its token as eos_token_id"
            )
            raise config_error("chat_template", what, f"{fix} in the model's generation_config.json")
        return turn[: len(turn) - len(tail) + place + 1], tail[place]

    def _render(self, messages: list[Message], generation: bool, **how: Any) -> Tokens:
        fix = "write a chat_template that can, or use environments without these roles"
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        what = f"the template cannot render messages of the roles {roles}"
        with translate(TemplateError, lambda error: config_error("chat_template", f"{what}: {error}", fix)):
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=generation, tokenize=True, return_dict=False, **how, **self._kwargs
            )
        return list(ids)


def _common_end(one: Tokens, other: Tokens) -> Tokens:
    """Return the tokens with which both end."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    length = next((place for place, (mine, its) in enumerate(pairs) if mine != its), 0)
    return one[len(one) - length :]
