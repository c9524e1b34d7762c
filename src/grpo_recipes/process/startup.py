"""Start and end a trainer faster: hide packages from TRL, and keep libraries out of Python's garbage collections.

    with fast_imports("vllm"):
        import trl
    ...
    exit_at_once()

TRL imports vLLM wherever it is installed, which takes a third of a trainer's start-up time. It imports wandb too, which
can't be hidden: TRL uses it at each checkpoint wherever it is installed.
"""

import atexit
import functools
import gc
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, cast

from grpo_recipes.attributes import replace_attributes

HIDDEN_PACKAGES = "GRPO_HIDDEN_PACKAGES"  # variable that the launcher sets for a trainer: names with spaces


@contextmanager
def hidden_packages(*names: str) -> Iterator[None]:
    """Make the packages look uninstalled in the block: importing them raises ModuleNotFoundError.

    Packages that are imported already are not changed.
    """
    hidden = [name for name in names if name not in sys.modules]
    modules = cast(dict[str, object], sys.modules)
    modules.update(dict.fromkeys(hidden))  # Python takes None for a missing module
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


@contextmanager
def fast_imports(*hidden: str) -> Iterator[None]:
    """Hide packages in the block like ``hidden_packages``, and exempt all objects of the block from garbage collection.

    Classes and functions of libraries are never garbage. In the block, collections would only search them. After it,
    each collection would search them again, and accelerate collects several times in each start of a training.
    The files of all installed packages are listed once: transformers and TRL each ask for them, for half a second.
    Garbage collection is on after the block, also if it was off before.
    """
    gc.disable()
    packages = functools.cache(importlib.metadata.packages_distributions)
    try:
        with hidden_packages(*hidden), replace_attributes(importlib.metadata, packages_distributions=packages):
            yield
    finally:
        freeze_imports()
        gc.enable()


def freeze_imports() -> None:
    """Exempt all present objects from garbage collection until the exit of Python.

    At the exit they are collected as usual. Otherwise Triton would print a list of them after the last log line.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


def exit_at_once() -> NoReturn:
    """Run the functions registered with ``atexit``, and end the process with exit code 0.

    Python's usual exit would first search all objects of torch and transformers for garbage, which takes 2 s.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
