"""R12: nodes that the user starts by hand meet at node 0, prove that they share files, and end together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.launch import rendezvous
from grpo_recipes.launch.nodes import NodeWorkers, RemoteChild, preflight_nodes
from grpo_recipes.launch.processes import Ending, Group, wait_for_ending
from grpo_recipes.launch.rendezvous import Meeting, MeetingChannel, connect_to_node_0
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.types import Process
from grpo_recipes.process.tree import is_alive

COMMAND = {"recipe": "a.yaml", "flags": "--max_steps 3", "--nodes": 2}
NODE = """
import json, sys
from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.nodes import serve_node
from grpo_recipes.launch.rendezvous import Meeting
rank, port, limit, command = sys.argv[1:]
try:
    sys.exit(serve_node(Meeting(2, int(rank), "127.0.0.1", int(port), float(limit)), json.loads(command)))
except ConfigError as error:
    print(error)
    sys.exit(2)
"""


class StartedNode:
    """The command of another node: its output and exit code."""

    def __init__(self, port: int, limit: float, command: dict, prefix: tuple[str, ...], rank: int) -> None:
        argv = [*prefix, sys.executable, "-c", NODE, str(rank), str(port), str(limit), json.dumps(command)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def result(self, timeout: float = 100) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start_node(port: int) -> Iterator[Callable[..., StartedNode]]:
    nodes: list[StartedNode] = []

    def start(command: dict = COMMAND, limit: float = 100, prefix: tuple[str, ...] = (), rank: int = 1) -> StartedNode:
        nodes.append(StartedNode(port, limit, command, prefix, rank))
        return nodes[-1]

    yield start
    for node in nodes:
        node.process.kill()
        node.process.communicate()


@pytest.fixture
def node_0(port: int) -> Iterator[Callable[..., NodeWorkers]]:
    launches: list[NodeWorkers] = []

    def make(limit: float = 100) -> NodeWorkers:
        meeting = Meeting(2, 0, "127.0.0.1", port, limit)
        launches.append(NodeWorkers(2, MeetingChannel(meeting, COMMAND)))
        return launches[-1]

    yield make
    for workers in launches:
        workers.close()


def meet(workers: NodeWorkers, folder: Path) -> Resources:
    return preflight_nodes(workers, Resources("cpu", (), 2).on_nodes(2), os.environ, folder)


@pytest.mark.parametrize("first", ["node 0", "node 1"])
def test_nodes_meet_in_either_order_and_end_with_the_same_code(first, start_node, node_0, tmp_path, capsys):
    """R12: the order of the starts does not matter."""
    nodes = [start_node()] if first == "node 1" else []
    if first == "node 1":
        time.sleep(1.5)
    else:
        threading.Timer(1.5, lambda: nodes.append(start_node())).start()
    workers = node_0()
    resources = meet(workers, tmp_path / "runs")
    assert [node.address for node in resources.nodes] == ["127.0.0.1", "127.0.0.1"]
    assert [node.name.split()[0] for node in resources.nodes] == ["0", "1"]
    assert list((tmp_path / "runs").iterdir()) == [], "the key is removed"
    workers.close(Ending(75, "stopped"))
    code, output = nodes[0].result()
    assert code == 75 and "the run ended with exit code 75: stopped" in output
    assert "waiting for node 1 to connect to 127.0.0.1:" in capsys.readouterr().out


def test_the_wait_of_node_0_is_bounded_and_names_the_missing_node(node_0, tmp_path, port):
    """R12: the error of the wait names the missing node and the address."""
    with pytest.raises(ConfigError) as raised:
        meet(node_0(limit=0.5), tmp_path)
    assert str(raised.value) == (
        f"--nodes: node 1 did not connect to 127.0.0.1:{port} within 0.5 s. "
        "Fix: start the same command there with --node-rank 1, and check the firewall"
    )


def test_the_wait_of_another_node_is_bounded_and_names_node_0(start_node, port):
    """R12: node 1 prints the address of node 0, and gives up."""
    code, output = start_node(limit=1).result()
    assert code == 2
    assert f"--master-addr: node 0 did not answer at 127.0.0.1:{port} within 1 s (Connection refused)" in output
    assert "Fix: start the same command with --node-rank 0 on 127.0.0.1" in output


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_node_that_does_not_see_the_files_of_node_0_is_rejected(start_node, node_0, tmp_path, capsys):
    """R12: a run directory that is not shared is a clear error on that node, and node 0 prints the reason."""
    runs, results = tmp_path / "runs", []
    runs.mkdir()
    hidden = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {runs} && exec "$@"', "sh")
    blind = start_node(prefix=hidden)

    def start_a_node_with_the_files() -> None:
        results.append(blind.result(100))
        start_node()

    thread = threading.Thread(target=start_a_node_with_the_files)
    thread.start()
    meet(node_0(limit=150), runs)
    thread.join()
    code, output = results[0]
    assert code == 2 and f"run_root: node 1 does not see {runs}/.nodes-" in output
    assert "Fix: start every node in the same shared folder" in output
    assert f"rejected a connection from 127.0.0.1: node 1 does not see {runs}/.nodes-" in capsys.readouterr().out


def test_nodes_with_different_commands_are_rejected(start_node, node_0, tmp_path):
    """R12: a flag that only one node has is not dropped silently."""
    node = start_node({**COMMAND, "flags": "--max_steps 4"})
    difference = "node 1 was started with flags '--max_steps 4', node 0 with '--max_steps 3'"
    with pytest.raises(ConfigError, match=difference):
        meet(node_0(), tmp_path)
    code, output = node.result()
    assert code == 2 and difference in output


def test_a_stranger_is_not_a_node_and_gets_no_token(start_node, node_0, tmp_path, port, capsys):
    """R12: a client without the key in the shared folder is rejected, and the run still starts."""
    answers: list[dict] = []

    def intrude() -> None:
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port), 1)
                break
            except OSError:
                time.sleep(0.02)
        with connection, connection.makefile("rw") as lines:
            answers.append(json.loads(lines.readline()))
            worker = json.dumps({"rank": 1, "host": "stranger", "nonce": "0", "command": COMMAND})
            lines.write(json.dumps({"worker": worker, "proof": "0" * 64}) + "\n")
            lines.flush()
            answers.append(lines.readline())
        answers.append(start_node())

    thread = threading.Thread(target=intrude)
    thread.start()
    meet(node_0(), tmp_path)
    thread.join()
    assert answers[1] == "" and "the peer does not know the key of this run" in capsys.readouterr().out


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b'{"file": "/etc/passwd", "nonce": "1"}\n'])
def test_a_program_that_is_not_node_0_gives_no_orders(greeting, port, tmp_path):
    """R12: a node obeys only a peer that knows the key."""
    with socket.create_server(("127.0.0.1", port)) as other:
        answering = threading.Thread(target=lambda: other.accept()[0].sendall(greeting))
        answering.start()
        with pytest.raises(ConfigError, match=f"another program answers at 127.0.0.1:{port}"):
            connect_to_node_0(Meeting(2, 1, "127.0.0.1", port, 5), COMMAND)
        answering.join()


def test_a_peer_that_sees_the_key_but_cannot_read_it_is_rejected(port, tmp_path, monkeypatch):
    """R12: a key file that other users can read is not accepted."""
    monkeypatch.setattr(rendezvous, "_FILE_SECONDS", 0.1)
    (file := tmp_path / ".nodes-0").write_bytes(b"key")
    file.chmod(0o644)
    hello = json.dumps({"file": str(file), "nonce": "1"}).encode() + b"\n"
    with socket.create_server(("127.0.0.1", port)) as other:
        answering = threading.Thread(target=lambda: other.accept()[0].sendall(hello))
        answering.start()
        with pytest.raises(ConfigError, match="does not see"):
            connect_to_node_0(Meeting(2, 1, "127.0.0.1", port, 5), COMMAND)
        answering.join()


@pytest.mark.slow
def test_the_loss_of_a_node_ends_the_run_and_names_it(start_node, node_0, tmp_path):
    """R12: if the command of a node is killed, the run on the other node ends."""
    node, workers = start_node(), node_0()
    meet(workers, tmp_path)
    run_dir = tmp_path / "run"
    (run_dir / "processes").mkdir(parents=True)
    workers.begin(run_dir, "mark", "token", {})
    argv = [sys.executable, "-c", "import time; time.sleep(300)"]
    child = RemoteChild(workers, Process("trainer", argv, {}, (), str(tmp_path / "node1.log"), 1))
    deadline = time.monotonic() + 60
    while (pid := child.state().pid) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    node.process.kill()
    ending = wait_for_ending([Group([child])], lambda: None)
    assert ending.code == 1 and "node 1 (" in ending.cause and "was lost" in ending.cause
    while is_alive(pid):
        assert time.monotonic() < deadline + 20
        time.sleep(0.05)


LAUNCHER = """
import os, sys
from pathlib import Path
from grpo_recipes.launch.nodes import NodeWorkers, preflight_nodes
from grpo_recipes.launch.rendezvous import Meeting, MeetingChannel
from grpo_recipes.plan.devices import Resources
import json
workers = NodeWorkers(2, MeetingChannel(Meeting(2, 0, "127.0.0.1", int(sys.argv[1]), 100), json.loads(sys.argv[2])))
preflight_nodes(workers, Resources("cpu", (), 2).on_nodes(2), os.environ, Path(sys.argv[3]))
os.kill(os.getpid(), 9)
"""


def test_the_loss_of_node_0_ends_the_others(start_node, tmp_path, port):
    """R12: if node 0 is killed, the command of node 1 ends with an error."""
    node = start_node()
    argv = [sys.executable, "-c", LAUNCHER, str(port), json.dumps(COMMAND), str(tmp_path)]
    assert subprocess.run(argv, timeout=120, check=False).returncode == -9
    code, output = node.result()
    assert code == 1 and "the connection to node 0 was lost" in output


def test_a_signal_at_another_node_reaches_the_launch(start_node, node_0, tmp_path):
    """R12: Ctrl-C on node 1 asks the run to stop as Ctrl-C on node 0 does."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _: received.append(signum))
    try:
        node, workers = start_node(), node_0()
        meet(workers, tmp_path)
        node.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        while not received:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert node.process.poll() is None, "the launch decides when node 1 ends"
    finally:
        signal.signal(signal.SIGINT, before)
