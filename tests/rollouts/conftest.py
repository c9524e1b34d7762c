"""The environments of the tests, found by name."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("envs")))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
