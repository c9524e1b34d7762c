"""Commands of README.md and docs/, as tests run them.

A test that runs a command of a page takes its words from ``documented``; ``runners`` finds these tests by reading their
code, and ``tests/docs/test_commands.py`` holds every command of the pages to one of them.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parent
PAGES = [TESTS.parent / "README.md", *sorted((TESTS.parent / "docs").glob("*.md"))]
_BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FAKE_MARK = re.compile(r"^# tested (?:with|on) .*fake.*$")


def commands() -> dict[str, bool]:
    """Return each command of the pages, with whether every page states above it that its test uses a fake."""
    commands_shown: dict[str, bool] = {}
    for page in PAGES:
        for block in _BASH.findall(page.read_text()):
            marked = False
            for line in block.splitlines():
                if line.startswith("#"):
                    marked = bool(_FAKE_MARK.match(line))
                elif line:
                    commands_shown[line] = commands_shown.get(line, True) and marked
    return commands_shown


def documented(command: str, places: Mapping[str, str] | None = None, fake: str = "") -> list[str]:
    """Return the words of a command that a page shows, for a test that runs them.

    Args:
        command: the line on the page.
        places: words to replace, such as a path or a number of GPUs. The other words are the page's.
        fake: the part that the test replaces with a fake. The page must state it above the command.

    Raises:
        AssertionError: no page has the command, or a word to replace is not in it.
    """
    shown = commands()
    assert command in shown, f"no page shows: {command}"
    assert not fake or shown[command], f"some page does not say that {fake} is a fake: {command}"
    words = shlex.split(command)
    assert set(places or {}) <= set(words), places
    words = [(places or {}).get(word, word) for word in words]
    if "=" in words[0]:
        words = ["env", *words]
    return [str(Path(sys.executable).with_name("grpo")) if word == "grpo" else word for word in words]


def runners() -> dict[str, list[tuple[str, bool]]]:
    """Return for each command the tests that take its words from ``documented``, and whether they name a fake."""
    tests_by_command: dict[str, list[tuple[str, bool]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text()
        if "from documented import documented" not in source:
            continue
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
                continue
            unused = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Expr)}
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "documented":
                    continue
                assert id(call) not in unused, f"{path}: {function.name} does not use the words it asks for"
                command = _text(call.args[0], function)
                faked = any(keyword.arg == "fake" for keyword in call.keywords)
                tests_by_command.setdefault(command, []).append(
                    (f"{path.relative_to(TESTS.parent)}::{function.name}", faked)
                )
    return tests_by_command


def _text(node: ast.expr, function: ast.FunctionDef) -> str:
    """Return the text of a literal, or of the local name that it was given."""
    if isinstance(node, ast.Name):
        (node,) = [
            line.value
            for line in ast.walk(function)
            if isinstance(line, ast.Assign) and [getattr(target, "id", "") for target in line.targets] == [node.id]
        ]
    return str(ast.literal_eval(node))
