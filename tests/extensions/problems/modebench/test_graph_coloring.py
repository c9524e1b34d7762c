"""Graph colouring: completions against every assignment, answers in both lengths, puzzles as their keys say."""

from __future__ import annotations

from itertools import product

import pytest

from grpo_recipes.extensions.problems.modebench.graph_coloring import Edges, completions, mode, puzzles

TRIANGLE: Edges = ((1, 2), (1, 3), (2, 3))


def by_hand(edges: Edges, partial: str) -> list[str]:
    """Every assignment of all vertices, looked at one by one."""
    found = []
    for colors in product("123", repeat=len(partial)):
        fits = all(shown in ("?", color) for shown, color in zip(partial, colors, strict=True))
        if fits and all(colors[one - 1] != colors[other - 1] for one, other in edges):
            found.append("".join(color for shown, color in zip(partial, colors, strict=True) if shown == "?"))
    return found


@pytest.mark.parametrize(("vertices", "hidden"), [(6, 3), (8, 5), (5, 5)])
def test_puzzles_have_the_completions_they_say(vertices: int, hidden: int) -> None:
    made = puzzles(vertices, hidden, range(2, 25), 40, seed=1)
    assert len({(one.edges, one.partial) for one in made}) == 40
    for one in made:
        right = by_hand(one.edges, one.partial)
        assert completions(one.edges, one.partial) == right
        assert (one.vertices, one.partial.count("?"), one.modes) == (vertices, hidden, len(right))
        assert 2 <= len(right) <= 24
        assert vertices <= len(one.edges) <= 2 * vertices and list(one.edges) == sorted(set(one.edges))
        for colors in product("123", repeat=hidden):
            answer = "".join(colors)
            assert (mode(one.edges, one.partial, answer) is not None) == (answer in right)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("23", "123"), ("32", "132"), ("123", "123"), ("22", None), ("13", None), ("213", None), ("2", None),
        ("", None), ("1233", None), ("24", None), ("2?", None), ("1??", None), ("2 3", None),
        ("\u0662\u0663", None), ("ab", None),
    ],
)  # fmt: skip
def test_answers(answer: str, right: str | None) -> None:
    assert mode(TRIANGLE, "1??", answer) == right


def test_more_puzzles_begin_with_the_same_and_a_seed_draws_others() -> None:
    few, many, others = (puzzles(8, 5, range(2, 25), count, seed) for count, seed in ((5, 3), (9, 3), (9, 4)))
    assert many[:5] == few
    assert not {one.partial for one in many} <= {one.partial for one in others}


def test_shown_ends_of_an_edge_that_are_alike_leave_nothing() -> None:
    assert completions(TRIANGLE, "11?") == []


def test_where_there_are_no_more_it_ends() -> None:
    assert len(puzzles(3, 1, range(2, 3), 100, seed=0)) < 30
