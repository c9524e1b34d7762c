"""The environment's packages, in environments made broken on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_recipes.doctor import environment
from grpo_recipes.paths import home
from grpo_recipes.recipe.keys import catalogue_trl


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch):
    """``recorded(KEY=VALUE)``: an environment whose record is that of this one with these entries changed."""
    real = json.loads((Path(sys.prefix) / environment.RECORD).read_text())
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    def make(**changes: str) -> None:
        (tmp_path / environment.RECORD).write_text(json.dumps({**real, "root": str(home()), **changes}))

    return make


def test_the_record_of_the_set_up(machine, recorded):
    recorded()
    right = environment.environment(machine())
    assert "Python 3." in right.value
    recorded(lock="0" * 64)
    changed = environment.environment(machine())
    assert changed.status == "problem" and "changed since" in changed.value and "make setup" in changed.fix
    recorded(python="3.10.1")
    assert "made for Python 3.10.1" in environment.environment(machine()).value
    other = {"cpu": "cuda", "cuda": "cpu"}[machine().device]
    recorded(flavour=other)
    found = environment.environment(machine())
    assert found.status == "problem" and "--rebuild" in found.fix


def test_an_environment_of_another_checkout_and_one_without_a_record(machine, recorded):
    recorded(root="/elsewhere")
    assert "/elsewhere" in environment.environment(machine()).value
    (Path(sys.prefix) / environment.RECORD).unlink()
    assert environment.environment(machine()).status == "warning"


def fake_package(folder: Path, name: str, version: str) -> None:
    """The files by which importlib.metadata and import find a package."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()


def test_versions_of_this_environment(machine):
    found = environment.versions(machine())
    assert found.status == "ok" and f"trl {catalogue_trl()}" in found.value


def test_another_trl_is_a_problem_and_another_peft_a_warning(machine, tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    fake_package(tmp_path, "peft", "0.1.0")
    found = environment.versions(machine())
    assert found.status == "warning" and "peft 0.1.0 (locked: 0." in found.value
    fake_package(tmp_path, "trl", "0.18.0")
    found = environment.versions(machine())
    assert found.status == "problem" and "trl 0.18.0" in found.value


def test_a_local_part_of_a_version_that_the_lock_does_not_name_is_the_same():
    assert environment._same_version("2.13.0+cu130", "2.13.0")
    assert environment._same_version("2.13.0+cpu", "2.13.0+cpu")
    assert not environment._same_version("2.13.0", "2.13.0+cpu")
    assert not environment._same_version(None, "2.13.0")


def test_modules(machine, tmp_path: Path, monkeypatch):
    assert environment.modules(machine()).status == "ok"
    if machine().device == "cpu":
        monkeypatch.syspath_prepend(tmp_path)
        fake_package(tmp_path, "torchvision", "0.28.0")
        found = environment.modules(machine())
        assert found.status == "problem" and found.fix == "pip uninstall torchvision"
    monkeypatch.setattr(environment, "_MODULES", ("torch", "no_such_module"))
    found = environment.modules(machine())
    assert found.status == "problem" and found.value == "missing: no_such_module"


def test_packages_of_pythonpath_and_of_the_user(machine, tmp_path: Path):
    assert environment.user_packages(machine(PYTHONPATH="")).value == "none"
    fake_package(tmp_path, "transformers", "4.0.0")
    found = environment.user_packages(machine(PYTHONPATH=str(tmp_path)))
    assert found.status == "warning" and "transformers in" in found.value and "PYTHONNOUSERSITE" in found.fix


def test_packages_of_the_documentation(machine, monkeypatch):
    assert environment.documentation(machine()).status == "ok"
    real = environment.installed
    monkeypatch.setattr(environment, "installed", lambda name: None if name == "mkdocs-material" else real(name))
    found = environment.documentation(machine())
    assert found.status == "warning" and found.value == "missing: mkdocs-material" and "make docs" in found.fix


def test_python(machine, monkeypatch):
    assert environment.python(machine()).status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 10, 2))
    assert environment.python(machine()).status == "problem"


def test_no_heavy_import():
    heavy = {"torch", "trl", "transformers", "datasets", "vllm", "accelerate"}
    code = f"import sys, grpo_recipes.cli.machine; print(*{heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
