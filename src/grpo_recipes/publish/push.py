"""One commit to a repository of the hub, in a process of its own.

    python -m grpo_recipes.publish.push JOB.json

The launcher starts it: trainers and server run offline, and a push that fails or hangs must not touch them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.secrets import masked

WAITS = (5.0, 20.0)  # seconds between attempts
_LONGEST_WAIT = 300.0
_LONGEST_PUSH = 2 * 3600.0
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


@dataclass(frozen=True)
class Job:
    """What to push.

    Attributes:
        repo: ``user/name``.
        private: whether it is private when it is made.
        branch: branch that gets the commit.
        message: of the commit.
        folders: local folder -> folder in the repository, "" for its root.
        result: file that tells how it ended.
        waits: seconds between attempts; one attempt more than waits.
    """

    repo: str
    private: bool
    branch: str
    message: str
    folders: dict[str, str]
    result: str
    waits: tuple[float, ...]

    def write(self, path: Path) -> None:
        """Leave the job for the process that does it."""
        write_json(path, asdict(self))


def main(path: str) -> int:
    """Do the job, a bounded number of times."""
    job = Job(**json.loads(Path(path).read_text()))
    error = ""
    for wait in (0.0, *job.waits):
        time.sleep(wait)
        try:
            write_json(Path(job.result), push(job))
            return 0
        except Exception as failure:  # whatever it is, the run must hear of it and go on
            error = masked(f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}")
            print(f"grpo: push to {job.repo} failed: {error}", flush=True)
    attempts = len(job.waits) + 1
    write_json(Path(job.result), {"repo": job.repo, "error": f"{error} ({attempts} attempts)"})
    return 1


def push(job: Job) -> dict[str, Any]:
    """Make the repository and the branch if they are not there, and add one commit with all files.

    ``HfApi.upload_folder`` would make several commits of a large folder; half a model must never be the newest one.

    Returns:
        repo, revision, commit and url.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    api.create_repo(job.repo, private=job.private, exist_ok=True)
    if job.branch != "main":
        api.create_branch(job.repo, branch=job.branch, exist_ok=True)
    files = {inside: path for folder, root in job.folders.items() for inside, path in _files(Path(folder), root)}
    there = api.list_repo_files(job.repo, revision=job.branch)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationDelete(name) for name in stale(there, files, job.folders.values())
    ]
    operations += [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
    done = api.create_commit(job.repo, operations, commit_message=job.message, revision=job.branch)
    url = f"{api.endpoint}/{job.repo}/tree/{job.branch}"
    return {"repo": job.repo, "revision": job.branch, "commit": done.oid, "url": url}


def stale(there: Iterable[str], new: Iterable[str], roots: Iterable[str]) -> list[str]:
    """Files of earlier pushes that would be read together with the new ones.

    Args:
        there: files of the repository.
        new: files of this push.
        roots: folders of the repository that are pushed, "" for its root.

    Returns:
        Weights in the root that are not new (an old model.safetensors is preferred to new shards), and everything that
        is not new in the other folders.
    """
    kept, folders = set(new), [root for root in roots if root]
    whole = [name for name in there if name not in kept and any(name.startswith(f"{root}/") for root in folders)]
    if "" not in roots:
        return whole
    return whole + [name for name in there if name not in kept and "/" not in name and name.endswith(_WEIGHTS)]


def _files(folder: Path, root: str) -> Iterable[tuple[str, Path]]:
    """Names in the repository and files; a pickle of our arguments has no place beside the model."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (root or path.name != "training_args.bin"):
            name = str(path.relative_to(folder))
            yield (f"{root}/{name}" if root else name), path


def wait_for(child: subprocess.Popen[bytes]) -> str:
    """Wait for the last push, which Ctrl-C, SIGTERM or the time limit cuts off.

    Returns:
        Why it was cut off, or nothing.
    """
    seen: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {signum: signal.signal(signum, lambda number, _: seen.append(number)) for signum in signals}
    deadline, reason = time.monotonic() + _LONGEST_PUSH, ""
    while child.poll() is None and not reason:
        if seen:
            reason = f"stopped by {signal.Signals(seen[0]).name}"
        elif time.monotonic() > deadline:
            reason = f"not finished after {_LONGEST_PUSH / 3600:.0f} hours"
        time.sleep(0.1)
    if reason:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    for signum, handler in before.items():
        signal.signal(signum, handler)
    return reason


if __name__ == "__main__":
    die_with_parent(os.getppid(), signal.SIGKILL)  # SIGTERM is ignored by the launcher's last processes
    from grpo_recipes.fetch.client import bound_every_wait

    bound_every_wait(_LONGEST_WAIT)
    sys.exit(main(sys.argv[1]))
