from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def beside_the_recipe(tmp_path, monkeypatch) -> None:
    """Change to the folder of the test's recipes, so that messages show the names of files without a folder."""
    monkeypatch.chdir(tmp_path)
