"""The rooms of the package from the ground up, and the imports between them as they are in the code.

A room imports only rooms before it in ``ROOMS``; ``tests/test_rooms.py`` fails otherwise. ``python scripts/rooms.py``
prints the drawing that the page "How it works" shows.
"""

from __future__ import annotations

import ast
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
    "smoke": "the built-in model and its sums",
    "algorithms": "the mathematics of MaxEnt-GRPO and its controllers",
    "modebench": "puzzles with many right answers",
    "process": "process tree, scratch folders, phases, reachability",
    "recipe": "keys, reading, typing, rules",
    "runs": "a run directory: written, found and read; health, advice, stop requests",
    "slurm": "Slurm's commands, site profiles, the batch script",
    "data": "prompts from datasets",
    "rewards": "reward functions, and the processes they run in",
    "server": "what of ours runs inside vLLM",
    "weights": "how new weights reach the server, and the guard",
    "rollouts": "where completions come from",
    "fetch": "models and datasets from the hub",
    "plan": "devices, batch, commands, estimates",
    "publish": "checkpoints to the hub",
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
