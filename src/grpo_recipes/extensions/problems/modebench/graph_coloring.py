"""Complete the 3-coloring of a graph: color the hidden vertices so that both ends of each edge have different colors.

An answer has a digit for each hidden vertex. Every proper coloring is a mode.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

COLORS = "123"
HIDDEN = "?"
_TRIES = 50  # failed draws for each wanted puzzle before giving up

Edges = Sequence[Sequence[int]]  # pairs of vertices


@dataclass(frozen=True)
class ColoringPuzzle:
    """One graph with a partial coloring."""

    vertices: int  # number of vertices, which are called 1, 2, ...
    edges: Edges  # pairs of vertices, the smaller first, in ascending order
    partial: str  # a color or ``?`` for each vertex
    modes: int  # number of proper colorings


def list_colorings(edges: Edges, partial: str) -> list[str]:
    """List every proper coloring as the colors of the hidden vertices, from left to right, in ascending order.

    Return [] if an edge connects two shown vertices of the same color.
    """
    neighbors: list[list[int]] = [[] for _ in partial]
    for start, end in edges:
        neighbors[start - 1].append(end - 1)
        neighbors[end - 1].append(start - 1)
    hidden = [vertex for vertex, color in enumerate(partial) if color == HIDDEN]
    if any(partial[start - 1] == partial[end - 1] != HIDDEN for start, end in edges):
        return []
    return list(_yield_colorings(list(partial), hidden, neighbors))


def _yield_colorings(colors: list[str], hidden: list[int], neighbors: list[list[int]]) -> Iterator[str]:
    """Yield the colors of the hidden vertices in every proper coloring that extends ``colors``, in ascending order.

    ``colors`` is changed in between and restored at the end.
    """
    uncolored = next((vertex for vertex in hidden if colors[vertex] == HIDDEN), None)
    if uncolored is None:
        yield "".join(colors[vertex] for vertex in hidden)
        return
    for color in COLORS:
        if all(colors[neighbor] != color for neighbor in neighbors[uncolored]):
            colors[uncolored] = color
            yield from _yield_colorings(colors, hidden, neighbors)
    colors[uncolored] = HIDDEN


def complete_coloring(edges: Edges, partial: str, answer: str) -> str | None:
    """Return the colors of all vertices with the answer's colors, or None if the answer is incorrect.

    An answer has a digit for each hidden vertex, or for each vertex. It must not change shown colors, and the ends of
    each edge must have different colors.
    """
    if len(answer) == partial.count(HIDDEN):
        digits = iter(answer)
        answer = "".join(next(digits) if color == HIDDEN else color for color in partial)
    if len(answer) != len(partial) or not set(answer) <= set(COLORS):
        return None
    if any(shown not in (HIDDEN, color) for shown, color in zip(partial, answer, strict=True)):
        return None
    return None if any(answer[start - 1] == answer[end - 1] for start, end in edges) else answer


def draw_puzzles(vertices: int, hidden: int, modes: range, count: int, seed: int) -> list[ColoringPuzzle]:
    """Draw different puzzles, one after the other: a larger ``count`` starts with the same puzzles.

    A graph has between ``vertices`` and twice as many edges, or all possible edges. The shown vertices and their colors
    are drawn uniformly. ``modes`` are the allowed numbers of proper colorings. The result is shorter than ``count`` if
    no other puzzle is found.
    """
    rng = random.Random(seed)
    possible_edges = list(combinations(range(1, vertices + 1), 2))
    most = min(2 * vertices, len(possible_edges))
    drawn: dict[tuple[Edges, str], ColoringPuzzle] = {}
    failures = 0
    while len(drawn) < count and failures < _TRIES * (len(drawn) + 100):
        edges = tuple(sorted(rng.sample(possible_edges, rng.randint(min(vertices, most), most))))
        hidden_vertices = rng.sample(range(vertices), hidden)
        partial = "".join(HIDDEN if vertex in hidden_vertices else rng.choice(COLORS) for vertex in range(vertices))
        answers = len(list_colorings(edges, partial))
        if answers not in modes or (edges, partial) in drawn:
            failures += 1
            continue
        drawn[edges, partial] = ColoringPuzzle(vertices, edges, partial, answers)
    return list(drawn.values())
