"""Children that import: what they say when an import fails or hangs. tests/e2e imports the real packages."""

from __future__ import annotations

import pytest

from grpo_recipes.doctor import environment
from grpo_recipes.doctor.examine import Machine, NoAnswer
from grpo_recipes.errors import ConfigError


@pytest.fixture
def broken_torch(tmp_path, monkeypatch):
    """A Python whose torch cannot be imported, as with a library missing."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    monkeypatch.setattr(
        environment, "base_environment", lambda environment: {**environment, "PYTHONPATH": str(tmp_path)}
    )


def test_a_torch_that_does_not_import_is_a_problem(machine, broken_torch):
    with pytest.raises(ConfigError, match=r"import of torch halted.*--rebuild"):
        environment.torch(machine())


def test_an_import_that_hangs_is_told(machine, monkeypatch):
    monkeypatch.setattr(environment, "_TRL", "import time; time.sleep(60)")
    with pytest.raises(NoAnswer, match="did not answer within"):
        environment.trl(Machine(machine().environment, patience=0.5))


def test_a_child_that_a_signal_ends_is_a_problem(machine, monkeypatch):
    monkeypatch.setattr(environment, "_VLLM", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    with pytest.raises(ConfigError, match="signal 4"):
        environment.vllm(machine())
