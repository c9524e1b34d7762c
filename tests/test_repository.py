"""What must not be in the repository, and the sizes it keeps to."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_recipes.paths import find_code_root
from grpo_recipes.secrets import contains_secret

LONGEST_FUNCTION = 60
LONGEST_FILE = 520
# A variable is named after the thing that it holds, not with a pronoun or a participle.
VAGUE_NAMES = {
    "again", "asked", "found", "given", "held", "here", "it", "kept", "left", "made", "one", "ones", "ours", "own",
    "rest", "said", "taken", "theirs", "there", "wanted", "what", "whose",
}  # fmt: skip
VAGUE_FIELDS = {("errors.py", "what"), ("extensions/migrate/migrate.py", "kept"), ("rewards/probe.py", "taken")}


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=find_code_root(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [find_code_root() / name for name in done.stdout.split("\0") if name and (find_code_root() / name).is_file()]


def test_no_file_holds_a_secret() -> None:
    files = tracked_files()
    assert len(files) > 100
    for path in files:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            # user:password@ in a test of masking is not a secret, but a token is.
            assert "@" in line or not contains_secret(line), f"{path}:{number}"


def test_a_planted_token_would_be_found() -> None:
    assert contains_secret("HF_TOKEN=hf_" + "abcdefgh" * 3)
    assert contains_secret("key: sk-" + "abcdefgh" * 3)


def test_no_function_and_no_file_is_too_long() -> None:
    for path in (find_code_root() / "src").rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= LONGEST_FILE, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                code = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                assert (node.end_lineno or 0) - code[0].lineno < LONGEST_FUNCTION, f"{path}:{node.lineno} {node.name}"


def test_variables_of_the_package_are_named_after_what_they_hold() -> None:
    package = find_code_root() / "src/grpo_recipes"
    found_names = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
            name = node.arg if isinstance(node, ast.arg) else name
            if name in VAGUE_NAMES:
                found_names.add((str(path.relative_to(package)), name))
    assert found_names == VAGUE_FIELDS


def test_pre_commit_runs_programs_of_the_environment() -> None:
    (repository,) = yaml.safe_load((find_code_root() / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # a clone would need a network, and could have other versions
    programs = {hook["id"]: hook["entry"].split()[0] for hook in repository["hooks"]}
    assert set(programs) == {"ruff", "ruff-format", "shellcheck"}
    for program in programs.values():
        folder, _, name = program.rpartition("/")
        assert folder == ".venv/bin" and (Path(sys.executable).parent / name).is_file(), program


def test_what_contributing_names_is_there() -> None:
    text = (find_code_root() / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"^([a-z0-9-]+):.*##", (find_code_root() / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z0-9-]+)", text)) <= set(targets)
    for path in re.findall(r"`((?:tests|src|scripts|bench|\.ci)/[\w/.]*)`", text):
        assert (find_code_root() / path).exists(), path
    for path in re.findall(r"`([a-z]+/(?:[a-z]+\.py)?)`", text):
        assert (find_code_root() / path).exists() or (find_code_root() / "src/grpo_recipes" / path).exists(), path


def test_every_python_that_is_started_leaves_the_working_folder_out() -> None:
    """``python -m`` and ``-c`` put it first on the path, where a user's yaml.py takes a package's place."""
    started = re.compile(r'sys\.executable,\s*"-[mc]"')
    assert [path.name for path in (find_code_root() / "src").rglob("*.py") if started.search(path.read_text())] == []
