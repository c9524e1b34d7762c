"""The version of the code of a run: commit, uncommitted changes and locks, or the files frozen at submission."""

import contextlib
import hashlib
import subprocess
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error, translate
from grpo_recipes.paths import home

FROZEN_CODE = "code"  # folder with the code of a submitted run
_GIT_SECONDS = 30.0


def frozen_hash(folder: Path) -> str:
    """Return a hash of the names and contents of the frozen code in a run directory, without compiled files."""
    digest = hashlib.sha256()
    for path in sorted((folder / FROZEN_CODE).rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def code_state() -> dict[str, Any]:
    """Return commit, uncommitted patch of tracked files, whether there is a patch, and hashes of patch and locks.

    The commit is None without git and without the file ``.commit`` of a container.
    """
    commit_file = home() / ".commit"  # written by docker/install.sh, since a container's image has no git
    commit = _git("rev-parse", "HEAD").strip() or (commit_file.read_text().strip() if commit_file.is_file() else None)
    patch = _git("diff", "HEAD", "--", "src", "training.sh") if commit else ""
    locks = b"".join(path.read_bytes() for path in sorted((home() / "requirements").glob("*.txt")))
    hashes = {"patch_sha256": patch.encode(), "lock_sha256": locks}
    digests = {key: hashlib.sha256(content).hexdigest() for key, content in hashes.items()}
    return {"commit": commit, "dirty": bool(patch), "patch": patch, **digests}


def _git(*arguments: str) -> str:
    fault = f"git took more than {_GIT_SECONDS:.0f} seconds to report the state of the code in {home()}"
    timed_out = config_error("code", fault, "check the disk of that folder")
    with (
        contextlib.suppress(OSError, subprocess.CalledProcessError),  # no git, or no repository
        translate(subprocess.TimeoutExpired, lambda _: timed_out),
    ):
        return subprocess.check_output(
            ["git", *arguments], cwd=home(), stderr=subprocess.DEVNULL, text=True, timeout=_GIT_SECONDS
        )
    return ""
