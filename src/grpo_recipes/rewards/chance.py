"""Random numbers of rewards: the same call of a run draws the same numbers, in any process and after a resume.

    from grpo_recipes.rewards.chance import call_seed, seed_libraries

    seed_libraries(call_seed(run_seed, generation, key))

``random``, ``numpy.random`` and torch are seeded, also if a call imports them itself. Sources of the operating system,
such as ``os.urandom`` or ``numpy.random.default_rng()`` without a seed, cannot be seeded.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_SEEDERS = {"numpy.random": "seed", "torch": "manual_seed"}  # module -> its function that seeds
_seed = 0  # of the current call, for modules that the call imports


def call_seed(*parts: Any) -> int:
    """Return a seed of 32 bits, which numpy's limit is, from a run's seed and the name of a call."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4])


def seed_libraries(seed: int) -> None:
    """Seed every library that is imported, and those that are imported until the next call of this function."""
    global _seed
    _seed = seed
    random.seed(seed)
    for name in _SEEDERS:
        if name in sys.modules:
            _seed_module(sys.modules[name])


def seed_later_imports() -> None:
    """Have libraries seeded as soon as they are imported."""
    sys.meta_path.insert(0, _Finder())


def _seed_module(module: ModuleType) -> None:
    seed = getattr(module, _SEEDERS[module.__name__], None)  # None while another thread imports the module
    if seed is not None:
        seed(_seed)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules in ``_SEEDERS`` as Python does, and has them seeded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the usual spec with a loader that seeds; None for every other module."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in _SEEDERS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, and seeds it."""

    def __init__(self, loader: importlib.abc.Loader):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # resources and source code, which some packages ask for

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return what the module's own loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then seed it."""
        self._loader.exec_module(module)
        _seed_module(module)
