r"""The text of an answer: clean it of formula signs and the like, find the items of a list and the unit of a number.

Cleaning leaves a space, so that two numbers beside each other never become one: ``$12$,$345$`` reads ``12 , 345``.
Commas are then written in one way, ``, `` between items and none inside a number.
"""

from __future__ import annotations

import re

DOLLAR = "¤"  # in place of \$, which does not begin a formula; a unit as well

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u200b\ufeff", ""),
        **dict.fromkeys("\u2009\u202f", r"\,"),
        "²": "^2",
        "³": "^3",
        "±": r"\pm ",
        "°": " degrees ",
        "~": " ",
    }
)
# Commas and thin spaces that occur only inside a number: 1{,}000, 1,\!000, 1\,000.
_GROUPED_IN_LATEX = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:\s*\{\s*,\s*\}\s*|,\\!\s*|\\,)[0-9]{3})+(?![0-9])")
_NO_DIGITS = re.compile(r"[^0-9]+")
# What must be in the text for the pattern to match, which saves most of the searches; the pattern; what replaces it.
_REWRITES = tuple(
    (needed, re.compile(pattern), replacement)
    for needed, pattern, replacement in (
        ("\\", r"(?<!\\)\\\$", DOLLAR),
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
_LEAD_IN = re.compile(
    r"(?:(?:the\s+)?(?:final\s+)?answers?(?:\s+(?:is|are))?(?:\s*[:=]\s*|\s+)|=\s*)(?=\S)", re.IGNORECASE
)

_GROUPED = r"(?<![0-9.])(?<!\S,)[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,[0-9])"
_WORD = r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
_PART = re.compile(
    r"(?P<open>\\\{|\\(?:lbrace|langle)(?![A-Za-z])|[(\[{])|(?P<close>\\\}|\\(?:rbrace|rangle)(?![A-Za-z])|[)\]}])"
    rf"|(?P<number>{_GROUPED})|(?P<separator>(?:[,;]\s*)?{_WORD}|[,;])"
)
_ANY_GROUPED = re.compile(_GROUPED)
_SEPARATOR = re.compile(rf"[,;]|{_WORD}")
_COMMA = re.compile(r"\s*,\s*")
_ZERO_GROUP = re.compile(r",0[0-9]{2}")
# Brackets around items in one character each: braces for a set; {…} alone only groups.
_BRACKETS = {r"\{": "{", r"\}": "}", r"\lbrace": "{", r"\rbrace": "}", r"\langle": "<", r"\rangle": ">"}
_BRACKETS |= {bracket: bracket for bracket in "()[]"}


def clean(text: str) -> str:
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
    return without_braces(text)


def without_braces(text: str) -> str:
    """Return the text without ``{…}`` around the whole of it."""
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _without_commands(text: str) -> str:
    r"""Return the text with ``\boxed{…}`` and ``\text{…}`` replaced by their content, braces inside it and all."""
    start = 0
    while match := _COMMANDS.search(text, start):
        end = closing_brace(text, match.end() - 1)
        if end < 0:
            start = match.end()
            continue
        # A space keeps their content apart: 5\text{eggs}, and 12\boxed{3} is not 123.
        gap = " " if match[1] in ("boxed", "fbox") or text[match.end()].isalnum() else ""
        text = text[: match.start()] + gap + text[match.end() : end] + gap + text[end + 1 :]
        start = match.start()
    return text


def closing_brace(text: str, start: int) -> int:
    """Return where the brace that opens at ``start`` is closed, -1 where it is not."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    return -1


def one_kind_of_comma(text: str) -> str:
    """Return the text with ``, `` between items and no comma inside numbers.

    ``12,345`` is one number. In brackets that hold no other separator it is two: ``(12,345)``, but ``(12,345; 6)`` and
    ``(1,000)``, as no item begins with a zero.
    """
    if not _ANY_GROUPED.search(text):
        return _COMMA.sub(", ", text)
    levels: list[tuple[str, list[re.Match[str]]]] = [("", [])]
    numbers: list[re.Match[str]] = []
    for part in _PART.finditer(text):
        if part["open"]:
            levels.append((part["open"], []))
        elif part["close"]:
            numbers += _whole_numbers(*levels.pop()) if len(levels) > 1 else []
        else:
            levels[-1][1].append(part)
    numbers += [number for level in levels for number in _whole_numbers(*level)]
    for number in sorted(numbers, key=re.Match.start, reverse=True):
        text = text[: number.start()] + number[0].replace(",", "") + text[number.end() :]
    return _COMMA.sub(", ", text)


def _whole_numbers(bracket: str, parts: list[re.Match[str]]) -> list[re.Match[str]]:
    """Return which numbers with commas of one pair of brackets are one number."""
    numbers = [part for part in parts if part["number"]]
    mixed = bracket not in _BRACKETS or len(numbers) < len(parts) or any(_ZERO_GROUP.search(one[0]) for one in numbers)
    return numbers if mixed else []


def brackets_around(text: str) -> tuple[str, str]:
    r"""Return the text inside the brackets around all of it, and these: ``("0, 1", "[)")``; ``(text, "")`` without."""
    if not text.endswith((")", "]", "}", "angle", "brace")):
        return text, ""
    depth, opened = 0, None
    for part in _PART.finditer(text):
        if part["open"]:
            depth += 1
            if depth == 1 and (opened := part).start() > 0:
                break
        elif part["close"]:
            depth -= 1
            if depth <= 0:
                pair = _BRACKETS.get(opened[0] if opened else "", "") + _BRACKETS.get(part[0], "")
                if opened is None or part.end() < len(text) or len(pair) < 2 or ("{" in pair) != ("}" in pair):
                    break
                return text[opened.end() : part.start()].strip(), pair
    return text, ""


def items_of(text: str) -> tuple[list[str], set[str]]:
    """Return the items of a list without brackets, and which of ``and`` and ``or`` join them.

    A semicolon divides more than a comma: ``1, 2; 3, 4`` are two items. A text that is not a list is one item.
    """
    if not _SEPARATOR.search(text):
        return [text], set()
    depth, cuts = 0, []
    for part in _PART.finditer(text):
        if part["separator"] and depth == 0:
            cuts.append(part)
        depth += bool(part["open"]) - bool(part["close"])
        if depth < 0:
            break
    if depth or not cuts:
        return [text], set()
    cuts = [cut for cut in cuts if cut[0].startswith(";")] or cuts
    starts, ends = [0, *(cut.end() for cut in cuts)], [*(cut.start() for cut in cuts), len(text)]
    items = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    words = {word for cut in cuts for word in ("and", "or") if cut[0].endswith(word)}
    return (items, words) if all(items) else ([text], set())


def both_signs(text: str) -> list[str]:
    r"""Return ``1+2`` and ``1-2`` for ``1\pm 2``, and any other text as it is."""
    single = text.count(r"\pm") == 1 and r"\mp" not in text
    return [text.replace(r"\pm", sign) for sign in "+-"] if single else [text]


# --- units

_UNITS = {
    "dollar": "dollars usd buck bucks $ ¤",
    "cent": "cents ¢",
    "euro": "euros eur €",
    "pound": "pounds lb lbs £ gbp",  # money or weight: the problem says which
    "yen": "¥ jpy",
    "percent": "% percentage pct",
    "degree": "degrees deg",
    "metre": "m meter meters metres",
    "centimetre": "cm centimeter centimeters centimetres",
    "millimetre": "mm millimeter millimeters millimetres",
    "kilometre": "km kilometer kilometers kilometres",
    "inch": "inches",
    "foot": "feet ft",
    "yard": "yards yd",
    "mile": "miles mi",
    "gram": "g grams gramme grammes",
    "kilogram": "kg kilograms kilo kilos",
    "ounce": "ounces oz",
    "litre": "l liter liters litres",
    "millilitre": "ml milliliter milliliters millilitres",
    "second": "s sec secs seconds",
    "minute": "min mins minutes",
    "hour": "h hr hrs hours",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "years yr yrs",
    "mph": "",
    "square": "sq",
    "cubic": "cu",
    "per": "/",
}
_UNIT_OF_WORD = {name: unit for unit, names in _UNITS.items() for name in (unit, *names.split())}
_SHORT_WORDS = frozenset({"of", "in"})
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
    words: list[str] = []
    position = 0
    while position < len(text.rstrip()):
        match = _UNIT_WORD.match(text, position)
        if match is None or len(words) == _MOST_WORDS:
            return None
        name = _unit_word(match[1], glued=position == 0 and not match[0][0].isspace())
        if name is None:
            return None
        words.append(name + (match[2] or ""))
        position = match.end()
    return " ".join(words)


def _unit_word(word: str, glued: bool) -> str | None:
    """Return the one spelling of a word that is a unit, None for another word."""
    known = _UNIT_OF_WORD.get(word if len(word) == 1 else word.lower())
    if known is not None:
        return known
    word = word.lower()
    if glued or word in _NO_UNIT or (len(word) < 3 and word not in _SHORT_WORDS):
        return None
    return word.rstrip("s") if len(word) > 3 else word
