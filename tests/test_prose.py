"""scripts/prose.py counts stilted constructions in pages and in the strings of the source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/prose.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60)


def test_the_pages_and_texts_of_the_repository_are_plain() -> None:
    result = run()
    assert (result.stdout, result.returncode) == ("", 0)


def test_each_stilted_construction_is_printed_with_its_line(tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("A plain line.\n\nWhere no GPU is free, `that of` waits.\n\n```text\nbeside the code\n```\n")
    module.write_text("'beside'\n\n\nprint('the weights are those of a run')\n")

    lines = run(str(page), str(module)).stdout.splitlines()

    assert lines == [f"{page}:3: 'Where no': if, when", f"{module}:4: 'those of': repeat the noun"]
