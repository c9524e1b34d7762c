"""A run on several nodes: one srun with a worker a node, which does there what the launcher orders.

The launcher itself runs what the plan has for the first node, where it is; the node workers run the rest. Orders and
reports go through srun's own input and output, so that they need no network of ours and no file system that is up to
date: orders as lines of JSON, the same for all; reports in pieces, since Slurm keeps no long line in one piece. When a
worker's input ends, the launcher closed it, or it or srun is gone: then the worker ends everything of the run on its
node. The launcher's side comes first, then its look at the network, then the worker (``main``).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, config_error
from grpo_recipes.launch.processes import Child, Lost, State, rank_pids, rank_records
from grpo_recipes.plan.commands import base_environment, run_environment
from grpo_recipes.plan.devices import Node, Resources, environment_device, visible_gpus
from grpo_recipes.plan.types import Process
from grpo_recipes.process.reports import say
from grpo_recipes.process.scratch import Scratch, make_scratch, remove_dead_scratch
from grpo_recipes.process.tree import OWN_CHILDREN, become_subreaper, end_descendants, reap
from grpo_recipes.recipe.keys import SRUN_OPTIONS
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.slurm.client import address_of_node

# The first of these that is set names the interface; the last two are NCCL's and gloo's own.
INTERFACE_VARIABLES = ("NETWORK_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_ANSWER_SECONDS = 60.0
_START_SECONDS = 180.0  # the first report of a worker: Python read from a cold file system
_CONNECT_SECONDS = 20.0
_END_SECONDS = 30.0
_TICK_SECONDS = 0.2
_MARK = "grpo-node"  # first word of a report; other lines on standard output are not ours
_PIECE = 800  # characters of a report in a line
_FIREWALL = ", or have the firewall between them opened"

Report = dict[str, Any]


class NodeWorkers(contextlib.AbstractContextManager["NodeWorkers"]):
    """One srun over the ``count`` nodes of the job, and what its workers reported; on one node nothing is started."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reports: dict[tuple[str, int, str], Report] = {}  # by kind, node, and name of a process
        self.starts = itertools.count(1)  # numbers of the starts of processes
        self._news = threading.Condition()
        self._writing = threading.Lock()
        self._srun: subprocess.Popen[str] | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, environment: Mapping[str, str]) -> None:
        """Start a worker on every node; refuse a launch that is not on the first node, or has no srun."""
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
        return f"srun, which runs the node workers, exited with code {self._srun.wait() if self._srun else None}"

    def send(self, order: str, to: Sequence[int] | None = None, **facts: Any) -> None:
        """Send an order to nodes, by default to all but the first; a lost srun is found by ``alive``, not here."""
        line = json.dumps({"order": order, "to": list(range(1, self.count) if to is None else to), **facts})
        if self._srun is not None and self._srun.stdin is not None:
            with self._writing, contextlib.suppress(OSError, ValueError):
                self._srun.stdin.write(line + "\n")
                self._srun.stdin.flush()

    def ask(
        self, order: str, to: Sequence[int], seconds: float = _ANSWER_SECONDS, **facts: Any
    ) -> list[dict[str, Any]]:
        """Send an order to nodes and return the report of its name by each; refuse the job where one stays silent."""
        for node in to:
            self.reports.pop((order, node, ""), None)
        self.send(order, to, **facts)
        deadline = time.monotonic() + seconds
        where = "nodes of the job"
        with self._news:
            while silent := [node for node in to if (order, node, "") not in self.reports]:
                if not self.alive():
                    raise config_error(where, self.ending(), "see what srun wrote above, in the job's error log")
                if time.monotonic() > deadline:
                    what = f"node {silent[0]} did not answer within {seconds:.0f} s"
                    raise config_error(where, what, "look at that node, or leave it out with sbatch --exclude")
                self._news.wait(0.2)
            return [self.reports[(order, node, "")] for node in to]

    def begin(self, run_dir: Path, mark: str, token: str, variables: Mapping[str, str]) -> None:
        """Have every other node make its scratch folders; refuse the job where one does not answer.

        ``mark`` is the value of GRPO_RUN, ``variables`` go to every process. The run's token goes through srun's
        input, so it is in no argv and no log.
        """
        facts: Report = {"run_dir": str(run_dir), "mark": mark, "token": token, "variables": dict(variables)}
        for node, report in enumerate(self.ask("begin", range(1, self.count), **facts), 1):
            if report["removed"]:
                say(f"node {node}: {report['removed']}")

    def close(self) -> None:
        """Have the workers end everything on their nodes, and wait for srun; safe to call twice."""
        if self._srun is None:
            return
        assert self._srun.stdin is not None
        with self._writing, contextlib.suppress(OSError):
            self._srun.stdin.close()
        # SIGTERM, and srun kills the step on every node.
        for harder in (self._srun.terminate, self._srun.kill, lambda: None):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(_END_SECONDS)
                return
            harder()

    def _read(self, srun: subprocess.Popen[str]) -> None:
        """Collect the workers' reports, which come in pieces, until srun ends."""
        pieces: dict[str, str] = {}
        assert srun.stdout is not None
        for line in srun.stdout:
            words = line.rstrip("\n").split(" ", 3)
            if words[0] != _MARK or len(words) < 4:
                continue
            _, node, more, piece = words
            pieces[node] = pieces.get(node, "") + piece
            if more == "0":
                report = json.loads(pieces.pop(node))
                with self._news:
                    self.reports[(report["kind"], int(node), report.get("name", ""))] = report
                    self._news.notify_all()


class RemoteChild:
    """A process of the plan on another node; see ``processes.Started``."""

    def __init__(self, workers: NodeWorkers, process: Process) -> None:
        self.process = process
        self.log = Path(process.log).absolute()
        self._workers = workers
        self._key = "process", process.node, process.name
        self._start = next(workers.starts)
        workers.send("start", [process.node], process=asdict(process), start=self._start)

    def state(self) -> State:
        """Return what its node reported last; without srun it is lost."""
        report, workers = self._workers.reports.get(self._key), self._workers
        # A report of an earlier start is of the process that ran in its place before.
        state = State.of_json(report["state"]) if report and report["start"] == self._start else State()
        if workers.alive():
            return state
        return replace(state, alive=False, lost=state.lost or Lost(None, workers.ending(), 1))

    def end(self, grace: float = 3.0) -> None:
        """End the command and all it started, and wait for that; a silent worker is found by ``NodeWorkers.alive``."""
        with contextlib.suppress(ConfigError):
            self._workers.ask("end", [self.process.node], process=self.process.name, grace=grace)


def srun_command(count: int, environment: Mapping[str, str]) -> list[str]:
    """Return the one srun of a job on ``count`` nodes; a second one would wait for the first."""
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
        sys.executable, "-m", "grpo_recipes.launch.nodes",
    ]  # fmt: skip


def preflight_nodes(workers: NodeWorkers, resources: Resources, environment: Mapping[str, str]) -> Resources:
    """Start the node workers, and return the resources with the nodes as they report them; unchanged on one node.

    A job whose nodes do not all reach each other ends before anything heavy starts.
    """
    if not resources.nodes:
        return resources
    workers.start(environment)
    all_nodes = range(workers.count)
    reports = workers.ask("describe", all_nodes, _START_SECONDS)
    listening = workers.ask("listen", all_nodes, wanted=_wanted_addresses(reports, environment))
    for report, listener in zip(reports, listening, strict=True):
        if listener["error"]:
            further = _FIREWALL if listener["address"] else ""
            raise _no_way(f"node {report['host']} {listener['error']}", further)
    nodes = [
        Node(
            # This node's processes are ours to start: what we see counts, not what a step of the job may use.
            gpus=tuple(report["gpus"]) if index else resources.gpus,
            cores=report["cores"] if index else resources.cores,
            address=listener["address"],
            interface=next((name for name, own in report["interfaces"].items() if listener["address"] in own), None),
            name=report["host"],
        )
        for index, (report, listener) in enumerate(zip(reports, listening, strict=True))
    ]
    peers = [[listener["address"], listener["port"]] for listener in listening]
    tried = workers.ask("connect", all_nodes, peers=peers, limit=_CONNECT_SECONDS)
    for node, report in zip(nodes, tried, strict=True):
        for to, error in zip(nodes, report["errors"], strict=True):
            if error:
                pair = f"node {node.name} ({node.address}) does not reach node {to.name} ({to.address})"
                raise _no_way(f"{pair}: {error}", _FIREWALL)
    return replace(resources, nodes=tuple(nodes))


def _wanted_addresses(reports: list[Report], environment: Mapping[str, str]) -> dict[int, list[str | None]]:
    """Return for each node the address of the interface that is named, else the one by which Slurm knows the node.

    Where Slurm knows names only, it is None, with a peer towards which the node finds its own address.
    """
    variable = next((name for name in INTERFACE_VARIABLES if environment.get(name)), None)
    if variable is not None:
        wanted = environment[variable].split(",")[0].removeprefix("=")  # NCCL and gloo take a list, NCCL also "=name"
        lacking = [report for report in reports if not report["interfaces"].get(wanted)]
        if not lacking:
            return {node: [report["interfaces"][wanted][0], None] for node, report in enumerate(reports)}
        if variable == INTERFACE_VARIABLES[0]:
            known = ", ".join(name for name, own in lacking[0]["interfaces"].items() if own)
            what = f"node {lacking[0]['host']} has no address on '{wanted}' (it has {known})"
            raise config_error(variable, what, "name the interface that joins the nodes, or unset it")
    named = [node_address(report["host"]) for report in reports]
    if all(re.fullmatch(r"\d+(\.\d+){3}", address) for address in named):
        return {node: [address, None] for node, address in enumerate(named)}
    # A name may mean the loopback on its own node.
    return {node: [None, named[1 if node == 0 else 0]] for node in range(len(named))}


def node_address(name: str) -> str:
    """Return the address or name of a node as Slurm has it, or refuse the job."""
    if address := address_of_node(name):
        return address
    raise _no_way(f"scontrol shows no address of node {name}")


def _no_way(what: str, further: str = "") -> ConfigError:
    fix = f"name the interface that joins them with NETWORK_INTERFACE{further}"
    return config_error("network of the nodes", what, fix)


class NodeWorker:
    """The worker of one node; ``obey`` runs an order by the method of its name."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._run_dir = Path()
        self._scratch: Scratch | None = None
        self._environment: dict[str, str] = {}
        self._listener: socket.socket | None = None
        self._children: dict[str, Child] = {}
        self._starts: dict[str, int] = {}  # number of the last start of each process
        self._reported: dict[str, dict[str, Any]] = {}  # the newest report of each process

    def obey(self, line: str) -> None:
        """Carry out one order, if it is for this node."""
        order = json.loads(line)
        if self._node in order.pop("to"):
            getattr(self, f"order_{order.pop('order')}")(**order)

    def order_describe(self) -> None:
        """Report what this node offers."""
        interfaces = {
            name: [one.address for one in addresses if one.family == socket.AF_INET]
            for name, addresses in psutil.net_if_addrs().items()
        }
        gpus = visible_gpus(os.environ) if environment_device() == "cuda" else ()
        host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        self._report("describe", gpus=gpus, cores=len(os.sched_getaffinity(0)), host=host, interfaces=interfaces)

    def order_listen(self, wanted: dict[str, tuple[str | None, str | None]]) -> None:
        """Listen for the connections that the other nodes try.

        Where no address is wanted, it is the one that the kernel uses towards a peer.
        """
        address, peer = wanted[str(self._node)]
        error, port = f"finds no way to {peer}", None
        try:
            if address is None:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((peer, 9))  # nothing is sent
                    address = probe.getsockname()[0]
            error = f"cannot listen on {address}"
            self._listener = socket.socket()
            self._listener.bind((address, 0))
            self._listener.listen(1024)
            threading.Thread(target=_answer, args=(self._listener, self._node), daemon=True).start()
            error, port = "", self._listener.getsockname()[1]
        except (OSError, UnicodeError) as problem:
            error += f" ({getattr(problem, 'strerror', None) or problem})"
        self._report("listen", address=address, port=port, error=error)

    def order_connect(self, peers: list[tuple[str, int]], limit: float) -> None:
        """Try to reach every node by its address and port; report what went wrong with each, or empty texts."""

        def reach(node: int, peer: tuple[str, int]) -> str:
            try:
                with socket.create_connection((peer[0], peer[1]), timeout=limit) as connection:
                    connection.settimeout(limit)
                    answer = connection.recv(16).decode(errors="replace").strip()
            except OSError as error:
                return str(error.strerror or error) or type(error).__name__
            return "" if answer == str(node) else "something else answered there"

        with ThreadPoolExecutor(len(peers)) as executor:
            self._report("connect", errors=list(executor.map(reach, range(len(peers)), peers)))

    def order_begin(self, run_dir: str, mark: str, token: str, variables: dict[str, str]) -> None:
        """Make this node's own scratch folders with the run's token; ``variables`` go to every process."""
        self._run_dir = Path(run_dir)
        removed = remove_dead_scratch(os.environ)
        self._scratch = make_scratch(os.environ)
        self._scratch.token.write_text(token)
        own = run_environment(os.environ, self._scratch, self._run_dir, mark)
        self._environment = {**base_environment(os.environ), **own, **variables}
        self._report("begin", removed=removed)

    def order_start(self, process: dict[str, Any], start: int) -> None:
        """Start a process of the plan under its guard; its reports carry ``start``, the number of this start."""
        assert self._scratch is not None
        planned = Process.of_json(process)
        for record in rank_records(self._run_dir, self._node):  # of the process that ran in its place before
            (self._run_dir / "processes" / f"rank_{record['rank']}.json").unlink(missing_ok=True)
        environment = {**self._environment, **planned.environment}
        self._children[planned.name] = Child(planned, environment, self._run_dir, self._scratch)
        self._starts[planned.name] = start

    def order_end(self, process: str, grace: float) -> None:
        """End a process with all it started, and report nothing more of it."""
        self._reported.pop(process, None)
        if child := self._children.pop(process, None):
            child.end(grace)
        self._report("end")

    def order_stop(self) -> None:
        """Touch the stop request: another node's new file may stay unseen for a minute on NFS."""
        stop_file(self._run_dir).touch()

    def order_stacks(self) -> None:
        """Have every rank of this node write its stacks."""
        for pid in rank_pids(self._run_dir, self._node).values():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGUSR2)

    def look(self) -> None:
        """Report what changed of the processes of this node and of their ranks."""
        reap()
        for name, child in self._children.items():
            facts = {"start": self._starts[name], "state": asdict(child.state())}
            if self._reported.get(name) != facts:
                self._reported[name] = facts
                self._report("process", name=name, **facts)

    def end(self) -> None:
        """End everything of the run on this node and remove its scratch folders."""
        end_descendants()
        if self._scratch is not None:
            self._scratch.remove()

    def _report(self, kind: str, **facts: Any) -> None:
        text = json.dumps({"kind": kind, **facts})
        for start in range(0, len(text), _PIECE):
            more = int(start + _PIECE < len(text))
            print(_MARK, self._node, more, text[start : start + _PIECE], flush=True)


def _answer(listener: socket.socket, node: int) -> None:
    """Send the number of this node to all who connect."""
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):  # the other side may have gone
            connection.sendall(f"{node}\n".encode())


def _read_orders(orders: queue.Queue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    orders.put("")


def main() -> int:
    """Obey until standard input ends."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        # Slurm's signals reach every process of the job; what they mean is for the launcher to say. Not SIG_IGN, which
        # the processes started here would inherit.
        signal.signal(signum, lambda *_: None)
    become_subreaper()
    worker = NodeWorker(int(os.environ["SLURM_NODEID"]))
    orders: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_orders, args=(orders,), daemon=True).start()
    try:
        while True:
            try:
                line = orders.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                worker.look()
                continue
            if not line:
                return 0
            worker.obey(line)
    except ConfigError as error:
        print(f"grpo: node {os.environ['SLURM_NODEID']}: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG_ERROR
    finally:
        worker.end()


if __name__ == "__main__":
    raise SystemExit(main())
