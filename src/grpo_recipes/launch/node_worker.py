"""One node's part in a run on several: it does there what the launcher on the first node orders.

srun starts one worker a node and carries the lines: orders as JSON on standard input, the same for all; reports on
standard output, in pieces of ``PIECE`` characters since Slurm keeps no longer line in one piece. When standard input
ends, the launcher closed it, or it or srun is gone: then everything of the run on this node is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError
from grpo_recipes.launch.supervisor import Child
from grpo_recipes.plan.commands import base_environment, run_environment
from grpo_recipes.plan.devices import environment_device, visible_gpus
from grpo_recipes.plan.types import Process
from grpo_recipes.process.scratch import Scratch, make_scratch, remove_dead_scratch
from grpo_recipes.process.tree import become_subreaper, end_descendants, is_alive, reap
from grpo_recipes.runs.rundir import stop_file

MARK = "grpo-node"  # first word of a report; other lines on standard output are not ours
PIECE = 800
_TICK_SECONDS = 0.2


class NodeWorker:
    """The worker of one node; ``obey`` runs an order by the method of its name."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._run_dir = Path()
        self._scratch: Scratch | None = None
        self._environment: dict[str, str] = {}
        self._children: dict[str, tuple[Child, int]] = {}  # by name, with the number of their start
        self._rank_codes: dict[int, int | None] = {}  # of ranks that are gone, by pid
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

    def order_route(self, peers: dict[str, str]) -> None:
        """Report the address of this node that the kernel uses towards its peer."""
        peer = peers[str(self._node)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((peer, 9))  # nothing is sent
                self._report("route", peer=peer, address=probe.getsockname()[0])
            except (OSError, UnicodeError) as error:
                self._report("route", peer=peer, address=None, error=str(error))

    def order_listen(self, addresses: dict[str, str]) -> None:
        """Listen on this node's address for the connections that the other nodes try."""
        server = socket.socket()
        try:
            server.bind((addresses[str(self._node)], 0))
        except OSError as error:
            self._report("listen", port=None, error=str(error.strerror))
            return
        server.listen(1024)
        threading.Thread(target=_answer, args=(server, self._node), daemon=True).start()
        self._report("listen", port=server.getsockname()[1])

    def order_connect(self, peers: list[tuple[int, str, int]], limit: float) -> None:
        """Try to reach every other node by its number, address and port; report those that did not answer."""
        others = [peer for peer in peers if peer[0] != self._node]
        with ThreadPoolExecutor(max_workers=max(1, len(others))) as executor:
            errors = list(executor.map(lambda peer: _reach(peer, limit), others))
        failed = {str(peer[0]): error for peer, error in zip(others, errors, strict=True) if error}
        self._report("connect", failed=failed)

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
        for rank in self._ranks():  # of the process that ran in its place before
            (self._run_dir / "processes" / f"rank_{rank['rank']}.json").unlink(missing_ok=True)
        environment = {**self._environment, **planned.environment}
        self._children[planned.name] = Child(planned, environment, self._run_dir, self._scratch), start
        self._rank_codes.clear()

    def order_end(self, process: str, grace: float) -> None:
        """End a process with all it started."""
        self._children[process][0].end(grace)
        self._report("end")

    def order_stop(self) -> None:
        """Touch the stop request: another node's new file may stay unseen for a minute on NFS."""
        stop_file(self._run_dir).touch()

    def order_stacks(self) -> None:
        """Have every rank of this node write its stacks."""
        for record in self._ranks():
            if is_alive(record["pid"]):
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(record["pid"], signal.SIGUSR2)

    def look(self) -> None:
        """Report what changed of the processes of this node and of their ranks."""
        reap()
        for name, (child, start) in self._children.items():
            lost, ranks = child.lost(), child.ranks()
            for rank in ranks:
                if rank.gone and rank.record["pid"] not in self._rank_codes:
                    self._rank_codes[rank.record["pid"]] = child.code_of_rank(rank.record["pid"])
            facts = {
                "start": start,
                "alive": child.alive(),
                "pid": child.command_pid(),
                "exit": child.exit_code(),
                "lost": asdict(lost) if lost else None,
                "ranks": [
                    {"record": one.record, "gone": one.gone, "code": self._rank_codes.get(one.record["pid"])}
                    for one in ranks
                ],
            }
            if self._reported.get(name) != facts:
                self._reported[name] = facts
                self._report("process", name=name, **facts)

    def end(self) -> None:
        """End everything of the run on this node and remove its scratch folders."""
        end_descendants()
        if self._scratch is not None:
            self._scratch.remove()

    def _ranks(self) -> list[dict[str, Any]]:
        return [rank.record for child, _ in self._children.values() for rank in child.ranks()]

    def _report(self, kind: str, **facts: Any) -> None:
        text = json.dumps({"kind": kind, **facts})
        pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
        for index, piece in enumerate(pieces):
            more = int(index + 1 < len(pieces))
            print(MARK, self._node, more, piece, flush=True)


def _answer(server: socket.socket, node: int) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(f"{node}\n".encode())


def _reach(peer: tuple[int, str, int], seconds: float) -> str:
    """Return what went wrong on the way to a node, or an empty text."""
    node, address, port = peer
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            connection.settimeout(seconds)
            answer = connection.recv(16).decode(errors="replace").strip()
    except OSError as error:
        return str(error.strerror or error) or type(error).__name__
    return "" if answer == str(node) else "something else answered there"


def _read_orders(orders: queue.Queue[str]) -> None:
    for line in sys.stdin:
        orders.put(line)
    orders.put("")


def main() -> int:
    """Obey until standard input ends."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        # Slurm's signals reach every process of the job; what they mean is the launcher's to say. Not SIG_IGN, which
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
    except ConfigError as refused:
        print(f"grpo: node {os.environ['SLURM_NODEID']}: {refused}", file=sys.stderr, flush=True)
        return EXIT_CONFIG_ERROR
    finally:
        worker.end()


if __name__ == "__main__":
    raise SystemExit(main())
