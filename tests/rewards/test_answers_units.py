"""Which words after a number are its unit."""

from __future__ import annotations

import pytest

from grpo_recipes.rewards.units import normalize_unit


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("", ""),
        (" ", ""),
        ("%", "percent"),
        (" dollars", "dollar"),
        ("cm^2", "centimetre2"),
        (" square feet", "square foot"),
        ("km/h", "kilometre per hour"),
        (" dollars/week", "dollar per week"),
        (" duck eggs", "duck egg"),
        (" light-years", "light-year"),
        (" pieces of cake", "piece of cake"),
    ],
)
def test_units_have_one_spelling(text, unit):
    assert normalize_unit(text) == unit


@pytest.mark.parametrize(
    "text",
    ["x", " x", "eggs", " ab", " thousand", " million dollars", " or so", "^2", "!", " 5", " é", " mil", " grand"],
)
def test_other_words_are_no_unit(text):
    assert normalize_unit(text) is None


@pytest.mark.parametrize("word", ["bil", "gross", "lakh", "crore", "quadrillion", "thousandths"])
def test_words_that_change_the_number_are_no_unit(word):
    assert normalize_unit(f" {word}") is None and normalize_unit(f" {word} dollars") is None


def test_a_sentence_is_no_unit():
    assert normalize_unit(" eggs that she sold every single day") is None
