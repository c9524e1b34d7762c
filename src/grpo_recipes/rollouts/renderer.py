"""Convert between messages and the token ids of a conversation with the policy. No torch.

The token ids of the policy's own turns stay exactly as sampled. Only the messages between them are rendered.
"""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.rollouts.turns import Message, Turn
from grpo_recipes.runs.rundir import load_json_mapping

Tokens = list[int]
DUMMY: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
_OTHER: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


class Renderer:
    """Render the messages of an environment as tokens for the policy.

    Sampling ends a turn at the tokenizer's end token and at the tokens in ``stops``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None, stops: Iterable[int] = ()
    ) -> None:
        self._tokenizer, self._kwargs = tokenizer, template_kwargs or {}
        self._stops = {tokenizer.eos_token_id, *stops}

    def text(self, ids: Tokens) -> str:
        """Return the text of a sampled turn, without the token that ended it."""
        text_ids = ids[:-1] if ids and ids[-1] in self._stops else ids
        return str(self._tokenizer.decode(text_ids, skip_special_tokens=True))

    def prompt(self, turn: Turn) -> Tokens:
        """Return the tokens of an environment's first turn, including the tools that the policy may call.

        Raise ConfigError if the template leaves out the tools.
        """
        if not turn.tools:
            return self._render(turn.messages, True)
        ids = self._render(turn.messages, True, tools=turn.tools)
        if ids == self._render(turn.messages, True):
            problem = "the template leaves out the tools"
            raise config_error("chat_template", problem, "add a chat_template that shows tools, or take another model")
        return ids

    def between(self, messages: list[Message], turn_ids: Tokens) -> Tokens:
        """Return the tokens between the policy's turn ``turn_ids`` and its next turn: the end token and ``messages``.

        They start with the template's end token only if the turn was cut and does not end with it. Raise ConfigError if
        the template renders earlier turns differently when more messages follow.
        """
        prefix, end = self._rendered_turn
        rendered = self._render([*DUMMY, *messages], True)
        if all(message["role"] == "tool" for message in messages):  # Qwen3 only moves its empty thought
            tail = _find_common_end(rendered, self._render([*_OTHER, *messages], True))
            prefix = rendered[: len(rendered) - len(tail) + 1] if tail[:1] == [end] else prefix
        if rendered[: len(prefix)] != prefix:
            problem = (
                "the template changes earlier turns once more messages follow, so sampled tokens would not be kept"
            )
            raise config_error("chat_template", problem, "add a chat_template that only appends")
        return ([] if turn_ids[-1:] == [end] else [end]) + rendered[len(prefix) :]

    def end(self) -> int:
        """Return the token that ends a turn in the template. Raise ConfigError if sampling does not stop at it."""
        return self._rendered_turn[1]

    @cached_property
    def _rendered_turn(self) -> tuple[Tokens, int]:
        """(tokens, end token): a dummy conversation up to and including the token that ends the policy's turn.

        If the template writes nothing after a turn, the end token is the tokenizer's, and the tokens do not have it.
        Raise ConfigError if the template writes tokens after a turn, but sampling stops at none of them.
        """
        turn, other_turn = self._render(DUMMY, False), self._render(_OTHER, False)
        tail = _find_common_end(turn, other_turn)  # the tokens after the text
        if not tail:
            end: int = self._tokenizer.eos_token_id
            return turn, end
        index = next((index for index, token in enumerate(tail) if token in self._stops), None)
        if index is None:
            problem = (
                f"the template ends a turn with {self._tokenizer.decode(tail)!r}, but sampling does not stop there"
            )
            fix = (
                f"add a chat_template that ends it with {self._tokenizer.eos_token}, or name its token as eos_token_id"
            )
            raise config_error("chat_template", problem, f"{fix} in the model's generation_config.json")
        return turn[: len(turn) - len(tail) + index + 1], tail[index]

    def _render(self, messages: list[Message], generation: bool, **options: Any) -> Tokens:
        """Return the template's tokens of messages. ``generation`` adds the start of the policy's next turn.

        Raise ConfigError if the template can't render them.
        """
        fix = "write a chat_template that can, or use environments without these roles"
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        problem = f"the template cannot render messages of the roles {roles}"
        with translate_errors(TemplateError, lambda error: config_error("chat_template", f"{problem}: {error}", fix)):
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=generation, tokenize=True, return_dict=False, **options, **self._kwargs
            )
        return list(ids)


def read_stop_tokens(model: str) -> list[int]:
    """Read the end-of-sequence token ids in a model's ``generation_config.json``; return [] if there are none."""
    file = cached_file(model, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    ids = (load_json_mapping(Path(file)) or {}).get("eos_token_id") if file else None
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _find_common_end(first: Tokens, second: Tokens) -> Tokens:
    """Return the longest common suffix of two sequences that differ; empty if one is the end of the other."""
    pairs = zip(reversed(first), reversed(second), strict=False)
    length = next((index for index, (token, other_token) in enumerate(pairs) if token != other_token), 0)
    return first[len(first) - length :]
