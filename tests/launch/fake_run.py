"""A run of fake processes under the real launcher: how a test starts, drives and inspects it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.monitor import StoppedAtOnce, StopSignals
from grpo_recipes.launch.nodes import NodeWorkers
from grpo_recipes.launch.processes import Ending
from grpo_recipes.launch.run import Supervisor, supervise
from grpo_recipes.plan.ports import reserve_port
from grpo_recipes.plan.types import Names, Plan, Process
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.rundir import SERVER_STATE, Run, read_json, read_metrics, stop_file

_ENVIRONMENT = "environment-"  # begins the role of a process that starts after the trainers
_SECONDS = 60.0  # limit for a wait of a few seconds on a busy machine
FAKE = str(Path(__file__).with_name("fake_processes.py"))


def free_port() -> int:
    """Return a port that no other process is given until the test ends, as a plan keeps its ports."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if reserve_port(port):
            return port


class FakeRun:
    """A run of fake processes. The launcher's loop runs in the main thread, the test's actions in a second thread."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.folder = attempt.run.folder
        self._thread: threading.Thread | None = None

    def then(self, action: Callable[[], None]) -> FakeRun:
        self._thread = threading.Thread(target=action)
        self._thread.start()
        return self

    def end(self, whole: bool = False) -> Ending:
        """Run the processes to the end; ``whole``: with the clean-up afterwards."""
        with StopSignals() as stop:
            try:
                if whole:
                    ending = supervise(self.attempt, stop)
                else:
                    stop.resume(stop_file(self.folder))
                    ending = Supervisor(self.attempt, stop).run()
            except StoppedAtOnce as stopped:
                ending = stopped.ending()
        if self._thread is not None:
            self._thread.join()
        return ending

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(read_metrics(self.folder)) >= step)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop the trainer's steps inside the ``with`` block."""
        (self.folder / "hang").touch()
        yield
        (self.folder / "hang").unlink()

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def records(self, *roles: str) -> list[dict[str, Any]]:
        return [read_json(self.folder / f"processes/{role}.json") for role in roles]

    def began_again(self, before: dict[str, dict[str, Any]]) -> bool:
        """Check that each of these roles has a new running process, not the process of this record."""
        return all((now := self.records(role)[0]) and now != before[role] and "exit" not in now for role in before)

    def kill(self, role: str, signum: int = signal.SIGKILL) -> None:
        record = read_json(self.folder / f"processes/{role}.json")
        assert record is not None
        os.kill(record["pid"], signum)

    def state(self) -> dict:
        """Read the launcher's record of the server, without its address and process guard."""
        state = read_json(self.folder / SERVER_STATE)
        return {name: fact for name, fact in state.items() if name not in ("url", "guard")}

    def summary(self) -> dict:
        return read_json(self.folder / "summary.json")


def make_fake_run(
    recipe: Recipe, plan: Plan, tmp_path: Path, steps: int = 8, phase: str = "sample", bridge: str = "file",
    server: str = "server", first: Sequence[Process] = (), last: Sequence[Process] = (),
) -> FakeRun:  # fmt: skip
    """Create the run without starting its processes.

    In the plan, ``first`` come before the server and ``last`` come after the trainers. The trainers start after both,
    but do not wait for environments.
    """
    folder = tmp_path / "run"
    (folder / "processes").mkdir(parents=True)
    scratch = Scratch(tmp_path / "disk", tmp_path / "memory")
    scratch.disk.mkdir()
    scratch.token_file.write_text("token")
    plan = replace(plan, bridge=bridge, ports=replace(plan.ports, server=free_port()))
    before_trainers = [process.role for process in (*first, *last) if not process.role.startswith(_ENVIRONMENT)]
    alone = bridge != "nccl"
    processes = [
        *first,
        Process(
            "server",
            [sys.executable, FAKE, server, "--port", str(plan.ports.server), "name", "--model", "first"],
            {},
            (),
            f"{folder}/s.log",
            ready="serving",
            on_loss="restart" if alone else "restart with trainers",
            with_trainers=not alone,
            renewed=bridge == "restart",
        ),
        Process(
            "trainer",
            [sys.executable, FAKE, "trainer", str(steps), phase],
            {},
            (),
            f"{folder}/t.log",
            after=("server", *before_trainers),
            beside=("server",),
        ),
        *last,
    ]
    environment = {
        **os.environ,
        "GRPO_RUN_DIR": str(folder),
        "GRPO_SYNC_DIR": str(tmp_path / "sync"),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    names = Names(folder, "fake", "name", "stamp")
    plan = replace(plan, processes=processes)
    return FakeRun(
        Attempt(Run(folder), recipe, plan, names, scratch, environment, resume_note="", workers=NodeWorkers(1))
    )
