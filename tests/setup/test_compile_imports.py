"""scripts/compile_imports.py: the modules that the set-up compiles are those that a run imports."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/compile_imports.py"


def test_every_module_exists() -> None:
    spec = importlib.util.spec_from_file_location("compile_imports", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for names in script.MODULES.values():
        for name in names:
            source = Path(*name.split("."))
            folders = [Path(folder) for folder in sys.path]
            files = [folder / f for folder in folders for f in (source.with_suffix(".py"), source / "__init__.py")]
            assert any(file.is_file() for file in files), name


@pytest.mark.slow
def test_importing_compiles_thousands_of_modules(tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-X", f"pycache_prefix={tmp_path}", str(SCRIPT), "trainer"]
    subprocess.run(
        command, env=variables, check=True, timeout=300, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert sum(1 for _ in tmp_path.rglob("*.pyc")) > 3000
