"""Which words after a number are its unit."""

from __future__ import annotations

import pytest

from grpo_recipes.rewards.units import unit_of


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
    assert unit_of(text) == unit


@pytest.mark.parametrize(
    "text",
    ["x", " x", "eggs", " ab", " thousand", " million dollars", " or so", "^2", "!", " 5", " é", " mil", " grand"],
)
def test_other_words_are_no_unit(text):
    assert unit_of(text) is None


@pytest.mark.parametrize("word", ["bil", "gross", "lakh", "crore", "quadrillion", "thousandths"])
def test_words_that_change_the_number_are_no_unit(word):
    assert unit_of(f" {word}") is None and unit_of(f" {word} dollars") is None


def test_a_sentence_is_no_unit():
    assert unit_of(" eggs that she sold every single day") is None
