"""Checkpoints, complete or not listed; and proof that what a resume reads is what our code wrote.

XXH3 with 128 bits runs at the speed of memory, about ten times that of SHA-256, so a digest costs little beside writing
or reading the file. It finds what disks, copies and people change; nobody has to be kept from forging it. No torch.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import display_path
from grpo_recipes.runs.rundir import json_mapping, write_json

MARKER = "COMPLETE"
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)", re.ASCII)
_LARGE_BYTES = 2 << 30  # reading it takes seconds, so that a line says so
CHECKSUM = "checksum"  # key of a JSON object: a digest of its other keys
RECORD = "digests.json"  # in a run directory
# What a resume reads of a run directory beside its checkpoints. `code/` has a hash of its own in run.json; what the
# trainers share under `prompts/` is made anew by every attempt.
_RECORDED = (
    "run.json", "recipe.yaml", "plan.json", "sources.json", "accelerate.yaml", "rewards/*.py", "callbacks/*.py"
)  # fmt: skip
_FEW_BYTES = 64 * 2**20
_MOST_THREADS = 4
_RESTORE = (
    "restore what the run wrote, give a change of the recipe as a flag (--KEY VALUE), or add --allow-changed-code"
)
new_digest = xxhash.xxh3_128


def digest_of(path: Path) -> str:
    """Return the digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()


def _threads() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) - 1  # one is left to the caller
    return ThreadPoolExecutor(max(1, min(_MOST_THREADS, cores)), "digests")


def _differences(folder: Path, names: Iterable[str], digests: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Read files in several threads; yield each whose digest is another, and what is wrong with it."""

    def difference(name: str) -> tuple[str, str]:
        try:
            same = digest_of(folder / name) == digests.get(name)
            return name, "" if same else "was changed since the run wrote it"
        except OSError as error:
            return name, f"cannot be read ({error.strerror})"

    with _threads() as pool:
        yield from ((name, what) for name, what in pool.map(difference, names) if what)


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a digest of its other keys; it equals ``content`` where that has the right one."""
    others = {key: value for key, value in content.items() if key != CHECKSUM}
    return {**others, CHECKSUM: new_digest(json.dumps(others, sort_keys=True).encode()).hexdigest()}


def publish_checkpoint(
    staged: Path, folder: Path, step: int, world_size: int, digests: Mapping[str, str] | None = None
) -> None:
    """Mark a staged checkpoint, every rank's part of it written, complete and put it into ``folder``.

    ``digests`` are those made while the files were written, by name; the other files are read back.
    """
    paths = sorted(path for path in staged.rglob("*") if path.is_file())
    files = {str(path.relative_to(staged)): path.stat().st_size for path in paths}
    known = {name: digest for name, digest in (digests or {}).items() if name in files}
    unknown = [name for name in files if name not in known]
    with ExitStack() as ended:
        to_read = [staged / name for name in unknown]  # from the page cache
        read: Iterator[str] = map(digest_of, to_read)
        # A thread that gets no memory to begin with is waited for by Python without end: few bytes need none.
        if sum(files[name] for name in unknown) > _FEW_BYTES:
            pool = ended.enter_context(_threads())
            ended.callback(pool.shutdown, cancel_futures=True)  # a disk that fails ends the save at once
            read = pool.map(digest_of, to_read)
        for path in paths:
            flush_to_disk(path)
        known |= zip(unknown, read, strict=True)
    content = {"step": step, "world_size": world_size, "files": files, "digests": known}
    (staged / MARKER).write_text(json.dumps(with_checksum(content), indent=1))
    flush_to_disk(staged / MARKER)
    target = folder / staged.name
    if target.exists():  # left incomplete by other software or a broken disk: never resumed, in the way
        shutil.rmtree(target)
    staged.rename(target)
    flush_to_disk(folder)


def flush_to_disk(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    with ExitStack() as opened:
        opened.callback(os.close, descriptor)
        os.fsync(descriptor)


def _marker(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's marker; None unless it is one that ``publish`` wrote for this folder."""
    content = json_mapping(checkpoint / MARKER)
    if content is None or not _NAME.fullmatch(checkpoint.name) or content.get("step") != step_of(checkpoint):
        return None
    files, world_size = content.get("files"), content.get("world_size")
    if not isinstance(files, dict) or not all(isinstance(size, int) for size in [world_size, *files.values()]):
        return None
    return content if content == with_checksum(content) or not _is_verifiable(content) else None


def _is_verifiable(marker: Mapping[str, Any]) -> bool:
    return "digests" in marker or CHECKSUM in marker  # those of earlier versions had sizes alone


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file that the marker lists is there in its full size; their bytes are not read."""
    marker = _marker(checkpoint)
    return marker is not None and not _wrong_size(checkpoint, marker["files"])


def _wrong_size(checkpoint: Path, files: Mapping[str, int]) -> str:
    """Return what is wrong with the first file that is missing, or has another size than the marker says."""
    for name, size in files.items():
        found = -1
        with suppress(OSError, ValueError):  # not there, or a name that no file can have
            found = (checkpoint / name).stat().st_size
        if found != size:
            return f"{name} is missing" if found < 0 else f"{name} has {found:,} of {size:,} bytes"
    return ""


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest step first."""
    return [path for path in checkpoint_folders(folder) if is_complete(path)]


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders that are named as checkpoints are, oldest step first, without ``checkpoint-6.bak``."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step a checkpoint folder is named after."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def world_size_of(checkpoint: Path) -> int:
    """Return how many training processes made a complete checkpoint."""
    return int(json.loads((checkpoint / MARKER).read_text())["world_size"])


def newest_complete(folder: Path) -> Path | None:
    """Return the newest checkpoint that has every file in its full size, or None."""
    return next(iter(complete_checkpoints(folder)[::-1]), None)


def verified_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume from, each byte of it verified; None where none was ever saved.

    It is ``newest_complete`` afterwards, for the ranks too: damaged checkpoints that are newer are renamed to
    ``checkpoint-6.damaged``. Nothing is deleted. ``say`` prints a line for the user. Where there are checkpoints and
    none can be resumed, or the folder is something else, that is a ConfigError, and nothing is renamed.
    """
    if folder.exists() and not folder.is_dir():
        raise config_error(display_path(folder), "is not a folder; a run keeps its checkpoints there", "move it away")
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(checkpoint_folders(folder)):
        what = find_damage(checkpoint, say)
        if what is None:
            for other, why in damaged.items():
                endings = itertools.chain([".damaged"], (f".damaged-{number}" for number in itertools.count(2)))
                names = (other.with_name(other.name + ending) for ending in endings)
                aside = other.rename(next(path for path in names if not path.exists())).name
                say(f"{other.name} is damaged: {why}; it is now {aside}, resuming from {checkpoint.name}")
            return checkpoint
        damaged[checkpoint] = what
    if damaged:
        each = ", ".join(f"{checkpoint.name} ({why})" for checkpoint, why in damaged.items())
        fix = "launch the recipe as a new run, or move this folder away to start this run again from step 0"
        raise config_error(display_path(folder), f"holds no checkpoint that can be resumed: {each}", fix)
    return None


def find_damage(checkpoint: Path, say: Callable[[str], None]) -> str | None:
    """Return what is wrong with a checkpoint, naming the file, or None. All of it is read, by several threads."""
    marker = _marker(checkpoint)
    if marker is None:
        return f"{MARKER} is {'damaged' if (checkpoint / MARKER).exists() else 'missing'}"
    files, total = marker["files"], sum(marker["files"].values())
    if wrong := _wrong_size(checkpoint, files):
        return wrong
    if not _is_verifiable(marker):
        say(f"note: {checkpoint.name} was saved without digests: its bytes cannot be verified")
        return None
    if total > _LARGE_BYTES:
        say(f"verifying {checkpoint.name} ({total / 1e9:.0f} GB)")
    largest_first = sorted(files, key=files.__getitem__, reverse=True)
    found = _differences(checkpoint, largest_first, marker["digests"])
    return next((f"{name} {what}" for name, what in found), None)


def prune(folder: Path, limit: int | None) -> None:
    """Remove complete checkpoints beyond the ``limit`` newest, and what interrupted saves left."""
    shutil.rmtree(folder / "partial", ignore_errors=True)
    if limit is None:
        return
    for path in complete_checkpoints(folder)[:-limit]:
        (path / MARKER).unlink()  # from here on it is not listed, however far the removal comes
        shutil.rmtree(path)


@contextmanager
def recording_changes(run_dir: Path) -> Iterator[None]:
    """Let our code write files of a run directory, then record the digests of all of them.

    There is no record meanwhile: a run that is killed in between resumes unverified, and is not refused.
    """
    (run_dir / RECORD).unlink(missing_ok=True)
    yield
    files = {name: digest_of(run_dir / name) for name in _recorded_files(run_dir)}
    write_json(run_dir / RECORD, with_checksum({"files": files}))


def _recorded_files(run_dir: Path) -> list[str]:
    found = [path for pattern in _RECORDED for path in run_dir.glob(pattern) if not path.name.startswith(".")]
    return sorted(str(path.relative_to(run_dir)) for path in found)


def verify_run_files(run_dir: Path, allow_changed: bool) -> list[str]:
    """Refuse a resume where what it reads of a run directory is not what our code wrote, one problem a file.

    Return notes for the user: what changed (with ``allow_changed``), or that this cannot be known.
    """
    path = run_dir / RECORD
    if not path.exists() or path.stat().st_size == 0:  # of an earlier version, or the node lost power as it was written
        return [f"cannot verify that recipe and plan are unchanged: {display_path(run_dir)} has no {RECORD}"]
    record = json_mapping(path)
    if record is None or record != with_checksum(record):
        found = [(RECORD, "is damaged: it cannot show that the files of the run are unchanged")]
    else:
        files = record["files"]
        found = [(name, "was not written by this run") for name in _recorded_files(run_dir) if name not in files]
        found += _differences(run_dir, files, files)
    problems = [Problem(display_path(run_dir / name), what, _RESTORE) for name, what in found]
    if problems and not allow_changed:
        raise ConfigError(*problems)
    return [f"{problem.where} {problem.what}; this attempt goes on with it as it is" for problem in problems]
