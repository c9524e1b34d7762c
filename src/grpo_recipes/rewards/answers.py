r"""The answer of a completion, and when two answers are the same. Pure and fast: no sympy, no torch.

Numbers are compared exactly, as fractions, however they are written: ``18``, ``18.0``, ``$18``, ``\boxed{18}``,
``1,000``, ``1/2``, ``\frac{1}{2}``, ``18 dollars``. Lists, sets and tuples are compared item by item. Everything else
is compared as text.

A text is cleaned of formula signs first, which leaves a space, so that two numbers beside each other never become one:
``$12$,$345$`` reads ``12 , 345``. Then commas are written in one way, ``, `` between items and none inside a number.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

LONGEST = 500  # a longer answer is compared as it is: cleaning is for answers, not for essays

_OPEN, _CLOSE = "<answer>", "</answer>"
_DEEPEST = 8  # brackets inside each other; deeper ones are compared as text
_DOLLAR = "¤"  # in place of \$, which does not begin a formula; a unit as well
_BOX = re.compile(r"\\boxed\{")
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
    rf"(?P<sign>[-+]?)\s*(?P<currency>[{_DOLLAR}$€£¥]?)\s*(?P<inner>[-+]?)\s*"
    rf"(?:(?:(?P<whole>[0-9]+)\s*)?\\frac\s*\{{\s*(?P<above>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<below>-?{_DECIMAL})\s*\}}"
    rf"|(?:(?P<mixed>[0-9]+)\s+(?=[0-9]+\s*/))?(?P<number>{_DECIMAL})(?:\s*/\s*(?P<divisor>{_DECIMAL}))?)"
    r"(?P<unit>(?![0-9.,/]).*)?",
    re.DOTALL,
)

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-")
    | dict.fromkeys("\u200b\ufeff", "")
    | dict.fromkeys("\u2009\u202f", r"\,")
    | {"²": "^2", "³": "^3", "±": r"\pm ", "°": " degrees ", "~": " "}
)
# Commas and thin spaces that occur only inside a number: 1{,}000, 1,\!000, 1\,000.
_GROUPED_IN_LATEX = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:\s*\{\s*,\s*\}\s*|,\\!\s*|\\,)[0-9]{3})+(?![0-9])")
_NO_DIGITS = re.compile(r"[^0-9]+")
# What must be in the text for the pattern to match, which saves most of the searches; the pattern; what replaces it.
_REWRITES = tuple(
    (needed, re.compile(pattern), replacement)
    for needed, pattern, replacement in (
        ("\\", r"(?<!\\)\\\$", _DOLLAR),
        ("\\", r"\\%", "%"),
        ("\\", r"(?<!\\)\\[()\[\]]", " "),
        ("\\", r"\\(?:left|right|displaystyle|[Bb]igg?[lr]?)(?![A-Za-z])|(?<!\\)\\!", ""),
        ("\\", r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])", " "),
        ("\\", r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", " degrees "),
        ("$", r"\$\$?([^$]+)\$\$?", r" \1 "),
        ("\\", r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        ("\\", r"\\frac\s*([0-9])\s*(?=[0-9{])", r"\\frac{\1}"),
        ("\\", r"(\\frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}"),
        ("^", r"\s+(?=\^)", ""),
    )
)
_LINES = re.compile(r"(?<=[0-9])[ \t]*[\r\n]\s*(?=[0-9])")  # a number a line is a list
_COMMANDS = re.compile(r"\\(boxed|fbox|text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s*\{")
_LEAD_IN = re.compile(r"(?i:(?:the\s+)?(?:final\s+)?answers?(?:\s+(?:is|are))?(?:\s*[:=]\s*|\s+)|=\s*)(?=\S)")

_GROUPED = r"(?<![0-9.])(?<!\S,)[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
_WORD = r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
_PART = re.compile(
    r"(?P<open>\\\{|\\(?:lbrace|langle)(?![A-Za-z])|[(\[{])|(?P<close>\\\}|\\(?:rbrace|rangle)(?![A-Za-z])|[)\]}])"
    rf"|(?P<number>{_GROUPED})|(?P<separator>(?:[,;]\s*)?{_WORD}|[,;])"
)
_COMMA = re.compile(r"\s*,\s*")
# Brackets around items in one character each: braces for a set; {…} alone only groups.
_BRACKETS = {r"\{": "{", r"\}": "}", r"\lbrace": "{", r"\rbrace": "}", r"\langle": "<", r"\rangle": ">"}
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
    starts = [match.start() for match in _BOX.finditer(text)]
    end = _closing_brace(text, starts[-1]) if starts else -1
    if end < 0:
        return None
    first = starts.pop()
    box, differ = text[first : end + 1], False
    while starts and (close := _closing_brace(text, starts[-1])) >= 0:
        between = text[close + 1 : first]
        if not (_BETWEEN_BOXES.fullmatch(between) and _SEPARATOR.search(between)):
            break
        first = starts.pop()
        differ = differ or text[first : close + 1] != box
    return text[first : end + 1] if differ else box[box.index("{") + 1 : -1]


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
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
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
    return Answer(int(text)) if _INTEGER.fullmatch(text) else _read(_clean(text), depth=0)


def _read(text: str, depth: int) -> Answer:
    """Return the normal form of a cleaned text."""
    assignment = _VARIABLE.fullmatch(text) if "=" in text else None
    variable, text = assignment.groups() if assignment else ("", text)
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
    items = [_read(_without_braces(one), depth + 1) for one in texts] if listed else []
    if not items or any(one.value == "" for one in items):
        return Answer(_PUNCTUATION.sub(r"\1", text).removeprefix("+"), variable=variable)
    if not brackets:  # x=1, 2 names both
        variable = variable or ("" if any(one.variable for one in items[1:]) else items[0].variable)
        items, variable = [one if one.variable else replace(one, variable=variable) for one in items], ""
    word = words.pop() if len(words) == 1 and _RELATION.search(text) else ""
    return Answer(tuple(items), "", variable, brackets, word)


def _number(text: str, variable: str) -> Answer | None:
    """Return ``text`` as a number with its unit; None when it is something else, or divides by zero."""
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


# --- the text of an answer


def _clean(text: str) -> str:
    """Return an answer without formula signs, boxes, bold, a full stop, an introduction."""
    text = text.translate(_CHARACTERS)
    if "\\" in text or "{" in text:
        text = _GROUPED_IN_LATEX.sub(lambda match: _NO_DIGITS.sub("", match[0]), _without_commands(text))
    for needed, pattern, replacement in _REWRITES:
        if needed in text:
            text = pattern.sub(replacement, text)
    text = " ".join(_LINES.sub(", ", text).split())
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2].strip()
    introduction = _LEAD_IN.match(text)
    text = (text[introduction.end() :] if introduction else text).removesuffix(".").strip()
    return _without_braces(text)


def _without_braces(text: str) -> str:
    """Return the text without ``{…}`` around the whole of it."""
    while text.startswith("{") and _closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _without_commands(text: str) -> str:
    r"""Return the text with ``\boxed{…}`` and ``\text{…}`` replaced by their content, braces inside it and all."""
    start = 0
    while match := _COMMANDS.search(text, start):
        end = _closing_brace(text, match.end() - 1)
        if end < 0:
            start = match.end()
            continue
        # A space keeps their content apart: 5\text{eggs}, and 12\boxed{3} is not 123.
        gap = " " if match[1] in ("boxed", "fbox") or text[match.end()].isalnum() else ""
        text = text[: match.start()] + gap + text[match.end() : end] + gap + text[end + 1 :]
        start = match.start()
    return text


def _closing_brace(text: str, start: int) -> int:
    """Return where the first brace that opens from ``start`` on is closed, -1 where it is not."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0 and text[position] == "}":
            return position
    return -1


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


# --- units

# The words for one unit, of which the first stands for all; a pound is money or weight, as the problem says.
_UNITS = """
    dollar dollars usd buck bucks $ ¤ | cent cents ¢ | euro euros eur € | pound pounds lb lbs £ gbp | yen ¥ jpy |
    percent % percentage pct | degree degrees deg | metre m meter meters metres |
    centimetre cm centimeter centimeters centimetres | millimetre mm millimeter millimeters millimetres |
    kilometre km kilometer kilometers kilometres | inch inches | foot feet ft | yard yards yd | mile miles mi |
    gram g grams gramme grammes | kilogram kg kilograms kilo kilos | ounce ounces oz | litre l liter liters litres |
    millilitre ml milliliter milliliters millilitres | second s sec secs seconds | minute min mins minutes |
    hour h hr hrs hours | day days | week weeks | month months | year years yr yrs | mph | square sq | cubic cu |
    per /
"""
_UNIT_OF_WORD = {word: words.split()[0] for words in _UNITS.split("|") for word in words.split()}
# Words that change the number before them: with one of these it is not a number and a unit.
_CHANGES_THE_NUMBER = """
    and or not plus minus over less more fewer than from between choose mod remainder divided multiplied squared cubed
    factorial sqrt root pi sin cos tan log exp below under above negative infinity point zero one two three four five
    six seven eight nine ten tens dozen dozens hundred hundreds thousand thousands million millions billion billions
    trillion trillions half halves third thirds fourth fourths quarter quarters fifth fifths sixth sixths eighth eighths
    tenth tenths hundredth hundredths thousandth thousandths mil bil grand gross lakh lakhs crore crores
    quadrillion quadrillions
"""
_NO_UNIT = frozenset(_CHANGES_THE_NUMBER.split())
_UNIT_WORD = re.compile(r"\s*([A-Za-z]+(?:-[A-Za-z]+)*|[%$¤¢€£¥/])(?:\^\{?([23])\}?)?")
_MOST_WORDS = 5


def unit_of(text: str) -> str | None:
    """Return the unit that follows a number, in one spelling: ``" cm^2"`` and ``"centimeters^2"`` give the same.

    A word glued to the number must be a known unit (``5cm``, but ``5x`` is a product); after a space any word of three
    letters or more is one (``5 eggs``), unless it changes the number (``5 million``). ``""`` for blank text, None when
    the text is something else.
    """
    if not text or text.isspace():
        return ""
    matches = list(_UNIT_WORD.finditer(text))
    if "".join(match[0] for match in matches) != text.rstrip() or len(matches) > _MOST_WORDS:
        return None
    words = []
    for match in matches:
        word = match[1]
        known = _UNIT_OF_WORD.get(word if len(word) == 1 else word.lower())
        if known is None:
            word = word.lower()
            if match.start(1) == 0 or word in _NO_UNIT or (len(word) < 3 and word not in ("of", "in")):
                return None
            known = word.rstrip("s") if len(word) > 3 else word
        words.append(known + (match[2] or ""))
    return " ".join(words)
