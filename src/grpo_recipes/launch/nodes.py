"""The launcher's side of a run on several nodes: one srun with a worker a node, and the processes they run.

The launcher itself runs what the plan has for the first node, where it is; the node workers run the rest. Orders and
reports go through srun's own input and output, so that they need no network of ours and no file system that is up to
date.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.launch.node_worker import MARK
from grpo_recipes.launch.supervisor import Lost, RankSeen
from grpo_recipes.plan.types import Process
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import OWN_CHILDREN
from grpo_recipes.recipe.keys import SRUN_OPTIONS
from grpo_recipes.runs.rundir import dump_request, stop_file

ANSWER_SECONDS = 60.0
START_SECONDS = 180.0  # the first report of a worker: Python read from a cold file system
_END_SECONDS = 30.0
_FORWARD_SECONDS = 0.5


class NodeWorkers:
    """One srun over the ``count`` nodes of the job, and what its workers reported; on one node nothing is started."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._reports: dict[tuple[str, int, str], dict[str, Any]] = {}  # by kind, node, and name of a process
        self._news = threading.Condition()
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._srun: subprocess.Popen[str] | None = None

    def __enter__(self) -> NodeWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, environment: Mapping[str, str]) -> None:
        """Start a worker on every node.

        Raises:
            ConfigError: this process is not on the first node, or there is no srun.
        """
        if environment.get("SLURM_NODEID") != "0" or environment.get("SLURM_PROCID", "0") != "0":
            what = "a job on several nodes is launched once, on its first node; this is not there"
            raise config_error("SLURM_NODEID", what, "submit training.sh with sbatch")
        if shutil.which("srun") is None:
            raise config_error("srun", "there is none here", "load the module that has it, e.g. MODULES=slurm")
        self._srun = subprocess.Popen(
            srun_command(self.count, environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",  # a prologue of the site may write anything
            start_new_session=True,  # what a terminal sends to us is not for srun, which would end the step
        )
        OWN_CHILDREN.add(self._srun.pid)
        threading.Thread(target=self._read, args=(self._srun,), daemon=True).start()

    def alive(self) -> bool:
        """Return whether srun, and so every worker, runs."""
        return self._srun is not None and self._srun.poll() is None

    def ending(self) -> str:
        """Return how srun ended, in words."""
        code = self._srun.wait() if self._srun else None
        return f"srun, which runs the node workers, exited with code {code}"

    def send(self, order: str, to: Sequence[int], **facts: Any) -> None:
        """Send an order to nodes; a lost srun is found by ``alive``, not here."""
        line = json.dumps({"order": order, "to": list(to), **facts})
        assert self._srun is not None and self._srun.stdin is not None
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._srun.stdin.write(line + "\n")
            self._srun.stdin.flush()

    def ask(
        self, order: str, seconds: float = ANSWER_SECONDS, to: Sequence[int] | None = None, **facts: Any
    ) -> list[dict[str, Any]]:
        """Send an order to nodes, all by default, and return the report of its name by each of them.

        Raises:
            ConfigError: a node is silent for ``seconds``, or srun ended.
        """
        to = range(self.count) if to is None else to
        with self._news:
            for node in to:
                self._reports.pop((order, node, ""), None)
        self.send(order, to, **facts)
        where = "nodes of the job"
        deadline = time.monotonic() + seconds
        with self._news:
            while silent := [node for node in to if (order, node, "") not in self._reports]:
                if not self.alive():
                    raise config_error(where, self.ending(), "see what srun wrote above, in the job's error log")
                if time.monotonic() > deadline:
                    what = f"node {silent[0]} did not answer within {seconds:.0f} s"
                    raise config_error(where, what, "look at that node, or leave it out with sbatch --exclude")
                self._news.wait(0.2)
            return [self._reports[(order, node, "")] for node in to]

    def report(self, kind: str, node: int, name: str) -> dict[str, Any] | None:
        """Return the newest report of a process of a node, or None."""
        with self._news:
            return self._reports.get((kind, node, name))

    def begin(self, run_dir: Path, mark: str, token: str, variables: Mapping[str, str]) -> None:
        """Have every other node make its scratch folders, and forward requests that are files in the run directory.

        ``mark`` is the value of GRPO_RUN. The run's token goes through srun's input, so it is in no argv and no log.
        Every process gets ``variables`` beside the environment that the worker makes on its node.

        Raises:
            ConfigError: a node did not answer.
        """
        if self._srun is None:
            return
        facts: dict[str, Any] = {"mark": mark, "token": token, "variables": dict(variables)}
        others = range(1, self.count)
        for node, report in zip(
            others, self.ask("begin", ANSWER_SECONDS, others, run_dir=str(run_dir), **facts), strict=True
        ):
            if report["removed"]:
                say(f"node {node}: {report['removed']}")
        threading.Thread(target=self._forward_requests, args=(run_dir, others), daemon=True).start()

    def close(self) -> None:
        """Have the workers end everything on their nodes, and wait for srun; safe to call twice."""
        self._closing.set()
        if self._srun is None:
            return
        assert self._srun.stdin is not None
        with self._writing, contextlib.suppress(OSError):
            self._srun.stdin.close()
        # SIGTERM, and srun kills the step on every node.
        for harder in (self._srun.terminate, self._srun.kill, lambda: None):
            try:
                self._srun.wait(_END_SECONDS)
                return
            except subprocess.TimeoutExpired:
                harder()

    def _read(self, srun: subprocess.Popen[str]) -> None:
        """Collect the workers' reports, which come in pieces, until srun ends."""
        pieces: dict[str, str] = {}
        assert srun.stdout is not None
        for line in srun.stdout:
            words = line.rstrip("\n").split(" ", 3)
            if words[0] != MARK or len(words) < 4:
                continue
            _, node, more, piece = words
            pieces[node] = pieces.get(node, "") + piece
            if more == "1":
                continue
            report = json.loads(pieces.pop(node))
            with self._news:
                self._reports[(report["kind"], int(node), report.get("name", ""))] = report
                self._news.notify_all()

    def _forward_requests(self, run_dir: Path, others: Sequence[int]) -> None:
        seen: dict[str, float | None] = {}
        while not self._closing.wait(_FORWARD_SECONDS):
            for order, path in (("stop", stop_file(run_dir)), ("stacks", dump_request(run_dir))):
                before, changed = seen.get(order), None
                with contextlib.suppress(FileNotFoundError):
                    changed = path.stat().st_mtime
                if changed is not None and (before is None or (order == "stacks" and before != changed)):
                    self.send(order, others)
                seen[order] = changed


def srun_command(count: int, environment: Mapping[str, str]) -> list[str]:
    """Return the one srun of a job on ``count`` nodes; a second one would wait for the first.

    Raises:
        ConfigError: the user's further options cannot be split into words.
    """
    try:
        further = shlex.split(environment.get(SRUN_OPTIONS, ""))
    except ValueError as error:
        what = f"'{environment[SRUN_OPTIONS]}' cannot be split into words ({error})"
        raise config_error(SRUN_OPTIONS, what, "close the quotes, or unset it") from None
    cores = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return [
        "srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap",
        f"--cpus-per-task={min(map(int, cores), default=1)}",  # else all processes of a node share one core
        "--kill-on-bad-exit=1", "--mpi=none", "--input=all",
        "--export=ALL",  # a job submitted with --export=NONE would start the workers without an environment
        f"--chdir={os.getcwd()}",
        *further,
        sys.executable, "-m", "grpo_recipes.launch.node_worker",
    ]  # fmt: skip


class RemoteChild:
    """A process of the plan on another node; see ``supervisor.Started``."""

    _starts = itertools.count(1)

    def __init__(self, workers: NodeWorkers, process: Process) -> None:
        self.process = process
        self.log = Path(process.log).absolute()
        self._workers = workers
        self._start = next(self._starts)
        workers.send("start", [process.node], process=asdict(process), start=self._start)

    def alive(self) -> bool:
        return self._workers.alive() and bool(self._report().get("alive", True))

    def command_pid(self) -> int | None:
        return self._report().get("pid")

    def exit_code(self) -> int | None:
        return self._report().get("exit")

    def lost(self) -> Lost | None:
        """Return what of it is gone, or that the node workers are."""
        if lost := self._report().get("lost"):
            return Lost(lost["pid"], f"{lost['name']} on node {self.process.node}", lost["code"])
        return None if self._workers.alive() else Lost(None, self._workers.ending(), 1)

    def killed(self) -> bool:
        return (self.exit_code() or 0) < 0

    def ranks(self) -> list[RankSeen]:
        return [RankSeen(rank["record"], rank["gone"], self) for rank in self._report().get("ranks", [])]

    def code_of_rank(self, pid: int) -> int | None:
        ranks = self._report().get("ranks", [])
        return next((rank["code"] for rank in ranks if rank["record"]["pid"] == pid), None)

    def end(self, grace: float = 3.0) -> None:
        """End the command and all it started on its node, and wait for that; a silent worker is found by ``alive``."""
        with contextlib.suppress(ConfigError):
            self._workers.ask("end", to=[self.process.node], process=self.process.name, grace=grace)

    def _report(self) -> dict[str, Any]:
        report = self._workers.report("process", self.process.node, self.process.name)
        return report if report is not None and report["start"] == self._start else {}
