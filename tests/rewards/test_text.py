"""A completion is a text, or a chat whose last message counts."""

from __future__ import annotations

import pytest

from grpo_recipes.rewards.answers import completion_text


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("7", "7"),
        ("", ""),
        ([], ""),
        ([{"role": "assistant", "content": "7"}], "7"),
        ([{"role": "assistant", "content": "6"}, {"role": "assistant", "content": "7"}], "7"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant", "tool_calls": []}], ""),
    ],
)
def test_the_text_of_a_completion(completion, text):
    assert completion_text(completion) == text
