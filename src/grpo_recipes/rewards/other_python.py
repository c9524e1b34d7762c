"""Start a child of the reward pool with the Python of another environment, e.g. of a library that conflicts with ours.

The child imports the other environment's packages. From this environment it gets only our code and the three small
packages that our code imports there, if the other environment does not have them.

    /envs/games/bin/python -P other_python.py FOLDERS PARENT_PID

The file runs on its own, before the child can import our package. The other Python must be 3.11 or later.
"""

import importlib.util
import os
import runpy
import sys
from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_OUR_CODE = "grpo_recipes"
_LENT = ("packaging", "psutil", "yaml")  # packages that our code imports; they run in each version of Python


def make_command(python: Path) -> list[str]:
    """Return the command that runs a child of this process with the interpreter ``python``."""
    specs = map(importlib.util.find_spec, (_OUR_CODE, *_LENT))
    folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin]
    return [str(python), "-P", __file__, os.pathsep.join(dict.fromkeys(folders)), str(os.getpid())]


class _Finder(MetaPathFinder):
    """Find only these packages, in these folders."""

    def __init__(self, packages: Collection[str], folders: Sequence[str]):
        self._packages, self._folders = packages, folders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the packages, or None for all other modules."""
        return PathFinder.find_spec(fullname, self._folders) if fullname in self._packages else None


if __name__ == "__main__":
    folders = sys.argv.pop(1).split(os.pathsep)
    sys.path.append(folders[0])
    sys.meta_path.insert(0, _Finder([_OUR_CODE], folders))  # another version of our code has another protocol
    sys.meta_path.append(_Finder(_LENT, folders))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    runpy.run_module(f"{_OUR_CODE}.rewards.child", run_name="__main__", alter_sys=True)
