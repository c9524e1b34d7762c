"""A run on several nodes: a worker on each node does what the launcher orders.

The launcher itself runs the processes that the plan has for the first node; the node workers run the others. Orders
and reports go through a channel: one srun in a Slurm job (``channels``), or connections of nodes that the user started
by hand (``rendezvous``). Orders are lines of JSON, the same for all workers. Reports come in pieces, since Slurm splits
long lines. If a worker's input ends, the launcher closed it, or the channel is gone: then the worker ends everything of
the run on its node. The launcher's side comes first, then the worker (``main``, ``serve_node``).
"""

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, Problem, config_error, translate
from grpo_recipes.launch.channels import Channel, SrunChannel
from grpo_recipes.launch.processes import Child, Ending, Started, State, rank_pids, rank_records
from grpo_recipes.launch.rendezvous import ADDRESS_VARIABLE, RANK_VARIABLE, Meeting, join
from grpo_recipes.paths import home
from grpo_recipes.plan.commands import base_environment, run_environment
from grpo_recipes.plan.devices import Node, Resources, environment_device, visible_gpus
from grpo_recipes.plan.ports import is_free, reserve
from grpo_recipes.plan.preflight import node_problems, raise_file_limit
from grpo_recipes.plan.types import Process
from grpo_recipes.process.reports import say
from grpo_recipes.process.scratch import Scratch, make_scratch, remove_dead_scratch
from grpo_recipes.process.tree import become_subreaper, end_descendants, reap
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.slurm.client import address_of_node

# The first of these that is set names the interface; the last two are NCCL's and gloo's own.
INTERFACE_VARIABLES = ("NETWORK_INTERFACE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_ANSWER_SECONDS = 60.0
_START_SECONDS = 180.0  # the first report of a worker: Python read from a cold file system
_CONNECT_SECONDS = 20.0
_TICK_SECONDS = 0.2
_MARK = "grpo-node"  # first word of a report; other lines on standard output are not ours
_PIECE = 800  # characters of a report in a line
_UNSTARTED = Ending(
    EXIT_CONFIG_ERROR, "node 0 rejected the launch before anything was started; its output has the reason"
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

Report = dict[str, Any]


class NodeWorkers:
    """The workers of the ``count`` nodes of a run, and their reports; on one node nothing is started."""

    def __init__(self, count: int, channel: Channel | None = None) -> None:
        self.count = count
        self.reports: dict[tuple[str, int, str], Report] = {}  # by kind, node, and name of a process
        self.starts = itertools.count(1)  # numbers of the starts of processes
        self._writing = threading.Lock()
        self._channel: Channel = SrunChannel(count) if channel is None else channel
        self._pieces: dict[str, str] = {}  # of unfinished reports, by node

    def start(self, environment: Mapping[str, str], folder: Path = Path()) -> None:
        """Start or await a worker on every node; ``folder`` is on the file system that all nodes share."""
        self._channel.start(environment, folder, self._read)

    def alive(self) -> bool:
        """Return whether every worker runs."""
        return self._channel.alive()

    def ending(self) -> str:
        """Describe how the workers ended: by the error that a node reported, or by the end of the channel."""
        errors = [
            f"node {node}: {report['error']}" for (kind, node, _), report in self.reports.items() if kind == "failed"
        ]
        return "; ".join(errors) or self._channel.ending()

    def send(self, order: str, to: Sequence[int] | None = None, **facts: Any) -> None:
        """Send an order to nodes, by default to all but the first; ``alive`` finds a lost worker, not this."""
        line = json.dumps({"order": order, "to": list(range(1, self.count) if to is None else to), **facts})
        with self._writing:
            self._channel.send(line)

    def ask(self, order: str, to: Sequence[int], seconds: float = _ANSWER_SECONDS, **facts: Any) -> list[Report]:
        """Send an order to nodes and return each node's report of that name; reject nodes that stay silent."""
        for node in to:
            self.reports.pop((order, node, ""), None)
        self.send(order, to, **facts)
        deadline = time.monotonic() + seconds
        while silent := [node for node in to if (order, node, "") not in self.reports]:
            if not self.alive():
                raise config_error("nodes of the run", self.ending(), self._channel.lost_fix)
            if time.monotonic() > deadline:
                what = f"node {silent[0]} did not answer within {seconds:.0f} s"
                raise config_error("nodes of the run", what, self._channel.silent_fix)
            time.sleep(0.05)
        return [self.reports[(order, node, "")] for node in to]

    def port_of(self, node: int) -> Callable[[int], bool] | None:
        """Return a function that tells whether a port of another node is free, None for the launcher's own node."""
        return (lambda port: bool(self.ask("port", [node], port=port)[0]["free"])) if node else None

    def begin(self, run_dir: Path, mark: str, token: str, variables: Mapping[str, str]) -> None:
        """Have every other node make its scratch folders; ``mark`` is GRPO_RUN, ``variables`` go to every process."""
        # The run's token goes through the channel, so it is in no argv and no log.
        facts: Report = {"run_dir": str(run_dir), "mark": mark, "token": token, "variables": dict(variables)}
        for node, report in enumerate(self.ask("begin", range(1, self.count), **facts), 1):
            if report["removed"]:
                say(f"node {node}: {report['removed']}")

    def close(self, ending: Ending = _UNSTARTED) -> None:
        """Tell the workers how the run ended, have them end everything on their nodes; safe to call twice."""
        self.send("over", code=ending.code, cause=ending.cause)
        self._channel.close()

    def _read(self, line: str) -> None:
        """Collect a worker's report, which comes in pieces."""
        words = line.rstrip("\n").split(" ", 3)
        if words[0] != _MARK or len(words) < 4:
            return
        _, node, more, piece = words
        self._pieces[node] = self._pieces.get(node, "") + piece
        if more != "0":
            return
        report = json.loads(self._pieces.pop(node))
        if report["kind"] == "signal":  # a request at another node is a request to the launcher
            say(f"node {node}: {signal.Signals(report['signum']).name}")
            os.kill(os.getpid(), report["signum"])
        self.reports[(report["kind"], int(node), report.get("name", ""))] = report


class RemoteChild(Started):
    """A process of the plan on another node."""

    def __init__(self, workers: NodeWorkers, process: Process) -> None:
        super().__init__(process)
        self._workers = workers
        name = f"{process.name} {next(workers.starts)}"  # so no late report is of its successor
        self._key = "process", process.node, name
        workers.send("start", [process.node], name=name, process=asdict(process))

    def state(self) -> State:
        # The newest report of its node; without the channel the process is lost.
        report, workers = self._workers.reports.get(self._key), self._workers
        state = State.of_json(report["state"]) if report else State()
        if workers.alive():
            return state
        return replace(state, alive=False, lost=state.lost or Ending(1, workers.ending()))

    def end(self) -> None:
        with contextlib.suppress(ConfigError):  # a silent worker is found by ``NodeWorkers.alive``
            self._workers.ask("end", [self.process.node], name=self._key[2])
        self._workers.reports.pop(self._key, None)


def preflight_nodes(
    workers: NodeWorkers, resources: Resources, environment: Mapping[str, str], folder: Path = Path()
) -> Resources:
    """Start the node workers, and return the resources with the nodes as they report them; unchanged on one node.

    A run ends before anything heavy starts if a node lacks something that it needs, or if two nodes do not reach each
    other. ``folder`` is on the file system that all nodes share.
    """
    raise_file_limit()  # of the processes that the launcher starts, those of the first node
    if not resources.nodes:
        if problems := node_problems(len(resources.gpus), environment):
            raise ConfigError(*problems)
        return resources
    workers.start(environment, folder)
    all_nodes = range(workers.count)
    needed = [sys.executable, str(home()), str(folder.absolute())] if folder.exists() else [sys.executable, str(home())]
    reports = workers.ask("describe", all_nodes, _START_SECONDS, needed=needed)
    if problems := [
        Problem(f"node {report['host']}, {where}", what, fix)
        for report in reports
        for where, what, fix in report["problems"]
    ]:
        raise ConfigError(*problems)
    addresses = _addresses(reports, environment)
    listening = workers.ask("listen", all_nodes, addresses=addresses)
    for report, address, listener in zip(reports, addresses, listening, strict=True):
        if listener["error"]:
            raise _no_way(f"node {report['host']} cannot listen on {address} ({listener['error']})")
    nodes = [
        Node(
            # This node's processes are ours to start: what we see counts, not what a step of the job may use.
            gpus=tuple(report["gpus"]) if index else resources.gpus,
            cores=report["cores"] if index else resources.cores,
            address=address,
            interface=next((name for name, own in report["interfaces"].items() if address in own), None),
            name=report["host"],
        )
        for index, (report, address) in enumerate(zip(reports, addresses, strict=True))
    ]
    peers = [[address, listener["port"]] for address, listener in zip(addresses, listening, strict=True)]
    tried = workers.ask("connect", all_nodes, peers=peers, limit=_CONNECT_SECONDS)
    for node, report in zip(nodes, tried, strict=True):
        for to, error in zip(nodes, report["errors"], strict=True):
            if error:
                pair = f"node {node.name} ({node.address}) does not reach node {to.name} ({to.address})"
                raise _no_way(f"{pair}: {error}")
    return replace(resources, nodes=tuple(nodes))


def _addresses(reports: list[Report], environment: Mapping[str, str]) -> list[str]:
    """Return each node's address: on the interface that is named, at which it met node 0, or as Slurm knows it."""
    variable = next((name for name in INTERFACE_VARIABLES if environment.get(name)), "")
    wanted = environment.get(variable, "").split(",")[0].removeprefix("=")  # NCCL and gloo take a list, NCCL also "="
    lacking = [report for report in reports if not report["interfaces"].get(wanted)]
    if not lacking:
        return [report["interfaces"][wanted][0] for report in reports]
    if variable == INTERFACE_VARIABLES[0]:
        known = ", ".join(name for name, own in lacking[0]["interfaces"].items() if own)
        what = f"node {lacking[0]['host']} has no address on '{wanted}' (it has {known})"
        raise config_error(variable, what, "name the interface that joins the nodes, or unset it")
    addresses = [report["address"] or node_address(report["host"]) for report in reports]
    if addresses[0].startswith("127."):  # on its own node a name may mean the loopback
        no_way = translate(OSError, lambda error: _no_way(f"the first node finds no way to {addresses[1]}: {error}"))
        with no_way, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((addresses[1], 9))  # nothing is sent
            addresses[0] = probe.getsockname()[0]
    return addresses


def node_address(name: str) -> str:
    """Return the address of a node as Slurm has it, or refuse the job."""
    known = address_of_node(name)  # an address, or a name
    if known is None:
        raise _no_way(f"scontrol shows no address of node {name}")
    with translate((OSError, UnicodeError), lambda error: _no_way(f"{known}, by which Slurm knows {name}: {error}")):
        return socket.gethostbyname(known)


def _no_way(what: str) -> ConfigError:
    fix = "set NETWORK_INTERFACE to the interface that joins them, or open the firewall between them"
    return config_error("network of the nodes", what, fix)


class NodeWorker:
    """The worker of one node, which runs an order by the method of its name."""

    def __init__(
        self, node: int, orders: int = 0, write: Callable[[bytes], object] | None = None, address: str | None = None
    ) -> None:
        """Read orders from the descriptor ``orders``; ``address`` is this node's, if the nodes have met there."""
        self.ending = Ending(1, "the connection to node 0 was lost: its command ended, or its machine is gone")
        self._orders, self._write, self._address = orders, write or _print_bytes, address
        self._signals: list[int] = []  # received and not yet reported
        self._node = node
        self._run_dir = Path()
        self._scratch: Scratch | None = None
        self._environment: dict[str, str] = {}
        self._children: dict[str, Child] = {}
        self._reported: dict[str, dict[str, Any]] = {}  # the newest report of each process

    def run(self) -> None:
        """Obey until the input ends; then end everything of the run on this node, and remove its scratch."""
        try:
            self._obey()
        except (ConnectionError, TimeoutError):
            return  # the launcher is gone
        except ConfigError as error:
            with contextlib.suppress(OSError):
                self._report("failed", error=str(error))
            raise
        finally:
            end_descendants()
            if self._scratch is not None:
                self._scratch.remove()

    def _obey(self) -> None:
        unread = b""
        while True:
            while self._signals:
                self._report("signal", signum=self._signals.pop(0))
            if not select.select([self._orders], [], [], _TICK_SECONDS)[0]:
                self._look()
                continue
            received = os.read(self._orders, 1 << 16)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for order in map(json.loads, lines):
                name, nodes = order.pop("order"), order.pop("to")
                if self._node in nodes:
                    getattr(self, f"order_{name}")(**order)

    def forward_signals(self) -> None:
        """Pass signals on to the launcher, as a terminal does on a single node."""
        for signum in _SIGNALS:
            signal.signal(signum, lambda signum, _: self._signals.append(signum))

    def order_over(self, code: int, cause: str) -> None:
        """Keep how the run ended."""
        self.ending = Ending(code, cause)

    def order_describe(self, needed: Sequence[str] = ()) -> None:
        """Report what this node offers, and which of the ``needed`` files it does not see."""
        raise_file_limit()
        interfaces = {
            name: [entry.address for entry in addresses if entry.family == socket.AF_INET]
            for name, addresses in psutil.net_if_addrs().items()
        }
        gpus = visible_gpus(os.environ) if environment_device() == "cuda" else ()
        host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        if self._address is not None:
            host = f"{self._node} ({host})"
        problems = [astuple(problem) for problem in node_problems(len(gpus), os.environ)]
        for path in needed:
            if not os.path.exists(path):
                what = f"does not see {path} of the first node"
                problems.append(("shared files", what, "keep it on a file system that all nodes share"))
        self._report(
            "describe", gpus=gpus, cores=len(os.sched_getaffinity(0)), host=host, interfaces=interfaces,
            problems=problems, address=self._address,
        )  # fmt: skip

    def order_port(self, port: int) -> None:
        """Report whether a port is free on this node, and keep other launches off it."""
        self._report("port", free=is_free("0.0.0.0", port) and reserve(port))

    def order_listen(self, addresses: list[str]) -> None:
        """Listen at the address of this node, which are all in the order of the nodes, for what the others try."""
        try:
            listener = socket.create_server((addresses[self._node], 0), backlog=1024)
        except OSError as error:
            self._report("listen", error=os.strerror(error.errno or 0))
            return
        threading.Thread(target=self._answer, args=(listener,), daemon=True).start()
        self._report("listen", port=listener.getsockname()[1], error="")

    def _answer(self, listener: socket.socket) -> None:
        """Send the number of this node to all who connect."""
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the other side may have gone
                connection.sendall(f"{self._node}\n".encode())

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
        self._scratch.write_token(token)
        own = run_environment(os.environ, self._scratch, self._run_dir, mark)
        self._environment = {**base_environment(os.environ), **own, **variables}
        self._report("begin", removed=removed)

    def order_token(self, token: str) -> None:
        """Keep the token of the next server."""
        assert self._scratch is not None
        self._scratch.write_token(token)

    def order_start(self, name: str, process: dict[str, Any]) -> None:
        """Start a process of the plan under its guard; ``name`` is of this start alone."""
        assert self._scratch is not None
        planned = Process.of_json(process)
        for record in rank_records(self._run_dir, self._node):  # of the process that ran in its place before
            (self._run_dir / "processes" / f"rank_{record['rank']}.json").unlink(missing_ok=True)
        self._children[name] = Child(planned, self._environment, self._run_dir, self._scratch)

    def order_end(self, name: str) -> None:
        """End a process with all it started, and report nothing more of it."""
        self._reported.pop(name, None)
        if child := self._children.pop(name, None):
            child.end()
        self._report("end")

    def order_stop(self) -> None:
        """Touch the stop request: another node's new file may stay unseen for a minute on NFS."""
        stop_file(self._run_dir).touch()

    def order_stacks(self) -> None:
        """Have every rank of this node write its stacks."""
        for pid in rank_pids(self._run_dir, self._node).values():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGUSR2)

    def _look(self) -> None:
        """Report what changed of the processes of this node and of their ranks."""
        reap()
        for name, child in self._children.items():
            state = asdict(child.state())
            if self._reported.get(name) != state:
                self._reported[name] = state
                self._report("process", name=name, state=state)

    def _report(self, kind: str, **facts: Any) -> None:
        text = json.dumps({"kind": kind, **facts})
        for start in range(0, len(text), _PIECE):
            more = int(start + _PIECE < len(text))
            self._write(f"{_MARK} {self._node} {more} {text[start : start + _PIECE]}\n".encode())


def _print_bytes(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def serve_node(meeting: Meeting, command: dict[str, Any]) -> int:
    """Run the worker of a node that the user started; return the exit code of the run."""
    connection = join(meeting, command)
    with contextlib.closing(connection):
        say(f"node {meeting.rank}: connected to node 0 at {meeting.place}, which runs the launch; its output is there")
        become_subreaper()
        own_address = str(connection.getsockname()[0])
        worker = NodeWorker(meeting.rank, connection.fileno(), connection.sendall, own_address)
        worker.forward_signals()
        worker.run()
    ending = worker.ending
    say(f"node {meeting.rank}: the run ended with exit code {ending.code}{f': {ending.cause}' if ending.cause else ''}")
    return ending.code


def main() -> int:
    """Run the worker of this node."""
    for signum in _SIGNALS:
        # Slurm's signals reach every process of the job, and the launcher decides what they mean. Not SIG_IGN, which
        # the processes started here would inherit.
        signal.signal(signum, lambda *_: None)
    become_subreaper()
    node = os.environ.get(RANK_VARIABLE) or os.environ["SLURM_NODEID"]
    try:
        NodeWorker(int(node), address=os.environ.get(ADDRESS_VARIABLE)).run()
    except ConfigError as error:
        print(f"grpo: node {node}: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG_ERROR
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
