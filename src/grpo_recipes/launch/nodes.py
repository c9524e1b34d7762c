"""Run the processes of a plan on several nodes: a worker on each node executes the orders of the launcher.

The launcher itself runs the processes of the first node. The worker on that node only checks the node and its network.
The workers of the other nodes run all other processes. Orders and reports are transferred by a channel: one srun in a
Slurm job (``channels``), or connections between nodes that the user started by hand (``rendezvous``). An order is a
line of JSON that all workers receive. Reports are sent in pieces, since Slurm splits long lines. If a worker's input
ends, the launcher has closed it or the channel is lost, and the worker ends all processes of the run on its node. The
launcher's side comes first, then the worker (``main``, ``serve_node``).
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, Problem, config_error
from grpo_recipes.launch.addresses import choose_addresses, make_network_error
from grpo_recipes.launch.channels import SrunChannel
from grpo_recipes.launch.processes import Child, Ending, StartedProcess, State, find_rank_pids, read_rank_records
from grpo_recipes.launch.rendezvous import ADDRESS_VARIABLE, RANK_VARIABLE, Meeting, MeetingChannel, connect_to_node_0
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.commands import base_environment, run_environment
from grpo_recipes.plan.devices import Node, Resources, environment_device, find_visible_gpus
from grpo_recipes.plan.ports import is_port_free, reserve_port
from grpo_recipes.plan.preflight import node_problems, raise_file_limit
from grpo_recipes.plan.types import Process
from grpo_recipes.process.reports import say
from grpo_recipes.process.scratch import Scratch, make_scratch, remove_dead_scratch
from grpo_recipes.process.tree import become_subreaper, descendants, end_descendants, reap, request_stacks
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.runs.rundir import stop_file

_ANSWER_SECONDS = 60.0
_START_SECONDS = 180.0  # limit of the first report of a worker, which reads Python from a cold file system
_CONNECT_SECONDS = 20.0
_STACKS_SECONDS = 5.0  # a node signals its processes within this time
_TICK_SECONDS = 0.2
_MARK = "grpo-node"  # first word of a report; other lines on standard output are ignored
_PIECE_LENGTH = 800  # characters of a report per line
_UNSTARTED = Ending(
    EXIT_CONFIG_ERROR, "node 0 rejected the launch before anything was started; see the output of node 0"
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

Report = dict[str, Any]


class NodeWorkers:
    """The workers of the ``count`` nodes of a run, and their reports; on a single node nothing is started."""

    def __init__(self, count: int, channel: SrunChannel | MeetingChannel | None = None) -> None:
        self.count = count
        self.reports: dict[tuple[str, int, str], Report] = {}  # by kind, node, and name of a process (or "")
        self.starts = itertools.count(1)  # numbers that make the starts of a process distinguishable
        self._writing = threading.Lock()
        self._channel = SrunChannel(count) if channel is None else channel
        self._pieces: dict[str, str] = {}  # beginnings of incomplete reports, by node

    def start(self, environment: Mapping[str, str], folder: Path = Path()) -> None:
        """Start a worker on every node, or wait for it; ``folder`` is on the file system that all nodes share."""
        self._channel.start(environment, folder, self._collect_report)

    def alive(self) -> bool:
        """Return whether every worker runs."""
        return self._channel.alive()

    def ending(self) -> str:
        """Return the errors that nodes reported, or describe how the channel ended."""
        errors = [
            f"node {node}: {report['error']}" for (kind, node, _), report in self.reports.items() if kind == "failed"
        ]
        return "; ".join(errors) or self._channel.ending()

    def send(self, order: str, to: Sequence[int] | None = None, **facts: Any) -> None:
        """Send an order with its ``facts`` to the nodes ``to``, by default to all except the first.

        Do not wait for a report. Lost workers are ignored here; ``alive`` detects them.
        """
        line = json.dumps({"order": order, "to": list(range(1, self.count) if to is None else to), **facts})
        with self._writing:
            self._channel.send(line)

    def ask(self, order: str, to: Sequence[int], seconds: float = _ANSWER_SECONDS, **facts: Any) -> list[Report]:
        """Send an order with its ``facts`` to the nodes ``to``, and return one report for each, in the same order.

        Raise ConfigError if a node does not answer within ``seconds``, or if a worker is lost.
        """
        for node in to:
            self.reports.pop((order, node, ""), None)
        self.send(order, to, **facts)

        def silent_nodes() -> list[int]:
            """Return the nodes that have not answered the order."""
            return [node for node in to if (order, node, "") not in self.reports]

        wait_until(lambda: not silent_nodes(), seconds, pause=0.05, stopped=lambda: not self.alive())
        if silent := silent_nodes():
            if not self.alive():
                raise config_error("nodes of the run", self.ending(), self._channel.lost_fix)
            problem = f"node {silent[0]} did not answer within {seconds:.0f} s"
            raise config_error("nodes of the run", problem, self._channel.silent_fix)
        return [self.reports[(order, node, "")] for node in to]

    def make_port_checker(self, node: int) -> Callable[[int], bool] | None:
        """Return a function that reserves a port on another node and returns whether the port was free.

        Return None for the launcher's node 0.
        """
        return (lambda port: bool(self.ask("port", [node], port=port)[0]["free"])) if node else None

    def request_stacks(self, with_ranks: bool) -> list[str]:
        """Let the server's processes of the other nodes write their stacks, ``with_ranks`` also the ranks.

        Return the processes that can't, because a signal has stopped them. A lost or silent worker is ignored.
        """
        with contextlib.suppress(ConfigError):
            reports = self.ask("stacks", range(1, self.count), _STACKS_SECONDS, with_ranks=with_ranks)
            return [f"{name} on node {node}" for node, report in enumerate(reports, 1) for name in report["stopped"]]
        return []

    def begin(self, run_dir: Path, mark: str, token: str, variables: Mapping[str, str]) -> None:
        """Let every node except the first create its scratch folders with the run's token.

        ``mark`` is the value of GRPO_RUN. Every process gets ``variables``. Raise ConfigError if a node does not
        answer.
        """
        # The run's token is sent through the channel, so it never appears in an argv or a log.
        facts: Report = {"run_dir": str(run_dir), "mark": mark, "token": token, "variables": dict(variables)}
        for node, report in enumerate(self.ask("begin", range(1, self.count), **facts), 1):
            if report["removed"]:
                say(f"node {node}: {report['removed']}")

    def close(self, ending: Ending = _UNSTARTED) -> None:
        """Tell the workers how the run ended and let them end all processes on their nodes; safe to call twice."""
        self.send("over", code=ending.code, cause=ending.cause)
        self._channel.close()

    def _collect_report(self, line: str) -> None:
        """Add a line from a worker to its incomplete report; store the report when its last piece has arrived.

        A report about a signal is also sent to this process as that signal. Other lines are ignored.
        """
        words = line.rstrip("\n").split(" ", 3)
        if words[0] != _MARK or len(words) < 4:
            return
        _, node, has_more, piece = words
        self._pieces[node] = self._pieces.get(node, "") + piece
        if has_more != "0":
            return
        report = json.loads(self._pieces.pop(node))
        if report["kind"] == "signal":  # a signal on another node is a request to the launcher
            say(f"node {node}: {signal.Signals(report['signum']).name}")
            os.kill(os.getpid(), report["signum"])
        self.reports[(report["kind"], int(node), report.get("name", ""))] = report


class RemoteChild(StartedProcess):
    """A process of the plan on another node, which the constructor starts."""

    def __init__(self, workers: NodeWorkers, process: Process) -> None:
        super().__init__(process)
        self._workers = workers
        name = f"{process.name} {next(workers.starts)}"  # no late report is confused with a report of its successor
        self._key = "process", process.node, name
        workers.send("start", [process.node], name=name, process=asdict(process))

    def state(self) -> State:
        """Return the state in the newest report of the process's node. If a worker is lost, the process is lost."""
        report, workers = self._workers.reports.get(self._key), self._workers
        state = State.of_json(report["state"]) if report else State()
        if workers.alive():
            return state
        return replace(state, alive=False, lost=state.lost or Ending(1, workers.ending()))

    def end(self) -> None:
        """Let the process's node end it, wait for the answer, at most 60 seconds, and forget its reports."""
        with contextlib.suppress(ConfigError):  # ``NodeWorkers.alive`` detects a silent worker
            self._workers.ask("end", [self.process.node], name=self._key[2])
        self._workers.reports.pop(self._key, None)


def preflight_nodes(
    workers: NodeWorkers, resources: Resources, environment: Mapping[str, str], folder: Path = Path()
) -> Resources:
    """Start the node workers and return the resources with the reported nodes; unchanged on a single node.

    Raise ConfigError if a node lacks something that the run needs, or if two nodes can't reach each other. Raise this
    process's limit of open files. ``folder`` is on the file system that all nodes share.
    """
    raise_file_limit()  # for processes of the first node, which inherit the limit from the launcher
    if not resources.nodes:
        if problems := node_problems(len(resources.gpus), environment):
            raise ConfigError(*problems)
        return resources
    workers.start(environment, folder)
    all_nodes = range(workers.count)
    needed = [sys.executable, str(find_code_root()), *([str(folder.absolute())] if folder.exists() else [])]
    reports = workers.ask("describe", all_nodes, _START_SECONDS, needed=needed)
    if problems := [
        Problem(f"node {report['host']}, {location}", problem, fix)
        for report in reports
        for location, problem, fix in report["problems"]
    ]:
        raise ConfigError(*problems)
    addresses = choose_addresses(reports, environment)
    listening = workers.ask("listen", all_nodes, addresses=addresses)
    for report, address, listener in zip(reports, addresses, listening, strict=True):
        if listener["error"]:
            raise make_network_error(f"node {report['host']} cannot listen on {address} ({listener['error']})")
    nodes = [
        Node(
            # The launcher starts the processes of the first node. Its own view counts, not the view of a job step.
            gpus=tuple(report["gpus"]) if index else resources.gpus,
            cores=report["cores"] if index else resources.cores,
            address=address,
            interface=next((name for name, local in report["interfaces"].items() if address in local), None),
            name=report["host"],
        )
        for index, (report, address) in enumerate(zip(reports, addresses, strict=True))
    ]
    peers = [[address, listener["port"]] for address, listener in zip(addresses, listening, strict=True)]
    connections = workers.ask("connect", all_nodes, peers=peers, limit=_CONNECT_SECONDS)
    for node, report in zip(nodes, connections, strict=True):
        for peer, error in zip(nodes, report["errors"], strict=True):
            if error:
                pair = f"node {node.name} ({node.address}) can't reach node {peer.name} ({peer.address})"
                raise make_network_error(f"{pair}: {error}")
    return replace(resources, nodes=tuple(nodes))


class NodeWorker:
    """The worker of a node: it reads orders of the launcher and executes the order ``NAME`` by ``order_NAME``."""

    def __init__(
        self, node: int, orders: int = 0, write: Callable[[bytes], object] | None = None, address: str | None = None
    ) -> None:
        """Read orders from the descriptor ``orders``, and send reports by ``write``, by default to standard output.

        ``address`` is this node's address in a rendezvous.
        """
        self.ending = Ending(1, "the connection to node 0 was lost: its command ended, or its machine is gone")
        self._orders, self._write, self._address = orders, write or _print_bytes, address
        self._signals: list[int] = []  # received signals that are not reported yet
        self._node = node
        self._run_dir = Path()
        self._scratch: Scratch | None = None
        self._environment: dict[str, str] = {}
        self._children: dict[str, Child] = {}
        self._reported: dict[str, dict[str, Any]] = {}  # the newest report of each process

    def run(self) -> None:
        """Execute orders until the input ends, then end all processes of the run on this node and remove scratch.

        A lost launcher is not an error. A ConfigError is reported to the launcher and raised.
        """
        try:
            self._execute_orders()
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

    def _execute_orders(self) -> None:
        """Execute orders until their input ends; in between, report received signals and changed processes."""
        unread = b""
        while True:
            while self._signals:
                self._report("signal", signum=self._signals.pop(0))
            if not select.select([self._orders], [], [], _TICK_SECONDS)[0]:
                reap()
                for name, child in self._children.items():
                    state = asdict(child.state())
                    if self._reported.get(name) != state:
                        self._reported[name] = state
                        self._report("process", name=name, state=state)
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
        """Let SIGTERM, SIGINT, SIGHUP and SIGUSR1 be reported to the launcher instead of ending this worker."""
        for signum in _SIGNALS:
            signal.signal(signum, lambda signum, _: self._signals.append(signum))

    def order_over(self, code: int, cause: str) -> None:
        """Store how the run ended: its exit code and the cause, for the worker's own exit code."""
        self.ending = Ending(code, cause)

    def order_describe(self, needed: Sequence[str] = ()) -> None:
        """Report the resources and problems of this node. Files in ``needed`` that it does not see are problems too.

        This also raises the limit of open files.
        """
        raise_file_limit()
        interfaces = {
            name: [entry.address for entry in addresses if entry.family == socket.AF_INET]
            for name, addresses in psutil.net_if_addrs().items()
        }
        gpus = find_visible_gpus(os.environ) if environment_device() == "cuda" else ()
        host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        if self._address is not None:
            host = f"{self._node} ({host})"
        problems = [astuple(problem) for problem in node_problems(len(gpus), os.environ)]
        for path in needed:
            if not os.path.exists(path):
                problem = f"does not see {path} of the first node"
                problems.append(("shared files", problem, "move it to a file system that all nodes share"))
        self._report(
            "describe", gpus=gpus, cores=len(os.sched_getaffinity(0)), host=host, interfaces=interfaces,
            problems=problems, address=self._address,
        )  # fmt: skip

    def order_port(self, port: int) -> None:
        """Report whether a port is free on this node and could be reserved against other launches."""
        self._report("port", free=is_port_free("0.0.0.0", port) and reserve_port(port))

    def order_listen(self, addresses: list[str]) -> None:
        """Listen on a new port at this node's entry of ``addresses``, and report the port or an error text.

        ``order_connect`` of all nodes tests a connection to it.
        """
        try:
            listener = socket.create_server((addresses[self._node], 0), backlog=1024)
        except OSError as error:
            self._report("listen", error=os.strerror(error.errno or 0))
            return
        threading.Thread(target=self._accept_peers, args=(listener,), daemon=True).start()
        self._report("listen", port=listener.getsockname()[1], error="")

    def _accept_peers(self, listener: socket.socket) -> None:
        """Send the number of this node to each peer that connects."""
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the peer may have ended
                connection.sendall(f"{self._node}\n".encode())

    def order_connect(self, peers: list[tuple[str, int]], limit: float) -> None:
        """Connect to every node within ``limit`` seconds; report an error text for each, empty after success."""

        def connect(node: int, peer: tuple[str, int]) -> str:
            """Return an empty text if the node with this number answers at ``peer``, else the error."""
            try:
                with socket.create_connection((peer[0], peer[1]), timeout=limit) as connection:
                    connection.settimeout(limit)
                    answer = connection.recv(16).decode(errors="replace").strip()
            except OSError as error:
                return str(error.strerror or error) or type(error).__name__
            return "" if answer == str(node) else "another program answered there"

        with ThreadPoolExecutor(len(peers)) as executor:
            self._report("connect", errors=list(executor.map(connect, range(len(peers)), peers)))

    def order_begin(self, run_dir: str, mark: str, token: str, variables: dict[str, str]) -> None:
        """Create scratch folders here with the token; processes get ``variables``, and GRPO_RUN from ``mark``."""
        self._run_dir = Path(run_dir)
        removed = remove_dead_scratch(os.environ)
        self._scratch = make_scratch(os.environ)
        self._scratch.write_token(token)
        run_variables = run_environment(os.environ, self._scratch, self._run_dir, mark)
        self._environment = {**base_environment(os.environ), **run_variables, **variables}
        self._report("begin", removed=removed)

    def order_token(self, token: str) -> None:
        """Write the token of the next server to this node's token file."""
        assert self._scratch is not None
        self._scratch.write_token(token)

    def order_start(self, name: str, process: dict[str, Any]) -> None:
        """Start a process of the plan under its guard; ``name`` identifies this start in later orders and reports.

        Records that earlier ranks of this node have left are removed first.
        """
        assert self._scratch is not None
        planned = Process.of_json(process)
        for record in read_rank_records(self._run_dir, self._node) if planned.trains else []:  # of the predecessor
            (self._run_dir / "processes" / f"rank_{record['rank']}.json").unlink(missing_ok=True)
        self._children[name] = Child(planned, self._environment, self._run_dir, self._scratch)

    def order_end(self, name: str) -> None:
        """End a process and its descendants, and stop reporting its state."""
        self._reported.pop(name, None)
        if child := self._children.pop(name, None):
            child.end()
        self._report("end")

    def order_stop(self) -> None:
        """Create the stop file from this node, too: on NFS, a file of another node may be invisible for a minute."""
        stop_file(self._run_dir).touch()

    def order_stacks(self, with_ranks: bool) -> None:
        """Let the server's processes of this node write their stacks, and report those that are stopped by a signal.

        Ranks only write their stacks ``with_ranks``.
        """
        pids = list(find_rank_pids(self._run_dir, self._node).values()) if with_ranks else []
        servers = [child for child in self._children.values() if child.process.ready == "serving"]
        for server in servers:  # engines and workers before the command that started them
            pids += [process.pid for process in reversed(descendants(server.guard_pid))]
        self._report("stacks", stopped=request_stacks(pids))

    def _report(self, kind: str, **facts: Any) -> None:
        """Send a report to the launcher as JSON, in lines of at most 800 characters of it."""
        text = json.dumps({"kind": kind, **facts})
        for start in range(0, len(text), _PIECE_LENGTH):
            end = start + _PIECE_LENGTH
            self._write(f"{_MARK} {self._node} {int(end < len(text))} {text[start:end]}\n".encode())


def _print_bytes(text: bytes) -> None:
    """Write bytes to standard output at once."""
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


def serve_node(meeting: Meeting, command: dict[str, Any]) -> int:
    """Join a run from a node that the user started by hand, and execute the orders of node 0 until the run ends.

    ``command`` has the launch options, which must be equal on all nodes. Signals to this process are forwarded to node
    0. Return the exit code of the whole run, or 1 if the connection is lost before node 0 reports how the run ended.
    Raise ConfigError if node 0 does not answer within ``meeting.limit`` seconds, or rejects this node.
    """
    connection = connect_to_node_0(meeting, command)
    with contextlib.closing(connection):
        say(f"node {meeting.rank}: connected to node 0 at {meeting.endpoint}; the output of the run is there")
        become_subreaper()
        address = str(connection.getsockname()[0])
        worker = NodeWorker(meeting.rank, connection.fileno(), connection.sendall, address)
        worker.forward_signals()
        worker.run()
    ending = worker.ending
    say(f"node {meeting.rank}: the run ended with exit code {ending.code}{f': {ending.cause}' if ending.cause else ''}")
    return ending.code


def main() -> int:
    """Run the worker of this node with orders from standard input; return its exit code.

    Return 2 if a ConfigError ends the worker; the error is also reported to the launcher.
    """
    for signum in _SIGNALS:
        # Slurm sends its signals to every process of the job, and the launcher handles them. SIG_IGN would be inherited
        # by the processes that are started here.
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
