"""`grpo check` with the reward ``code_tests``: a recipe whose sandbox can't run is rejected with what to install."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.extensions.code import jail
from grpo_recipes.recipe.check import check, missing_requirement, notes

FAKE_BWRAP = "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without bwrap."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_missing_sandbox_is_named_with_its_package(read: Any, programs: Path) -> None:
    (problem,) = check(read(reward_funcs=["code_tests"]), {})
    assert problem.what == "code_tests: the sandbox needs bwrap, which is not installed"
    assert problem.fix.startswith("apt-get install bubblewrap, or set code_sandbox: piston")
    service = dict(code_sandbox="piston", code_server_url="http://127.0.0.1:2000")
    assert check(read(reward_funcs=["code_tests"], **service), {}) == []
    assert check(read(reward_funcs=["math_verify"]), {}) == []


def test_e2b_needs_its_key(read: Any, programs: Path) -> None:
    keys = {"reward_funcs": ["code_tests"], "code_sandbox": "e2b"}
    (problem,) = check(read(**keys), {"E2B_API_KEY": "x"})
    assert problem.what == "rewards don't get the variable E2B_API_KEY"
    assert problem.fix == "set reward_environment: [E2B_API_KEY]"
    recipe = read(**keys, reward_environment=["E2B_API_KEY"])
    (problem,) = check(recipe, {})
    assert problem.what == "environment variable E2B_API_KEY is not set"
    assert check(recipe, {"E2B_API_KEY": "x"}) == []
    assert not any("reward_environment" in note for note in notes(recipe))


def test_a_sandbox_without_namespaces_is_rejected_with_its_own_words(read: Any, programs: Path) -> None:
    (programs / "bwrap").write_text(FAKE_BWRAP)
    (programs / "bwrap").chmod(0o755)
    (problem,) = check(read(reward_funcs=["code_tests"]), {})
    assert "does not start (bwrap: No permissions to create new namespace)" in problem.what
    assert "allow user namespaces" in problem.fix


@pytest.mark.skipif(jail.find_jail_problem() is not None, reason=str(jail.find_jail_problem()))
def test_a_python_that_does_not_run_inside_is_rejected(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(read(reward_funcs=["code_tests"]), {}) == []
    monkeypatch.setattr(sys, "executable", "/no/python")
    (problem,) = check(read(reward_funcs=["code_tests"]), {})
    assert problem.what == "code_tests: the sandbox can't run /no/python"


def test_keys_do_nothing_without_the_reward(read: Any) -> None:
    recipe = read(reward_funcs=["math_verify"], code_score="all")
    assert missing_requirement(recipe, "code_score") == "code_tests"
    assert missing_requirement(recipe, "reward_memory_gib") == ""


def test_old_kernels_count_all_tasks_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("platform.release", lambda: "4.18.0-553.el8_10.x86_64")
    assert any(int(word.partition("=")[2]) > 50 for word in make_command() if word.startswith("--nproc="))
    monkeypatch.setattr("platform.release", lambda: "6.8.0-45-generic")
    assert f"--nproc={jail.MOST_PROCESSES}" in make_command()


@pytest.mark.skipif(jail.find_jail_problem() is not None, reason=str(jail.find_jail_problem()))
def test_a_machine_without_a_list_of_system_calls_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    fault, fix = jail.find_jail_problem() or ("", "")
    assert "no list of system calls for riscv64, only for x86_64 and aarch64" in fault and "piston" in fix


def make_command() -> list[str]:
    """Return the command of a jail."""
    return jail._make_command(3, 4, 5, 1.0, 1 << 30)
