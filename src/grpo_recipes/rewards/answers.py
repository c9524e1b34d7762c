r"""The answer of a completion, and when two answers are the same. Pure and fast: no sympy, no torch.

Numbers are compared exactly, as fractions, however they are written: ``18``, ``18.0``, ``$18``, ``\boxed{18}``,
``1,000``, ``1/2``, ``\frac{1}{2}``, ``18 dollars``. Lists, sets and tuples are compared item by item. Everything else
is compared as text.

A text is cleaned of formula signs first, which leaves a space, so that two numbers beside each other never become one:
``$12$,$345$`` reads ``12 , 345``. Then commas are written in one way, ``, `` between items and none inside a number.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from grpo_recipes.rewards.notation import DOLLAR, clean, closing_brace, without_braces
from grpo_recipes.rewards.units import trailing_unit, unit_of

LONGEST = 500  # a longer answer is compared as it is: cleaning is for answers, not for essays

_OPEN, _CLOSE = "<answer>", "</answer>"
_THINK, _THINK_END = "<think>", "</think>"
_DEEPEST = 8  # brackets inside each other; deeper ones are compared as text
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<brace>\{)?")
_UNBRACED = re.compile(r"[^\s$\\]+")  # ``\boxed 42``
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;~]|\\[()\[\],;: !]|\\q?quad(?![A-Za-z])|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\})*"
)
_SEPARATOR = re.compile(r"(?<!\\)[,;]|and|or")
# White space around signs means nothing. The full stop is not one of them: `12. 345` is not a number.
_PUNCTUATION = re.compile(r"\s*([^\w\s.,])\s*")

_SYMBOL = r"\\?[A-Za-z]\w*(?:_\{\w+\})?"
# Also ``f(x)``, ``f'(0)``, ``f^{-1}(x)``, ``P(A)`` and ``\angle ABC``.
_NAME = rf"(?:\\angle\s*)?{_SYMBOL}(?:'*(?:\^\{{?-1\}}?)?\s*\(\s*[\w\s,]+\))?"
_VARIABLE = re.compile(
    rf"({_NAME}|\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL})+\s*\))\s*(?::?==?|\\approx(?![A-Za-z])|\\in(?![A-Za-z]))\s*(.+)",
    re.DOTALL,
)
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_OPTION = re.compile(
    r"(?:(?i:option|choice)\s+)?(?:\(\s*(?P<bracketed>[A-Ja-j])\s*\)|(?P<letter>[A-Ja-j])(?=[.):]|$))[.):]*"
    r"(?:\s+(?P<wording>.+))?",
    re.DOTALL,
)
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

_POWER_OF_TEN = r"(?:[eE]|(?:\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|[*x])\s*10\s*(?:\^|\*\*)\s*)"
_SCIENTIFIC = re.compile(
    rf"(?P<number>[-+]?{_DECIMAL})\s*{_POWER_OF_TEN}[{{(]?(?P<exponent>[-+]?[0-9]{{1,3}})[)}}]?(?P<unit>(?![0-9.,/^]).*)?",
    re.DOTALL,
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASES |= {"eleven": 11, "twelve": 12, "sixteen": 16}
_BASE = re.compile(
    r"(?P<digits>-?[0-9][0-9A-Fa-f]*)\s*(?:_\s*\{?\s*|\(?\s*(?:in\s+)?base[\s-]*)(?P<base>[0-9]+|[a-z]{3,8})\s*[)}]?"
)

_GROUPED = r"(?<![0-9.])(?<!\S,)[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
_WORD = r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
_PART = re.compile(
    r"(?P<open>\\\{|\\(?:lbrace|langle)(?![A-Za-z])|[(\[{])|(?P<close>\\\}|\\(?:rbrace|rangle)(?![A-Za-z])|[)\]}])"
    rf"|(?P<number>{_GROUPED})|(?P<separator>(?:[,;]\s*)?{_WORD}|[,;])"
)
_COMMA = re.compile(r"\s*,\s*")
_SHORT_SCRIPT = re.compile(r"([_^])\{(\w)\}")
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
# Brackets around items in one character each: braces for a set; {…} without backslashes only groups.
_BRACKETS = {r"\{": "{", r"\}": "}", r"\lbrace": "{", r"\rbrace": "}", r"\langle": "(", r"\rangle": ")"}
_BRACKETS |= {bracket: bracket for bracket in "()[]"}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in its normal form."""

    value: int | Fraction | str | tuple[Answer, ...]  # the number, the items, or the cleaned text of anything else
    unit: str = ""  # beside a number, ``"dollar"`` for ``$18``
    variable: str = ""  # ``"x"`` for ``x=5``
    brackets: str = ""  # of items: ``{}`` of a set, ``()``, ``[)`` and the like of a tuple or interval, "" of a list
    word: str = ""  # ``and`` or ``or`` between inequalities, where it changes the meaning


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion given as text, or as a list of chat messages (the last one counts)."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def final_text(completion: str | list[dict[str, Any]]) -> str:
    """Return the text after the last ``</think>``: only there is an answer, and an unclosed think block has none."""
    text = completion_text(completion)
    if "think>" not in text:
        return text
    text = text.rpartition(_THINK_END)[2]
    return "" if _THINK in text else text


def solution_text(solution: Any) -> str:
    """Return a reference solution as text: numbers, booleans and lists of typed columns as JSON writes them."""
    return solution if isinstance(solution, str) else json.dumps(solution, ensure_ascii=False, default=str)


def last_answer(text: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>``, None where there is none."""
    start = text.rfind(_OPEN, 0, text.rfind(_CLOSE) + 1)
    return None if start < 0 else text[start + len(_OPEN) : text.find(_CLOSE, start)]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}``, None where there is none or it is not closed.

    Boxes with nothing but a comma, a semicolon, ``and`` or ``or`` between them are one list, and returned as it is
    written: ``\boxed{1} and \boxed{2}`` answers the same as ``\boxed{1 and 2}``.
    """
    boxes = _boxes_from_the_end(text)
    last = next(boxes, None)
    if last is None:
        return None
    if not last["brace"]:
        unbraced = _UNBRACED.match(text, last.end())
        return unbraced[0].rstrip(".,;") if unbraced else None
    end = closing_brace(text, last.start())
    if end < 0:
        return None
    first = last.start()
    box, differ = text[first : end + 1], False
    for earlier in boxes:
        close = closing_brace(text, earlier.start()) if earlier["brace"] else -1
        between = text[close + 1 : first]
        if close < 0 or not (_BETWEEN_BOXES.fullmatch(between) and _SEPARATOR.search(between)):
            break
        first = earlier.start()
        differ = differ or text[first : close + 1] != box
    return text[first : end + 1] if differ else box[box.index("{") + 1 : -1]


def _boxes_from_the_end(text: str) -> Iterator[re.Match[str]]:
    position = len(text)
    while (position := text.rfind("box", 0, position)) >= 0:
        match = _BOX.match(text, max(0, position - 1)) or _BOX.match(text, max(0, position - 2))
        if match:
            yield match


def reference(gold: str) -> str:
    r"""Return the answer of a reference solution: its last ``\boxed{…}`` if it has one, else all of it."""
    boxed = last_boxed(gold) if "box" in gold else None
    return gold if boxed is None else boxed


def is_right(text: str, gold: str, matching: str) -> bool:
    """Return whether a completion's last answer tag holds the reference solution ``gold``.

    ``matching`` is ``strict`` for the same text up to surrounding white space, else ``normalized``.
    """
    answer = last_answer(text)
    if answer is None:
        return False
    if matching == "strict":
        return answer.strip() != "" and answer.strip() == gold.strip()
    return same(answer, reference(gold))


def same(answer: str, gold: str) -> bool:
    """Return whether two answers are the same; an empty one is like no other.

    A unit or a variable counts only where both have one: ``18 dollars`` is ``18``, but not ``18 cents``; ``10%`` is
    ``10`` and not ``0.1``.
    """
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return answer != ""
    left, right = normal(answer), normal(gold)
    if isinstance(left.value, int | Fraction) and isinstance(right.value, int | Fraction):
        return alike(left, right)
    return agree(left, right, alike) or same_choice(answer, gold, same)


def alike(left: Answer, right: Answer) -> bool:
    """Return whether two answers have the same value, and no two units or variables that differ."""
    return left.value == right.value and left.value != "" and compatible(left, right)


def compatible(left: Answer, right: Answer) -> bool:
    """Return whether two answers have no two units or variables that differ."""
    units_agree = not left.unit or not right.unit or left.unit == right.unit
    return units_agree and (not left.variable or not right.variable or left.variable == right.variable)


def same_choice(answer: str, gold: str, equal: Callable[[str, str], bool]) -> bool:
    """Return whether both answers choose the same option: ``B``, ``(b)``, ``B. Paris``, ``(B) 42``.

    ``equal`` compares the wording of options. An option that is written out with its letter equals its wording.
    """
    chosen, due = _option(answer), _option(gold)
    if chosen and due and chosen[0] and due[0]:
        return chosen[0] == due[0] and (not chosen[1] or not due[1] or equal(chosen[1], due[1]))
    written = chosen if chosen and chosen[1] else due
    return bool(written and written[1]) and equal(written[1], gold if written is chosen else answer)


@functools.lru_cache(maxsize=8192)
def _option(text: str) -> tuple[str, str] | None:
    """Return letter and wording of a multiple-choice answer, None if it is not one."""
    match = _OPTION.fullmatch(clean(text)) if len(text) <= LONGEST else None
    return ((match["bracketed"] or match["letter"]).upper(), match["wording"] or "") if match else None


def agree(left: Answer, right: Answer, equal: Callable[[Answer, Answer], bool]) -> bool:
    """Return whether two answers are the same, lists item by item.

    Lists and sets have no order, but an item that is repeated counts. Tuples and intervals have an order, and so has a
    list that is compared with a tuple, or ``x=1, y=2`` with ``1, 2``. ``equal`` compares two answers without items.
    """
    one, other = left.value, right.value
    if not (isinstance(one, tuple) and isinstance(other, tuple)) or bool(left.word) != bool(right.word):
        return equal(left, right)
    brackets = {left.brackets, right.brackets}  # a list without any may be a set, or a tuple in parentheses
    if len(one) != len(other) or (len(brackets) > 1 and brackets not in ({"", "{}"}, {"", "()"})):
        return False
    variables_differ = left.variable and right.variable and left.variable != right.variable
    if variables_differ or {left.word, right.word} == {"and", "or"}:
        return False
    one_named, other_named = (len({item.variable for item in items}) > 1 for items in (one, other))  # x=1, y=2
    if brackets - {"", "{}"} or one_named != other_named:
        return all(agree(*pair, equal) for pair in zip(one, other, strict=True))
    return Counter(one) == Counter(other) or _matched(one, other, equal)


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
    variable, text = _named(text) if "=" in text or r"\approx" in text or r"\in" in text else ("", text)
    number = _number(text, variable)
    if number is not None:
        return number
    text, variable = _one_kind_of_comma(text), variable.replace(" ", "")
    inside, brackets = _brackets_around(text)
    texts, words = _items_of(inside)
    if brackets in ("", "{}"):
        texts = [signed for one in texts for signed in _both_signs(one)]
    elif len(signed := _both_signs(text)) > 1:
        texts, brackets = signed, ""
    listed = len(texts) > 1 and depth < _DEEPEST and r"\begin" not in text
    items = [_read(without_braces(one), depth + 1) for one in texts] if listed else []
    if not items or any(one.value == "" for one in items):
        text, unit = trailing_unit(text)
        return Answer(_spelling(text), unit, variable)
    if not brackets:  # x=1, 2 names both
        variable = variable or ("" if any(one.variable for one in items[1:]) else items[0].variable)
        items, variable = [one if one.variable else replace(one, variable=variable) for one in items], ""
    word = words.pop() if len(words) == 1 and _RELATION.search(text) else ""
    return Answer(tuple(items), "", variable, brackets, word)


def _named(text: str) -> tuple[str, str]:
    r"""Return the variable and the value of ``x = 5``, ``x \in [0, 1]``, ``x = \frac{1}{3} \approx 0.333``.

    The exact value counts, not its approximation. ``x = 1, y = 2`` is a list, and ``3 + 5 = 8`` has no variable.
    """
    assignment = _VARIABLE.fullmatch(text)
    variable, value = assignment.groups() if assignment else ("", text)
    if "=" in value and _SEPARATOR.search(value):
        variable, value = "", text
    return variable, _APPROXIMATELY.split(value)[0].strip() or value


def _spelling(text: str) -> str:
    r"""Return text in one spelling: no space around signs, ``x_1`` for ``x_{1}``, words of any case alike."""
    text = _PUNCTUATION.sub(r"\1", text).removeprefix("+")
    return _LETTERS.sub(lambda match: match[0].lower(), _SHORT_SCRIPT.sub(r"\1\2", text))


def _number(text: str, variable: str) -> Answer | None:
    """Return ``text`` as a number with its unit; None if it is something else, or divides by zero."""
    return _plain_number(text, variable) or _scientific(text, variable) or _in_base(text, variable)


def _scientific(text: str, variable: str) -> Answer | None:
    match = _SCIENTIFIC.fullmatch(text)
    unit = unit_of(match["unit"] or "") if match else None
    if match is None or unit is None:
        return None
    return Answer(Fraction(_exact(match["number"])) * Fraction(10) ** int(match["exponent"]), unit, variable)


def _in_base(text: str, variable: str) -> Answer | None:
    """Return the digits with their base as unit, so that it counts only if both answers have one."""
    match = _BASE.fullmatch(text)
    base = match["base"] if match else ""
    base = str(_BASES.get(base, base))
    if match is None or not base.isdecimal():
        return None
    digits = match["digits"]
    value = int(digits) if digits.lstrip("-").isdecimal() else digits.upper()
    return Answer(value, f"base {base}", variable)


def _plain_number(text: str, variable: str) -> Answer | None:
    match = _NUMBER.fullmatch(text)
    unit = unit_of(match["unit"] or "") if match else None
    if match is None or unit is None or (match["sign"] and match["inner"]):
        return None
    above, below = match["above"] or match["number"], match["below"] or match["divisor"] or "1"
    dividend, divisor = _exact(above), _exact(below)
    if divisor == 0:
        return None
    value = dividend if divisor == 1 else Fraction(dividend, divisor)
    if whole := match["whole"] or match["mixed"]:
        if not (0 <= value < 1 and dividend.denominator == divisor.denominator == 1):
            return None  # 1 3/2 is not a mixed number
        value += int(whole)
    if match["currency"]:
        currency = unit_of(match["currency"]) or ""
        unit = unit if unit.split(" ")[0] == currency else f"{currency} {unit}".strip()
    return Answer(-value if "-" in (match["sign"], match["inner"]) else value, unit, variable)


def _exact(digits: str) -> int | Fraction:
    """Return a number written with digits, a point and commas; a whole one as int, which is far faster."""
    digits = digits.replace(",", "")
    return Fraction(digits) if "." in digits else int(digits)


def _walk(text: str) -> Iterator[tuple[re.Match[str], re.Match[str] | None]]:
    """Yield brackets, separators and numbers with commas, each with the bracket that is open around it, or None.

    With a bracket that closes comes the one that it closes.
    """
    opened: list[re.Match[str]] = []
    for part in _PART.finditer(text):
        yield part, opened[-1] if opened else None
        if part["open"]:
            opened.append(part)
        elif part["close"] and opened:
            opened.pop()


def _one_kind_of_comma(text: str) -> str:
    """Return the text with ``, `` between items and no comma inside numbers.

    ``12,345`` is one number. In brackets that hold no other separator it is two: ``(12,345)``, but ``(12,345; 6)`` and
    ``(1,000)``, as no item begins with a zero.
    """
    groups: dict[re.Match[str] | None, list[re.Match[str]]] = {}
    for part, around in _walk(text):
        if part["number"] or part["separator"]:
            groups.setdefault(around, []).append(part)
    whole: list[re.Match[str]] = []
    for around, parts in groups.items():
        numbers = [part for part in parts if part["number"]]
        tuple_like = around is not None and around[0] in _BRACKETS and len(numbers) == len(parts)
        if not tuple_like or any(",0" in number[0] for number in numbers):
            whole += numbers
    for number in sorted(whole, key=re.Match.start, reverse=True):
        text = text[: number.start()] + number[0].replace(",", "") + text[number.end() :]
    return _COMMA.sub(", ", text)


def _brackets_around(text: str) -> tuple[str, str]:
    r"""Return the text inside the brackets around all of it, and these: ``("0, 1", "[)")``; ``(text, "")`` without."""
    for part, opener in _walk(text) if text.endswith((")", "]", "}", "angle", "brace")) else ():
        if opener is not None and part["close"] and opener.start() == 0 and part.end() == len(text):
            pair = _BRACKETS.get(opener[0], "") + _BRACKETS.get(part[0], "")
            alike = len(pair) == 2 and ("{" in pair) == ("}" in pair)
            return (text[opener.end() : part.start()].strip(), pair) if alike else (text, "")
    return text, ""


def _items_of(text: str) -> tuple[list[str], set[str]]:
    """Return the items of a list without brackets, and which of ``and`` and ``or`` join them.

    A semicolon divides more than a comma: ``1, 2; 3, 4`` are two items. A text that is not a list is one item.
    """
    parts = list(_walk(text))
    outside = [part for part, around in parts if around is None]
    balanced = sum(bool(part["open"]) - bool(part["close"]) for part, _ in parts) == 0
    cuts = [part for part in outside if part["separator"]]
    cuts = [cut for cut in cuts if cut[0].startswith(";")] or cuts
    starts, ends = [0, *(cut.end() for cut in cuts)], [*(cut.start() for cut in cuts), len(text)]
    items = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    words = {word for cut in cuts for word in ("and", "or") if cut[0].endswith(word)}
    listed = all(items) and balanced and not any(part["close"] for part in outside)
    return (items, words) if listed else ([text], set())


def _both_signs(text: str) -> list[str]:
    r"""Return ``1+2`` and ``1-2`` for ``1\pm 2``, and any other text as it is."""
    single = text.count(r"\pm") == 1 and r"\mp" not in text
    return [text.replace(r"\pm", sign) for sign in "+-"] if single else [text]
