"""Compile the modules that a run imports during the set-up, because the first run would compile them at their import.

    python scripts/compile_imports.py             compile the folders that imported_folders.txt lists
    python scripts/compile_imports.py PREFIX      write imported_folders.txt, after a change of the locks

A run imports a quarter of the installed code. The list has the folders of site-packages of which a run imports at least
a quarter, by bytes. Importing the modules here would take longer than compiling them. PREFIX has the bytecode of a run:

    PYTHONPYCACHEPREFIX=PREFIX grpo launch recipes/smoke/grpo.yaml --max_steps 1
"""

import compileall
import ctypes
import os
import signal
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("imported_folders.txt")
PACKAGES = Path(sysconfig.get_path("purelib"))
_LEAST = 0.25  # imported part of a folder in the list
_MOST_PROCESSES = 8
_PR_SET_PDEATHSIG = 1


def compile_folders() -> None:
    """Compile the modules in the listed folders and those of this project, in as many processes as there are cores."""
    folders = [PACKAGES / line for line in LIST.read_text().splitlines()]
    files = [file for folder in folders for file in folder.glob("*.py")]
    files += (ROOT / "src").rglob("*.py")
    files.sort(key=lambda file: file.stat().st_size, reverse=True)  # so that no process ends with a large module
    count = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    with ProcessPoolExecutor(count, initializer=_end_with_parent, initargs=(os.getpid(),)) as pool:
        list(pool.map(_compile, files, chunksize=20))


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this worker when its parent, which has this pid, is killed. It would wait for work forever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _compile(file: Path) -> None:
    """Write the bytecode of a module, except if it is up to date or the module has a syntax error."""
    compileall.compile_file(file, quiet=2)


def find_imports(prefix: Path) -> list[Path]:
    """Return the files of site-packages whose bytecode is in ``prefix``."""
    folder = prefix / PACKAGES.relative_to("/")
    sources = (path.with_name(path.name.partition(".")[0] + ".py") for path in folder.rglob("*.pyc"))
    return [PACKAGES / source.relative_to(folder) for source in sources]


def choose_folders(imports: Iterable[Path]) -> list[str]:
    """Return the folders, relative to site-packages, of which ``imports`` are a large part."""
    sizes = Counter[Path]()
    for file in imports:
        sizes[file.parent] += file.stat().st_size
    totals = {folder: sum(file.stat().st_size for file in folder.glob("*.py")) for folder in sizes}
    large = (folder for folder, size in sizes.items() if size >= _LEAST * totals[folder])
    return sorted(str(folder.relative_to(PACKAGES)) for folder in large)


if __name__ == "__main__":
    if prefixes := sys.argv[1:]:
        LIST.write_text("".join(f"{name}\n" for name in choose_folders(find_imports(Path(prefixes[0])))))
    else:
        compile_folders()
