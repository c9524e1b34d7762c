"""Nothing that a model writes becomes markup, hides, or reorders what is around it."""

from __future__ import annotations

import html
import re

import pytest

from grpo_recipes.report.page import fragment, model_text


def escape(text: str) -> str:
    return fragment("parts.html.j2", "paragraph", text).removeprefix("<p>").removesuffix("</p>")


def read_back(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "</style>", "\"'>", "a & b", "&lt;"])
def test_texts_are_escaped_and_read_as_they_were(text: str) -> None:
    assert not set("<>\"'") & set(escape(text))
    assert read_back(escape(text)) == text


@pytest.mark.parametrize("value", ['"><script>', "<b>x</b>"])
def test_values_of_attributes_are_escaped_and_markup_of_ours_is_not(value: str) -> None:
    assert escape(fragment("parts.html.j2", "bold", "x")) == "<b>x</b>"
    link = fragment("parts.html.j2", "link", "x", value)
    assert re.fullmatch('<a href="[^"<>]*">x</a>', link)
    assert html.unescape(link) == f'<a href="{value}">x</a>'


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
    for made in (escape(f"a{char}b"), model_text(f"a{char}b")):
        assert char not in made
        assert read_back(made) == f"a{name}b"
        made.encode("utf-8")


@pytest.mark.parametrize("char", ["é", "漢", "🎉", "\u0627", "\u200d"])
def test_letters_of_any_script_stay(char: str) -> None:
    assert escape(char) == char


def test_white_space_is_marked_and_copies_as_it_was() -> None:
    text = "a b\n  two\tend \n\n$x^2$   y"
    made = model_text(text)
    assert read_back(made) == text
    assert made.count('class="nl"') == 3
    assert made.count('class="tab"') == 1
    assert made.count('class="sp"') == 3  # not the single space between two words
