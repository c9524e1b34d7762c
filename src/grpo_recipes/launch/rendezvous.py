"""Connect nodes that the user starts by hand, each with the same command and its own ``--node-rank``.

Node 0 listens at the master address and waits for the workers of the other nodes, which may start in any order. A
worker runs every order of node 0, and node 0 sends it the run's token. Therefore, each side must prove to the other
that it can read the key file. Node 0 writes this file with a new key to the folder of the runs, and only the user can
read it. This also proves that both nodes see the same files. Keep-alive probes detect a lost machine within half a
minute.

    MeetingChannel(meeting, command).start(...)     # on node 0: waits for all nodes
    connect_to_node_0(meeting, command)             # on every other node: returns the connection
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

from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.launch.channels import END_SECONDS, WORKER_MODULE, OnLine, end_worker, read_lines, write_line
from grpo_recipes.paths import display_path, module_command
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import OWN_CHILDREN
from grpo_recipes.process.waiting import wait_until

MASTER_PORT = 29500  # torchrun's default
MEETING_LIMIT = 600.0  # seconds within which every node must be started
# Variables with the rank and address of the worker on node 0, which the launcher starts.
RANK_VARIABLE, ADDRESS_VARIABLE = "GRPO_NODE_RANK", "GRPO_NODE_ADDRESS"
_KEY_PREFIX = ".nodes-"
_HANDSHAKE_SECONDS = 20.0  # for the whole handshake with a peer
_FILE_SECONDS = 10.0  # until a new file is visible on another node
_REMINDER_SECONDS = 60.0
_MAX_MESSAGE_BYTES = 64 * 1024
# After 10 s of silence the peer is probed every 5 s. The third probe without an answer ends the connection.
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 25_000}
Message = dict[str, Any]


@dataclass(frozen=True)
class Meeting:
    """The place and time limit for the connection of all nodes of a run."""

    nodes: int  # at least two
    rank: int  # rank of this node, from 0
    address: str  # address of node 0
    port: int = MASTER_PORT
    limit: float = MEETING_LIMIT  # seconds to wait for the other nodes

    @property
    def endpoint(self) -> str:
        """Return the address and port of node 0 as text."""
        return f"{self.address}:{self.port}"


class _Rejected(Exception):
    """The peer is not a worker of this run; the message is printed as a note."""


class MeetingChannel:
    """Node 0's connections to the workers of the other nodes, and to its own worker.

    ``command`` describes the launch. Every node must be started with an equal command.
    """

    silent_fix = "check the output of the command on that node, and the machine itself"
    lost_fix = "check the output of the command on the other nodes"

    def __init__(self, meeting: Meeting, command: Message) -> None:
        """Store the arguments; connect and start nothing yet."""
        self._meeting, self._command = meeting, json.loads(json.dumps(command))  # in the form that a node sends
        self._connections: dict[int, socket.socket] = {}  # by rank
        self._ended: dict[int, threading.Event] = {}  # an event is set when the connection has ended; by rank
        self._names: dict[int, str] = {}  # names for messages, by rank
        self._worker: subprocess.Popen[str] | None = None  # the worker of this node
        self._note = ""  # why the newest connection was rejected
        self._error: ConfigError | None = None  # the error that ends the wait
        self._changing = threading.Lock()

    def start(self, environment: Mapping[str, str], folder: Path, on_line: OnLine) -> None:
        """Start the worker of this node, and wait until the workers of all other nodes have connected.

        During the wait, ``folder`` has a file with a key that the other nodes must read.

        ``on_line`` gets each line that a worker reports. Raise ConfigError if a node does not connect within
        ``meeting.limit`` seconds or was started with another command, or if the port or the folder of the key can't be
        used.
        """
        meeting = self._meeting
        problem, fix = f"cannot listen at {meeting.endpoint}", "choose another --master-port on every node"
        with translate_errors(
            OSError,
            lambda error: config_error("--master-port", f"{problem} ({os.strerror(error.errno or 0)})", fix),
        ):
            listener = socket.create_server((meeting.address, meeting.port), backlog=64)
        with listener, _key_file(folder) as (file, key):
            self._worker = subprocess.Popen(
                module_command(WORKER_MODULE), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
                env={**environment, RANK_VARIABLE: "0", ADDRESS_VARIABLE: socket.gethostbyname(meeting.address)},
            )  # fmt: skip
            OWN_CHILDREN.add(self._worker.pid)
            threading.Thread(target=read_lines, args=(self._worker, on_line), daemon=True).start()
            threading.Thread(target=self._accept_peers, args=(listener, file, key, on_line), daemon=True).start()
            self._wait_for_all()
        say(f"all {meeting.nodes} nodes have connected: {', '.join(map(self._name, sorted(self._connections)))}")

    def alive(self) -> bool:
        """Return whether the worker of every node is connected."""
        has_own_worker = self._worker is not None and self._worker.poll() is None
        return has_own_worker and not any(ended.is_set() for ended in self._ended.values())

    def ending(self) -> str:
        """Return a sentence with the names of the nodes that have lost their connection."""
        lost = [self._name(rank) for rank, ended in sorted(self._ended.items()) if ended.is_set()]
        return f"{' and '.join(lost) or 'the worker of node 0'} was lost: its command ended, or its machine is gone"

    def send(self, line: str) -> None:
        """Send a line to the worker of every node, including this node; ignore workers that are lost.

        ``alive`` detects lost workers.
        """
        if self._worker is not None:
            write_line(self._worker, line)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def close(self) -> None:
        """End every worker, and wait at most ``END_SECONDS`` until all processes on its node have ended."""
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
        """Return the name of a node for messages, with host and address once it has connected."""
        return self._names.get(rank, f"node {rank}")

    def _wait_for_all(self) -> None:
        """Wait until all ranks have connected, with a reminder every minute.

        Raise ConfigError if a rank does not connect in time, or was started with another command.
        """
        meeting, start, reminder = self._meeting, time.monotonic(), 0.0

        def missing_ranks() -> list[int]:
            """Return the ranks of the nodes that have not connected."""
            return sorted(set(range(1, meeting.nodes)) - self._connections.keys())

        def all_connected() -> bool:
            """Return whether all other nodes have connected. If not, print a reminder every minute.

            Raise the ConfigError if a node was started with another command.
            """
            nonlocal reminder
            if not (missing := missing_ranks()):
                return True
            if self._error is not None:
                raise self._error
            waited = time.monotonic() - start
            if reminder <= waited <= meeting.limit:
                reminder += _REMINDER_SECONDS
                names, seconds = ", ".join(map(str, missing)), f"{meeting.limit - waited:.0f} s"
                say(f"waiting for node {names} to connect to {meeting.endpoint}, at most {seconds}: start the same "
                    f"command there with --node-rank {missing[0]}")  # fmt: skip
            return False

        if not wait_until(all_connected, meeting.limit, pause=0.05):
            missing, note = missing_ranks(), f" ({self._note})" if self._note else ""
            names = ", ".join(map(str, missing))
            fault = f"node {names} did not connect to {meeting.endpoint} within {meeting.limit:g} s{note}"
            fix = f"start the same command there with --node-rank {missing[0]}, and check the firewall"
            raise config_error("--nodes", fault, fix)

    def _accept_peers(self, listener: socket.socket, file: Path, key: bytes, on_line: OnLine) -> None:
        """Accept connections until the listener is closed, and start a thread with ``_serve_peer`` for each."""
        with contextlib.suppress(OSError):  # the listener is closed when all nodes have connected
            while True:
                connection, peer = listener.accept()
                threading.Thread(
                    target=self._serve_peer, args=(connection, str(peer[0]), file, key, on_line), daemon=True
                ).start()

    def _serve_peer(self, connection: socket.socket, peer: str, file: Path, key: bytes, on_line: OnLine) -> None:
        """Run the handshake with a peer, then call ``on_line`` with each line that it sends until the connection ends.

        Close the connection of a peer that fails the handshake, and print a note.
        """
        try:
            rank = self._verify_worker(connection, peer, file, key)
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

    def _verify_worker(self, connection: socket.socket, peer: str, file: Path, key: bytes) -> int:
        """Run node 0's side of the handshake with a worker, store the connection, and return the worker's rank.

        ``_prove_identity`` is the worker's side.

        Raise _Rejected if the peer does not know the key or has a rank that is taken or invalid. If its command
        differs, the wait of ``start`` also ends with a ConfigError.
        """
        deadline, nonce = time.monotonic() + _HANDSHAKE_SECONDS, secrets.token_hex(16)
        _send_message(connection, {"grpo": "node 0", "file": str(file), "nonce": nonce})
        answer = _receive_message(connection, deadline)
        if "blind" in answer:
            raise _Rejected(f"node {int(answer['blind'])} does not see {file}, which node 0 has just written")
        worker = json.loads(answer["worker"])
        if not hmac.compare_digest(answer["proof"], _compute_proof(key, "worker", nonce, answer["worker"])):
            raise _Rejected("the peer does not know the key of this run")
        rank: int = worker["rank"]
        problem = ""
        with self._changing:
            if (command := worker["command"]) != self._command:
                name = next((name for name, value in self._command.items() if command.get(name) != value), "command")
                values = f"{name} {command.get(name)!r}", repr(self._command.get(name))
                problem = f"node {rank} was started with {values[0]}, node 0 with {values[1]}"
                self._error = config_error(f"node {rank}", problem, "start every node with the same command")
            elif not isinstance(rank, int) or not 0 < rank < self._meeting.nodes or rank in self._connections:
                problem = f"node {rank} is already connected"
            reply = json.dumps({"problem": problem, "nodes": self._meeting.nodes})
            _send_message(connection, {"reply": reply, "proof": _compute_proof(key, "node 0", worker["nonce"], reply)})
            if problem:
                raise _Rejected(problem)
            _enable_keep_alive(connection)
            self._names[rank] = f"node {rank} ({worker['host']}, {peer})"
            self._ended[rank] = threading.Event()
            self._connections[rank] = connection
        return rank


def connect_to_node_0(meeting: Meeting, command: Message) -> socket.socket:
    """Connect this node's worker to node 0, which may start later, and return the connection after the handshake.

    Raise ConfigError if node 0 does not answer within ``meeting.limit`` seconds or rejects this node, if another
    program listens there, or if node 0's key file is not visible on this node.
    """
    say(f"node {meeting.rank}: waiting for node 0 at {meeting.endpoint}, at most {meeting.limit:.0f} s")
    deadline, last_error = time.monotonic() + meeting.limit, OSError()

    def connect() -> socket.socket | None:
        """Return a connection that node 0 has accepted, or None after a network error, which is kept.

        Raise ConfigError if node 0 rejects this node, another program answers, or the key file is not visible here.
        """
        nonlocal last_error
        try:
            timeout = min(_HANDSHAKE_SECONDS, max(0.1, deadline - time.monotonic()))
            connection = socket.create_connection((meeting.address, meeting.port), timeout=timeout)
            try:
                _prove_identity(connection, meeting, command)
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:  # node 0 does not listen yet, or has just ended
            last_error = error
            return None

    connection = wait_until(connect, meeting.limit, pause=min(1.0, meeting.limit / 10))
    if connection is None:
        reason = last_error.strerror or str(last_error) or type(last_error).__name__
        fault = f"node 0 did not answer at {meeting.endpoint} within {meeting.limit:.0f} s ({reason})"
        fix = f"start the same command with --node-rank 0 on {meeting.address}, and check the firewall"
        raise config_error("--master-addr", fault, fix) from last_error
    return connection


def _prove_identity(connection: socket.socket, meeting: Meeting, command: Message) -> None:
    """Run a worker's side of the handshake: prove to node 0, and let it prove, that both can read the key file.

    Raise ConfigError if the peer is another program or rejects this node, or if the key file is not visible here.
    """
    foreign_peer = config_error(
        "--master-port", f"another program answers at {meeting.endpoint}", "choose another --master-port on every node"
    )
    with translate_errors((ValueError, KeyError, TypeError), lambda _: foreign_peer):
        hello = _receive_message(connection, time.monotonic() + _HANDSHAKE_SECONDS)
        file, nonce = Path(hello["file"]), str(hello["nonce"])
    if not file.name.startswith(_KEY_PREFIX):
        raise foreign_peer
    key = _read_key(file)
    if key is None:
        _send_message(connection, {"blind": meeting.rank})
        fault = f"node {meeting.rank} does not see {file}, which node 0 has just written"
        fix = "start every node in the same shared folder, or set run_root to a shared folder"
        raise config_error("run_root", fault, fix)
    own_nonce = secrets.token_hex(16)
    worker = json.dumps({"rank": meeting.rank, "host": socket.gethostname(), "nonce": own_nonce, "command": command})
    _send_message(connection, {"worker": worker, "proof": _compute_proof(key, "worker", nonce, worker)})
    with translate_errors((ValueError, KeyError, TypeError), lambda _: foreign_peer):
        answer = _receive_message(connection, time.monotonic() + _HANDSHAKE_SECONDS)
        genuine = hmac.compare_digest(answer["proof"], _compute_proof(key, "node 0", own_nonce, answer["reply"]))
    if not genuine:
        raise foreign_peer
    reply = json.loads(answer["reply"])
    if problem := reply["problem"]:
        fix = "start every node with the same command and its own --node-rank"
        raise config_error(f"node {meeting.rank}", problem, fix)
    connection.settimeout(None)
    _enable_keep_alive(connection)


def _read_key(file: Path) -> bytes | None:
    """Return the key from a file that only this user can read; None if no such file appears within 10 seconds."""

    def read() -> bytes | None:
        """Return the file's content; None if it is missing, or not a regular file that only this user may use."""
        with contextlib.suppress(OSError), file.open("rb") as key_file:
            status = os.fstat(key_file.fileno())
            if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077:
                return key_file.read()
        return None

    return wait_until(read, _FILE_SECONDS, pause=0.5)


@contextlib.contextmanager
def _key_file(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Write a new key to a file in ``folder`` that only this user can read, and yield path and key.

    Remove the file at the end of the block. Raise ConfigError if the folder can't be written.
    """
    file, key = folder.absolute() / f"{_KEY_PREFIX}{secrets.token_hex(8)}", secrets.token_bytes(32)
    problem = f"cannot write in {display_path(folder)}"
    with translate_errors(
        OSError, lambda error: config_error("run_root", f"{problem} ({error.strerror})", "set run_root: FOLDER")
    ):
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as key_file:
            key_file.write(key)
    try:
        yield file, key
    finally:
        file.unlink(missing_ok=True)


def _compute_proof(key: bytes, sender: str, nonce: str, text: str) -> str:
    """Return the HMAC-SHA256 of sender, nonce and text, which proves that ``sender`` knows the key.

    The receiver has chosen the nonce.
    """
    return hmac.new(key, json.dumps([sender, nonce, text]).encode(), "sha256").hexdigest()


def _enable_keep_alive(connection: socket.socket) -> None:
    """Let the kernel end the connection after half a minute without an answer, and remove its other timeout."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
    connection.settimeout(None)


def _send_message(connection: socket.socket, message: Message) -> None:
    """Send a message as a line of JSON. Raise OSError if it is not sent within 20 seconds."""
    connection.settimeout(_HANDSHAKE_SECONDS)
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive_message(connection: socket.socket, deadline: float) -> Message:
    """Return the next message, a line of JSON; the deadline limits the whole line.

    Raise ValueError if it is too long or not a mapping, and OSError if the peer closes the connection or time runs out.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        received = connection.recv(1)  # one byte at a time, because the bytes after the line belong to the worker
        if not received:
            raise ConnectionResetError("the peer closed the connection")
        line += received
        if len(line) > _MAX_MESSAGE_BYTES:
            raise ValueError("the message is too long")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("the message is not a mapping")
    return message
