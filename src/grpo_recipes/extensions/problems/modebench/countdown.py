"""Countdown: make a target from some numbers, each used exactly once; and which answers are different.

Two expressions are one mode when they are equal whatever the numbers are: ``a-b+c`` and ``c-(b-a)``, ``a*(b/c)`` and
``a/(c/b)``, ``a*(b-c)`` and ``-a*(c-b)``. So brackets, order and signs cannot make one idea into many. With each number
used once, that is the normal form below: sums and products flattened and sorted, signs pulled out.
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

from grpo_recipes.errors import translate

# A form is a tuple that sorts before or after every other: (0, number), (1, terms) or (2, factors); a term is
# (form, its sign), a factor (form, its exponent 1 or -1), both sorted. A signed form is (sign, form), where the first
# term of every sum is positive.
Form = tuple[int, Any]
Signed = tuple[int, Form]
_NUMBER, _SUM, _PRODUCT = range(3)
_OPERATORS = "+-*/"
SMALLEST = 2  # number of a puzzle: with 1, products have answers that differ by nothing


@dataclass(frozen=True)
class CountdownPuzzle:
    """One problem."""

    numbers: tuple[int, ...]  # in ascending order, all different
    target: int
    modes: int  # how many algebraically distinct expressions make the target


def combine(operator: str, left: Signed, right: Signed) -> Signed:
    """Return the form of ``left operator right``, one of + - * /."""
    if operator in "+-":
        terms = sorted((*_parts(left, _SUM), *_parts(right if operator == "+" else negated(right), _SUM)))
        first = terms[0][1]
        return first, (_SUM, tuple((form, sign * first) for form, sign in terms))
    exponent = -1 if operator == "/" else 1
    factors = _parts((1, left[1]), _PRODUCT)
    factors += [(form, power * exponent) for form, power in _parts((1, right[1]), _PRODUCT)]
    return left[0] * right[0], (_PRODUCT, tuple(sorted(factors)))


def negated(one: Signed) -> Signed:
    """Return the form of ``-one``."""
    return -one[0], one[1]


def _parts(one: Signed, kind: int) -> list[tuple[Form, int]]:
    """Return the terms or factors of a form, or the form as the only one."""
    sign, form = one
    return [(part, sign * power) for part, power in form[1]] if form[0] == kind else [(form, sign)]


def text(one: Signed) -> str:
    """Return a form as an expression, the key of a mode; it begins with a minus only where no part can take that."""
    sign, (kind, parts) = one
    if kind == _NUMBER:
        return f"{'-' if sign < 0 else ''}{parts}"
    if kind == _SUM:
        terms = sorted(((part, own * sign) for part, own in parts), key=lambda term: -term[1])  # a positive one first
        written = "".join(f"{'+' if own > 0 else '-'}{text((1, part))}" for part, own in terms)
        return written.removeprefix("+")
    # A sum with terms of both signs can be turned: its negative is written without a sign before it.
    sums = [part for part, _ in parts if part[0] == _SUM and any(own < 0 for _, own in part[1])]
    turned = sums[0] if sums and sign < 0 else None
    factors = [(f"({text((-1 if part is turned else 1, part))})" if part[0] == _SUM else text((1, part)), power)
               for part, power in parts]  # fmt: skip
    above = "*".join(factor for factor, power in factors if power > 0)
    product = above + "".join(f"/{factor}" for factor, power in factors if power < 0)
    return f"-{product}" if sign < 0 and turned is None else product


Value = tuple[int, int]  # a fraction in lowest terms, below the line above 0
Trees = dict[Signed, tuple[Value, int]]  # form -> its value, and how many ways of writing it with + - * / and brackets


def ways(numbers: tuple[int, ...], target: int) -> dict[str, int]:
    """Return every mode of a puzzle of different numbers, and how many ways (``written``) there are of writing it."""
    found = _made(tuple(sorted(numbers)), lambda value: value == (target, 1))
    return {text(form): count for form, (_, count) in sorted(found.items())}


def written(count: int) -> int:
    """Return the ways of writing an expression of ``count`` numbers, each once: orders, brackets and operators."""
    brackets = math.comb(2 * count - 2, count - 1) // count
    return math.factorial(count) * brackets * len(_OPERATORS) ** (count - 1)


@cache
def puzzles(count: int, largest: int) -> tuple[CountdownPuzzle, ...]:
    """Return every puzzle of ``count`` different numbers from 2 to ``largest``, sorted.

    Targets are whole, positive, none of the numbers, and at most ``largest * count``.
    """
    found = []
    for numbers in combinations(range(SMALLEST, largest + 1), count):
        made = _made(numbers, lambda value: value[1] == 1 and 0 < value[0] <= largest * count)
        modes = Counter(value[0] for value, _ in made.values() if value[0] not in numbers)
        found += [CountdownPuzzle(numbers, target, modes[target]) for target in sorted(modes)]
    return tuple(found)


def _made(numbers: tuple[int, ...], wanted: Callable[[Value], bool]) -> Trees:
    """Return all forms of the numbers, each of them used once, whose value is wanted."""
    found: Trees = {}
    for left in [part for size in range(1, len(numbers)) for part in combinations(numbers, size)]:
        right = tuple(one for one in numbers if one not in left)
        for one, (value, count) in _trees(left).items():
            for other, (value_of_other, count_of_other) in _trees(right).items():
                for operator, result in _results(value, value_of_other):
                    if wanted(result):
                        form = combine(operator, one, other)
                        found[form] = (result, found.get(form, (result, 0))[1] + count * count_of_other)
    return found


@cache
def _trees(numbers: tuple[int, ...]) -> Trees:
    return {(1, (_NUMBER, numbers[0])): ((numbers[0], 1), 1)} if len(numbers) == 1 else _made(numbers, lambda _: True)


def _results(left: Value, right: Value) -> list[tuple[str, Value]]:
    """Return each operator with the result of ``left operator right``. A division by 0 is left out."""
    (a, b), (c, d) = left, right
    made = [("+", _lowest(a * d + c * b, b * d)), ("-", _lowest(a * d - c * b, b * d)), ("*", _lowest(a * c, b * d))]
    return [*made, ("/", _lowest(a * d, b * c))] if c else made


def _lowest(above: int, below: int) -> Value:
    shared = math.gcd(above, below) * (1 if below > 0 else -1)
    return above // shared, below // shared


class NotAnExpression(ValueError):
    """The text is not an expression of whole numbers, + - * / and brackets, is too long, or divides by 0."""


@dataclass(frozen=True)
class Parsed:
    """The content of an expression."""

    numbers: tuple[int, ...]  # those in it, in ascending order
    value: Fraction
    key: str  # of its mode


def parsed(expression: str) -> Parsed:
    """Read an expression. Nothing is executed, and work and memory are bounded by its length.

    A minus before a number or a bracket is allowed, and changes no mode by itself. NotAnExpression is raised for
    anything else, ``2.0``, ``02``, ``2**3``, ``2//3`` and ``2(3)`` included.
    """
    numbers: list[int] = []
    if len(expression) > _LONGEST or not _CHARACTERS.fullmatch(expression):
        raise NotAnExpression(f"another character than 0-9 + - * / ( ) and blanks, or more than {_LONGEST}")
    unreadable = (SyntaxError, ZeroDivisionError, MemoryError, RecursionError)  # the last two: nested too deeply
    with translate(unreadable, lambda error: NotAnExpression(str(error))):
        value, form = _read(ast.parse(expression.strip(" \t"), mode="eval").body, numbers)
    return Parsed(tuple(sorted(numbers)), value, text(form))


def _read(node: ast.expr, numbers: list[int]) -> tuple[Fraction, Signed]:
    """Return value and form of a node of the syntax tree, and add its numbers to ``numbers``."""
    match node:
        case ast.Constant(value=int(whole)):
            numbers.append(whole)
            return Fraction(whole), (1, (_NUMBER, whole))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value, form = _read(operand, numbers)
            return -value, negated(form)
        case ast.BinOp(left=one, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as operation, right=other):
            operator, apply = _OPERATIONS[type(operation)]
            (left, left_form), (right, right_form) = _read(one, numbers), _read(other, numbers)
            return apply(left, right), combine(operator, left_form, right_form)
    raise NotAnExpression("neither a number, nor a minus, nor two parts with + - * / between them")


_LONGEST = 200  # characters
# Python takes 00 for 0; other numbers that begin with 0 are errors there too.
_CHARACTERS = re.compile(rf"(?!.*\b0[0-9])[0-9+\-*/() \t]{{1,{_LONGEST}}}")
_OPERATIONS: dict[type[ast.operator], tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", add), ast.Sub: ("-", sub), ast.Mult: ("*", mul), ast.Div: ("/", truediv)
}  # fmt: skip
