"""Publish and verify checkpoints: a checkpoint is complete or it is not listed.

Rank 0 moves a checkpoint into place once all ranks have written it. A marker file, ``COMPLETE``, then lists the size
and the digest of each file. Before a resume, every byte of the checkpoint and of the run's own files is verified. The
digest is XXH3 with 128 bits. It is about ten times as fast as SHA-256, so it costs little compared with reading or
writing the file. It detects damage and edits, not forgery. No torch.

    checkpoint = find_verified_checkpoint(run.folder / "checkpoints", print)
"""

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
from grpo_recipes.runs.commands import fill_commands
from grpo_recipes.runs.rundir import Run, load_json_mapping, write_json

MARKER = "COMPLETE"
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)", re.ASCII)
_LARGE_BYTES = 2 << 30  # verifying more than this takes seconds, so a line announces it
CHECKSUM = "checksum"  # key of a JSON object: the digest of its other keys
RECORD = "digests.json"  # in a run directory
# Files of a run directory that a resume reads, next to its checkpoints. `code/` has its own hash in run.json, and
# `prompts/` has its own digests.
_RECORDED = (
    "run.json", "recipe.yaml", "plan.json", "sources.json", "accelerate.yaml", "rewards/*.py", "callbacks/*.py"
)  # fmt: skip
_FEW_BYTES = 64 * 2**20
_MOST_THREADS = 4
_BUFFER_BYTES = 2**20
_RESTORE = (
    "restore the file that the run wrote, change the recipe with a flag (--KEY VALUE), or add --allow-changed-code"
)
new_digest = xxhash.xxh3_128


class VerificationStopped(Exception):
    """The caller of a verification does not need its result any more."""


def never() -> bool:
    """Return False."""
    return False


def compute_digest(path: Path, stopped: Callable[[], bool] = never) -> str:
    """Return the XXH3 digest of a file's bytes as hexadecimal text.

    Raise VerificationStopped soon after ``stopped()`` becomes true.
    """
    digest, buffer = new_digest(), memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            if stopped():
                raise VerificationStopped
            digest.update(buffer[:size])
    return digest.hexdigest()


def _make_thread_pool() -> ThreadPoolExecutor:
    """Return a pool of up to 4 threads for digests, which leaves one core to the caller."""
    cores = len(os.sched_getaffinity(0)) - 1  # the caller uses one core
    return ThreadPoolExecutor(max(1, min(_MOST_THREADS, cores)), "digests")


def _find_changed_files(
    folder: Path, names: Iterable[str], digests: Mapping[str, str], stopped: Callable[[], bool] = never
) -> Iterator[tuple[str, str]]:
    """Read files in several threads; yield name and fault of each file that is unreadable or has another digest.

    ``digests`` maps the names to the expected digests. Raise VerificationStopped soon after ``stopped()`` becomes true.
    """

    def find_difference(name: str) -> tuple[str, str]:
        """Return a file's name and its fault, "" if the file in ``folder`` has the digest in ``digests``.

        A file without a digest there counts as changed. An unreadable file is a fault too: no OSError is raised.
        """
        try:
            is_same = compute_digest(folder / name, stopped) == digests.get(name)
            return name, "" if is_same else "was changed since the run wrote it"
        except OSError as error:
            return name, f"cannot be read ({error.strerror})"

    with _make_thread_pool() as pool:
        yield from ((name, fault) for name, fault in pool.map(find_difference, names) if fault)


def add_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON object whose key ``checksum`` is the digest of its other keys.

    An existing checksum is replaced. So the copy equals ``content`` only if its checksum was correct.
    """
    other_keys = {key: value for key, value in content.items() if key != CHECKSUM}
    return {**other_keys, CHECKSUM: new_digest(json.dumps(other_keys, sort_keys=True).encode()).hexdigest()}


def publish_checkpoint(
    staged: Path, folder: Path, step: int, world_size: int, digests: Mapping[str, str] | None = None
) -> None:
    """Flush a staged checkpoint to disk, write its marker file, and move it into ``folder``.

    Call it after every rank has written its part. The marker contains ``step``, ``world_size`` (the number of ranks),
    and the size and digest of each file. ``digests`` has the digests that were computed during writing, by file name.
    All other files are read again. A checkpoint of the same name is replaced, also if it is complete.
    """
    paths = sorted(path for path in staged.rglob("*") if path.is_file())
    files = {str(path.relative_to(staged)): path.stat().st_size for path in paths}
    all_digests = {name: digest for name, digest in (digests or {}).items() if name in files}
    missing_names = [name for name in files if name not in all_digests]
    with ExitStack() as exits:
        missing_paths = [staged / name for name in missing_names]  # still in the page cache
        missing_digests: Iterator[str] = map(compute_digest, missing_paths)
        # Few bytes need no threads: Python waits forever for a thread that fails to start because memory is short.
        if sum(files[name] for name in missing_names) > _FEW_BYTES:
            pool = exits.enter_context(_make_thread_pool())
            exits.callback(pool.shutdown, cancel_futures=True)  # a failing disk ends the save at once
            missing_digests = pool.map(compute_digest, missing_paths)
        for path in paths:
            flush_to_disk(path)
        all_digests |= zip(missing_names, missing_digests, strict=True)
    content = {"step": step, "world_size": world_size, "files": files, "digests": all_digests}
    (staged / MARKER).write_text(json.dumps(add_checksum(content), indent=1))
    flush_to_disk(staged / MARKER)
    target = folder / staged.name
    if target.exists():  # an incomplete checkpoint of other software or a broken disk, which is never resumed
        shutil.rmtree(target)
    staged.rename(target)
    flush_to_disk(folder)


def flush_to_disk(path: Path) -> None:
    """Wait until the system has written a file or folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_marker(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's marker; None if it is missing, damaged or of another step than the folder's name."""
    content = load_json_mapping(checkpoint / MARKER)
    if content is None or not _NAME.fullmatch(checkpoint.name) or content.get("step") != parse_step(checkpoint):
        return None
    files, world_size = content.get("files"), content.get("world_size")
    if not isinstance(files, dict) or not all(isinstance(size, int) for size in [world_size, *files.values()]):
        return None
    return content if content == add_checksum(content) or not _is_verifiable(content) else None


def _is_verifiable(marker: Mapping[str, Any]) -> bool:
    """Return whether a marker contains digests; markers of earlier versions contain only sizes."""
    return "digests" in marker or CHECKSUM in marker


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint has a valid marker, and every file in the marker exists with its full size.

    The contents of the files are not read.
    """
    marker = _read_marker(checkpoint)
    return marker is not None and not _find_wrong_size(checkpoint, marker["files"])


def _find_wrong_size(checkpoint: Path, files: Mapping[str, int]) -> str:
    """Describe the first file that is missing or does not have the size in the marker; "" if there is none."""
    for name, size in files.items():
        actual_size = -1
        with suppress(OSError, ValueError):  # missing, or a name that no file can have
            actual_size = (checkpoint / name).stat().st_size
        if actual_size != size:
            return f"{name} is missing" if actual_size < 0 else f"{name} has {actual_size:,} of {size:,} bytes"
    return ""


def list_complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in ``folder``, oldest step first; an empty list if the folder does not exist."""
    return [path for path in list_checkpoint_folders(folder) if is_complete(path)]


def list_checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders named ``checkpoint-STEP``, complete or not, oldest step first.

    Folders with other names, such as ``checkpoint-6.bak``, are left out.
    """
    paths = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=parse_step)


def parse_step(checkpoint: Path) -> int:
    """Return the optimizer step in a checkpoint folder's name: 6 for ``checkpoint-6``."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def read_world_size(checkpoint: Path) -> int:
    """Return the number of training processes that saved a complete checkpoint, from its marker file."""
    return int(json.loads((checkpoint / MARKER).read_text())["world_size"])


def find_newest_complete(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in ``folder``, or None if there is none.

    Only the sizes of its files are checked, not their contents.
    """
    return next(iter(list_complete_checkpoints(folder)[::-1]), None)


def find_verified_checkpoint(
    folder: Path, say: Callable[[str], None], stopped: Callable[[], bool] = never
) -> Path | None:
    """Return the newest undamaged checkpoint in ``folder``, after verifying each of its bytes.

    Newer checkpoints that are damaged are renamed to ``checkpoint-6.damaged``, so that ``find_newest_complete`` then
    returns the same checkpoint for the ranks. Nothing is deleted. ``say`` prints a line for the user. Return None if no
    checkpoint was ever saved. If no checkpoint can be resumed, or the folder is a file, raise ConfigError and rename
    nothing. Soon after ``stopped()`` becomes true, raise VerificationStopped.
    """
    if folder.exists() and not folder.is_dir():
        raise config_error(display_path(folder), "is not a folder, but checkpoints are saved there", "move it away")
    damages: dict[Path, str] = {}
    for checkpoint in reversed(list_checkpoint_folders(folder)):
        damage = find_damage(checkpoint, say, stopped)
        if damage is None:
            for damaged, its_damage in damages.items():
                suffixes = itertools.chain([".damaged"], (f".damaged-{number}" for number in itertools.count(2)))
                new_paths = (damaged.with_name(damaged.name + suffix) for suffix in suffixes)
                new_name = damaged.rename(next(path for path in new_paths if not path.exists())).name
                say(f"{damaged.name} is damaged: {its_damage}; renamed to {new_name}, resuming from {checkpoint.name}")
            return checkpoint
        damages[checkpoint] = damage
    if damages:
        details = ", ".join(f"{checkpoint.name} ({damage})" for checkpoint, damage in damages.items())
        fix = "start a new run with grpo launch RECIPE, or move this folder away to start this run again from step 0"
        problem = f"contains no checkpoint that can be resumed: {details}"
        raise config_error(display_path(folder), problem, fill_commands(fix, Run(folder.parent)))
    return None


def find_damage(checkpoint: Path, say: Callable[[str], None], stopped: Callable[[], bool] = never) -> str | None:
    """Describe the first damaged file of a checkpoint, for example "a is missing"; None if nothing is damaged.

    Every byte is read, with several threads. ``say`` prints a line before a long verification. A checkpoint that was
    saved without digests can't be verified: ``say`` prints a note, and the result is None if all sizes are correct.
    Raise VerificationStopped soon after ``stopped()`` becomes true.
    """
    marker = _read_marker(checkpoint)
    if marker is None:
        return f"{MARKER} is {'damaged' if (checkpoint / MARKER).exists() else 'missing'}"
    files, total = marker["files"], sum(marker["files"].values())
    if wrong_size := _find_wrong_size(checkpoint, files):
        return wrong_size
    if not _is_verifiable(marker):
        say(f"note: {checkpoint.name} was saved without digests, so its contents cannot be verified")
        return None
    if total > _LARGE_BYTES:
        say(f"verifying {checkpoint.name} ({total / 1e9:.0f} GB)")
    largest_first = sorted(files, key=files.__getitem__, reverse=True)
    differences = _find_changed_files(checkpoint, largest_first, marker["digests"], stopped)
    return next((f"{name} {fault}" for name, fault in differences), None)


def prune_checkpoints(folder: Path, limit: int | None, best: Path | None = None) -> None:
    """Delete complete checkpoints except the ``limit`` newest, and delete ``partial/``, the rest of interrupted saves.

    A ``limit`` of None keeps all checkpoints. The checkpoint ``best`` counts for the limit, and is kept next to at
    least one other. A checkpoint that can't be deleted is no error: the next call tries again.
    """
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    if limit is None:
        return
    checkpoints = list_complete_checkpoints(folder)
    others = [path for path in checkpoints if path != best]
    for path in others[: -max(1, limit - (len(checkpoints) - len(others)))]:
        # From here on it is not listed, however far the removal comes. NFS keeps files that a process reads.
        with suppress(OSError):
            partial.mkdir(exist_ok=True)
            path.rename(partial / path.name)
    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def recording_changes(run_dir: Path) -> Iterator[None]:
    """Delete ``digests.json`` before the block, which changes files that it records, and write it again afterwards.

    ``digests.json`` records the digests of a run directory's own files, such as recipe and plan. A run that fails or is
    killed inside the block has no record, so its resume does not verify these files.
    """
    (run_dir / RECORD).unlink(missing_ok=True)
    yield
    files = {name: compute_digest(run_dir / name) for name in _list_recorded_files(run_dir)}
    write_json(run_dir / RECORD, add_checksum({"files": files}))


def _list_recorded_files(run_dir: Path) -> list[str]:
    """Return the sorted relative paths of the existing files that ``digests.json`` records, without hidden files."""
    paths = [path for pattern in _RECORDED for path in run_dir.glob(pattern) if not path.name.startswith(".")]
    return sorted(str(path.relative_to(run_dir)) for path in paths)


def verify_run_files(run_dir: Path, allow_changed: bool) -> list[str]:
    """Compare recipe, plan and other files of a run directory with the digests in ``digests.json``.

    Raise ConfigError with one problem for each changed, unreadable or new file, unless ``allow_changed`` is true.
    Return notes for the user: the changes, or that the files can't be verified because ``digests.json`` is missing.
    """
    path = run_dir / RECORD
    # It is missing in runs of an earlier version, and empty if the node lost power during writing.
    if not path.exists() or path.stat().st_size == 0:
        return [f"cannot verify that recipe and plan are unchanged: {display_path(run_dir)} has no {RECORD}"]
    record = load_json_mapping(path)
    if record is None or record != add_checksum(record):
        faults = [(RECORD, "is damaged, so changes of the run's files cannot be detected")]
    else:
        files = record["files"]
        faults = [(name, "was not written by this run") for name in _list_recorded_files(run_dir) if name not in files]
        faults += _find_changed_files(run_dir, files, files)
    problems = [Problem(display_path(run_dir / name), fault, _RESTORE) for name, fault in faults]
    if problems and not allow_changed:
        raise ConfigError(*problems)
    return [f"{problem.where} {problem.what}; this attempt uses the changed file" for problem in problems]
