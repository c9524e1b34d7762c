"""Run a command as if the extensions and the console were deleted; `make test` runs the core's tests in this way.

    python tests/core_alone.py python -m pytest tests/recipe

The command gets a mount namespace in which ``src/grpo_recipes`` is a copy without them. If Linux does not allow this,
for example without root, the command runs with them, and a line says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from packages import ABOVE, SOURCE

# The copy is in memory, and ends with the namespace. With the times of the files, Python's bytecode in it stays valid.
DELETE = """
source=$1 folder=$2 && shift 2 && mount -t tmpfs tmpfs "$folder" && cp -a "$source/." "$folder" || exit 1
while [ "$1" != -- ]; do rm -r "$folder/$1" || exit 1; shift; done
mount --move "$folder" "$source" && rmdir "$folder" && shift && exec "$@"
"""
ALONE = "GRPO_CORE_ALONE"  # the command's variable: "1" if they are deleted


def unshare(*command: str) -> list[str]:
    """Return the command line that gives a command a mount namespace."""
    return ["unshare", "--mount", "--", *command]


def can_mount(folder: str) -> bool:
    """Return whether this process may mount a folder in a namespace."""
    trial = unshare("mount", "-t", "tmpfs", "tmpfs", folder)
    try:
        return subprocess.run(trial, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def main(command: list[str]) -> NoReturn:
    """Become the command."""
    folder = tempfile.mkdtemp(prefix="core-alone-")
    if can_mount(folder):
        names = [name.replace(".", "/") for name in ABOVE]
        os.environ[ALONE] = "1"
        command = unshare("sh", "-c", DELETE, "sh", str(SOURCE), folder, *names, "--", *command)
    else:
        os.rmdir(folder)
        print("core_alone.py: the extensions stay, because this system does not let us mount a folder", flush=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
