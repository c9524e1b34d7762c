r"""Lists, sets and tuples as answers: both accuracy rewards keep their items apart, in any notation.

The tables contain answers that were once judged wrong, and similar answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.rewards.math_verify import math_verify

REWARDS = (pure_accuracy_math, math_verify)


def scores(answer: str, gold: str) -> list[float | None]:
    """Return the scores of the exact reward and of math_verify."""
    return [reward([f"<answer>{answer}</answer>"], [gold])[0] for reward in REWARDS]


# Two numbers in notations that must never be read as one number.
TWO = [
    "{a}, {b}",
    "{a} , {b}",
    "{a} ,{b}",
    "{a},\n{b}",
    r"{a},\ {b}",
    r"{a},\,{b}",
    r"{a},\quad {b}",
    "{a},~{b}",
    "${a}, {b}$",
    "${a}$, ${b}$",
    "${a}$,${b}$",
    r"\({a}\),\({b}\)",
    r"\boxed{{{a}, {b}}}",
    r"\boxed{{{a}}},\boxed{{{b}}}",
    r"\boxed{{{a}}}, \boxed{{{b}}}",
    r"\mathbf{{{a}}},\mathbf{{{b}}}",
    "**{a}, {b}**",
    r"\{{{a}, {b}\}}",
    r"\{{{a},{b}\}}",
    r"\left\{{{a}, {b}\right\}}",
    "{{{a}, {b}}}",
    "{{{a}}},{{{b}}}",
    "({a}, {b})",
    "({a},{b})",
    "[{a}, {b}]",
    r"\left({a},{b}\right)",
    "{a} and {b}",
    "{a}, and {b}",
    r"{a}\text{{ and }}{b}",
    r"{a} \text{{or}} {b}",
    "{a} or {b}",
    "{a};{b}",
    "{a}; {b}",
    "{a} {b}",
    r"{a}\ {b}",
    "{a}\n{b}",
    "${a}${b}",
    "${a}$ ${b}$",
    r"{a}\({b}\)",
    r"{a}\boxed{{{b}}}",
    "x = {a}, {b}",
    "x = {a}, x = {b}",
    "x={a},y={b}",
    "The answer is {a}, {b}.",
]
DOLLARS = ["$12,$345", r"\$12,\$345", "$12, $345", "$12 and $345"]


@pytest.mark.parametrize("writing", TWO)
def test_two_numbers_are_never_one(writing):
    text = writing.format(a=12, b=345)
    for number in ("12345", "12,345", r"12\,345", "12.345", "357", "12", "345"):
        assert scores(text, number) == [0.0, 0.0], number
    for gold in ("12, 345", r"\{12, 345\}", "(12, 345)"):
        assert scores("12345", gold) == scores("12,345", gold) == [0.0, 0.0], gold
    assert set(scores("12345", text)) <= {0.0, None}


@pytest.mark.parametrize("text", DOLLARS)
def test_two_sums_of_money_are_never_one(text):
    assert scores(text, "12345") == [0.0, 0.0]
    assert scores(text, "12, 345") == scores(text, "345, 12") == [1.0, 1.0]


# Exclude tuples, items without a separator, and pairs of variables: they are not lists.
LISTS = [answer for answer in TWO if "(" not in answer.replace(r"\(", "") and "[" not in answer and "y=" not in answer]
LISTS = [answer for answer in LISTS if any(mark in answer for mark in (",", ";", "and", "or", "\n"))]


@pytest.mark.parametrize("writing", LISTS)
def test_a_list_has_no_order(writing):
    text = writing.format(a=12, b=345)
    for gold in ("12, 345", "345, 12", r"\{345, 12\}", "345 and 12"):
        assert scores(text, gold) == [1.0, 1.0], gold
    for gold in ("12, 346", "12", "12, 345, 6", "12, 12, 345", "-12, 345", "[12, 345]"):
        assert scores(text, gold) == [0.0, 0.0], gold


ONE = ["12345", "12,345", "$12,345$", r"12\,345", "12{,}345", r"12,\!345", r"12,\! 345", "12 {, }345", "12,345.0"]
ONE += ["$12,345", r"\$12,345", "12\u202f345", "12\u2009345", r"\boxed{12,345}", "12,345 dollars", "{12,345}"]


@pytest.mark.parametrize("text", ONE)
def test_a_thousands_separator_is_no_list(text):
    assert scores(text, "12345") == scores("12345", text) == [1.0, 1.0]
    assert scores(f"{text}, 7", "7, 12345") == [1.0, 1.0]
    assert scores(text, "12, 345") == [0.0, 0.0]


ALIKE = [
    ("100, 200", "200, 100"),
    ("3, 1, 2", "1, 2, 3"),
    ("-5, 12", "12, -5"),
    ("-1.5, 1/2", r"\frac{1}{2}, -\frac{3}{2}"),
    ("1,000, 2,000", "2000, 1000"),
    ("1,000 and 2,000", "2000, 1000"),
    ("(1,000, 2,000)", "(1000, 2000)"),
    ("5 eggs, 3 hens", "3, 5"),
    ("(1, 2)", "(1; 2)"),
    ("(1, 2)", "1, 2"),
    ("(1, 2), (3, 4)", r"\{(3, 4), (1, 2)\}"),
    ("(1, 2), (3, 4)", "(3,4) or (1,2)"),
    ("[0.5, 1)", r"\left[\frac12, 1\right)"),
    ("x = 1, y = 2", "y = 2, x = 1"),
    ("x = 1, y = 2", "1, 2"),
    ("x = 1, 2", "x = 2, x = 1"),
    (r"\pm 5", "5, -5"),
    (r"x = \pm 5", "-5 or 5"),
    ("x, y", "y, x"),
    ("Ann, Bob and Carl", "Carl, Ann, Bob"),
    ("2, 2, 3", "2, 3, 2"),
    ("(0.5, 2), (1,3)", "(1, 3), (1/2, 2)"),
    ("1\n2", "1, 2"),
    ("4 0/9", "4"),
    ("5, 5 cm", "5 cm, 5 kg"),
    ("x,100,200", "200, x, 100"),
    ("5, 5 cm, 5 kg", "5 kg, 5 cm, 5"),
]
APART = [
    ("(1, 2)", "(2, 1)"),
    ("(1, 2)", "2, 1"),
    ("(1, 2)", r"\{1, 2\}"),
    ("(1, 2)", r"\{2, 1\}"),
    ("(2, 1)", "1, 2"),
    ("(1, 2)", "[1, 2]"),
    ("[1, 2)", "[1, 2]"),
    ("(1, 2, 3)", "(1, 2)"),
    ("(1, 2), (3, 4)", "(1, 2), (4, 3)"),
    ("(1, 2), (3, 4)", "1, 2, 3, 4"),
    ("2, 2, 3", "2, 3"),
    ("5", "5, 5"),
    ("1, 2", "1, 2, 3"),
    ("1, 2", "1, 2, 2"),
    ("1,22", "1.22"),
    ("0.5", "0,5"),
    ("0.111", "0, 111"),
    ("0.111", "0,111"),
    ("100,200,30", "10020030"),
    ("x = 1, y = 2", "2, 1"),
    ("x = 1, y = 2", "x = 2, y = 1"),
    ("x > 1 and x < 3", "x > 1 or x < 3"),
    ("5 cm, 3", "3 cm, 5 kg"),
    ("2.5", "2 .5"),
    ("12.345", "12. 345"),
    ("5", "2 3"),
    ("0", "1 000"),
    ("1000", "1 000"),
    ("12,345\\pi", "12, 345\\pi"),
    (r"(1, 100) \cup (100, 200)", r"(1, 100) \cup (100200)"),
    ("x = 1, 2", "y = 1, 2"),
    ("x,100,200", "x, 100200"),
    ("71/6", "11\n5/6"),
    ("1, 2", "12"),
    ("1, 2", "1 2"),
    ("1, 2", "1.2"),
    ("1, 2", "3"),
]


@pytest.mark.parametrize(("answer", "other"), ALIKE)
def test_the_same_items(answer, other):
    assert scores(answer, other) == scores(other, answer) == [1.0, 1.0]


@pytest.mark.parametrize(("answer", "other"), APART)
def test_other_items_or_another_order(answer, other):
    assert set(scores(answer, other) + scores(other, answer)) <= {0.0, None}


EXPRESSIONS = [
    (r"2\sqrt{3}, 1", r"1, \sqrt{12}", 1.0),
    (r"\sqrt{2}, \sqrt{2}, 1", r"\sqrt{2}, 1", 0.0),
    (r"\sqrt{2}, 1", r"\sqrt{2}, 2", 0.0),
    (r"(\sqrt{2}, 1)", r"(1, \sqrt{2})", 0.0),
    (r"(\sqrt{8}, 1)", r"(2\sqrt{2}, 1)", 1.0),
    (r"\{1\pm\sqrt{5}, -2\}", r"-2, 1+\sqrt{5}, 1-\sqrt{5}", 1.0),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}", 1.0),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}", 0.0),
    (r"(-\infty, 1) \cup (100,200)", r"(100, 200) \cup (-\infty, 1)", 1.0),
    ("100 < x < 200", "(100,200)", 1.0),
    ("100 < x < 200", "(100, 200)", 1.0),
    ("y = 2x", "x = 2x", 0.0),
    (r"x = \sqrt{2}", r"y = \sqrt{2}", 0.0),
    (r"x = \sqrt{2}", r"\sqrt{2}", 1.0),
    ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}", 1.0),
    ("x = 5y", "y = x/5", 1.0),
    (r"x = \sqrt{2}, y = 1", r"1, \sqrt{2}", 0.0),
    (r"x = \sqrt{2}, y = 1", r"\frac{2}{\sqrt{2}}, 1", 1.0),
    ("(p,q)=(3,2)", "(3, 2)", 1.0),
    ("(p,q)=(3,2)", "(2, 3)", 0.0),
    (r"12,345\pi", r"12345\pi", 1.0),
    ("1000", "(1,000)", 1.0),
    (r"\sqrt{3}", "1, 3", 0.0),
    (r"S_{ABCD} = 5\pi", r"5\pi", 1.0),
]


@pytest.mark.parametrize(("gold", "answer", "expected"), EXPRESSIONS)
def test_math_verify_compares_items_as_mathematics(gold, answer, expected):
    assert math_verify([f"<answer>{answer}</answer>"], [gold]) == [expected]


@pytest.mark.parametrize("gold", ["1 000", "2 3", r"1\ 2", "12. 345", r"2 1/2 \pi", r"(1 2, \pi)"])
def test_a_reference_with_numbers_side_by_side_is_unscored(gold):
    assert math_verify(["<answer>5</answer>", "<answer>1, 2</answer>"], [gold] * 2) == [None, None]
    assert math_verify([f"<answer> {gold}</answer>"], [gold]) == [1.0], "the same text is right before any parsing"


@pytest.mark.parametrize("reward", REWARDS)
def test_random_lists_in_any_order_are_right_and_joined_or_shortened_wrong(reward: Callable[..., list[float | None]]):
    draw = random.Random(11)
    right, wrong = [], []
    for _ in range(800):
        items = [draw.choice([1, 1, -1]) * draw.randint(0, 10 ** draw.randint(1, 6)) for _ in range(draw.randint(2, 6))]
        write = draw.choice(["{}".format, "{:,}".format, "${}$".format])
        join = draw.choice([", ", " , ", r",\ ", "; ", " and ", ",  \n", " ,"])
        gold = draw.choice([", ", "; ", " and "]).join(map(str, items))
        shuffled = draw.sample(items, len(items))
        right.append((join.join(map(write, shuffled)), gold))
        right.append((r"\{" + join.join(map(write, shuffled)) + r"\}", gold))
        dropped = draw.randrange(len(items))
        wrong.append((join.join(map(write, shuffled[:dropped] + shuffled[dropped + 1 :])), gold))
        place = draw.randrange(1, len(items))
        first, second = str(items[place - 1]), str(abs(items[place]))
        joined = [*items[: place - 1], int(first + second), *items[place + 1 :]]
        wrong.append((join.join(map(write, joined)), gold))
        wrong.append(("".join(map(str, map(abs, items))), gold))
        wrong.append((join.join(map(write, items)), "".join(map(str, map(abs, items)))))
        wrong.append((gold, "".join(map(str, map(abs, items)))))
    for pairs, expected in ((right, 1.0), (wrong, 0.0)):
        rewards = reward([f"<answer>{answer}</answer>" for answer, _ in pairs], [gold for _, gold in pairs])
        assert [pair for pair, score in zip(pairs, rewards, strict=True) if score != expected] == []


@pytest.mark.parametrize("reward", REWARDS)
def test_random_tuples_keep_their_order(reward: Callable[..., list[float | None]]):
    draw = random.Random(12)
    right, wrong = [], []
    for _ in range(300):
        items = draw.sample(range(-200, 100_000), draw.randint(2, 5))
        shuffled = draw.sample(items, len(items))
        opened, closed = draw.choice(["()", "[]", "[)", "(]"])
        tight, spaced = (f"{opened}{join.join(map(str, items))}{closed}" for join in (",", ", "))
        right += [(tight, spaced), (spaced, tight), (spaced, tight.replace(",", ";"))]
        other = f"{opened}{', '.join(map(str, shuffled))}{closed}"
        (right if shuffled == items else wrong).append((other, tight))
        wrong.append((spaced, "".join(map(str, map(abs, items)))))
    for pairs, expected in ((right, 1.0), (wrong, 0.0)):
        rewards = reward([f"<answer>{answer}</answer>" for answer, _ in pairs], [gold for _, gold in pairs])
        assert [pair for pair, score in zip(pairs, rewards, strict=True) if score != expected] == []
