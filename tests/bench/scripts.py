"""The scripts of bench/ as modules of a test."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

HOME = Path(__file__).resolve().parents[2]


@contextmanager
def script(name: str, alias: str = "", threads: int = 0) -> Iterator[ModuleType]:
    """Yield a script, whose neighbours it finds as when it is run; then the import path and torch are as before.

    Args:
        name: of the file in bench/, without its ending.
        alias: the module's name, where a package of the tests has that of the file.
        threads: of torch meanwhile, where the script does not set them itself.
    """
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "bench"))
        module = _loaded(name, alias) if alias else importlib.import_module(name)
        torch.set_num_threads(threads or torch.get_num_threads())
        yield module
    torch.set_num_threads(before)


def _loaded(name: str, alias: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(alias, HOME / f"bench/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
