"""Fixtures of the tests of generated problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_recipes import smoke


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: for such small models, several threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return a tokenizer with a chat template."""
    return smoke.build_tokenizer()


@pytest.fixture
def beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the folder of the recipes: messages contain paths relative to it."""
    monkeypatch.chdir(tmp_path)
