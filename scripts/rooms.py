"""The rooms of the package from the ground up, and the imports between them as they are in the code.

A room imports only rooms before it in ``ROOMS``; ``tests/test_rooms.py`` fails otherwise. ``python scripts/rooms.py``
prints the drawing that the page "How it works" shows.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "grpo_recipes"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE
# From the ground up, with what each is for. Modules that stand alone are rooms of their own.
ROOMS: dict[str, str] = {
    "secrets": "what is masked",
    "paths": "where the repository and its caches are",
    "errors": "what a wrong input is answered with",
    "stats": "pass@k",
    "numbers": "limits of rewards and log-probs in float32",
    "attributes": "attributes that are replaced for a while",
    "smoke": "the built-in model and its sums",
    "algorithms": "the mathematics of MaxEnt-GRPO and its controllers",
    "modebench": "puzzles with many right answers",
    "seeded": "problems made from a seed",
    "environments": "environments of libraries, behind one protocol",
    "process": "process tree, scratch folders, phases, reachability",
    "recipe": "keys, reading, typing, rules",
    "runs": "a run directory: written, found and read; health, advice, stop requests",
    "slurm": "Slurm's commands, site profiles, the batch script",
    "data": "prompts from datasets",
    "rewards": "reward functions, and the processes they run in",
    "server": "what of ours runs inside vLLM",
    "weights": "how new weights reach the server, and the guard",
    "fetch": "models and datasets from the hub",
    "plan": "devices, batch, commands, estimates",
    "atropos": "scored groups of Atropos: run-api's client, environments",
    "rollouts": "where completions come from",
    "publish": "the final model to the hub",
    "evaluate": "benchmarks",
    "report": "report.html and comparisons",
    "launch": "execute a plan: start, supervise, monitor, finish",
    "trainers": "GRPOTrainer, and MaxEnt on top of it",
    "sweep": "many trials of one recipe",
    "doctor": "what is wrong on this machine, in this recipe, with that run",
    "cli": "the commands",
    "__main__": "python -m grpo_recipes",
}


def modules() -> dict[str, Path]:
    """Return every module of the package with its file; a package stands for its ``__init__.py``."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def imports(known: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield each import of one module of the package by another, those inside functions and for types included."""
    for module, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                named = [full if (full := f"{base}.{alias.name}") in known else base for alias in node.names]
            else:
                continue
            yield from ((module, name) for name in named if name in known and name != module)


def room(module: str) -> str:
    """Return the room of a module, empty for the package itself."""
    return module.removeprefix(PACKAGE).lstrip(".").split(".")[0]


def room_imports() -> dict[str, set[str]]:
    """Return for each room the rooms that it imports from; ``__main__`` is left out."""
    used: dict[str, set[str]] = {name: set() for name in ROOMS if name != "__main__"}
    for user, other in imports(modules()):
        if room(user) in used and room(other) in used and room(user) != room(other):
            used[room(user)].add(room(other))
    return used


def storeys(used: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms by height: a room stands one storey above the highest room that it imports from."""
    height: dict[str, int] = {}
    for name in used:  # in the order of ROOMS, so that the rooms below are known
        height[name] = 1 + max((height[other] for other in used[name]), default=-1)
    return [[name for name in used if height[name] == level] for level in range(max(height.values()) + 1)]


def direct(used: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield the imports that no longer way through other rooms implies: few enough to draw."""
    reach: dict[str, set[str]] = {}
    for name in used:
        reach[name] = used[name].union(*(reach[other] for other in used[name]))
    for name, others in used.items():
        yield from ((name, other) for other in others if not any(other in reach[middle] for middle in others - {other}))


_WIDTH, _BOX, _ROW = 880, (104, 30), 64


def drawing() -> str:
    """Return the rooms as SVG in a frame that scrolls, the ground at the bottom.

    There is an arrow for each import that no other one implies.
    """
    used = room_imports()
    levels = storeys(used)
    (box_width, box_height), height = _BOX, _ROW * len(levels)
    place: dict[str, tuple[float, float]] = {}
    for level, names in enumerate(levels):
        gap = _WIDTH / len(names)
        place |= {name: (gap * (index + 0.5), height - _ROW * (level + 0.5)) for index, name in enumerate(names)}
    lines = [
        f'<path d="M{x1:.0f} {y1 + box_height / 2:.0f} L{x2:.0f} {y2 - box_height / 2 - 3:.0f}"/>'
        for user, other in sorted(direct(used))
        for (x1, y1), (x2, y2) in [(place[user], place[other])]
    ]
    boxes = [
        f'<g><title>{html.escape(ROOMS[name])}</title><rect x="{x - box_width / 2:.0f}" y="{y - box_height / 2:.0f}" '
        f'width="{box_width}" height="{box_height}" rx="4"/><text x="{x:.0f}" y="{y + 5:.0f}">{name}</text></g>'
        for name, (x, y) in place.items()
    ]
    head = (
        '<defs><marker id="arrow" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L6 3L0 6z"/></marker></defs>'
    )
    label = "Rooms of the package; every arrow points down"
    return f'<div class="rooms"><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">' + "".join(
        [head, *lines, *boxes, "</svg></div>"]
    )


def files_with(word: str) -> list[tuple[str, list[int]]]:
    """Return the files of the package that hold ``word`` as a whole, from the ground up, each with its lines.

    Dialects are left out: they write keys under the names of other projects, and no value passes them.
    """
    found = []
    height = {name: index for index, name in enumerate(ROOMS)}
    for module, path in modules().items():
        if ".dialects." in module:
            continue
        numbers = [
            number for number, line in enumerate(path.read_text().splitlines(), 1) if re.search(rf"\b{word}\b", line)
        ]
        if numbers:
            found.append((height.get(room(module), 0), path.relative_to(SOURCE).as_posix(), numbers))
    return [(name, numbers) for _, name, numbers in sorted(found)]


if __name__ == "__main__":
    print(drawing())
