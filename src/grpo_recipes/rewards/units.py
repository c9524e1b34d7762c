"""Units written after a number: which words are one, and which of them mean the same."""

from __future__ import annotations

import re

_NAMES = {
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
_KNOWN = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}
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
_WORD = re.compile(r"\s*([A-Za-z]+(?:-[A-Za-z]+)*|[%$¤¢€£¥/])(?:\^\{?([23])\}?)?")
_MOST_WORDS = 5


def unit_of(text: str) -> str | None:
    """The unit in what follows a number, in one spelling: ``" cm^2"`` and ``"centimeters^2"`` give the same.

    A word glued to the number must be a known unit (``5cm``, but ``5x`` is a product); after a space any word of three
    letters or more is one (``5 eggs``), unless it changes the number (``5 million``).

    Returns:
        The unit, ``""`` for blank text, None when the text is something else.
    """
    words: list[str] = []
    position = 0
    while position < len(text.rstrip()):
        match = _WORD.match(text, position)
        if match is None or len(words) == _MOST_WORDS:
            return None
        name = _name(match[1], glued=position == 0 and not match[0][0].isspace())
        if name is None:
            return None
        words.append(name + (match[2] or ""))
        position = match.end()
    return " ".join(words)


def _name(word: str, glued: bool) -> str | None:
    """One word's spelling of a unit, None when it is none."""
    known = _KNOWN.get(word if len(word) == 1 else word.lower())
    if known is not None:
        return known
    word = word.lower()
    if glued or word in _NO_UNIT or (len(word) < 3 and word not in _SHORT_WORDS):
        return None
    return word.rstrip("s") if len(word) > 3 else word
