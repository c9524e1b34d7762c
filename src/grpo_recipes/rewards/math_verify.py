r"""The reward ``math_verify``: equality by the math-verify library, so ``\frac{\sqrt{2}}{2}`` equals ``1/\sqrt{2}``.

Numbers are compared exactly and words as text (``answers``). Everything else is translated to LaTeX (``notation``),
parsed to sympy and compared by the library. sympy may run forever on a model's output, so this reward is called in a
child process with a time limit (``reward_timeout``). The library's own limit is off, because its alarm signal makes
every score wrong outside the main thread.
"""

import contextlib
import functools
import logging
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.grader import should_treat_as_complex

from grpo_recipes.rewards import answers
from grpo_recipes.rewards.notation import KNOWN_WORDS, to_latex

for _part in ("parser", "grader", "utils"):
    logging.getLogger(f"math_verify.{_part}").setLevel(logging.ERROR)  # no warning that its alarm is off

# The library's other steps drop letters that it takes for units, and break nested parentheses.
_NORMALIZATION = NormalizationConfig(basic_latex=True, boxed="none")
_COMMAND = re.compile(r"\\(?:begin|end|operatorname|mathbb)\{\w+\}|\\[A-Za-z]+|_\{\w+\}")
# A word is between spaces; a product of variables is next to a sign or a digit: `xyz + 1`, `2xyz`.
_WORD = re.compile(r"(?<![\w\\^_(+*/=<>])(?<![+*/=<>]\s)[A-Za-z]{3,}(?!\w|\s*[\^_(+*/=<>])")
_TIME = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?(?: ?[ap]m)?")
# The parser adds numbers that are side by side, as in `1 1/2`: it reads `2 3` as 5.
_SIDE_BY_SIDE = re.compile(r"[0-9]\.?\s+\.?[0-9]")
_EQUALS = re.compile(r"(?<![\\<>!:])=")
_POINTS = (
    0.7390851332,
    1.3247179572,
    0.5671432904,
    1.1591478312,
    0.8346268417,
)  # arbitrary values at which equal expressions must agree
_INFINITE = (sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


def math_verify(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    r"""Return 1.0 if the completion's answer equals the reference solution, 0.0 if it differs or cannot be read.

    The answer is in the last ``<answer>…</answer>`` after any ``</think>``. Without such a tag, it is in the last
    ``\boxed{…}``. If the reference solution has a ``\boxed{…}``, only its last one is compared. Return None if the
    reference solution cannot be read, unless the answer is the same text.
    """
    scores: list[float | None] = []
    for completion, row_solution in zip(completions, answer, strict=True):
        text, solution = answers.extract_final_text(completion), answers.format_solution(row_solution)
        candidate, gold = answers.extract_last_answer(text), answers.extract_reference_answer(solution)
        candidate = answers.extract_last_boxed(text) if candidate is None else candidate
        if candidate is not None and (answers.is_same_answer(candidate, solution) or is_equal_answer(candidate, gold)):
            scores.append(1.0)
        else:
            scores.append(0.0 if _is_readable(answers.normalize(gold)) else None)
    return scores


def is_equal_answer(answer: str, gold: str) -> bool:
    """Return whether two answers are equal as text, by value, as lists or options, or as mathematics by sympy."""
    if answers.is_same_answer(answer, gold):
        return True
    gold_form, answer_form = answers.normalize(gold), answers.normalize(answer)
    if _is_text(gold_form):
        return False
    return answers.are_equal(gold_form, answer_form, _are_equal_items) or answers.is_same_choice(
        answer, gold, is_equal_answer
    )


def _is_readable(answer: answers.Answer) -> bool:
    """Return whether an answer, with each of its items, is a number, words, or mathematics that sympy can parse."""
    if isinstance(answer.value, tuple):
        return all(map(_is_readable, answer.value))
    return not isinstance(answer.value, str) or _is_text(answer) or bool(_parse_expression(answer.value))


def _is_text(answer: answers.Answer) -> bool:
    """Return whether the answer is words or a time of day, which is not mathematics."""
    return _has_words(answer) or _TIME.fullmatch(_write_latex(answer)) is not None


def _has_words(answer: answers.Answer) -> bool:
    """Return whether an answer contains a word that is not a name in mathematics, such as ``sqrt``."""
    return any(word not in KNOWN_WORDS for word in _WORD.findall(_COMMAND.sub(" ", _write_latex(answer))))


def _are_equal_items(gold: answers.Answer, answer: answers.Answer) -> bool:
    """Return whether two answers are equal by value, as intervals or inequalities, or as mathematics.

    The answers are not both lists: the items of two lists are compared one by one.
    """
    if answers.have_equal_values(gold, answer):
        return True
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.word or answer.word:
        sets = _find_solution_set(gold), _find_solution_set(answer)
        return None not in sets and sets[0] == sets[1]
    if not (isinstance(gold.value, str) or isinstance(answer.value, str)):
        return False
    return not _has_words(answer) and _are_equal_latex(
        _write_with_variable(gold, answer), _write_with_variable(answer, gold)
    )


def _find_solution_set(answer: answers.Answer) -> Any:
    """Return the sympy set of an interval, an inequality, or several inequalities joined by ``and`` or ``or``.

    Return None for other answers, and for relations that sympy cannot solve.
    """
    if isinstance(answer.value, tuple) and answer.word:
        sets = [_find_solution_set(item) for item in answer.value]
        if None not in sets:
            return sympy.Union(*sets) if answer.word == "or" else sympy.Intersection(*sets)
    (parsed,) = _parse_expression(_write_latex(answer)) or (None,)
    with contextlib.suppress(Exception):  # sympy raises any exception on relations that it cannot solve
        return parsed if isinstance(parsed, sympy.Set) else parsed.as_set()
    return None


def _write_with_variable(answer: answers.Answer, compared: answers.Answer) -> str:
    """Return an answer as LaTeX, with ``VARIABLE=`` before it only if the compared answer has another variable.

    Then ``y=2x`` does not equal ``x=2x``. A tuple is written as a matrix if the compared answer is one. Each item is a
    row, e.g. ``[[1, 2], [3, 4]]`` has two. If the compared matrix has a single row, all items are in one row.
    """
    is_equation = compared.variable or (isinstance(compared.value, str) and "=" in compared.value)
    needs_variable = answer.variable and is_equation and compared.variable != answer.variable
    latex, compared_text = _write_latex(answer), str(compared.value)
    if "matrix}" in compared_text and isinstance(answer.value, tuple) and answer.brackets in ("()", "[]"):
        rows = [_write_latex(replace(item, brackets="")).replace(", ", "&") for item in answer.value]
        separator = r"\\" if r"\\" in compared_text else "&"
        latex = rf"\begin{{pmatrix}}{separator.join(rows)}\end{{pmatrix}}"
    return f"{answer.variable}={latex}" if needs_variable else latex


@functools.lru_cache(maxsize=1024)  # completions of one prompt often agree
def _are_equal_latex(gold: str, answer: str) -> bool:
    """Return whether two LaTeX expressions are equal by math-verify; False if one can't be parsed or compared.

    The last side of a chain counts, such as 0.5 in ``x = 1/2 = 0.5``. A gold ``x = 5`` stays an equation. An answer
    with different constant sides is wrong, such as 41=42. A MemoryError is raised: it leaves the completion unscored.
    """
    # The value of a chain such as 3+5=8 is its last step. Its other numbers must equal that value: 41=42 is wrong.
    *earlier, last = _EQUALS.split(gold)
    if len(earlier) > 1 or (earlier and _is_constant(earlier[0]) and _is_constant(last)):
        gold, earlier = last, []
    *steps, last = _EQUALS.split(answer)
    if steps and not earlier:
        answer = last
        if not all(_are_equal_latex(answer, step) for step in steps if _is_constant(step)):
            return False
    try:
        parsed_gold, parsed_answer = _parse_expression(gold), _parse_expression(answer)
        if not (parsed_gold and parsed_answer):
            return False
        first, second = parsed_gold[0], parsed_answer[0]
        if _surely_differ(first, second):
            return False
        if isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr) and _contain_infinity(first, second):
            first_value, second_value = first.doit(), second.doit()
            return bool(first_value == second_value != sympy.nan)
        is_equal: bool = verify(
            list(parsed_gold),
            list(parsed_answer),
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
        return is_equal
    except MemoryError:
        raise  # the child process is at its memory limit: the completion is unscored
    except Exception:  # sympy raises any exception on expressions that it cannot compare
        return False


def _is_constant(latex: str) -> bool:
    """Return whether sympy can parse a LaTeX expression and it has no variables."""
    parsed = _parse_expression(latex)
    return bool(parsed) and isinstance(parsed[0], sympy.Expr) and not parsed[0].free_symbols


def _contain_infinity(first: sympy.Expr, second: sympy.Expr) -> bool:
    """Return whether two expressions have no variables and one of them contains infinity or nan.

    The library may find such expressions equal although they differ.
    """
    return not (first.free_symbols or second.free_symbols) and (first.has(*_INFINITE) or second.has(*_INFINITE))


def _surely_differ(first: Any, second: Any) -> bool:
    """Return whether two expressions have different values at one arbitrary point; False if that can't be computed.

    This is much faster than a comparison by sympy, which would try many transformations.
    """
    if not (isinstance(first, sympy.Expr) and isinstance(second, sympy.Expr)):
        return False
    symbols = first.free_symbols | second.free_symbols
    points = dict(zip(sorted({symbol.name for symbol in symbols}), _POINTS, strict=False))
    with contextlib.suppress(Exception):  # more symbols than points, or a function that sympy cannot evaluate
        point = {symbol: points[symbol.name] for symbol in symbols}
        value, other_value = (complex(expression.subs(point).evalf(20)) for expression in (first, second))
        return abs(value - other_value) > 1e-6 * max(1.0, abs(value), abs(other_value))
    return False


@functools.lru_cache(maxsize=1024)
def _parse_expression(text: str) -> tuple[Any, ...]:
    """Parse an answer to a sympy object; return a tuple with it, or () if the answer can't be parsed; cached.

    Decimals become fractions, and the symbol ``i`` becomes the imaginary unit. Raise MemoryError.
    """
    try:
        latex = normalize_latex(to_latex(text), _NORMALIZATION)
        if _SIDE_BY_SIDE.search(latex):
            return ()
        is_real = not should_treat_as_complex(latex)
        parsed = latex2sympy(latex, is_real=is_real, convert_degrees=False, normalization_config=None)
        replacements: dict[Any, Any] = {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float)}
        if not parsed.has(sympy.Sum, sympy.Product):  # there, ``i`` stays a symbol
            replacements |= {symbol: sympy.I for symbol in parsed.free_symbols if symbol.name == "i"}
        return (parsed.xreplace(replacements) if replacements else parsed,)
    except MemoryError:
        raise
    except Exception:  # the parser raises any exception, RecursionError included
        return ()


def _write_latex(answer: answers.Answer) -> str:
    """Return an answer's value as LaTeX: a number, a text, or a list in its brackets; without unit and variable."""
    value = answer.value
    if isinstance(value, tuple):
        first, last = (rf"\{bracket}" if bracket in ("{", "}") else bracket for bracket in answer.brackets or ("", ""))
        return first + ", ".join(map(_write_latex, value)) + last
    if isinstance(value, Fraction) and value.denominator != 1:
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return str(value)
