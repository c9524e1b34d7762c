"""Digests of the files that a resume reads, so that a byte that changed at the same size is noticed. No torch.

XXH3 with 128 bits runs at the speed of memory, about ten times that of SHA-256, so a digest costs little beside writing
or reading the file. It finds what disks, copies and people change; nobody has to be kept from forging it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.paths import shown
from grpo_recipes.runs.rundir import write_json

CHECKSUM = "checksum"  # key of a JSON object: a digest of its other keys
RECORD = "digests.json"  # in a run directory
# What a resume reads of a run directory beside its checkpoints. `code/` has a hash of its own in run.json; what the
# trainers share under `prompts/` is made anew by every attempt.
_RECORDED = (
    "run.json", "recipe.yaml", "plan.json", "sources.json", "accelerate.yaml", "rewards/*.py", "callbacks/*.py"
)  # fmt: skip
_MOST_THREADS = 4
_GO_ON = "or add --allow-changed-code to go on with it as it is"
_FIXES = {
    "recipe.yaml": f"put it back and give the change as a flag (--KEY VALUE), {_GO_ON}",
    RECORD: "add --allow-changed-code to go on unverified",
}
_ADDED = "was not written by this run"


new_digest = xxhash.xxh3_128


def digest_of(path: Path) -> str:
    """Return the digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


@contextmanager
def digests_under_way(folder: Path, names: Iterable[str]) -> Iterator[Iterator[tuple[str, str | OSError]]]:
    """Read files in threads while the caller does something else.

    Yields:
        Name and digest of each file, in the order given, or the error for which it could not be read.
    """
    names = list(names)

    def digest(name: str) -> tuple[str, str | OSError]:
        try:
            return name, digest_of(folder / name)
        except OSError as error:
            return name, error

    cores = len(os.sched_getaffinity(0)) - 1  # one is left to the caller
    pool = ThreadPoolExecutor(max(1, min(_MOST_THREADS, cores)), "digests")
    try:
        yield pool.map(digest, names)
    finally:
        pool.shutdown(cancel_futures=True)


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a digest of itself."""
    return {**content, CHECKSUM: _checksum(content)}


def has_its_checksum(content: Mapping[str, Any]) -> bool:
    """Return whether an object that ``with_checksum`` made is as it was."""
    return content.get(CHECKSUM) == _checksum({key: value for key, value in content.items() if key != CHECKSUM})


def _checksum(content: Mapping[str, Any]) -> str:
    return new_digest(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def rewriting(run_dir: Path) -> Iterator[None]:
    """Let our code write files of a run directory, then record the digests of all of them.

    There is no record meanwhile: after a kill in these moments the run resumes unverified, and is not refused for a
    file that we had just written.
    """
    (run_dir / RECORD).unlink(missing_ok=True)
    yield
    write_json(
        run_dir / RECORD, with_checksum({"files": {name: digest_of(run_dir / name) for name in _files(run_dir)}})
    )


def _files(run_dir: Path) -> list[str]:
    found = [path for pattern in _RECORDED for path in run_dir.glob(pattern) if not path.name.startswith(".")]
    return sorted(str(path.relative_to(run_dir)) for path in found)


def need_same_files(run_dir: Path, allow_changed: bool) -> list[str]:
    """Check that what a resume reads of a run directory is what our code wrote there.

    Args:
        run_dir: the run directory.
        allow_changed: go on with files that changed.

    Returns:
        Notes for the person who watches: what changed, or that this cannot be known.

    Raises:
        ConfigError: files changed, one problem each.
    """
    try:
        text = (run_dir / RECORD).read_text()
    except FileNotFoundError:
        text = ""
    except (OSError, ValueError):
        text = "unreadable"
    if not text:  # of an earlier version, or of a node that lost power in the moment of writing
        return [f"cannot verify that recipe and plan are unchanged: {shown(run_dir)} has no {RECORD}"]
    problems = [Problem(shown(run_dir / name), what, _fix(name, what)) for name, what in _changes(run_dir, text)]
    if problems and not allow_changed:
        raise ConfigError(*problems)
    return [f"{problem.where} {problem.what}; this attempt goes on with it as it is" for problem in problems]


def _fix(name: str, what: str) -> str:
    if what == _ADDED:
        return f"remove it, {_GO_ON}"
    return _FIXES.get(name, f"put it back, {_GO_ON}")


def _changes(run_dir: Path, record: str) -> Iterator[tuple[str, str]]:
    """Yield each file that changed since the record was written, and what happened to it."""
    try:
        content = json.loads(record)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not has_its_checksum(content):
        yield RECORD, "is damaged: it cannot show that the files of the run are unchanged"
        return
    recorded, here = content["files"], _files(run_dir)
    yield from ((name, _ADDED) for name in here if name not in recorded)
    with digests_under_way(run_dir, recorded) as digests:
        for name, digest in digests:
            if isinstance(digest, OSError):
                yield name, f"cannot be read ({digest.strerror})"
            elif digest != recorded[name]:
                yield name, "was changed since the run wrote it"
