"""Running the real launcher: vLLM, TRL and accelerate on CPU."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from forked import ForkedProcess, Template, starts_runs

from grpo_recipes import smoke
from grpo_recipes.plan.commands import base_environment, hub_environment, server_environment
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.runs.rundir import read_json, read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
LEARNS = ("--max_steps", "30")  # half of the smoke recipe's steps: its reward rises above 0.85
SECRET = "hf_" + "plantedsecret" * 2


@dataclass
class Launch:
    """One `grpo launch` (or another command that becomes one), with its own run root and working folder."""

    process: subprocess.Popen[bytes] | ForkedProcess
    folder: Path
    cwd: Path
    mark: str
    started: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    @property
    def run_dir(self) -> Path:
        (only,) = [path.parent for path in (self.folder / "runs").glob("*/run.json")]
        return only

    def has_run_dir(self) -> bool:
        return len(list((self.folder / "runs").glob("*/summary.json"))) == 1

    def summary(self) -> dict:
        return read_json(self.run_dir / "summary.json")

    def rows(self) -> list[dict]:
        return read_metrics(self.run_dir)

    def log_path(self, role: str) -> Path:
        plan = read_json(self.run_dir / "plan.json")
        (name,) = [process["log"] for process in plan["processes"] if process["role"] == role]
        return self.cwd / name

    def log(self, role: str) -> str:
        return self.log_path(role).read_text(errors="replace")

    def wait(self, timeout: float = 600) -> int:
        return self.process.wait(timeout)

    def wait_for(self, condition: Callable[[], object], event: str, timeout: float = 400) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended before {event}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {event} within {timeout} s:\n{self.output}"
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.has_run_dir() and len(self.rows()) >= step, f"step {step}")

    def processes(self) -> list[psutil.Process]:
        """Return every living process of the run: each has the test's mark in its environment."""
        return marked_processes(self.mark)

    def wait_for_nothing_left(self, timeout: float = 30) -> None:
        deadline = time.monotonic() + timeout
        while self.processes():
            assert time.monotonic() < deadline, f"left behind: {self.processes()}"
            time.sleep(0.1)

    def sync_folders(self) -> set[Path]:
        """Return the folders of the weights in shared memory, from the environments of the run's processes."""
        environments = [process.environ() for process in self.processes()]
        return {Path(variables["GRPO_SYNC_DIR"]) for variables in environments if "GRPO_SYNC_DIR" in variables}

    def pid_of(self, role: str) -> int:
        record = read_json(self.run_dir / "processes" / f"{role}.json")
        assert record is not None, f"no record of {role}"
        return int(record["pid"])


@contextlib.contextmanager
def start_launches(root: Path) -> Iterator[Callable[..., Launch]]:
    """Yield a function that starts launches in folders below ``root``; end the launches that still run afterwards.

    Its arguments are the words after `grpo launch`, by default with the smoke recipe. ``command`` replaces the whole
    command line, and keyword arguments are environment variables. With GRPO_FORK_RUNS, the launches are forked from a
    template (forked.py), except those with ``by_exec`` or a ``command`` that does not start runs itself.
    """
    launches: list[Launch] = []

    def start(
        *arguments: str, command: list[str] | None = None, folder: str = ".", by_exec: bool = False, **variables: str
    ) -> Launch:
        working_folder = root / folder
        working_folder.mkdir(exist_ok=True)
        mark = f"{root.name}-{len(launches)}-{os.getpid()}"
        has_recipe = "--resume" in arguments or any(word.endswith(".yaml") for word in arguments)
        recipe = [] if has_recipe or "CONFIG" in variables else [str(REPOSITORY / "recipes/smoke/grpo.yaml")]
        argv = command or [str(Path(sys.executable).with_name("grpo")), "launch", *recipe, *arguments]
        environment = clean_environment(working_folder, mark, **variables)
        with (working_folder / "output.txt").open("ab") as output:
            if os.environ.get("GRPO_FORK_RUNS") and starts_runs(argv) and not by_exec:
                process = template().start(argv, working_folder, environment, output)
            else:
                process = subprocess.Popen(
                    argv, cwd=working_folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
        launches.append(Launch(process, working_folder, REPOSITORY if command else working_folder, mark))
        return launches[-1]

    yield start
    for launch in launches:
        if launch.process.poll() is None:
            launch.process.send_signal(signal.SIGTERM)
            try:
                launch.process.wait(30)
            except subprocess.TimeoutExpired:
                launch.process.kill()
        for process in launch.processes():
            process.kill()


def template() -> Template:
    """Return the template of this process; start another if a test has ended all processes below pytest."""
    if not _start_template().is_alive():
        _start_template.cache_clear()
    return _start_template()


@functools.cache
def _start_template() -> Template:
    """Start a template with the variables of a vLLM server on CPU."""
    environment = clean_environment(Path(), "template")
    environment = base_environment(environment) | hub_environment(environment)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Template(environment | server_environment("cpu", None, environment) | offline)


def override(flags: Sequence[str], **keys: Any) -> tuple[str, ...]:
    """Return ``--KEY VALUE`` flags with the values of these keys replaced or added; grpo rejects a repeated flag."""
    values = dict(zip(flags[::2], flags[1::2], strict=True)) | {f"--{key}": str(value) for key, value in keys.items()}
    return tuple(word for flag in values.items() for word in flag)


# Metrics that differ between two runs of one recipe.
TIMES = (
    "seconds/",
    "seconds_max",
    "memory/",
    "pause_seconds",
    "syncs",
    "tokens_per_second",
    "step_time",
    "runtime",
    "samples_per_second",
    "steps_per_second",
)


def same_rows(run: Launch, expected: Launch, *ignored: str) -> bool:
    """Compare the rows of ``metrics.jsonl`` of two runs, except for times and the names that contain ``ignored``."""

    def rows_of(launch: Launch) -> list[dict]:
        names = (*TIMES, *ignored)
        return [
            {key: value for key, value in row.items() if not any(name in key for name in names)}
            for row in launch.rows()
        ]

    return rows_of(run) == rows_of(expected)


def stop_and_resume(start: Callable[..., Launch], *arguments: str) -> Launch:
    """Stop a run after its first step as Slurm does, resume it, and return the completed launch."""
    stopped = start(*arguments, folder="stopped")
    stopped.wait_for_step(1)
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.wait() == 75, stopped.output
    resumed = start("--resume", str(stopped.run_dir), folder="stopped", by_exec=True)  # with other string hashes
    assert resumed.wait() == 0, resumed.output
    return resumed


def weights_hash(run: Launch) -> str:
    """SHA-256 of the final weights."""
    return hashlib.sha256((run.run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()


def marked_processes(mark: str) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        try:
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if f"GRPO_TEST={mark}".encode() in variables and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (OSError, psutil.Error):
            continue
    return processes


def clean_environment(folder: Path, mark: str, **variables: str) -> dict[str, str]:
    """The tester's environment without anything that the launcher reads, plus the test's own."""
    # TRL sets VLLM_LOGGING_LEVEL in the environment of whoever imports it, as other tests of this process do.
    read = {*READ_VARIABLES, *environment_keys(), "WANDB_MODE", "HF_TOKEN", "VLLM_LOGGING_LEVEL"} - {"CACHE_ROOT"}
    names = {name for name in os.environ if name not in read and not name.startswith("SLURM_")}
    inherited = {name: os.environ[name] for name in names}
    return {
        **inherited,
        "RUN_ROOT": str(folder / "runs"),
        "GRPO_TEST": mark,
        "HF_TOKEN": SECRET,
        **variables,
    }


def smoke_model() -> str:
    """The built-in model's folder, made if no test made it before."""
    folder, command = smoke.smoke_command("smoke:sums", os.environ)
    if not (folder / "COMPLETE").exists():
        subprocess.run(command, check=True, timeout=300)
    return str(folder / "model")
