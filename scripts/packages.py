"""The packages of the core from the ground up, the extensions above them, and the imports as they are in the code.

A package of the core imports only packages before it in ``CORE``. An extension imports the core and itself. The console
imports the core. The core imports neither. ``tests/test_packages.py`` fails otherwise. The page "How it works" shows
``drawing()``:

    python scripts/packages.py > drawing.html
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "grpo_recipes"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE
# From the ground up, with the subject of each package. Modules that stand alone count as packages.
CORE: dict[str, str] = {
    "secrets": "what is masked",
    "paths": "where the repository and its caches are",
    "errors": "how wrong input is reported",
    "stats": "pass@k, numbers in words",
    "numbers": "limits of rewards and log-probs in float32",
    "attributes": "attributes that are replaced for a while",
    "algorithms": "the mathematics of MaxEnt-GRPO and its controllers",
    "process": "process tree, scratch folders, phases, reachability",
    "smoke": "the built-in model and its sums",
    "recipe": "keys, reading, typing, rules, the registry of extensions",
    "runs": "a run directory: written, found and read; health, advice, stop requests",
    "slurm": "Slurm's commands, site profiles, the batch script",
    "data": "prompts from datasets",
    "rewards": "reward functions, and the processes they run in",
    "server": "our code inside vLLM",
    "trainer_protocol": "what the packages above may use of the trainer",
    "weights": "how new weights reach the server, and the guard",
    "fetch": "models and datasets from the hub",
    "plan": "devices, batch, commands, estimates",
    "rollouts": "sources of completions",
    "evaluate": "benchmarks",
    "launch": "execute a plan: start, supervise, monitor, finish",
    "trainers": "GRPOTrainer, and MaxEnt on top of it",
    "cli": "the commands of the core",
    "__main__": "python -m grpo_recipes",
}
EXTENSIONS = "extensions"
CONSOLE = "console"
# Above the core, each deletable.
ABOVE: dict[str, str] = {
    "extensions.atropos": "scored groups from Atropos environments",
    "extensions.code": "the reward code_tests: programs on test cases, in a sandbox",
    "extensions.colocated": "flags and YAML of the co-located trainer",
    "extensions.environments": "multi-turn episodes of libraries and of your own classes",
    "extensions.judge": "the reward llm_judge: grades of a language model",
    "extensions.migrate": "recipes of open-r1, TRL, verl and others",
    "extensions.offline": "the offline trainer: Hydra keys and iterations",
    "extensions.problems": "generated problems: ModeBench, and problems drawn by seeds",
    "extensions.sft": "supervised fine-tuning before GRPO",
    "console": "report, dashboard, sweeps, doctor, publishing, evaluation, generation and chat",
}
PACKAGES = {**CORE, **ABOVE}
# Words by which a file of the core would name an extension.
NAMES: dict[str, str] = {
    "atropos": r"atropos|run[-_]api",
    "code": r"code_tests|code_(sandbox|server_url|score)",
    "colocated": r"colocated_grpo|run_colocated",
    "environments": r"textarena|reasoning_gym|openenv|extensions[./]environments|environment_"
    r"(args|mixture|episodes|eval_episodes|max_turns|turn_length|credit|unfinished|timeout|memory_gib|workers|network)",
    "judge": r"llm_judge|judge_(base_url|model|api_key_variable|mode|prompt|scale|cache|retries)",
    "migrate": r"open-?r1",
    "offline": r"hydra|offline_grpo|run_offline",
    "sft": r"extensions[./]sft|SFTTrainer|SFTConfig",
    "problems": r"modebench|seeded:|problem_seeds|problem_seed_start",
}


def modules() -> dict[str, Path]:
    """Return every module of the package with its file; a package stands for its ``__init__.py``."""
    files = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        files[".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return files


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


def package(module: str) -> str:
    """Return the package of a module: ``plan``, ``console`` or ``extensions.atropos``; empty for the package itself."""
    parts = module.removeprefix(PACKAGE).lstrip(".").split(".")
    return ".".join(parts[:2]) if parts[0] == EXTENSIONS and len(parts) > 1 else parts[0]


def package_imports() -> dict[str, set[str]]:
    """Return for each package those that it imports from; ``__main__`` is left out."""
    used: dict[str, set[str]] = {name: set() for name in PACKAGES if name != "__main__"}
    for user, other in imports(modules()):
        if package(user) in used and package(other) in used and package(user) != package(other):
            used[package(user)].add(package(other))
    return used


def storeys(used: dict[str, set[str]]) -> list[list[str]]:
    """Return the packages by height: one storey above the highest package that each imports from."""
    height: dict[str, int] = {}
    for name in used:  # in the order of PACKAGES, so that the packages below are known
        height[name] = 1 + max((height[other] for other in used[name]), default=-1)
    top = max(height.values(), default=0)
    for name in used.keys() & ABOVE.keys():
        height[name] = top + 1
    return [[name for name in used if height[name] == level] for level in sorted(set(height.values()))]


def direct(used: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield the imports that no longer way through other packages implies: few enough to draw."""
    reach: dict[str, set[str]] = {}
    for name in used:
        reach[name] = used[name].union(*(reach[other] for other in used[name]))
    for name, imported in used.items():
        yield from (
            (name, other) for other in imported if not any(other in reach[middle] for middle in imported - {other})
        )


_WIDTH, _BOX, _ROW = 880, (104, 30), 64


def drawing() -> str:
    """Return the packages as SVG in a frame that scrolls, the ground at the bottom.

    There is an arrow for each import that no other one implies.
    """
    used = package_imports()
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
        f'<g class="{"above" if name in ABOVE else "core"}"><title>{html.escape(PACKAGES[name])}</title>'
        f'<rect x="{x - box_width / 2:.0f}" y="{y - box_height / 2:.0f}" width="{box_width}" height="{box_height}" '
        f'rx="4"/><text x="{x:.0f}" y="{y + 5:.0f}">{name.removeprefix(f"{EXTENSIONS}.")}</text></g>'
        for name, (x, y) in place.items()
    ]
    head = (
        '<defs><marker id="arrow" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L6 3L0 6z"/></marker></defs>'
    )
    label = "Packages of grpo-recipes; every arrow points down"
    return f'<div class="packages"><svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">' + "".join(
        [head, *lines, *boxes, "</svg></div>"]
    )


def table() -> str:
    """Return a Markdown row for each package, the highest first: its name, its subject, and the packages it imports."""
    used = package_imports()
    rows = [
        f"| `{name}` | {PACKAGES[name]} | {', '.join(f'`{other}`' for other in used if other in used[name])} |"
        for name in reversed(used)
    ]
    return "\n".join(["| package | subject | imports from |", "|---|---|---|", *rows])


def fill(markdown: str) -> str:
    """Return a page with the drawing and the table of packages instead of their markers."""
    for marker, make in (("<!-- packages drawing -->", drawing), ("<!-- packages table -->", table)):
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown


def files_with(word: str) -> list[tuple[str, list[int]]]:
    """Return the files of the package with a whole word that matches ``word``, from the ground up, each with its lines.

    Config converters are left out: they write keys under the names of other projects, and no value passes them.
    """
    files = []
    height = {name: index for index, name in enumerate(PACKAGES)}
    for module, path in modules().items():
        if ".converters" in module or ".dialects." in module or "extensions.migrate" in module:
            continue
        lines = enumerate(path.read_text().splitlines(), 1)
        numbers = [number for number, line in lines if re.search(rf"\b(?:{word})\b", line)]
        if numbers:
            files.append((height.get(package(module), 0), path.relative_to(SOURCE).as_posix(), numbers))
    return [(name, numbers) for _, name, numbers in sorted(files)]


def core_files_that_name(extension: str) -> list[str]:
    """Return the files of the core that name an extension by its keys, libraries or modules."""
    pattern, files = re.compile(NAMES[extension], re.IGNORECASE), []
    for module, path in modules().items():
        if package(module) in CORE and pattern.search(path.read_text()):
            files.append(path.relative_to(SOURCE).as_posix())
    return sorted(files)


if __name__ == "__main__":
    print(drawing())
