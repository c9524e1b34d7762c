"""Nodes that the user starts by hand, with the same command and another ``--node-rank`` each, and how they meet.

Node 0 listens at the master address and waits for the workers of the other nodes; the order of the starts does not
matter. A worker runs whatever node 0 orders, and node 0 sends it the run's token, so each proves to the other that it
can read one file: node 0 writes a new key, readable only by the user, into the folder of the runs. This also proves
that both nodes see the same files. Keep-alive probes find a lost machine within half a minute.

    MeetingChannel(meeting, command).start(...)     # on node 0: waits for all nodes
    join(meeting, command)                          # on every other node: returns the connection
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error, translate
from grpo_recipes.launch.channels import END_SECONDS, WORKER_MODULE, OnLine, end_worker, read_lines, write_line
from grpo_recipes.paths import display_path, python_module
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import OWN_CHILDREN

MASTER_PORT = 29500  # torchrun's default
MEETING_LIMIT = 600.0  # seconds in which every node must be started
# Tell the worker of node 0, which the launcher starts, its rank and address.
RANK_VARIABLE, ADDRESS_VARIABLE = "GRPO_NODE_RANK", "GRPO_NODE_ADDRESS"
_KEY_PREFIX = ".nodes-"
_HANDSHAKE_SECONDS = 20.0  # for the whole handshake of one connection
_FILE_SECONDS = 10.0  # for a new file to appear on another node
_REMINDER_SECONDS = 60.0
_LONGEST_MESSAGE = 64 * 1024  # bytes
# A peer that is silent for 10 s is probed every 5 s; the third probe without an answer ends the connection.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 25_000}
Message = dict[str, Any]


@dataclass(frozen=True)
class Meeting:
    """Where and when the nodes of a run meet."""

    nodes: int  # at least two
    rank: int  # this node's, from 0
    address: str  # of node 0
    port: int = MASTER_PORT
    limit: float = MEETING_LIMIT  # seconds to wait for the other nodes

    @property
    def place(self) -> str:
        """Return the address and port of node 0 as text."""
        return f"{self.address}:{self.port}"


class _Rejected(Exception):
    """The peer is not a worker of this run; the message is printed as a note."""


class MeetingChannel:
    """Node 0's connections to the workers of the other nodes, and to its own worker.

    ``command`` describes the launch; every node must have been started with an equal one.
    """

    silent_fix = "look at the output of the command on that node, and at that machine"
    lost_fix = "look at the output of the command on the other nodes"

    def __init__(self, meeting: Meeting, command: Message) -> None:
        self._meeting, self._command = meeting, json.loads(json.dumps(command))  # as a node sends it
        self._connections: dict[int, socket.socket] = {}  # by rank
        self._ended: dict[int, threading.Event] = {}  # set once a connection has ended, by rank
        self._names: dict[int, str] = {}  # for messages, by rank
        self._worker: subprocess.Popen[str] | None = None  # of this node
        self._note = ""  # why the newest connection was rejected
        self._error: ConfigError | None = None  # ends the wait
        self._changing = threading.Lock()

    def start(self, environment: Mapping[str, str], folder: Path, on_line: OnLine) -> None:
        """Wait until a worker of every node has connected, at most ``meeting.limit`` seconds."""
        meeting = self._meeting
        with _listener(meeting) as listener, _key_file(folder) as (file, key):
            self._worker = subprocess.Popen(
                python_module(WORKER_MODULE), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
                env={**environment, RANK_VARIABLE: "0", ADDRESS_VARIABLE: socket.gethostbyname(meeting.address)},
            )  # fmt: skip
            OWN_CHILDREN.add(self._worker.pid)
            threading.Thread(target=read_lines, args=(self._worker, on_line), daemon=True).start()
            threading.Thread(target=self._accept, args=(listener, file, key, on_line), daemon=True).start()
            self._wait_for_all()
        say(f"all {meeting.nodes} nodes have connected: {', '.join(map(self._name, sorted(self._connections)))}")

    def alive(self) -> bool:
        """Return whether the worker of every node is connected."""
        own = self._worker is not None and self._worker.poll() is None
        return own and not any(ended.is_set() for ended in self._ended.values())

    def ending(self) -> str:
        """Name the node whose connection has ended."""
        lost = [self._name(rank) for rank, ended in sorted(self._ended.items()) if ended.is_set()]
        return f"{' and '.join(lost) or 'the worker of node 0'} was lost: its command ended, or its machine is gone"

    def send(self, line: str) -> None:
        """Send a line to every worker."""
        if self._worker is not None:
            write_line(self._worker, line)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def close(self) -> None:
        """Have every worker end, and wait until its node is clean or ``END_SECONDS`` are over."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        if self._worker is not None:
            end_worker(self._worker)
        deadline = time.monotonic() + END_SECONDS
        for rank, connection in self._connections.items():
            self._ended[rank].wait(max(0.0, deadline - time.monotonic()))
            connection.close()
        self._connections.clear()

    def _name(self, rank: int) -> str:
        return self._names.get(rank, f"node {rank}")

    def _wait_for_all(self) -> None:
        meeting, start, reminder = self._meeting, time.monotonic(), 0.0
        while missing := sorted(set(range(1, meeting.nodes)) - self._connections.keys()):
            if self._error is not None:
                raise self._error
            names, waited = ", ".join(map(str, missing)), time.monotonic() - start
            if waited > meeting.limit:
                note = f" ({self._note})" if self._note else ""
                what = f"node {names} did not connect to {meeting.place} within {meeting.limit:g} s{note}"
                fix = f"start the same command there with --node-rank {missing[0]}, and check the firewall"
                raise config_error("--nodes", what, fix)
            if waited >= reminder:
                reminder += _REMINDER_SECONDS
                left = f"{meeting.limit - waited:.0f} s"
                say(f"waiting for node {names} to connect to {meeting.place}, at most {left}: start the same command "
                    f"there with --node-rank {missing[0]}")  # fmt: skip
            time.sleep(0.05)

    def _accept(self, listener: socket.socket, file: Path, key: bytes, on_line: OnLine) -> None:
        """Let each peer prove that it is a worker of this run, several at a time."""
        with contextlib.suppress(OSError):  # the listener is closed once all nodes are there
            while True:
                connection, peer = listener.accept()
                threading.Thread(
                    target=self._greet, args=(connection, str(peer[0]), file, key, on_line), daemon=True
                ).start()

    def _greet(self, connection: socket.socket, peer: str, file: Path, key: bytes, on_line: OnLine) -> None:
        """Shake hands with a peer, then pass on its reports until it is gone."""
        try:
            rank = self._admit(connection, peer, file, key)
        except (OSError, ValueError, LookupError, TypeError, _Rejected) as error:
            connection.close()
            note = f"{peer}: {error}"
            if isinstance(error, _Rejected) and note != self._note:
                self._note = note
                say(f"note: rejected a connection from {note}")
            return
        with contextlib.suppress(OSError, ValueError), connection.makefile(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                on_line(line)
        self._ended[rank].set()

    def _admit(self, connection: socket.socket, peer: str, file: Path, key: bytes) -> int:
        """Return the rank of a worker that has proven itself; see ``join`` for its side."""
        deadline, nonce = time.monotonic() + _HANDSHAKE_SECONDS, secrets.token_hex(16)
        _send(connection, {"grpo": "node 0", "file": str(file), "nonce": nonce})
        answer = _receive(connection, deadline)
        if "blind" in answer:
            raise _Rejected(f"node {int(answer['blind'])} does not see {file}, a file that node 0 has just written")
        worker = json.loads(answer["worker"])
        if not hmac.compare_digest(answer["proof"], _proof(key, "worker", nonce, answer["worker"])):
            raise _Rejected("it does not know the key of this run")
        rank, problem = worker["rank"], ""
        with self._changing:
            if worker["command"] != self._command:
                problem = _difference(rank, worker["command"], self._command)
                self._error = config_error(f"node {rank}", problem, "start every node with the same command")
            elif not isinstance(rank, int) or not 0 < rank < self._meeting.nodes or rank in self._connections:
                problem = f"node {rank} is connected already"
            reply = json.dumps({"problem": problem, "nodes": self._meeting.nodes})
            _send(connection, {"reply": reply, "proof": _proof(key, "node 0", worker["nonce"], reply)})
            if problem:
                raise _Rejected(problem)
            _keep_alive(connection)
            self._names[rank] = f"node {rank} ({worker['host']}, {peer})"
            self._ended[rank] = threading.Event()
            self._connections[rank] = connection
        return rank


def join(meeting: Meeting, command: Message) -> socket.socket:
    """Return the connection of this node's worker to node 0, which may start later; wait ``meeting.limit`` seconds."""
    say(f"node {meeting.rank}: waiting for node 0 at {meeting.place}, at most {meeting.limit:.0f} s")
    deadline = time.monotonic() + meeting.limit
    while True:
        try:
            limit = min(_HANDSHAKE_SECONDS, max(0.1, deadline - time.monotonic()))
            connection = socket.create_connection((meeting.address, meeting.port), timeout=limit)
            try:
                _introduce(connection, meeting, command)
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:  # nobody listens yet, or node 0 has just ended
            if time.monotonic() > deadline:
                reason = error.strerror or str(error) or type(error).__name__
                what = f"node 0 did not answer at {meeting.place} within {meeting.limit:.0f} s ({reason})"
                fix = f"start the same command with --node-rank 0 on {meeting.address}, and check the firewall"
                raise config_error("--master-addr", what, fix) from error
        time.sleep(min(1.0, meeting.limit / 10))


def _introduce(connection: socket.socket, meeting: Meeting, command: Message) -> None:
    """Shake hands with node 0; reject a peer that is not node 0, and a node 0 that rejects this node."""
    another = config_error(
        "--master-port", f"another program answers at {meeting.place}", "choose another --master-port on every node"
    )
    with translate((ValueError, KeyError, TypeError), lambda _: another):
        hello = _receive(connection, time.monotonic() + _HANDSHAKE_SECONDS)
        file, nonce = Path(hello["file"]), str(hello["nonce"])
    if not file.name.startswith(_KEY_PREFIX):
        raise another
    key = _read_key(file)
    if key is None:
        _send(connection, {"blind": meeting.rank})
        what = f"node {meeting.rank} does not see {file}, a file that node 0 has just written"
        fix = "start every node in the same folder of a file system that all nodes share, or set run_root to one"
        raise config_error("run_root", what, fix)
    own = secrets.token_hex(16)
    worker = json.dumps({"rank": meeting.rank, "host": socket.gethostname(), "nonce": own, "command": command})
    _send(connection, {"worker": worker, "proof": _proof(key, "worker", nonce, worker)})
    with translate((ValueError, KeyError, TypeError), lambda _: another):
        answer = _receive(connection, time.monotonic() + _HANDSHAKE_SECONDS)
        genuine = hmac.compare_digest(answer["proof"], _proof(key, "node 0", own, answer["reply"]))
    if not genuine:
        raise another
    reply = json.loads(answer["reply"])
    if problem := reply["problem"]:
        raise config_error(f"node {meeting.rank}", problem, "start every node with the same command and its own rank")
    connection.settimeout(None)
    _keep_alive(connection)


def _read_key(file: Path) -> bytes | None:
    """Return the key in a file that only this user can read; None if no such file appears within seconds."""
    deadline = time.monotonic() + _FILE_SECONDS
    while True:
        with contextlib.suppress(OSError), file.open("rb") as opened:
            facts = os.fstat(opened.fileno())
            if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077:
                return opened.read()
        if time.monotonic() > deadline:
            return None
        time.sleep(0.5)


@contextlib.contextmanager
def _key_file(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Write a new key that only this user can read, and remove it afterwards."""
    file, key = folder.absolute() / f"{_KEY_PREFIX}{secrets.token_hex(8)}", secrets.token_bytes(32)

    def unwritable(error: OSError) -> ConfigError:
        return config_error(
            "run_root", f"cannot write in {display_path(folder)} ({error.strerror})", "set run_root: FOLDER"
        )

    with translate(OSError, unwritable):
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
            opened.write(key)
    try:
        yield file, key
    finally:
        file.unlink(missing_ok=True)


def _listener(meeting: Meeting) -> socket.socket:
    """Return the socket at which node 0 waits for the other nodes."""

    def busy(error: OSError) -> ConfigError:
        what = f"cannot listen at {meeting.place} ({os.strerror(error.errno or 0)})"
        return config_error("--master-port", what, "choose another --master-port on every node")

    with translate(OSError, busy):
        return socket.create_server((meeting.address, meeting.port), backlog=64)


def _difference(rank: int, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Describe the first option in which the commands of a node and of node 0 differ."""
    name = next((name for name in ours if theirs.get(name) != ours[name]), "command")
    return f"node {rank} was started with {name} {theirs.get(name)!r}, node 0 with {ours.get(name)!r}"


def _proof(key: bytes, sender: str, nonce: str, text: str) -> str:
    """Return the proof that ``sender`` knows the key; the nonce comes from the receiver."""
    return hmac.new(key, json.dumps([sender, nonce, text]).encode(), "sha256").hexdigest()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    connection.settimeout(None)


def _send(connection: socket.socket, message: Message) -> None:
    connection.settimeout(_HANDSHAKE_SECONDS)
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline: float) -> Message:
    """Return the next message, one line of JSON; the deadline is for the whole line."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(1)  # never more than the line: what follows belongs to the worker
        if not received:
            raise ConnectionResetError("the peer closed the connection")
        line += received
        if len(line) > _LONGEST_MESSAGE:
            raise ValueError("the message is too long")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("the message is not a mapping")
    return message
