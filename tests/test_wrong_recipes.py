"""`grpo check` on recipes that are wrong in every way people have written them: see ``wrong_recipes/README.md``."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpo_command import run_python

FOLDER = Path(__file__).with_name("wrong_recipes")
FILES = sorted(FOLDER.glob("*.yaml"))


def told_and_command(path: Path) -> tuple[list[str], str]:
    """The messages the recipe's comments expect, and the command they name."""
    comments: Iterator[str] = (line[2:] for line in path.read_text().splitlines() if line.startswith("# "))
    told, command = [], "grpo check"
    for comment in comments:
        if "grpo check" in comment.split(":")[0]:
            command = comment
        else:
            told.append(comment)
    return told, command


def check(path: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of the recipe in an empty folder, and say whether torch was imported."""
    variables, _, flags = told_and_command(path)[1].partition("grpo check")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
    environment |= dict(pair.split("=", 1) for pair in shlex.split(variables))
    code = (
        "import sys; from grpo_recipes.cli import main; code = main(sys.argv[1:])\n"
        "print('HEAVY', *{'torch', 'trl', 'transformers', 'datasets', 'vllm'} & set(sys.modules)); sys.exit(code)"
    )
    return run_python("-c", code, "check", str(path), *shlex.split(flags), cwd=home, env=environment)


def test_there_are_fifty_of_them() -> None:
    assert len(FILES) >= 50


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_wrong_recipe_is_told_in_one_line_a_fault(path: Path, tmp_path: Path) -> None:
    expected, _ = told_and_command(path)
    done = check(path, tmp_path)
    assert done.returncode == 2
    assert done.stdout.split() == ["HEAVY"], "nothing heavy is imported, nothing else is printed"
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected) >= 1, done.stderr
    for line, words in zip(lines, expected, strict=True):
        where, _, message = words.partition(": ")
        where = f"{FOLDER}/{where}" if (FOLDER / where.partition(":")[0]).is_file() else where  # it was named so
        message = message.replace(path.name, str(path))
        assert line.startswith(f"grpo: {where}: "), line
        assert message in line and ". Fix: " in line, line
    assert list(tmp_path.iterdir()) == []
