"""What must not be in the repository, and the sizes it keeps to."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from grpo_recipes.paths import home
from grpo_recipes.secrets import secret_value

LONGEST_FUNCTION = 60
LONGEST_FILE = 500


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=home(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [home() / name for name in done.stdout.split("\0") if name and (home() / name).is_file()]


def test_no_file_holds_a_secret() -> None:
    files = tracked_files()
    assert len(files) > 100
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            # user:password@ in a test of masking is no secret; a token that looks like one is.
            assert "@" in line or not secret_value(line), f"{path}:{number}"


def test_a_planted_token_would_be_found() -> None:
    assert secret_value("HF_TOKEN=hf_" + "abcdefgh" * 3)
    assert secret_value("key: sk-" + "abcdefgh" * 3)


def test_no_function_and_no_file_is_too_long() -> None:
    for path in (home() / "src").rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= LONGEST_FILE, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                code = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                assert (node.end_lineno or 0) - code[0].lineno < LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name}"
