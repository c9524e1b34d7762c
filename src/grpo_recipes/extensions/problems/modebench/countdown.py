"""Countdown: make a target from some numbers, each used exactly once, and distinguish different answers.

Two expressions are the same mode if they are equal for all numbers: ``a-b+c`` and ``c-(b-a)``, ``a*(b/c)`` and
``a/(c/b)``, ``a*(b-c)`` and ``-a*(c-b)``. Brackets, order and signs therefore do not create new modes. The normal form
of a mode flattens and sorts sums and products, and factors out signs.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations
from operator import add, mul, sub, truediv
from typing import Any

from grpo_recipes.errors import translate_errors

# A form is a tuple with a total order: (0, number), (1, terms) or (2, factors). A term is (form, sign) and a factor is
# (form, exponent 1 or -1). Terms and factors are sorted. A signed form is (sign, form), and the first term of every sum
# is positive.
Form = tuple[int, Any]
Signed = tuple[int, Form]
_NUMBER, _SUM, _PRODUCT = range(3)
_OPERATORS = "+-*/"
SMALLEST = 2  # smallest number of a puzzle: factors of 1 would give modes that only differ by a multiplication with 1


@dataclass(frozen=True)
class CountdownPuzzle:
    """Numbers to combine with + - * /, each exactly once, and the target."""

    numbers: tuple[int, ...]  # all different, in ascending order
    target: int  # value to make
    modes: int  # number of algebraically distinct expressions with this value


def combine(operator: str, left_form: Signed, right_form: Signed) -> Signed:
    """Return the normal form of ``left_form operator right_form``: sums and products flattened, sorted, signs factored.

    ``operator`` is one of + - * /.
    """
    if operator in "+-":
        terms = sorted(
            (*_list_parts(left_form, _SUM), *_list_parts(right_form if operator == "+" else negate(right_form), _SUM))
        )
        first = terms[0][1]
        return first, (_SUM, tuple((form, sign * first) for form, sign in terms))
    exponent = -1 if operator == "/" else 1
    factors = _list_parts((1, left_form[1]), _PRODUCT)
    factors += [(form, power * exponent) for form, power in _list_parts((1, right_form[1]), _PRODUCT)]
    return left_form[0] * right_form[0], (_PRODUCT, tuple(sorted(factors)))


def negate(signed: Signed) -> Signed:
    """Return a signed form with the opposite sign."""
    return -signed[0], signed[1]


def _list_parts(signed: Signed, kind: int) -> list[tuple[Form, int]]:
    """Return the terms (``kind`` _SUM) or factors (_PRODUCT) of a form; a form of another kind is its only part."""
    sign, form = signed
    return [(part, sign * power) for part, power in form[1]] if form[0] == kind else [(form, sign)]


def format_form(signed: Signed) -> str:
    """Write a normal form as an expression, e.g. ``2*(5-3)``; the text identifies the mode.

    A leading minus is avoided if possible.
    """
    sign, (kind, parts) = signed
    if kind == _NUMBER:
        return f"{'-' if sign < 0 else ''}{parts}"
    if kind == _SUM:
        terms = sorted(((part, part_sign * sign) for part, part_sign in parts), key=lambda term: -term[1])
        expression = "".join(f"{'+' if term_sign > 0 else '-'}{format_form((1, part))}" for part, term_sign in terms)
        return expression.removeprefix("+")
    # A factor that is a sum with terms of both signs can absorb the minus: (a-b) becomes (b-a).
    mixed_sums = [part for part, _ in parts if part[0] == _SUM and any(term_sign < 0 for _, term_sign in part[1])]
    flipped = mixed_sums[0] if mixed_sums and sign < 0 else None
    factors = [
        (f"({format_form((-1 if part is flipped else 1, part))})" if part[0] == _SUM else format_form((1, part)), power)
        for part, power in parts
    ]
    numerator = "*".join(factor for factor, power in factors if power > 0)
    product = numerator + "".join(f"/{factor}" for factor, power in factors if power < 0)
    return f"-{product}" if sign < 0 and flipped is None else product


Value = tuple[int, int]  # numerator and positive denominator of a fraction in lowest terms
Forms = dict[Signed, tuple[Value, int]]  # form -> its value, and the number of its expressions


def count_modes(numbers: tuple[int, ...], target: int) -> dict[str, int]:
    """Return the number of expressions of each mode (as a text) that makes ``target`` from all of the numbers.

    The numbers must be different.
    """
    forms = _make_forms(tuple(sorted(numbers)), lambda value: value == (target, 1))
    return {format_form(form): count for form, (_, count) in sorted(forms.items())}


def count_expressions(count: int) -> int:
    """Return the number of expressions that use ``count`` numbers once: all orders, brackets and operators."""
    brackets = math.comb(2 * count - 2, count - 1) // count
    return math.factorial(count) * brackets * int(len(_OPERATORS) ** (count - 1))


@cache
def list_puzzles(count: int, largest: int) -> tuple[CountdownPuzzle, ...]:
    """Return every puzzle of ``count`` different numbers from 2 to ``largest``, sorted; the result is cached.

    A target is the value of an expression that uses each number once. It is a positive integer, none of the numbers,
    and at most ``largest * count``.
    """
    result = []
    for numbers in combinations(range(SMALLEST, largest + 1), count):
        forms = _make_forms(numbers, lambda value: value[1] == 1 and 0 < value[0] <= largest * count)
        modes = Counter(value[0] for value, _ in forms.values() if value[0] not in numbers)
        result += [CountdownPuzzle(numbers, target, modes[target]) for target in sorted(modes)]
    return tuple(result)


def _make_forms(numbers: tuple[int, ...], accepts: Callable[[Value], bool]) -> Forms:
    """Return all normal forms of expressions that use each number once and have a value that ``accepts`` allows.

    ``numbers`` are at least two, all different. Each form has its value and the number of expressions with it.
    """
    forms: Forms = {}
    for left_numbers in [part for size in range(1, len(numbers)) for part in combinations(numbers, size)]:
        right_numbers = tuple(number for number in numbers if number not in left_numbers)
        for left_form, (left_value, left_count) in _list_all_forms(left_numbers).items():
            for right_form, (right_value, right_count) in _list_all_forms(right_numbers).items():
                for operator, value in _apply_operators(left_value, right_value):
                    if accepts(value):
                        form = combine(operator, left_form, right_form)
                        forms[form] = (value, forms.get(form, (value, 0))[1] + left_count * right_count)
    return forms


@cache
def _list_all_forms(numbers: tuple[int, ...]) -> Forms:
    """Return all normal forms of expressions that use each number once, with any value; cached."""
    if len(numbers) == 1:
        return {(1, (_NUMBER, numbers[0])): ((numbers[0], 1), 1)}
    return _make_forms(numbers, lambda _: True)


def _apply_operators(left_value: Value, right_value: Value) -> list[tuple[str, Value]]:
    """Apply + - * / to two fractions; return (operator, result) of each, without a division by 0."""
    (a, b), (c, d) = left_value, right_value
    results = [("+", _reduce(a * d + c * b, b * d)), ("-", _reduce(a * d - c * b, b * d)), ("*", _reduce(a * c, b * d))]
    return [*results, ("/", _reduce(a * d, b * c))] if c else results


def _reduce(numerator: int, denominator: int) -> Value:
    """Reduce a fraction to lowest terms with a positive denominator; return (numerator, denominator)."""
    divisor = math.gcd(numerator, denominator) * (1 if denominator > 0 else -1)
    return numerator // divisor, denominator // divisor


class NotAnExpression(ValueError):
    """The text is not an expression of integers, + - * / and brackets, is too long, or divides by 0."""


@dataclass(frozen=True)
class Expression:
    """A parsed expression, with everything that decides whether it solves a puzzle."""

    numbers: tuple[int, ...]  # its numbers in ascending order
    value: Fraction  # its value
    key: str  # key of its mode


def parse_expression(expression: str) -> Expression:
    """Parse an arithmetic expression without executing it; return its numbers, value and mode.

    A minus before a number or a bracket is allowed. Raise NotAnExpression for anything else, for example ``2.0``,
    ``02``, ``2**3``, ``2//3`` and ``2(3)``.
    """
    numbers: list[int] = []
    if len(expression) > _LONGEST or not _CHARACTERS.fullmatch(expression):
        raise NotAnExpression(f"expected only 0-9 + - * / ( ) and spaces, and at most {_LONGEST} characters")
    # Deeply nested expressions raise MemoryError or RecursionError.
    unreadable = (SyntaxError, ZeroDivisionError, MemoryError, RecursionError)
    with translate_errors(unreadable, lambda error: NotAnExpression(str(error))):
        value, form = _evaluate_node(ast.parse(expression.strip(" \t"), mode="eval").body, numbers)
    return Expression(tuple(sorted(numbers)), value, format_form(form))


def _evaluate_node(node: ast.expr, numbers: list[int]) -> tuple[Fraction, Signed]:
    """Compute value and normal form of a node of Python's syntax tree, and append its numbers to ``numbers``.

    Raise NotAnExpression for anything except integers, a minus and + - * /. Raise ZeroDivisionError for a division
    by 0.
    """
    match node:
        case ast.Constant(value=int(number)):
            numbers.append(number)
            return Fraction(number), (1, (_NUMBER, number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value, form = _evaluate_node(operand, numbers)
            return -value, negate(form)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as operation, right=right):
            operator, apply = _OPERATIONS[type(operation)]
            (left_value, left_form), (right_value, right_form) = (
                _evaluate_node(left, numbers),
                _evaluate_node(right, numbers),
            )
            return apply(left_value, right_value), combine(operator, left_form, right_form)
    raise NotAnExpression("expected a number, a minus, or two parts with + - * / between them")


_LONGEST = 200  # characters
# Python reads 00 as 0. Other numbers with a leading 0 are syntax errors in Python too.
_CHARACTERS = re.compile(rf"(?!.*\b0[0-9])[0-9+\-*/() \t]{{1,{_LONGEST}}}")
_OPERATIONS: dict[type[ast.operator], tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", add), ast.Sub: ("-", sub), ast.Mult: ("*", mul), ast.Div: ("/", truediv)
}  # fmt: skip
