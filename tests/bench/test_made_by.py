"""bench/made_by.py: a record names the loaded code, and is rejected if no commit has that code."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import ModuleType

import pytest

HOME = Path(__file__).resolve().parents[2]
GIT = ("git", "-c", "user.name=t", "-c", "user.email=t@t")


@pytest.fixture
def made_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, in its own small repository."""
    monkeypatch.syspath_prepend(str(HOME / "bench"))
    module = importlib.import_module("made_by")
    for name in ("src/code.py", "bench/script.py", "bench/results/old.json", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*GIT, *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(module, "find_code_root", lambda: tmp_path)
    monkeypatch.setattr("grpo_recipes.runs.code_version.find_code_root", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench/script.py"), "--name", "two words"])
    yield module


@pytest.mark.parametrize("changed", ["src/code.py", "bench/script.py", "bench/new.py", "new.yaml"])
def test_a_record_of_code_without_a_commit_is_refused(made_by: ModuleType, capfd, changed: str) -> None:
    (made_by.find_code_root() / changed).write_text("2\n")
    with pytest.raises(SystemExit, match="2"):
        made_by.begin(made_by.find_code_root() / "bench/results/new.json")
    errors = capfd.readouterr().err
    assert errors.startswith("script.py: bench/results/new.json: ")
    why = "is not committed, so that the record could not name the code that ran"
    assert errors.endswith(f"{changed} {why}; commit or remove it, or write elsewhere with --out\n")


def test_a_record_of_the_study_needs_a_commit_too(made_by: ModuleType, capfd) -> None:
    (made_by.find_code_root() / "src/code.py").write_text("2\n")
    with pytest.raises(SystemExit, match="2"):
        made_by.begin(made_by.find_code_root() / "evidence/results/new.json")
    assert capfd.readouterr().err.startswith("script.py: evidence/results/new.json: src/code.py is not committed")


def test_a_target_of_make_is_the_command(made_by: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ARGS", raising=False)
    assert made_by.begin(made_by.find_code_root() / "bench/results/new.json", target="exact")["command"] == "make exact"
    monkeypatch.setenv("PYTEST_ARGS", "-k one")
    assert (
        made_by.begin(made_by.find_code_root() / "bench/results/new.json", target="exact")["command"]
        == "make exact 'PYTEST_ARGS=-k one'"
    )


def test_elsewhere_the_record_says_so(made_by: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("elsewhere") / "new.json"
    (made_by.find_code_root() / "src/code.py").write_text("2\n")
    made_by.write_record(out, {"found": 1}, made_by.begin(out))
    assert json.loads(out.read_text())["uncommitted_changes"] is True


def test_without_git_there_is_no_record(made_by: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    with pytest.raises(SystemExit, match="2"):
        made_by.begin(made_by.find_code_root() / "bench/results/new.json")
    assert "no commit that git could name" in capfd.readouterr().err


def test_a_record_is_of_the_code_that_was_loaded(made_by: ModuleType) -> None:
    """Results and pages may change before and while it is made, and commits may follow."""
    home = made_by.find_code_root()
    (home / "docs/page.md").write_text("2\n")
    (home / "bench/results/old.json").write_text("2\n")
    loaded = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=home, text=True).strip()
    origin = made_by.begin(made_by.find_code_root() / "bench/results/new.jsonl", "numpy")
    subprocess.run([*GIT, "commit", "-qam", "second"], cwd=home, check=True)
    for seed in range(2):
        made_by.append_record(made_by.find_code_root() / "bench/results/new.jsonl", {"seed": seed}, origin)
    rows = [
        json.loads(line) for line in (made_by.find_code_root() / "bench/results/new.jsonl").read_text().splitlines()
    ]
    assert [row["seed"] for row in rows] == [0, 1]
    for row in rows:
        assert row["command"] == "python bench/script.py --name 'two words'"
        assert row["commit"] == loaded and row["uncommitted_changes"] is False
        assert {"torch", "trl", "transformers", "numpy", "python"} <= row["versions"].keys()
        assert row["machine"]["cores"] >= 1 and row["machine"]["cpu"] and row["machine"]["memory_gib"] > 0
        assert len(row["load_before"]) == 3
        started, finished = (datetime.fromisoformat(row[name]) for name in ("started", "finished"))
        assert started <= finished and str(started.tzinfo) == "UTC"
