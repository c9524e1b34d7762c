"""The two parts of `make test`: the core's tests, where all extensions are deleted, and the tests above the core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from core_alone import ABOVE, can_mount
from needs import FILES, HERE, TESTS, ignore_file, ignore_test

ALONE = str(HERE / "core_alone.py")


def run_alone(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, ALONE, sys.executable, "-c", code]
    return subprocess.run(argv, capture_output=True, text=True, env=os.environ | variables, timeout=60)


def test_every_name_of_the_lists_exists() -> None:
    assert [glob for glob in FILES if not list(HERE.glob(glob))] == []
    text = "".join(path.read_text() for path in HERE.rglob("test_*.py") if path != Path(__file__))
    assert [name for name in TESTS if f"def {name.partition('[')[0]}(" not in text] == []
    assert {*FILES.values(), *TESTS.values()} <= {*ABOVE, needs.WHOLE}


def test_each_test_belongs_to_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        ("recipe/test_check.py", "test_any"): "core",
        ("extensions/code/test_reward.py", "test_any"): "above",
        ("trainers/test_atropos_steps.py", "test_any"): "above",
        ("e2e/test_lora.py", "test_any"): "above",
        ("test_cli.py", "test_any"): "core",
        ("test_cli.py", "test_the_help_lists_every_command_in_a_group_and_examples"): "above",
    }
    parts = {}
    for part in ("core", "above"):
        monkeypatch.setattr(needs, "PART", part)
        needs.left_out.cache_clear()
        for file, name in cases:
            path = HERE / file
            ignored = any(ignore_file(place) for place in (path, *path.parents) if place.is_relative_to(HERE))
            if not ignored and not ignore_test(path, name):
                assert (file, name) not in parts
                parts[file, name] = part
    needs.left_out.cache_clear()
    assert parts == cases


@pytest.mark.skipif(not can_mount("/tmp"), reason="this system does not let us mount a folder")
def test_the_extensions_are_deleted_for_a_command_and_nobody_else() -> None:
    done = run_alone("import grpo_recipes.recipe.check, grpo_recipes.extensions; import grpo_recipes.extensions.code")
    assert done.returncode == 1 and "No module named 'grpo_recipes.extensions.code'" in done.stderr
    assert run_alone("import grpo_recipes.console").returncode == 1
    assert run_alone("raise SystemExit(7)").returncode == 7
    assert (HERE.parent / "src/grpo_recipes/console").is_dir()


def test_a_system_without_mounts_runs_the_command_with_extensions() -> None:
    done = run_alone("import grpo_recipes.console", PATH="")  # there is no unshare
    assert done.returncode == 0 and "the extensions stay" in done.stdout
