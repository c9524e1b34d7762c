"""Read the identity of a run: its command, and the state of its code. A resume compares both with the current ones.

The state is the commit with the uncommitted changes and the package locks (``read_code_state``). A submitted run has
a frozen copy of the code in its directory, and its state is a hash of that copy (``hash_frozen_code``).
"""

import contextlib
import hashlib
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.paths import display_path, find_code_root
from grpo_recipes.secrets import mask_secrets

FROZEN_CODE = "code"  # folder with the code of a submitted run
_GIT_SECONDS = 30.0


def format_own_command() -> str:
    """Return the command line of this process as the user types it, with masked secrets."""
    scripts = (find_code_root() / part / Path(sys.argv[0]).name for part in ("", "src"))  # entry scripts
    program = next((["python", display_path(script)] for script in scripts if script.is_file()), ["grpo"])
    return mask_secrets(shlex.join([*program, *sys.argv[1:]]))


def hash_frozen_code(folder: Path) -> str:
    """Return a SHA-256 of names and contents of the files in a run directory's ``code/``, without ``.pyc`` files."""
    digest = hashlib.sha256()
    for path in sorted((folder / FROZEN_CODE).rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def read_code_state() -> dict[str, Any]:
    """Return the state of the code: ``commit``, ``dirty``, ``patch``, ``patch_sha256`` and ``lock_sha256``.

    ``patch`` is the uncommitted diff of ``src`` and ``training.sh``, and ``dirty`` tells whether there is one.
    ``lock_sha256`` covers ``requirements/*.txt``. Without git, the commit comes from the file ``.commit`` of a
    container, or is None. Raise ConfigError if git takes more than 30 seconds.
    """
    commit_file = find_code_root() / ".commit"  # written by docker/install.sh, since a container's image has no git
    container_commit = commit_file.read_text().strip() if commit_file.is_file() else None
    commit = _run_git("rev-parse", "HEAD").strip() or container_commit
    patch = _run_git("diff", "HEAD", "--", "src", "training.sh") if commit else ""
    locks = b"".join(path.read_bytes() for path in sorted((find_code_root() / "requirements").glob("*.txt")))
    hashes = {"patch_sha256": patch.encode(), "lock_sha256": locks}
    digests = {key: hashlib.sha256(content).hexdigest() for key, content in hashes.items()}
    return {"commit": commit, "dirty": bool(patch), "patch": patch, **digests}


def _run_git(*arguments: str) -> str:
    """Return git's output for these arguments in the repository; "" without git or if it fails.

    Raise ConfigError after 30 seconds.
    """
    fault = f"git took more than {_GIT_SECONDS:.0f} seconds to report the state of the code in {find_code_root()}"
    timed_out = config_error("code", fault, "check the disk of that folder")
    with (
        contextlib.suppress(OSError, subprocess.CalledProcessError),  # no git, or no repository
        translate_errors(subprocess.TimeoutExpired, lambda _: timed_out),
    ):
        return subprocess.check_output(
            ["git", *arguments], cwd=find_code_root(), stderr=subprocess.DEVNULL, text=True, timeout=_GIT_SECONDS
        )
    return ""
