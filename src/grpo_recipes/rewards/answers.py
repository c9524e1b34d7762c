r"""The answer of a completion, and when two answers are the same. Pure and fast: no sympy, no torch.

Numbers are compared exactly, as fractions, however they are written: ``18``, ``18.0``, ``$18``, ``\boxed{18}``,
``1,000``, ``1/2``, ``\frac{1}{2}``, ``18 dollars``. Lists, sets and tuples are compared item by item. Everything else
is compared as text.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from grpo_recipes.rewards.answer_text import (
    DOLLAR,
    both_signs,
    brackets_around,
    clean,
    closing_brace,
    items_of,
    one_kind_of_comma,
    unit_of,
    without_braces,
)

LONGEST = 500  # a longer answer is compared as it is: cleaning is for answers, not for essays

_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = r"\boxed{"
_FARTHEST = 70  # characters between two boxes of one list
_DEEPEST = 8  # brackets inside each other; deeper ones are compared as text
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;~]|\\[()\[\],;: !]|\\q?quad(?![A-Za-z])|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\})*"
)
_SEPARATOR = re.compile(r"(?<!\\)[,;]|and|or")
# White space around signs means nothing. The full stop is not one of them: `12. 345` is not a number.
_PUNCTUATION = re.compile(r"\s*([^\w\s.,])\s*")

_NAME = r"\\?[A-Za-z]\w*(?:_\{\w+\})?"
_VARIABLE = re.compile(rf"({_NAME}|\(\s*{_NAME}(?:\s*,\s*{_NAME})+\s*\))\s*=\s*([^=]+)")
_RELATION = re.compile(r"[<>]|\\(?:leq?|geq?|lt|gt|neq?)(?![A-Za-z])")

_INTEGER = re.compile(r"[-+]?[0-9]+")
_WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<currency>[{DOLLAR}$€£¥]?)\s*(?P<inner>[-+]?)\s*"
    rf"(?:(?:(?P<whole>[0-9]+)\s*)?\\frac\s*\{{\s*(?P<above>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<below>-?{_DECIMAL})\s*\}}"
    rf"|(?:(?P<mixed>[0-9]+)\s+(?=[0-9]+\s*/))?(?P<number>{_DECIMAL})(?:\s*/\s*(?P<divisor>{_DECIMAL}))?)"
    r"(?P<unit>(?![0-9.,/]).*)?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in its normal form."""

    value: int | Fraction | str | Items  # the number, the items, or the cleaned text of anything else
    unit: str = ""  # beside a number, ``"dollar"`` for ``$18``; empty without
    variable: str = ""  # ``"x"`` for ``x=5``; empty without


@dataclass(frozen=True, slots=True)
class Items:
    """Several answers that are one answer together."""

    answers: tuple[Answer, ...]  # as they are written
    brackets: str = ""  # ``{}`` of a set, ``()``, ``[)`` and the like of a tuple or an interval, empty for a list
    word: str = ""  # ``and`` or ``or`` between inequalities, where it changes the meaning; else empty

    @property
    def ordered(self) -> bool:
        """Return whether the items are in an order that counts."""
        return self.brackets not in ("", "{}")

    @property
    def named(self) -> bool:
        """Return whether the items are of several variables, as in ``x=1, y=2``."""
        return len({item.variable for item in self.answers}) > 1


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion given as text, or as a list of chat messages (the last one counts)."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def last_answer(text: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>``, None where there is none."""
    start = text.rfind(_OPEN, 0, text.rfind(_CLOSE) + 1)
    if start < 0:
        return None
    return text[start + len(_OPEN) : text.find(_CLOSE, start)]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}``, None where there is none or it is not closed.

    Boxes with nothing but a comma, a semicolon, ``and`` or ``or`` between them are one list, and returned as it is
    written: ``\boxed{1} and \boxed{2}`` answers the same as ``\boxed{1 and 2}``.
    """
    start = text.rfind(_BOX)
    end = closing_brace(text, start + len(_BOX) - 1) if start >= 0 else -1
    if end < 0:
        return None
    first, last = start, text[start + len(_BOX) : end]
    alike = True
    while (before := _box_before(text, first)) is not None:
        first = before
        alike = alike and text.startswith(_BOX + last + "}", first)
    return last if alike else text[first : end + 1]


def _box_before(text: str, start: int) -> int | None:
    """Return where the box of the same list begins that ends before ``start``, None where there is none."""
    close = text.rfind("}", max(0, start - _FARTHEST), start)
    while close >= 0:
        between = text[close + 1 : start]
        if _BETWEEN_BOXES.fullmatch(between) and _SEPARATOR.search(between):
            before = text.rfind(_BOX, 0, close)
            if before >= 0 and closing_brace(text, before + len(_BOX) - 1) == close:
                return before
        close = text.rfind("}", max(0, start - _FARTHEST), close)
    return None


def is_right(text: str, gold: str, matching: str) -> bool:
    """Return whether a completion's last answer tag holds the reference solution ``gold``.

    ``matching`` is ``strict`` for the same text up to surrounding white space, else ``normalized``.
    """
    answer = last_answer(text)
    if answer is None:
        return False
    if matching == "strict":
        return answer.strip() != "" and answer.strip() == gold.strip()
    return same(answer, gold)


def same(answer: str, gold: str) -> bool:
    """Return whether two answers are the same; an empty one is like no other.

    A unit or a variable counts only where both have one: ``18 dollars`` is ``18``, but not ``18 cents``; ``10%`` is
    ``10`` and not ``0.1``.
    """
    return agree(normal(answer), normal(gold), alike)


def alike(left: Answer, right: Answer) -> bool:
    """Return whether two answers have the same value, and no two units or variables that differ."""
    if left.value != right.value or left.value == "":
        return False
    units_agree = not left.unit or not right.unit or left.unit == right.unit
    return units_agree and (not left.variable or not right.variable or left.variable == right.variable)


def agree(left: Answer, right: Answer, equal: Callable[[Answer, Answer], bool]) -> bool:
    """Return whether two answers are the same, lists item by item.

    Lists and sets have no order, but an item that is repeated counts. Tuples and intervals have an order, and so has a
    list that is compared with a tuple, or ``x=1, y=2`` with ``1, 2``. ``equal`` compares two answers without items.
    """
    one, other = left.value, right.value
    if not (isinstance(one, Items) and isinstance(other, Items)):
        return equal(left, right)
    brackets = {one.brackets, other.brackets}  # a list without any may be a set, or a tuple in parentheses
    if len(one.answers) != len(other.answers) or (len(brackets) > 1 and brackets not in ({"", "{}"}, {"", "()"})):
        return False
    variables_differ = left.variable and right.variable and left.variable != right.variable
    if variables_differ or {one.word, other.word} == {"and", "or"}:
        return False
    if one.ordered or other.ordered or one.named != other.named:
        return all(agree(*pair, equal) for pair in zip(one.answers, other.answers, strict=True))
    return Counter(one.answers) == Counter(other.answers) or _matched(one.answers, other.answers, equal)


def _matched(left: tuple[Answer, ...], right: tuple[Answer, ...], equal: Callable[[Answer, Answer], bool]) -> bool:
    """Return whether each item of one list has an equal one of its own in the other, in whatever order.

    Equality is not transitive (``5`` is ``5 cm`` and ``5 kg``), so an item may have to give its place to another.
    """
    holder: dict[int, int] = {}

    def placed(item: int, tried: set[int]) -> bool:
        """Give an item a place, moving others where that helps; ``tried`` are the places looked at."""
        for place in sorted(range(len(right)), key=lambda place: (place in holder, right[place] != left[item])):
            if place in tried or not agree(left[item], right[place], equal):
                continue
            tried.add(place)
            if place not in holder or placed(holder[place], tried):
                holder[place] = item
                return True
        return False

    return all(placed(item, set()) for item in range(len(left)))


def normal(text: str) -> Answer:
    """Return the normal form of an answer. Never raises."""
    text = text.strip()
    return _normal(text) if len(text) <= LONGEST else Answer(text)


@functools.lru_cache(maxsize=8192)
def _normal(text: str) -> Answer:
    return Answer(int(text)) if _INTEGER.fullmatch(text) else _read(clean(text), depth=0)


def _read(text: str, depth: int) -> Answer:
    """Return the normal form of a cleaned text."""
    assignment = _VARIABLE.fullmatch(text) if "=" in text else None
    variable, text = assignment.groups() if assignment else ("", text)
    number = _number(text, variable)
    if number is not None:
        return number
    text, variable = one_kind_of_comma(text), variable.replace(" ", "")
    items = _items(text, depth) if depth < _DEEPEST else None
    if items is None:
        return Answer(_PUNCTUATION.sub(r"\1", text).removeprefix("+"), variable=variable)
    if items.brackets:
        return Answer(items, variable=variable)
    # x=1, 2 names both.
    variable = variable or ("" if any(one.variable for one in items.answers[1:]) else items.answers[0].variable)
    named = tuple(one if one.variable else replace(one, variable=variable) for one in items.answers)
    return Answer(replace(items, answers=named))


def _items(text: str, depth: int) -> Items | None:
    """Return the items of a list, a set, a tuple or an interval, None for anything else."""
    if r"\begin" in text:
        return None
    inside, brackets = brackets_around(text)
    texts, words = items_of(inside)
    if brackets in ("", "{}"):
        texts = [signed for one in texts for signed in both_signs(one)]
    elif len(signed := both_signs(text)) > 1:
        texts, brackets = signed, ""
    if len(texts) < 2:
        return None
    answers = tuple(_read(without_braces(one), depth + 1) for one in texts)
    if any(one.value == "" for one in answers):
        return None
    word = words.pop() if len(words) == 1 and _RELATION.search(text) else ""
    return Items(answers, brackets, word)


def _number(text: str, variable: str) -> Answer | None:
    """Return ``text`` as a number with its unit, None when it is something else."""
    match = _NUMBER.fullmatch(text)
    if match is None or (match["sign"] and match["inner"]):
        return None
    unit = unit_of(match["unit"] or "")
    value = _value(match)
    if unit is None or value is None:
        return None
    if match["currency"]:
        currency = unit_of(match["currency"]) or ""
        unit = unit if unit.split(" ")[0] == currency else f"{currency} {unit}".strip()
    negative = "-" in (match["sign"], match["inner"])
    return Answer(-value if negative else value, unit, variable)


def _value(match: re.Match[str]) -> int | Fraction | None:
    """Return the number of a match without its sign; None for a division by zero or a mixed number that is none."""
    if match["above"] is not None:
        whole, above, below = match["whole"], match["above"], match["below"]
    else:
        whole, above, below = match["mixed"], match["number"], match["divisor"] or "1"
    dividend, divisor = _exact(above), _exact(below)
    if divisor == 0:
        return None
    value = dividend if divisor == 1 else Fraction(dividend, divisor)
    if whole is not None:
        proper = 0 <= value < 1 and dividend.denominator == 1 and divisor.denominator == 1
        return int(whole) + value if proper else None
    return value.numerator if value.denominator == 1 else value


def _exact(digits: str) -> int | Fraction:
    digits = digits.replace(",", "").removesuffix(".")
    return Fraction(digits) if "." in digits else int(digits)
