from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def beside_the_recipe(tmp_path, monkeypatch) -> None:
    """Stand where the tests write their recipes: messages name a file as it is typed from there."""
    monkeypatch.chdir(tmp_path)
