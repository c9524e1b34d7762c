"""One well-formed answer tag at the end, and nothing else."""

from __future__ import annotations

import pytest

from grpo_recipes.rewards.functions import format_tags


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>7</answer>", 1.0),
        ("thinking\nsome lines\n<answer>7</answer>", 1.0),
        ("<answer>7</answer>\n ", 1.0),
        ("<answer>two\nlines</answer>", 1.0),
        ("a < b > c <answer>7</answer>", 1.0),
        ("<answer>7</answer> and more", 0.0),
        ("<answer>7</answer><answer>8</answer>", 0.0),
        ("<answer><answer>7</answer>", 0.0),
        ("<answer>7</answer></answer>", 0.0),
        ("</answer><answer>7</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>7", 0.0),
        ("7", 0.0),
        ("", 0.0),
        ([{"role": "assistant", "content": "<answer>7</answer>"}], 1.0),
        ([{"role": "assistant", "content": "7"}], 0.0),
    ],
)
def test_a_completion_ends_in_one_well_formed_tag(completion, reward):
    assert format_tags([completion], answer=["ignored"]) == [reward]


def test_a_long_completion_without_a_tag_takes_no_time():
    assert format_tags(["<answer>" + "<" * 200_000]) == [0.0]
