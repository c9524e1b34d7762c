r"""The answer of a completion, and when two answers are the same. Pure and fast: no sympy, no torch.

Numbers are compared exactly, as fractions, however they are written: ``18``, ``18.0``, ``$18``, ``\boxed{18}``,
``1,000``, ``1/2``, ``\frac{1}{2}``, ``18 dollars``. Everything else is compared as text.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from grpo_recipes.rewards.units import unit_of

# An answer longer than this is compared as it stands: cleaning is for answers, not for essays.
LONGEST = 500

_OPEN, _CLOSE = "<answer>", "</answer>"
_DOLLAR = "¤"  # stands for \$, which does not begin a formula; `units` knows it too

_CHARACTERS = str.maketrans(
    {**dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"), "²": "^2", "³": "^3", **dict.fromkeys("\u200b\ufeff", "")}
)
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\\$", _DOLLAR),
        (r"\\%", "%"),
        (r"(?<!\\)\\[()\[\]]|\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3})", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|°", " degrees "),
        (r"\$\$?([^$]+)\$\$?", r"\1"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*([0-9])\s*(?=[0-9{])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}"),
        (r"\s+(?=\^)", ""),
    )
)
_COMMANDS = re.compile(r"\\(boxed|fbox|text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{")
_LEAD_IN = re.compile(r"(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?(?:\s*[:=]\s*|\s+)|=\s*)(?=\S)", re.IGNORECASE)
_VARIABLE = re.compile(r"(\\?[A-Za-z]\w*(?:_\{\w+\})?)\s*=\s*([^=]+)")
_PUNCTUATION = re.compile(r"\s*([^\w\s])\s*")

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


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in its normal form.

    Attributes:
        value: the number, or the cleaned text of what is no number.
        unit: what stands beside a number, ``"dollar"`` for ``$18``; empty without.
        variable: ``"x"`` for ``x=5``; empty without.
    """

    value: int | Fraction | str
    unit: str = ""
    variable: str = ""


def last_answer(text: str) -> str | None:
    """What the last ``<answer>…</answer>`` holds, None where there is none."""
    start = text.rfind(_OPEN, 0, text.rfind(_CLOSE) + 1)
    if start < 0:
        return None
    return text[start + len(_OPEN) : text.find(_CLOSE, start)]


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{…}`` holds, None where there is none or it is not closed."""
    start = text.rfind(r"\boxed{")
    end = _closing_brace(text, start + len(r"\boxed")) if start >= 0 else -1
    return text[start + len(r"\boxed{") : end] if end >= 0 else None


def is_right(text: str, gold: str, matching: str) -> bool:
    """Whether a completion's last answer tag holds the reference solution.

    Args:
        text: the completion.
        gold: the reference solution.
        matching: ``strict`` for the same text up to surrounding white space, else ``normalized``.
    """
    answer = last_answer(text)
    if answer is None:
        return False
    if matching == "strict":
        return answer.strip() != "" and answer.strip() == gold.strip()
    return same(answer, gold)


def same(answer: str, gold: str) -> bool:
    """Whether two answers are the same; an empty one is like no other.

    A unit or a variable counts only where both have one: ``18 dollars`` is ``18``, but not ``18 cents``; ``10%`` is
    ``10`` and not ``0.1``.
    """
    left, right = normal(answer), normal(gold)
    if left.value != right.value or left.value == "":
        return False
    units_agree = not left.unit or not right.unit or left.unit == right.unit
    return units_agree and (not left.variable or not right.variable or left.variable == right.variable)


def normal(text: str) -> Answer:
    """The normal form of an answer. Never raises."""
    text = text.strip()
    return _normal(text) if len(text) <= LONGEST else Answer(text)


@functools.lru_cache(maxsize=8192)
def _normal(text: str) -> Answer:
    if _INTEGER.fullmatch(text):
        return Answer(int(text))
    text = _clean(text)
    assignment = _VARIABLE.fullmatch(text)
    variable, text = assignment.groups() if assignment else ("", text)
    return _number(text, variable) or Answer(_PUNCTUATION.sub(r"\1", text), variable=variable)


def _clean(text: str) -> str:
    """Without what only dresses an answer: formula signs, boxes, bold, a full stop, an introduction."""
    text = _without_commands(text.translate(_CHARACTERS))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2].strip()
    introduction = _LEAD_IN.match(text)
    text = (text[introduction.end() :] if introduction else text).removesuffix(".").strip()
    while text.startswith("{") and _closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _without_commands(text: str) -> str:
    r"""``\boxed{…}`` and ``\text{…}`` replaced by what they hold, braces inside it and all."""
    start = 0
    while match := _COMMANDS.search(text, start):
        end = _closing_brace(text, match.end() - 1)
        if end < 0:
            start = match.end()
            continue
        # Words of a \text stand apart from the number before them: 5\text{eggs}.
        gap = " " if match[1] not in ("boxed", "fbox") and text[match.end()].isalpha() else ""
        text = text[: match.start()] + gap + text[match.end() : end] + gap + text[end + 1 :]
        start = match.start()
    return text


def _closing_brace(text: str, start: int) -> int:
    """Where the brace that opens at ``start`` is closed, -1 where it is not."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
            if depth == 0:
                return position
    return -1


def _number(text: str, variable: str) -> Answer | None:
    """``text`` as a number with its unit, None when it is something else."""
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


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match without its sign; None for a division by zero or a mixed number that is none."""
    if match["above"] is not None:
        whole, above, below = match["whole"], match["above"], match["below"]
    else:
        whole, above, below = match["mixed"], match["number"], match["divisor"] or "1"
    dividend, divisor = _fraction(above), _fraction(below)
    if divisor == 0:
        return None
    value = dividend / divisor
    if whole is None:
        return value
    proper = 0 < value < 1 and dividend.denominator == 1 and divisor.denominator == 1
    return int(whole) + value if proper else None


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").removesuffix("."))
