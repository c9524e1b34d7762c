"""Graph colouring: completions compared with every assignment, answers of both lengths, puzzle sizes."""

from __future__ import annotations

from itertools import product

import pytest

from grpo_recipes.extensions.problems.modebench.graph_coloring import (
    Edges,
    complete_coloring,
    draw_puzzles,
    list_colorings,
)

TRIANGLE: Edges = ((1, 2), (1, 3), (2, 3))


def by_hand(edges: Edges, partial: str) -> list[str]:
    """Check every assignment of all vertices and return the answers."""
    answers = []
    for colors in product("123", repeat=len(partial)):
        fits = all(shown in ("?", color) for shown, color in zip(partial, colors, strict=True))
        if fits and all(colors[vertex - 1] != colors[other - 1] for vertex, other in edges):
            answers.append("".join(color for shown, color in zip(partial, colors, strict=True) if shown == "?"))
    return answers


@pytest.mark.parametrize(("vertices", "hidden"), [(6, 3), (8, 5), (5, 5)])
def test_puzzles_have_the_completions_they_say(vertices: int, hidden: int) -> None:
    drawn = draw_puzzles(vertices, hidden, range(2, 25), 40, seed=1)
    assert len({(puzzle.edges, puzzle.partial) for puzzle in drawn}) == 40
    for puzzle in drawn:
        right = by_hand(puzzle.edges, puzzle.partial)
        assert list_colorings(puzzle.edges, puzzle.partial) == right
        assert (puzzle.vertices, puzzle.partial.count("?"), puzzle.modes) == (vertices, hidden, len(right))
        assert 2 <= len(right) <= 24
        assert vertices <= len(puzzle.edges) <= 2 * vertices and list(puzzle.edges) == sorted(set(puzzle.edges))
        for colors in product("123", repeat=hidden):
            answer = "".join(colors)
            assert (complete_coloring(puzzle.edges, puzzle.partial, answer) is not None) == (answer in right)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("23", "123"), ("32", "132"), ("123", "123"), ("22", None), ("13", None), ("213", None), ("2", None),
        ("", None), ("1233", None), ("24", None), ("2?", None), ("1??", None), ("2 3", None),
        ("\u0662\u0663", None), ("ab", None),
    ],
)  # fmt: skip
def test_answers(answer: str, right: str | None) -> None:
    assert complete_coloring(TRIANGLE, "1??", answer) == right


def test_more_puzzles_begin_with_the_same_and_a_seed_draws_others() -> None:
    few, many, other_seed = (draw_puzzles(8, 5, range(2, 25), count, seed) for count, seed in ((5, 3), (9, 3), (9, 4)))
    assert many[:5] == few
    assert not {puzzle.partial for puzzle in many} <= {puzzle.partial for puzzle in other_seed}


def test_shown_ends_of_an_edge_that_are_alike_leave_nothing() -> None:
    assert list_colorings(TRIANGLE, "11?") == []


def test_where_there_are_no_more_it_ends() -> None:
    assert len(draw_puzzles(3, 1, range(2, 3), 100, seed=0)) < 30
