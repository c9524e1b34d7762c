"""Countdown: the pool against another enumeration, modes against algebra, the parser against invalid text."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_recipes.extensions.problems.modebench.countdown import (
    NotAnExpression,
    _list_all_forms,
    count_expressions,
    count_modes,
    list_puzzles,
    parse_expression,
)

# sha256 of the sorted [[numbers, target, modes], ...]. ORIGIN: pools of the original ModeBench with 2 to 8 modes. Its
# mode is a syntax tree with sorted operands of + and *. OURS: all puzzles, with modes by algebra.
ORIGIN = {
    3: "fa3c6905deb99d1f8c3d8f94171f091e7b3ba7c29086e9965db9af72d41fc465",
    4: "4f74d4c7e2243bbb77c8e89a8e82069bf9e023bfee0ac216f747af223dde3dca",
}
OURS = {
    (3, 12): "da294b98f21ac4e511f28ebb2bf72c1e36b57eb0e19e0d91ada096144d927363",
    (3, 24): "83784dedd234b65e389c01e7c0961dc0260ad75ec33bd04e2b5ca0be1877871d",
    (4, 12): "82d284f97bac319d9528076d11078785382f4dcf9daed3b94be73805543c23de",
}
ONE_MODE_BY_ALGEBRA = {3: (787, 611), 4: (5426, 1888)}  # number of puzzles with 2 to 8 syntax trees


def digest(rows: list[list[object]]) -> str:
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def as_rows(count: int, largest: int) -> list[list[object]]:
    return [[list(puzzle.numbers), puzzle.target, puzzle.modes] for puzzle in list_puzzles(count, largest)]


@cache
def syntax_all_forms(numbers: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Return the value of every expression as a fraction, by the key of the original ModeBench."""
    if len(numbers) == 1:
        return {str(numbers[0]): (numbers[0], 1)}
    forms: dict[str, tuple[int, int]] = {}
    for size in range(1, len(numbers)):
        for subset in combinations(numbers, size):
            right = tuple(number for number in numbers if number not in subset)
            for form, (a, b) in syntax_all_forms(subset).items():
                for other, (c, d) in syntax_all_forms(right).items():
                    first, second = sorted([form, other])
                    forms[f"add({first},{second})"] = (a * d + b * c, b * d)
                    forms[f"mul({first},{second})"] = (a * c, b * d)
                    forms[f"sub({form},{other})"] = (a * d - b * c, b * d)
                    if c:
                        forms[f"div({form},{other})"] = (a * d, b * c)
    return forms


def origin_pool(count: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for numbers in combinations(range(2, 13), count):
        modes: Counter[int] = Counter()
        for above, below in syntax_all_forms(numbers).values():
            if above % below == 0 and 0 < above // below <= 12 * count and above // below not in numbers:
                modes[above // below] += 1
        rows += [[list(numbers), target, modes[target]] for target in sorted(modes)]
    return rows


def every_expression(numbers: tuple[str, ...]) -> Iterator[str]:
    """Yield all orders, brackets and operators, with brackets around every operation."""
    if len(numbers) == 1:
        yield numbers[0]
    for place in range(1, len(numbers)):
        for first in every_expression(numbers[:place]):
            for second in every_expression(numbers[place:]):
                yield from (f"({first}{operator}{second})" for operator in "+-*/")


@pytest.mark.parametrize("count", [3, 4])
def test_the_puzzles_are_those_of_the_origin_and_fewer_of_them_have_several_modes(count: int) -> None:
    origin_rows, own_pool = origin_pool(count), as_rows(count, 12)
    pool = [row for row in origin_rows if 2 <= row[2] <= 8]
    assert digest(pool) == ORIGIN[count]
    assert [row[:2] for row in own_pool] == [row[:2] for row in origin_rows]
    assert digest(own_pool) == OURS[count, 12]
    by_algebra = [mine[2] for mine, origin in zip(own_pool, origin_rows, strict=True) if 2 <= origin[2] <= 8]
    assert (len(by_algebra), by_algebra.count(1)) == ONE_MODE_BY_ALGEBRA[count]


def test_the_pool_of_the_default_keys() -> None:
    rows = as_rows(3, 24)
    assert digest(rows) == OURS[3, 24]
    assert (len(rows), sum(row[2] >= 2 for row in rows)) == (15184, 725)


def test_as_many_modes_as_there_are_inequivalent_expressions() -> None:
    """OEIS A140606."""
    numbers = (7, 101, 10007, 1000003)
    assert [len(_list_all_forms(numbers[:count])) for count in (1, 2, 3, 4)] == [1, 6, 68, 1170]
    for count in (2, 3, 4):
        assert sum(how_often for _, how_often in _list_all_forms(numbers[:count]).values()) == count_expressions(count)


def test_a_mode_is_what_is_equal_whatever_the_numbers_are() -> None:
    names = ("11", "101", "10007", "1000003")  # no value is 0, so no division by zero
    rng = random.Random(0)
    points = [{name: Fraction(rng.randrange(10**6, 10**9)) for name in names} for _ in range(2)]
    meant: dict[tuple[Fraction, ...], set[str]] = {}
    keys: dict[str, set[tuple[Fraction, ...]]] = {}
    for order in permutations(names):
        for expression in every_expression(order):
            values = tuple(value_at(expression, point) for point in points)
            key = parse_expression(expression).key
            meant.setdefault(values, set()).add(key)
            keys.setdefault(key, set()).add(values)
    assert all(len(group) == 1 for group in meant.values()) and all(len(group) == 1 for group in keys.values())
    assert len(keys) == 1170


def value_at(expression: str, point: dict[str, Fraction]) -> Fraction:
    value: Fraction = eval(re.sub("[0-9]+", r"p['\g<0>']", expression), {"p": point})
    return value


@pytest.mark.parametrize(("numbers", "target"), [((2, 4, 8), 6), ((4, 5, 10, 12), 32), ((2, 3, 5, 6), 11)])
def test_ways_are_counted_as_they_can_be_written(numbers: tuple[int, ...], target: int) -> None:
    counted: Counter[str] = Counter()
    for order in permutations(map(str, numbers)):
        for expression in every_expression(order):
            try:
                expression_tree = parse_expression(expression)
            except NotAnExpression:
                continue
            counted[expression_tree.key] += expression_tree.value == target
    assert {key: count for key, count in counted.items() if count} == count_modes(numbers, target)


def test_every_mode_of_every_puzzle_is_an_expression_that_makes_the_target() -> None:
    for puzzle in random.Random(0).sample(list_puzzles(3, 12), 300) + random.Random(0).sample(list_puzzles(4, 8), 100):
        keys = list(count_modes(puzzle.numbers, puzzle.target))
        assert len(keys) == puzzle.modes
        for key in keys:
            expression = parse_expression(key)
            assert (expression.numbers, expression.value, expression.key) == (puzzle.numbers, puzzle.target, key)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("2+8-4", "(8-4)+2"),
        ("2-(4-8)", "2+8-4"),
        ("2+(8-4)", "8-(4-2)"),
        ("-4+8+2", "2+8-4"),
        ("-(4-8-2)", "2+8-4"),
        ("--2+8-4", "2+8-4"),
        ("2--(8)-4", "-(-2)-(-(8-4))"),
        ("8*4/2", "8/(2/4)"),
        ("(-8)*(-4)/2", "4/2*8"),
        ("2*(4-8)", "-2*(8-4)"),
        ("8-2*(3-4)", "8+2*(4-3)"),
        ("((((2)+8)))-(4)", "2 + 8\t- 4"),
    ],
)
def test_what_only_looks_different_is_one_mode(text: str, other: str) -> None:
    assert parse_expression(text).key == parse_expression(other).key
    assert parse_expression(text).value == parse_expression(other).value


@pytest.mark.parametrize(("text", "other"), [("2+8-4", "2*8-4"), ("8/4+2", "8/(4+2)"), ("8-(4-2)", "8-4-2")])
def test_what_is_different_is_not(text: str, other: str) -> None:
    assert parse_expression(text).key != parse_expression(other).key


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "()", "2+", "+2", "2+3)", "(2+3", "2 3", "2(3)", "(2)(3)", "2**3", "2//3", "2^3", "2%3", "02+3", "00",
        "2.0+3", "2.+3", "2,3", "1_0", "2e3", "0x2", "a", "2+a", "__import__('os')", "2/0", "2/(3-3)", "2\n+3",
        "\u0662+3", "\uff12+3", "\u00b2", "2\u00a0+3", "lambda: 2", "2 if 3 else 4", "[2]", "{2}", "2;3", "2+3#",
        "\x002", "9" * 201, "(" * 150,
    ],
)  # fmt: skip
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(NotAnExpression):
        parse_expression(text)


def test_many_brackets_and_signs_are_read() -> None:
    assert parse_expression("(" * 99 + "2" + ")" * 99).key == "2"
    assert parse_expression("-" * 198 + "2").value == 2


@given(st.text("0123456789+-*/() ", max_size=210))
@settings(max_examples=200)
def test_whatever_is_read_is_what_python_computes(text: str) -> None:
    try:
        expression = parse_expression(text)
    except NotAnExpression:
        return
    exact = "".join(f"Fraction({part})" if part.isdecimal() else part for part in tokens(text))
    assert eval(exact, {"Fraction": Fraction}) == expression.value
    assert parse_expression(expression.key).value in (expression.value, -expression.value)


def tokens(text: str) -> list[str]:
    return [*"".join(f" {token} " if token in "+-*/()" else token for token in text).split()]
