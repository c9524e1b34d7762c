"""The cosine between a short and a long completion's reward."""

from __future__ import annotations

import pytest

from grpo_recipes.rewards.functions import cosine_length

RIGHT, WRONG = "<answer>7.0</answer>", "<answer>8</answer>"


def rewards(completion: str, lengths: list[int], **keys) -> list[float | None]:
    keys = {"max_completion_length": 100} | keys
    ids = [[5] * length for length in lengths]
    return cosine_length([completion] * len(ids), ["7"] * len(ids), ids, trainer_state=None, **keys)


def test_a_right_answer_falls_from_one_value_to_the_other():
    assert rewards(RIGHT, [0, 50, 100]) == pytest.approx([1.0, 0.75, 0.5])


def test_a_wrong_answer_falls_with_its_length_too():
    assert rewards(WRONG, [0, 50, 100]) == pytest.approx([0.0, -0.25, -0.5])


def test_beyond_the_longest_length_nothing_changes():
    assert rewards(RIGHT, [200, 300]) == pytest.approx([0.5, 0.5])


def test_each_key_changes_the_value_it_names():
    assert rewards(RIGHT, [50], cosine_max_len=50) == pytest.approx([0.5])
    assert rewards(RIGHT, [100], cosine_min_value_correct=0.2) == pytest.approx([0.2])
    assert rewards(RIGHT, [0], cosine_max_value_correct=3.0) == pytest.approx([3.0])
    assert rewards(WRONG, [0], cosine_min_value_wrong=-10.0) == pytest.approx([-10.0])
    assert rewards(WRONG, [100], cosine_max_value_wrong=-2.0) == pytest.approx([-2.0])
    assert rewards(RIGHT, [100], answer_matching="strict") == pytest.approx([-0.5])


def test_it_is_the_reference_schedule():
    """Compare with TRL's reward, which runs math-verify on the text, at the paper's values."""
    from trl.rewards import get_cosine_scaled_reward

    values = {"min_value_wrong": -10.0, "max_value_wrong": 0.0, "min_value_correct": 1.0, "max_value_correct": 2.0}
    reference = get_cosine_scaled_reward(max_len=100, **values)
    for number in ("7", "8"):
        for length in (0, 1, 37, 99, 100, 150):
            expected = reference([[{"content": rf"\boxed{{{number}}}"}]], ["7"], [[1] * length])
            keys = {f"cosine_{name}": value for name, value in values.items()}
            assert rewards(f"<answer>{number}</answer>", [length], **keys) == pytest.approx(expected)
