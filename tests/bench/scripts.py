"""The scripts of bench/ and evidence/ as modules of a test."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

HOME = Path(__file__).resolve().parents[2]


@contextmanager
def script(name: str, alias: str = "", threads: int = 0, folder: str = "bench") -> Iterator[ModuleType]:
    """Yield a script that can import its neighbors; afterwards, restore the import path and torch's threads.

    Args:
        name: name of the file, without its ending.
        alias: name of the module, if a package of the tests has the file's name.
        threads: number of torch's threads, if the script does not set it.
        folder: folder of the file.
    """
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / folder))
        module = _loaded(HOME / folder / f"{name}.py", alias) if alias else importlib.import_module(name)
        torch.set_num_threads(threads or torch.get_num_threads())
        yield module
    torch.set_num_threads(before)


def _loaded(path: Path, alias: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(alias, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def restored_tables(module: ModuleType) -> list[str]:
    """Edit each table of the pages that a script writes, and check that the script restores it; return their names."""
    pages, names = sys.modules["pages"], list[str]()
    for page in (*sorted((HOME / "docs").glob("*.md")), *pages.READMES):
        text = page.read_text()
        for _, name, _ in pages.marked(module.SCRIPT).findall(text):
            names.append(name)
            table = module.TABLES[name]()
            if " runs are recorded so far" in table:
                continue
            row = table.splitlines()[-1]
            assert len(table.splitlines()) > 3 and re.search(r"\d", row)
            edited = text.replace(row, re.sub(r"\d", "7", row) + " 1 |")
            assert pages.filled(edited, module.SCRIPT, module.TABLES) == text
    return sorted(names)
