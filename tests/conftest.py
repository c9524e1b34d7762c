"""Recipes and plans made on the spot, for every unit test."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from core_alone import ALONE
from hypothesis import settings
from needs import deleted, ignore_file, ignore_test
from private_network import pytest_configure
from ran_tests import pytest_runtest_logreport
from whole_runs import leave_out_if_late, sort_key

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node, Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.ports import _RESERVED
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.process.startup import freeze_imports
from grpo_recipes.recipe import Recipe, read_recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.slurm.client import SlurmJob

__all__ = ["pytest_configure", "pytest_runtest_logreport"]

# accelerate parses the metadata of PEFT and DeepSpeed in each training step, and TRL lists all installed packages.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)
# Modules are never garbage: collections search them neither while they are imported nor later.
gc.disable()

# The same examples in every run; --hypothesis-profile=explore draws others.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile("same")

RIGHT = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "dataset_name": "openai/gsm8k",
    "prompts_per_step": 12,
    "num_generations": 4,
    "use_vllm": True,
    "vllm_max_model_length": 2048,
}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out files and folders whose tests do not belong to this run."""
    return True if ignore_file(collection_path) else None


def pytest_sessionstart() -> None:
    """Check that a session which shall run without extensions has none."""
    assert bool(os.environ.get(ALONE)) <= bool(deleted()), "core_alone.py has deleted nothing"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of another part of `make test`, and sort the others."""
    items.sort(key=lambda item: sort_key(item.path))
    ignored = {item for item in items if ignore_test(item.path, item.name, getattr(item, "originalname", item.name))}
    config.hook.pytest_deselected(items=list(ignored))
    items[:] = [item for item in items if item not in ignored]


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collection."""
    freeze_imports()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start no slow test when the time of CI is over."""
    leave_out_if_late(item)


@pytest.fixture(autouse=True)
def commands_leave_nothing() -> Iterator[None]:
    """Restore what our commands changed in this process: variables and reserved ports.

    Variables not by ``monkeypatch``, which some tests undo before they call a command.
    """
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HOME", "HF_TOKEN_PATH", "CUDA_VISIBLE_DEVICES")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    while _RESERVED:  # else a run that a later test starts has other ports, and a note about it
        _RESERVED.popitem()[1].close()


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Recipe]:
    """``read(flags=..., variables=..., KEY=VALUE, ...)``: a right recipe, these keys changed, read from a file."""

    def read_it(
        flags: Sequence[str] = (), variables: Mapping[str, str] | None = None, without: str = "", **changes: Any
    ) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in {**RIGHT, **changes}.items() if key != without}))
        return read_recipe(path, flags, variables)

    return read_it


@pytest.fixture
def planned(read: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Plan]:
    """``planned(gpus=..., job=..., environment=..., KEY=VALUE, ...)``: the plan of a right recipe with keys changed."""

    def plan_it(
        *,
        recipe: Recipe | None = None,
        gpus: Sequence[str] = ("0", "1", "2", "3"),
        device: str = "cuda",
        job: SlurmJob | None = None,
        nodes: Sequence[Node] = (),
        flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> Plan:
        environment = {"CACHE_ROOT": str(tmp_path / "cache"), **(environment or {})}
        recipe = recipe or read(flags, environment, **changes)
        if problems := check(recipe, environment):  # resolve_recipe does the same for every command
            raise ConfigError(*problems)
        resources = Resources(device, tuple(gpus) if device == "cuda" else (), 8, job, tuple(nodes))
        name = recipe["run_name"] or "unnamed"
        names = Names(Path(recipe["run_root"]) / f"{name}-stamp", name, f"{name}-abcd", "stamp")
        return make_plan(recipe, resources, environment, names)

    return plan_it


def option(argv: Sequence[str], flag: str) -> str:
    """The value that follows ``flag`` in an argv."""
    return argv[list(argv).index(flag) + 1]


@pytest.fixture(name="option")
def option_fixture() -> Callable[[Sequence[str], str], str]:
    """``option(argv, flag)``: the value that follows ``flag`` in an argv."""
    return option
