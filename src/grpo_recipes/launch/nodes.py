"""The launcher's side of a run on several nodes: one srun with an agent a node, and the processes they run.

The launcher itself runs what the plan has for the first node, where it is; the agents run the rest. Orders and reports
go through srun's own input and output, so that they need no network of ours and no file system that is up to date.
"""

from __future__ import annotations

import contextlib
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
from grpo_recipes.launch.supervisor import Child, Lost, RankSeen
from grpo_recipes.plan.types import Process
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import OWN_CHILDREN
from grpo_recipes.recipe.keys import SRUN_OPTIONS
from grpo_recipes.runs.rundir import dump_request, stop_file

ANSWER_SECONDS = 60.0
START_SECONDS = 180.0  # the first report of an agent: Python read from a cold file system
_END_SECONDS = 30.0
_RELAY_SECONDS = 0.5


class Agents:
    """One srun over the nodes of the job, and what its agents reported; nothing is started on one node.

    Attributes:
        count: nodes of the job; 0 where it is this one alone.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._reports: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._news = threading.Condition()
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._srun: subprocess.Popen[str] | None = None

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, environment: Mapping[str, str]) -> None:
        """Start an agent on every node.

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
        """Whether srun, and so every agent, runs."""
        return self._srun is not None and self._srun.poll() is None

    def ending(self) -> str:
        """How srun ended, in words."""
        code = self._srun.wait() if self._srun else None
        return f"srun, which runs the agents of the nodes, exited with code {code}"

    def tell(self, order: str, to: Sequence[int] | None = None, **facts: Any) -> None:
        """Send an order to the nodes ``to``, all by default; a lost srun is found by ``alive``, not here."""
        line = json.dumps({"order": order, "to": list(to) if to is not None else None, **facts})
        assert self._srun is not None and self._srun.stdin is not None
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._srun.stdin.write(line + "\n")
            self._srun.stdin.flush()

    def ask(self, order: str, seconds: float = ANSWER_SECONDS, **facts: Any) -> list[dict[str, Any]]:
        """Send an order to all nodes and wait for the report of its name.

        Returns:
            One report a node, in their order.

        Raises:
            ConfigError: a node is silent for ``seconds``, or srun ended.
        """
        return self.ask_of(range(self.count), order, seconds, **facts)

    def ask_of(self, to: Sequence[int], order: str, seconds: float, **facts: Any) -> list[dict[str, Any]]:
        """As ``ask``, of some nodes."""
        with self._news:
            for node in to:
                self._reports.pop((order, node, ""), None)
        self.tell(order, to, **facts)
        deadline = time.monotonic() + seconds
        with self._news:
            while silent := [node for node in to if (order, node, "") not in self._reports]:
                if not self.alive():
                    raise config_error(
                        "nodes of the job", self.ending(), "see what srun wrote above, in the job's error log"
                    )
                if time.monotonic() > deadline:
                    what = f"node {silent[0]} did not answer within {seconds:.0f} s"
                    raise config_error(
                        "nodes of the job", what, "look at that node, or leave it out with sbatch --exclude"
                    )
                self._news.wait(0.2)
            return [self._reports[(order, node, "")] for node in to]

    def report(self, kind: str, node: int, name: str) -> dict[str, Any] | None:
        """The newest report of a process or rank of a node, or None."""
        with self._news:
            return self._reports.get((kind, node, name))

    def reports(self, kind: str, node: int) -> list[dict[str, Any]]:
        """The newest report of each process or rank of a node."""
        with self._news:
            return [report for (what, where, _), report in self._reports.items() if (what, where) == (kind, node)]

    def begin(self, run_dir: Path, mark: str, token: str, variables: Mapping[str, str]) -> None:
        """Have every other node make its scratch folders, and pass requests on that are files in the run directory.

        Args:
            run_dir: the run directory.
            mark: value of GRPO_RUN.
            token: the run's token; it goes through srun's input, so it is in no argv and no log.
            variables: what every process gets beside the environment that the agent makes on its node.

        Raises:
            ConfigError: a node did not answer.
        """
        if self._srun is None:
            return
        facts = {"run_dir": str(run_dir), "mark": mark, "token": token, "variables": dict(variables)}
        others = range(1, self.count)
        for node, report in zip(others, self.ask_of(others, "begin", ANSWER_SECONDS, **facts), strict=True):
            if report["removed"]:
                say(f"node {node}: {report['removed']}")
        threading.Thread(target=self._relay, args=(run_dir,), daemon=True).start()

    def close(self) -> None:
        """Have the agents end everything on their nodes, and wait for srun; safe to call twice."""
        self._closing.set()
        if self._srun is None:
            return
        assert self._srun.stdin is not None
        with self._writing, contextlib.suppress(OSError):
            self._srun.stdin.close()
        try:
            self._srun.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._srun.terminate()  # srun then kills the step on every node
            try:
                self._srun.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._srun.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._srun.wait(_END_SECONDS)

    def _read(self, srun: subprocess.Popen[str]) -> None:
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

    def _relay(self, run_dir: Path) -> None:
        others = range(1, self.count)
        seen: dict[str, float] = {}
        while not self._closing.wait(_RELAY_SECONDS):
            for order, path in (("stop", stop_file(run_dir)), ("stacks", dump_request(run_dir))):
                try:
                    changed = path.stat().st_mtime
                except FileNotFoundError:
                    seen.pop(order, None)
                    continue
                if seen.get(order) is None or (order == "stacks" and seen[order] != changed):
                    self.tell(order, others)
                seen[order] = changed


def srun_command(count: int, environment: Mapping[str, str]) -> list[str]:
    """The one srun of a job: a second one would wait for the first.

    Args:
        count: nodes of the job.
        environment: of the batch script; the cores of each node are in it.

    Raises:
        ConfigError: the further options are no words of a shell.
    """
    try:
        further = shlex.split(environment.get(SRUN_OPTIONS, ""))
    except ValueError as error:
        what = f"'{environment[SRUN_OPTIONS]}' cannot be split into words ({error})"
        raise config_error(SRUN_OPTIONS, what, "close the quotes, or unset it") from None
    cores = [
        int(number) for number in re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    ]
    return [
        "srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--overlap",
        f"--cpus-per-task={min(cores, default=1)}",  # else one core is all that the processes of a node may use
        "--kill-on-bad-exit=1", "--mpi=none", "--input=all",
        "--export=ALL",  # a job submitted with --export=NONE would start the agents without an environment
        f"--chdir={os.getcwd()}",
        *further,
        sys.executable, "-m", "grpo_recipes.launch.node_worker",
    ]  # fmt: skip


class RemoteChild:
    """A trainer process on another node; the interface of ``Child``."""

    role = "trainer"
    _starts = 0

    def __init__(self, agents: Agents, process: Process) -> None:
        RemoteChild._starts += 1
        self.log = Path(process.log).absolute()
        self._agents = agents
        self._node = process.node
        self._name = process.name
        self._start = RemoteChild._starts
        agents.tell("start", [self._node], process=asdict(process), start=self._start)

    def alive(self) -> bool:
        """Whether its warden runs."""
        return self._agents.alive() and bool(self._told().get("alive", True))

    def command_pid(self) -> int | None:
        """Pid of the command on its node, once started."""
        return self._told().get("pid")

    def exit_code(self) -> int | None:
        """Exit code of the command, once it ended."""
        return self._told().get("exit")

    def lost(self) -> Lost | None:
        """Whether it is gone, or the agent that ran it."""
        lost = self._told().get("lost")
        if lost is not None:
            return Lost(lost["pid"], f"{lost['name']} on node {self._node}", lost["code"])
        return None if self._agents.alive() else Lost(None, self._agents.ending(), 1)

    def killed(self) -> bool:
        """Whether the command itself was ended by a signal."""
        return (self.exit_code() or 0) < 0

    def ranks(self) -> list[RankSeen]:
        """Its ranks as the agent saw them."""
        reports = self._agents.reports("rank", self._node)
        return [
            RankSeen(report["record"], report["gone"], self) for report in reports if report["start"] == self._start
        ]

    def code_of_rank(self, pid: int) -> int | None:
        """How a rank that is gone died, as its agent found out."""
        reports = self._agents.reports("rank", self._node)
        return next((report["code"] for report in reports if report["record"]["pid"] == pid), None)

    def end(self, grace: float = 3.0) -> None:
        """End the command and all it started on its node, and wait for that; a silent agent is found by ``alive``."""
        with contextlib.suppress(ConfigError):
            self._agents.ask_of([self._node], "end", ANSWER_SECONDS, process=self._name, grace=grace)

    def _told(self) -> dict[str, Any]:
        report = self._agents.report("child", self._node, self._name)
        return report if report is not None and report["start"] == self._start else {}


class Trainers:
    """The trainers of all nodes as if they were one process; the interface of ``Child``."""

    role = "trainer"

    def __init__(self, children: Sequence[Child | RemoteChild]) -> None:
        self._children = list(children)
        self.log = children[0].log

    def alive(self) -> bool:
        """Whether any of them runs."""
        return any([child.alive() for child in self._children])

    def command_pid(self) -> int | None:
        """Pid of the first node's command."""
        return self._children[0].command_pid()

    def exit_code(self) -> int | None:
        """None while one runs, then the first code that is not 0, or 0."""
        codes = [child.exit_code() for child in self._children]
        return None if None in codes else next((code for code in codes if code), 0)

    def lost(self) -> Lost | None:
        """The one that failed; one that is done while others still run is not lost."""
        lost = [child.lost() for child in self._children]
        failed = next((one for one in lost if one is not None and one.code != 0), None)
        return failed or (lost[0] if None not in lost else None)

    def killed(self) -> bool:
        """Whether a command itself was ended by a signal."""
        return any([child.killed() for child in self._children])

    def ranks(self) -> list[RankSeen]:
        """The ranks of every node."""
        return [rank for child in self._children for rank in child.ranks()]

    def end(self, grace: float = 3.0) -> None:
        """End them on every node at once."""
        threads = [threading.Thread(target=child.end, args=(grace,)) for child in self._children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
