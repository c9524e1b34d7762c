"""The start and the end of a trainer process."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from grpo_recipes.process.startup import fast_imports, hidden_packages

EXITING = """
import atexit, sys, threading
from grpo_recipes.process.startup import exit_at_once

class Garbage:
    def __del__(self):
        print("searched for garbage")

garbage = Garbage()
garbage.self = garbage
atexit.register(print, "atexit")
print("last line", end="")
exit_at_once()
"""


def test_a_hidden_package_looks_as_if_it_were_not_installed() -> None:
    sys.modules.pop("wave", None)

    with hidden_packages("wave"):
        assert importlib.util.find_spec("wave") is None
        with pytest.raises(ModuleNotFoundError):
            import wave

    import wave

    assert wave.open
    with hidden_packages("wave"):  # already imported
        assert importlib.util.find_spec("wave") is not None


def test_objects_of_the_imports_are_exempt_from_garbage_collection() -> None:
    sys.modules.pop("wave", None)
    frozen = gc.get_freeze_count()
    with fast_imports("wave"):
        assert not gc.isenabled() and importlib.util.find_spec("wave") is None
        permanent = [[]]  # type: ignore[var-annotated]
    try:
        assert gc.isenabled() and gc.get_freeze_count() > frozen
        assert not any(thing is permanent for thing in gc.get_objects())
    finally:
        gc.unfreeze()


def test_installed_packages_are_listed_once_in_the_block() -> None:
    listed = importlib.metadata.packages_distributions
    with fast_imports():
        assert importlib.metadata.packages_distributions() is importlib.metadata.packages_distributions()
    gc.unfreeze()
    assert importlib.metadata.packages_distributions is listed


def test_exit_at_once_writes_what_was_printed_and_searches_no_garbage() -> None:
    result = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=60)

    assert result.returncode == 0
    assert result.stdout == "last lineatexit\n"
