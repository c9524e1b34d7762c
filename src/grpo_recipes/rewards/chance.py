"""Seed the random numbers of rewards: a call draws the same numbers in any process and after a resume.

    from grpo_recipes.rewards.chance import make_call_seed, seed_libraries

    seed_libraries(make_call_seed(run_seed, generation, key))

``random``, ``numpy.random`` and torch are seeded, even if a call imports them itself. The operating system's sources,
such as ``os.urandom`` or ``numpy.random.default_rng()`` without a seed, cannot be seeded.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_SEEDERS = {"numpy.random": "seed", "torch": "manual_seed"}  # module -> its seeding function
_seed = 0  # the current call's seed, for modules that the call imports


def make_call_seed(*parts: object) -> int:
    """Hash ``parts``, for example the run's seed and the name of a call, to a seed for the call.

    The same parts give the same seed in every process. It has 32 bits, NumPy's limit.
    """
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4])


def seed_libraries(seed: int) -> None:
    """Seed ``random``, and NumPy and torch if they are imported.

    After a call of ``seed_later_imports``, libraries that are imported later also get this seed.
    """
    global _seed
    _seed = seed
    random.seed(seed)
    for name in _SEEDERS:
        if name in sys.modules:
            _seed_module(sys.modules[name])


def seed_later_imports() -> None:
    """Install an import hook that seeds NumPy and torch at their import with the last seed of ``seed_libraries``."""
    sys.meta_path.insert(0, _Finder())


def _seed_module(module: ModuleType) -> None:
    """Call the seeding function of ``numpy.random`` or ``torch`` with the last seed of ``seed_libraries``.

    Do nothing while another thread imports the module.
    """
    seed = getattr(module, _SEEDERS[module.__name__], None)  # None while another thread imports the module
    if seed is not None:
        seed(_seed)


class _Finder(importlib.abc.MetaPathFinder):
    """Find the modules in ``_SEEDERS`` with Python's own finder, and seed them after their import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the usual spec with a loader that seeds the module. None for modules that need no seed."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in _SEEDERS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


@dataclass(eq=False)
class _Loader(importlib.abc.Loader):
    """Load a module with its own loader, then seed it."""

    loader: importlib.abc.Loader

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the module's own loader."""
        return getattr(self.loader, name)  # some packages read resources or source code through the loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with its own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then seed it."""
        self.loader.exec_module(module)
        _seed_module(module)
