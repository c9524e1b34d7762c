"""The fraction of n-grams that appeared before."""

from __future__ import annotations

import random

import pytest

from grpo_recipes.rewards.functions import repetition_penalty


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("", 0.0),
        ("two words", 0.0),
        ("all words of this are new", 0.0),
        ("again and again and again and again", -3 / 5),
        ("Again and again\nAND  again and again", -3 / 5),
        ([{"role": "assistant", "content": "a a a a a"}], -2 / 3),
    ],
)
def test_repeated_trigrams_cost(completion, reward):
    assert repetition_penalty([completion]) == pytest.approx([reward])


def test_both_keys_change_the_penalty():
    assert repetition_penalty(["a b a b"], repetition_n_grams=2) == pytest.approx([-1 / 3])
    assert repetition_penalty(["a a a a"], repetition_n_grams=1, repetition_max_penalty=-4.0) == pytest.approx([-3.0])


def test_it_is_the_reference_on_tokens_in_place_of_words():
    from trl.rewards import get_repetition_penalty_reward

    reference = get_repetition_penalty_reward(ngram_size=3, max_penalty=-0.5)
    draw = random.Random(1)
    samples = [[draw.randint(0, 4) for _ in range(draw.randint(0, 40))] for _ in range(200)]
    texts = [" ".join(map(str, ids)) for ids in samples]

    assert repetition_penalty(texts, repetition_max_penalty=-0.5) == pytest.approx(reference(samples))
