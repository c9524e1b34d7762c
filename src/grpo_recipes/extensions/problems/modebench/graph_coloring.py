"""Graph 3-colouring completion: colour the hidden vertices of a graph so that no edge has two ends of one colour.

An answer has a digit for each hidden vertex; every proper completion is a mode.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

COLORS = "123"
HIDDEN = "?"
_TRIES = 50  # graphs drawn for each that is wanted, before there seem to be no more

Edges = Sequence[Sequence[int]]  # pairs of vertices


@dataclass(frozen=True)
class ColoringPuzzle:
    """One problem."""

    vertices: int  # how many; they are called 1, 2, ...
    edges: Edges  # pairs of vertices, the smaller first, in ascending order
    partial: str  # a colour or ``?`` for each vertex
    modes: int  # how many completions are proper


def completions(edges: Edges, partial: str) -> list[str]:
    """Return the colours of the hidden vertices, from left to right, in every proper completion, in ascending order."""
    neighbours: list[list[int]] = [[] for _ in partial]
    for one, other in edges:
        neighbours[one - 1].append(other - 1)
        neighbours[other - 1].append(one - 1)
    hidden = [vertex for vertex, color in enumerate(partial) if color == HIDDEN]
    if any(partial[one - 1] == partial[other - 1] != HIDDEN for one, other in edges):
        return []
    return list(_filled(list(partial), hidden, neighbours))


def _filled(colors: list[str], hidden: list[int], neighbours: list[list[int]]) -> Iterator[str]:
    open_now = next((vertex for vertex in hidden if colors[vertex] == HIDDEN), None)
    if open_now is None:
        yield "".join(colors[vertex] for vertex in hidden)
        return
    for color in COLORS:
        if all(colors[other] != color for other in neighbours[open_now]):
            colors[open_now] = color
            yield from _filled(colors, hidden, neighbours)
    colors[open_now] = HIDDEN


def mode(edges: Edges, partial: str, answer: str) -> str | None:
    """Return the colours of all vertices if an answer is right, else None.

    An answer has a digit for each hidden vertex, or one for each vertex with the shown ones as they are.
    """
    if len(answer) == partial.count(HIDDEN):
        given = iter(answer)
        answer = "".join(next(given) if color == HIDDEN else color for color in partial)
    if len(answer) != len(partial) or not set(answer) <= set(COLORS):
        return None
    if any(shown not in (HIDDEN, color) for shown, color in zip(partial, answer, strict=True)):
        return None
    return None if any(answer[one - 1] == answer[other - 1] for one, other in edges) else answer


def puzzles(vertices: int, hidden: int, modes: range, count: int, seed: int) -> list[ColoringPuzzle]:
    """Draw different puzzles, one after the other: a larger ``count`` begins with the same ones.

    A graph has between ``vertices`` and twice as many edges (or all there can be); colours of the shown vertices and
    which are shown are drawn alike. ``modes`` is how many completions a puzzle may have. Fewer than ``count`` are
    returned when no others are found.
    """
    rng = random.Random(seed)
    possible = list(combinations(range(1, vertices + 1), 2))
    most = min(2 * vertices, len(possible))
    found: dict[tuple[Edges, str], ColoringPuzzle] = {}
    missed = 0
    while len(found) < count and missed < _TRIES * (len(found) + 100):
        edges = tuple(sorted(rng.sample(possible, rng.randint(min(vertices, most), most))))
        shut = rng.sample(range(vertices), hidden)
        partial = "".join(HIDDEN if vertex in shut else rng.choice(COLORS) for vertex in range(vertices))
        answers = len(completions(edges, partial))
        if answers not in modes or (edges, partial) in found:
            missed += 1
            continue
        found[edges, partial] = ColoringPuzzle(vertices, edges, partial, answers)
    return list(found.values())
