r"""Extract the answer of a completion, and compare two answers. Pure and fast: no sympy, no torch.

Numbers are compared exactly, as fractions, in any notation: ``18``, ``18.0``, ``$18``, ``\boxed{18}``,
``1,000``, ``1/2``, ``\frac{1}{2}``, ``18 dollars``. Lists, sets and tuples are compared item by item. Everything else
is compared as text.

Formula signs are replaced by spaces first, so that two numbers next to each other never become one number:
``$12$,$345$`` reads ``12 , 345``. Then commas are normalized: ``, `` between items and none inside a number.
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

from grpo_recipes.rewards.notation import DOLLAR, clean_answer, find_closing_bracket, strip_braces
from grpo_recipes.rewards.units import normalize_unit, split_trailing_unit

LONGEST_ANSWER = 500  # characters; longer texts are compared unchanged, since cleaning is for answers, not for essays

_OPEN, _CLOSE = "<answer>", "</answer>"
_THINK, _THINK_END = "<think>", "</think>"
_MAX_DEPTH = 8  # nested brackets; anything deeper is compared as text
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?P<brace>\{)?")
_UNBRACED = re.compile(r"[^\s$\\]+")  # ``\boxed 42``
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;~]|\\[()\[\],;: !]|\\q?quad(?![A-Za-z])|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
    r"|\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\})*"
)
_SEPARATOR = re.compile(r"(?<!\\)[,;]|and|or")
# White space around these signs has no meaning. The full stop is excluded: `12. 345` is not a number.
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
    unit: str = ""  # the unit of a number: ``"dollar"`` for ``$18``
    variable: str = ""  # ``"x"`` for ``x=5``
    brackets: str = ""  # around the items: ``{}`` for a set, ``()`` or ``[)`` for a tuple or interval, "" for a list
    word: str = ""  # ``and`` or ``or`` between inequalities, if it changes the meaning


def get_completion_text(completion: str | list[dict[str, Any]]) -> str:
    """Return a completion as text: a string unchanged, or the content of a list's last chat message, "" without one."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def extract_final_text(completion: str | list[dict[str, Any]]) -> str:
    """Return the part of a completion that may contain the answer: the text after the last ``</think>``.

    Return the whole text if it has no think tags, and "" if a think block is not closed. In a list of chat messages,
    only the last message counts.
    """
    text = get_completion_text(completion)
    if "think>" not in text:
        return text
    text = text.rpartition(_THINK_END)[2]
    return "" if _THINK in text else text


def format_solution(solution: Any) -> str:
    """Return a reference solution as text: a string unchanged, and numbers, booleans and lists as JSON."""
    return solution if isinstance(solution, str) else json.dumps(solution, ensure_ascii=False, default=str)


def extract_last_answer(text: str) -> str | None:
    """Return the text in the last complete ``<answer>…</answer>``, which may be empty. None without such a tag."""
    start = text.rfind(_OPEN, 0, text.rfind(_CLOSE) + 1)
    return None if start < 0 else text[start + len(_OPEN) : text.find(_CLOSE, start)]


def extract_last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}``. None without a box, or if the box is not closed.

    A box without braces contains the next word: ``42`` in ``\boxed 42``. Boxes separated only by a comma, a semicolon,
    ``and`` or ``or`` form one list, which is returned unchanged: ``\boxed{1} and \boxed{2}`` is the same answer as
    ``\boxed{1 and 2}``.
    """
    boxes = _iterate_boxes_backwards(text)
    last = next(boxes, None)
    if last is None:
        return None
    if not last["brace"]:
        unbraced = _UNBRACED.match(text, last.end())
        return unbraced[0].rstrip(".,;") if unbraced else None
    end = find_closing_bracket(text, last.start())
    if end < 0:
        return None
    first = last.start()
    box, boxes_differ = text[first : end + 1], False
    for earlier in boxes:
        close = find_closing_bracket(text, earlier.start()) if earlier["brace"] else -1
        between = text[close + 1 : first]
        if close < 0 or not (_BETWEEN_BOXES.fullmatch(between) and _SEPARATOR.search(between)):
            break
        first = earlier.start()
        boxes_differ = boxes_differ or text[first : close + 1] != box
    return text[first : end + 1] if boxes_differ else box[box.index("{") + 1 : -1]


def _iterate_boxes_backwards(text: str) -> Iterator[re.Match[str]]:
    r"""Yield a match for each ``\boxed`` and ``\fbox`` in a text, starting with the last one."""
    position = len(text)
    while (position := text.rfind("box", 0, position)) >= 0:
        match = _BOX.match(text, max(0, position - 1)) or _BOX.match(text, max(0, position - 2))
        if match:
            yield match


def extract_reference_answer(gold: str) -> str:
    r"""Return the answer of a reference solution: its last ``\boxed{…}``, or the whole text without a box."""
    boxed = extract_last_boxed(gold) if "box" in gold else None
    return gold if boxed is None else boxed


def is_correct(text: str, gold: str, matching: str) -> bool:
    """Return whether the text in the last ``<answer>…</answer>`` of a completion equals the reference solution.

    With the ``matching`` ``strict``, the text must equal ``gold``, except for white space around both. With
    ``normalized``, ``is_same_answer`` compares the text with the last box in ``gold``, or with all of ``gold`` if it
    has no box. Return False without an answer tag.
    """
    answer = extract_last_answer(text)
    if answer is None:
        return False
    if matching == "strict":
        return answer.strip() != "" and answer.strip() == gold.strip()
    return is_same_answer(answer, extract_reference_answer(gold))


def is_same_answer(answer: str, gold: str) -> bool:
    """Return whether two answers are the same: as numbers, lists, multiple-choice options, or cleaned text.

    A unit or a variable counts only if both answers have one: ``18 dollars`` equals ``18``, but not ``18 cents``.
    ``10%`` equals ``10`` and not ``0.1``. An empty answer equals nothing, not even another empty answer.
    """
    answer, gold = answer.strip(), gold.strip()
    if answer == gold:
        return answer != ""
    first, second = normalize(answer), normalize(gold)
    if isinstance(first.value, int | Fraction) and isinstance(second.value, int | Fraction):
        return have_equal_values(first, second)
    return are_equal(first, second, have_equal_values) or is_same_choice(answer, gold, is_same_answer)


def have_equal_values(first: Answer, second: Answer) -> bool:
    """Return whether two answers have the same value, and units and variables that do not contradict each other.

    A missing unit or variable equals any other.
    """
    units_agree = not first.unit or not second.unit or first.unit == second.unit
    variables_agree = not first.variable or not second.variable or first.variable == second.variable
    return first.value == second.value and first.value != "" and units_agree and variables_agree


def is_same_choice(answer: str, gold: str, equal: Callable[[str, str], bool]) -> bool:
    """Return whether two answers are the same option of a multiple-choice question: ``B``, ``(b)``, ``B. Paris``.

    ``equal`` compares the texts of options. ``B. Paris`` also equals ``Paris`` without a letter.
    """
    answer_option, gold_option = _parse_option(answer), _parse_option(gold)
    if answer_option and gold_option:
        (letter, wording), (gold_letter, gold_wording) = answer_option, gold_option
        return letter == gold_letter and (not wording or not gold_wording or equal(wording, gold_wording))
    if answer_option and answer_option[1]:
        return equal(answer_option[1], gold)
    return gold_option is not None and gold_option[1] != "" and equal(gold_option[1], answer)


@functools.lru_cache(maxsize=8192)
def _parse_option(text: str) -> tuple[str, str] | None:
    """Split a multiple-choice answer into its upper-case letter and its text: ``("B", "Paris")`` for ``b) Paris``.

    The text may be "". Return None for other answers.
    """
    match = _OPTION.fullmatch(clean_answer(text)) if len(text) <= LONGEST_ANSWER else None
    return ((match["bracketed"] or match["letter"]).upper(), match["wording"] or "") if match else None


def are_equal(first: Answer, second: Answer, equal: Callable[[Answer, Answer], bool]) -> bool:
    """Return whether two answers are equal; ``equal`` compares single answers and the items of two lists.

    Lists and sets have no order, but repeated items count. Order matters for tuples and intervals, for a list compared
    with a tuple, and for ``x=1, y=2`` compared with ``1, 2``.
    """
    first_items, second_items = first.value, second.value
    if not (isinstance(first_items, tuple) and isinstance(second_items, tuple)) or bool(first.word) != bool(
        second.word
    ):
        return equal(first, second)
    brackets = {first.brackets, second.brackets}  # a list without brackets may be a set, or a tuple in parentheses
    if len(first_items) != len(second_items) or (len(brackets) > 1 and brackets not in ({"", "{}"}, {"", "()"})):
        return False
    variables_differ = first.variable and second.variable and first.variable != second.variable
    if variables_differ or {first.word, second.word} == {"and", "or"}:
        return False
    first_named, second_named = (  # x=1, y=2
        len({item.variable for item in items}) > 1 for items in (first_items, second_items)
    )
    if brackets - {"", "{}"} or first_named != second_named:
        return all(are_equal(*pair, equal) for pair in zip(first_items, second_items, strict=True))
    return Counter(first_items) == Counter(second_items) or _can_pair_items(first_items, second_items, equal)


def _can_pair_items(
    first: tuple[Answer, ...], second: tuple[Answer, ...], equal: Callable[[Answer, Answer], bool]
) -> bool:
    """Return whether the items of two lists can be paired, in any order, so that the items of each pair are equal.

    Equality is not transitive (``5`` is ``5 cm`` and ``5 kg``), so pairing an item may require another pair to change.
    """
    first_of_second: dict[int, int] = {}  # index in `second` -> index of its partner in `first`

    def find_partner(first_index: int, tried: set[int]) -> bool:
        """Pair an item of ``first``, changing earlier pairs if needed; return False if that is impossible.

        ``tried`` are the indices of ``second`` that were already tried.
        """
        free_and_identical_first = sorted(
            range(len(second)), key=lambda index: (index in first_of_second, second[index] != first[first_index])
        )
        for second_index in free_and_identical_first:
            if second_index in tried or not are_equal(first[first_index], second[second_index], equal):
                continue
            tried.add(second_index)
            if second_index not in first_of_second or find_partner(first_of_second[second_index], tried):
                first_of_second[second_index] = first_index
                return True
        return False

    return all(find_partner(first_index, set()) for first_index in range(len(first)))


def normalize(text: str) -> Answer:
    """Parse an answer to its normal form: a number, a list of items, or cleaned text. Never raises.

    A text of more than 500 characters is returned unchanged as the value.
    """
    text = text.strip()
    return _normalize_short(text) if len(text) <= LONGEST_ANSWER else Answer(text)


@functools.lru_cache(maxsize=8192)
def _normalize_short(text: str) -> Answer:
    """Return the normal form of an answer of at most 500 characters, without white space at its ends; cached."""
    return Answer(int(text)) if _INTEGER.fullmatch(text) else _parse_answer(clean_answer(text), depth=0)


def _parse_answer(text: str, depth: int) -> Answer:
    """Parse a cleaned text to a number, a list of items (recursively), or else text.

    ``depth`` is the number of lists around it; at 8, the text is not split further.
    """
    variable, text = _split_variable(text) if "=" in text or r"\approx" in text or r"\in" in text else ("", text)
    number = (
        _parse_plain_number(text, variable)
        or _parse_scientific(text, variable)
        or _parse_number_with_base(text, variable)
    )
    if number is not None:
        return number
    text, variable = _normalize_commas(text), variable.replace(" ", "")
    inside, brackets = _strip_outer_brackets(text)
    item_texts, words = _split_items(inside)
    if brackets in ("", "{}"):
        item_texts = [signed for item_text in item_texts for signed in _expand_plus_minus(item_text)]
    elif len(signed_texts := _expand_plus_minus(text)) > 1:
        item_texts, brackets = signed_texts, ""
    is_list = len(item_texts) > 1 and depth < _MAX_DEPTH and r"\begin" not in text
    items = [_parse_answer(strip_braces(item_text), depth + 1) for item_text in item_texts] if is_list else []
    if not items or any(item.value == "" for item in items):
        text, unit = split_trailing_unit(text)
        # Normal spelling: no spaces around signs, x_1 for x_{1}, words in lower case.
        text = _SHORT_SCRIPT.sub(r"\1\2", _PUNCTUATION.sub(r"\1", text).removeprefix("+"))
        return Answer(_LETTERS.sub(lambda match: match[0].lower(), text), unit, variable)
    if not brackets:  # in `x=1, 2`, both items belong to x
        variable = variable or ("" if any(item.variable for item in items[1:]) else items[0].variable)
        items, variable = [item if item.variable else replace(item, variable=variable) for item in items], ""
    word = words.pop() if len(words) == 1 and _RELATION.search(text) else ""
    return Answer(tuple(items), "", variable, brackets, word)


def _split_variable(text: str) -> tuple[str, str]:
    r"""Split ``x = 5``, ``x \in …`` or ``x \approx …`` into the variable and the value; the variable may be "".

    In ``x = \frac{1}{3} \approx 0.333``, the exact value counts. ``x = 1, y = 2`` is a list, and ``3 + 5 = 8`` has no
    variable.
    """
    assignment = _VARIABLE.fullmatch(text)
    variable, value = assignment.groups() if assignment else ("", text)
    if "=" in value and _SEPARATOR.search(value):
        variable, value = "", text
    return variable, _APPROXIMATELY.split(value)[0].strip() or value


def _parse_scientific(text: str, variable: str) -> Answer | None:
    """Parse a number in scientific notation with an optional unit, for example ``3e5`` or ``3*10^5``.

    Return None for another text or an unknown unit. ``variable`` becomes the variable of the answer.
    """
    match = _SCIENTIFIC.fullmatch(text)
    unit = normalize_unit(match["unit"] or "") if match else None
    if match is None or unit is None:
        return None
    return Answer(Fraction(_parse_exact(match["number"])) * Fraction(10) ** int(match["exponent"]), unit, variable)


def _parse_number_with_base(text: str, variable: str) -> Answer | None:
    """Parse digits with a base, such as ``101_2`` or ``12 base three``. Return None for another text.

    The base becomes the unit, so it counts only if both answers have one. ``variable`` becomes the answer's variable.
    """
    match = _BASE.fullmatch(text)
    base = match["base"] if match else ""
    base = str(_BASES.get(base, base))
    if match is None or not base.isdecimal():
        return None
    digits = match["digits"]
    value = int(digits) if digits.lstrip("-").isdecimal() else digits.upper()
    return Answer(value, f"base {base}", variable)


def _parse_plain_number(text: str, variable: str) -> Answer | None:
    """Parse a decimal, fraction or mixed number with its unit or currency; return None for other texts.

    Return None also for an unknown unit and a division by zero.

    ``variable`` becomes the variable of the answer.
    """
    match = _NUMBER.fullmatch(text)
    unit = normalize_unit(match["unit"] or "") if match else None
    if match is None or unit is None or (match["sign"] and match["inner"]):
        return None
    above, below = match["above"] or match["number"], match["below"] or match["divisor"] or "1"
    dividend, divisor = _parse_exact(above), _parse_exact(below)
    if divisor == 0:
        return None
    value = dividend if divisor == 1 else Fraction(dividend, divisor)
    if whole := match["whole"] or match["mixed"]:
        if not (0 <= value < 1 and dividend.denominator == divisor.denominator == 1):
            return None  # 1 3/2 is not a mixed number
        value += int(whole)
    if match["currency"]:
        currency = normalize_unit(match["currency"]) or ""
        unit = unit if unit.split(" ")[0] == currency else f"{currency} {unit}".strip()
    return Answer(-value if "-" in (match["sign"], match["inner"]) else value, unit, variable)


def _parse_exact(digits: str) -> int | Fraction:
    """Convert digits, maybe with a point and commas, to a Fraction, or to an int without a point (much faster)."""
    digits = digits.replace(",", "")
    return Fraction(digits) if "." in digits else int(digits)


def _iterate_parts(text: str) -> Iterator[tuple[re.Match[str], re.Match[str] | None]]:
    """Yield a match for each bracket, separator and number with commas, with the innermost open bracket around it.

    The second entry is None outside of brackets. For a closing bracket, it is the bracket that it closes.
    """
    open_brackets: list[re.Match[str]] = []
    for part in _PART.finditer(text):
        yield part, open_brackets[-1] if open_brackets else None
        if part["open"]:
            open_brackets.append(part)
        elif part["close"] and open_brackets:
            open_brackets.pop()


def _normalize_commas(text: str) -> str:
    """Return a text with ``, `` between items, and without the commas inside numbers.

    ``12,345`` is one number. ``(12,345)`` contains two numbers, because brackets without any other separator are a
    tuple. ``(12,345; 6)`` and ``(1,000)`` contain the number with its comma: a tuple's item does not begin with zeros.
    """
    parts_by_bracket: dict[re.Match[str] | None, list[re.Match[str]]] = {}
    for part, bracket in _iterate_parts(text):
        if part["number"] or part["separator"]:
            parts_by_bracket.setdefault(bracket, []).append(part)
    single_numbers: list[re.Match[str]] = []
    for bracket, parts in parts_by_bracket.items():
        numbers = [part for part in parts if part["number"]]
        is_tuple = bracket is not None and bracket[0] in _BRACKETS and len(numbers) == len(parts)
        if not is_tuple or any(",0" in number[0] for number in numbers):
            single_numbers += numbers
    for number in sorted(single_numbers, key=re.Match.start, reverse=True):
        text = text[: number.start()] + number[0].replace(",", "") + text[number.end() :]
    return _COMMA.sub(", ", text)


def _strip_outer_brackets(text: str) -> tuple[str, str]:
    r"""Return the text inside the brackets around the whole text, and the brackets: ``("0, 1", "[)")`` for ``[0, 1)``.

    Return ``(text, "")`` if no brackets surround the whole text.
    """
    for part, opener in _iterate_parts(text) if text.endswith((")", "]", "}", "angle", "brace")) else ():
        if opener is not None and part["close"] and opener.start() == 0 and part.end() == len(text):
            pair = _BRACKETS.get(opener[0], "") + _BRACKETS.get(part[0], "")
            fits = len(pair) == 2 and ("{" in pair) == ("}" in pair)
            return (text[opener.end() : part.start()].strip(), pair) if fits else (text, "")
    return text, ""


def _split_items(text: str) -> tuple[list[str], set[str]]:
    """Split a list at commas, semicolons, ``and`` and ``or``; return its items and the words that join them.

    Separators inside brackets do not count. If there are semicolons, only they separate: ``1, 2; 3, 4`` has two items.
    A text that is not a list is one item, and has no words.
    """
    parts = list(_iterate_parts(text))
    outer_parts = [part for part, bracket in parts if bracket is None]
    is_balanced = sum(bool(part["open"]) - bool(part["close"]) for part, _ in parts) == 0
    separators = [part for part in outer_parts if part["separator"]]
    separators = [separator for separator in separators if separator[0].startswith(";")] or separators
    starts = [0, *(separator.end() for separator in separators)]
    ends = [*(separator.start() for separator in separators), len(text)]
    items = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    words = {word for separator in separators for word in ("and", "or") if separator[0].endswith(word)}
    is_list = all(items) and is_balanced and not any(part["close"] for part in outer_parts)
    return (items, words) if is_list else ([text], set())


def _expand_plus_minus(text: str) -> list[str]:
    r"""Return the list ``["1+ 2", "1- 2"]`` for ``1\pm 2``, and a list with the unchanged text for any other text."""
    has_one_sign = text.count(r"\pm") == 1 and r"\mp" not in text
    return [text.replace(r"\pm", sign) for sign in "+-"] if has_one_sign else [text]
