"""Normalize the units after a number or an expression.

A unit counts only if both answers have one, so its spelling must not matter: ``5 cm`` equals ``5 centimeters``.

    from grpo_recipes.rewards.units import normalize_unit

    normalize_unit(" centimeters^2")  # "centimetre2"
"""

from __future__ import annotations

import re

# Synonyms of each unit; the first is the normal form. A pound is money or weight, depending on the problem.
_UNITS = """
    dollar dollars usd buck bucks $ ¤ | cent cents ¢ | euro euros eur € | pound pounds lb lbs £ gbp | yen ¥ jpy |
    percent % percentage pct | degree degrees deg | metre m meter meters metres |
    centimetre cm centimeter centimeters centimetres | millimetre mm millimeter millimeters millimetres |
    kilometre km kilometer kilometers kilometres | inch inches | foot feet ft | yard yards yd | mile miles mi |
    gram g grams gramme grammes | kilogram kg kilograms kilo kilos | ounce ounces oz | litre l liter liters litres |
    millilitre ml milliliter milliliters millilitres | second s sec secs seconds | minute min mins minutes |
    hour h hr hrs hours | day days | week weeks | month months | year years yr yrs | mph | square sq | cubic cu |
    per / | unit units
"""
_UNIT_OF_WORD = {word: words.split()[0] for words in _UNITS.split("|") for word in words.split()}
# Words that change the number before them, so the text is not a number with a unit.
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
# A unit after an expression, which ends in a digit, a bracket or a command such as ``\pi``.
_TRAILING = re.compile(
    r"(?P<expression>.*(?:[0-9)}]|\\[A-Za-z]+|(?<![A-Za-z])pi))(?P<unit>(?:\s*[%¤$€£¥]|\s+(?:[A-Za-z]+|/)(?:\^\{?[23]\}?)?)(?:\s*/|\s+|[A-Za-z]|\^\{?[23]\}?)*)",
    re.DOTALL,
)


def normalize_unit(text: str) -> str | None:
    """Return the normal form of the unit in the text after a number: ``"centimetre2"`` for ``" cm^2"``.

    Without a space, a word must be a known unit (``5cm``, but ``5x`` is a product). After a space, any word of three
    letters or more is a unit (``5 eggs``), unless it changes the number (``5 million``). Return "" for blank text, and
    None if the text is not a unit.
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


def split_trailing_unit(text: str) -> tuple[str, str]:
    """Split an expression and the known unit after it: ``("8\\sqrt{3}", "centimetre2")``, or else ``(text, "")``.

    A unit of one letter counts only if the expression has no variables: ``5x m`` is a product.
    """
    match = _TRAILING.fullmatch(text) if text[-1:].isalpha() or text[-1:] in "23}%¤$€£¥" else None
    if match is None:
        return text, ""
    words = re.findall(r"[A-Za-z]+|[%¤$€£¥/]", match["unit"])
    letters = re.search(r"(?<![A-Za-z\\])[A-Za-z]", re.sub(r"\\[A-Za-z]+|pi", " ", match["expression"]))
    known = all(_UNIT_OF_WORD.get(word if len(word) == 1 else word.lower()) for word in words)
    if not known or (letters and any(len(word) == 1 and word.isalpha() for word in words)):
        return text, ""
    unit = normalize_unit(match["unit"])
    return (match["expression"].strip(), unit) if unit else (text, "")
