"""Short numbers and times. Texts of a model never become markup and never hide or reorder other text."""

from __future__ import annotations

import html
import re

import pytest

from grpo_recipes.console.report.chart import Chart, Curve
from grpo_recipes.console.report.page import (
    format_duration,
    format_number,
    format_recipe_value,
    render_fragment,
    render_model_text,
    use_minus_signs,
)
from grpo_recipes.runs.health import percent


def escape(text: str) -> str:
    """Return a text as a template expression renders it."""
    return re.findall(r"<dt>(.*)</dt>", render_fragment("parts.html.j2", "facts", [(text, "x")]), re.DOTALL)[0]


def read_back(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "</style>", "\"'>", "a & b", "&lt;"])
def test_texts_are_escaped_and_read_as_they_were(text: str) -> None:
    assert not set("<>\"'") & set(escape(text))
    assert read_back(escape(text)) == text


@pytest.mark.parametrize("value", ['"><script>', "<b>x</b>"])
def test_values_of_attributes_are_escaped_and_markup_of_ours_is_not(value: str) -> None:
    assert escape(render_fragment("parts.html.j2", "value", "x")) == '<code class="value">x</code>'
    (label,) = re.findall(
        'data-label="([^"<>]*)"', render_fragment("charts.html.j2", "lines", Chart("x", [Curve(value, [1], [1.0])]))
    )
    assert html.unescape(label) == value


@pytest.mark.parametrize(
    ("char", "name"),
    [
        ("\x00", "\\x00"),
        ("\x1b", "\\x1b"),
        ("\r", "\\x0d"),
        ("\x7f", "\\x7f"),
        ("\x9b", "\\x9b"),
        ("\u202e", "U+202E"),
        ("\u2066", "U+2066"),
        ("\u200f", "U+200F"),
        ("\u200b", "U+200B"),
        ("\ufeff", "U+FEFF"),
        ("\u2028", "U+2028"),
        ("\ud800", "U+D800"),
        ("\U000e0041", "U+E0041"),
    ],
)
def test_characters_that_hide_or_reorder_are_named(char: str, name: str) -> None:
    for escaped in (escape(f"a{char}b"), render_model_text(f"a{char}b")):
        assert char not in escaped
        assert read_back(escaped) == f"a{name}b"
        escaped.encode("utf-8")


@pytest.mark.parametrize("char", ["é", "漢", "🎉", "\u0627", "\u200d"])
def test_letters_of_any_script_stay(char: str) -> None:
    assert escape(char) == char


def test_white_space_is_marked_and_copies_as_it_was() -> None:
    text = "a b\n  two\tend \n\n$x^2$   y"
    marked = render_model_text(text)
    assert read_back(marked) == text
    assert marked.count('class="nl"') == 3
    assert marked.count('class="tab"') == 1
    assert marked.count('class="sp"') == 3  # not the single space between two words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (0.0, "0"),
        (0.8906, "0.891"),
        (-2.51e-4, "-2.51e-4"),
        (2.4e-7, "2.4e-7"),
        (12.0, "12"),
        (153.4, "153"),
        (1234.0, "1,234"),
        (9999.9, "10,000"),
        (12345.0, "12.3k"),
        (2_500_000.0, "2.5M"),
        (3e12, "3e12"),
    ],
)
def test_three_digits_that_count(value: float | None, text: str) -> None:
    assert format_number(value) == use_minus_signs(text)


def test_integers_of_a_recipe_have_no_decimals() -> None:
    values = (8.0, 0.5, 1e-6, 12, True, "8.0", [1.0, 2.0], None)
    assert [*map(format_recipe_value, values)] == ["8", "0.5", "1e-06", "12", "true", "8.0", "[1.0, 2.0]", "null"]


def test_shares() -> None:
    assert (percent(0.0), percent(0.512), percent(1.0)) == ("0 %", "51.2 %", "100 %")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.99, "1 min 00 s"),
        (61.0, "1 min 01 s"),
        (3599.9, "1 h 00 min"),
        (11_100.0, "3 h 05 min"),
        (86_399.0, "1 d 00 h"),
        (183_600.0, "2 d 03 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
