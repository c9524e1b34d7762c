"""A small fake of the run's server: its endpoints, a record of requests, and the ways to lose it."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from typing import Any

import torch
from safetensors import safe_open

from grpo_recipes.server.middleware import ACTIVITY_PATH, POLICY_HEADER, SYNCED_PATH
from grpo_recipes.server.plugin import fingerprint
from grpo_recipes.server.wire import REPLICA_HEADER, flatten_completions, pack_completions

WEIGHT = torch.arange(6.0).view(2, 3)


def sync_of(folder: str) -> int:
    """The number of the sync that wrote the weights there."""
    with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
        return int(file.metadata()["grpo_sync"])


class FakeServer:
    """Answers the client's requests, records them, and has ``held`` as its only parameter.

    Attributes:
        asked: JSON bodies of POST requests, in order.
        calls: paths of POST requests, queries included, in order.
        tokens: the Authorization headers of all requests.
        policies: the weights' number in each request that ends a sync, in order.
        delay: seconds before an answer to a POST.
        sampling_seconds: additional seconds that completions take.
        replicas: number of its engines.
        late_replicas: engines that report the sync before the last.
        replica_of: the replica that each request for completions asks for, by its prompt.
        held: its weights.
        loads: its weights after a weight load, or None if a load changes nothing.
        sync: the number of the sync that sent its weights.
        keeps_sync: whether a load leaves that number unchanged.
        serves: names of its models.
        refuses: paths that are answered with status 500.
        wrong: wrong answers by path: status, content (None closes the connection), and how often.
        loses: how often it closes the connection instead of answering, by path.
    """

    def __init__(self, port: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.tokens: set[str | None] = set()
        self.policies: list[str | None] = []
        self.replicas, self.late_replicas = 1, set[int]()
        self.replica_of: dict[str, str | None] = {}
        self.held = WEIGHT.clone()
        self.loads: torch.Tensor | None = None
        self.sync, self.keeps_sync = 0, False
        self.delay = 0.0
        self.sampling_seconds = 0.0
        self.serves = ["this-run"]
        self.refuses: set[str] = set()
        self.wrong: dict[str, tuple[int, bytes | None, int]] = {}
        self.loses: dict[str, int] = {}
        self.under_way = self.most_under_way = 0
        self.queues: list[int] = []  # completions there were at each resume
        self._lock = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.tokens.add(self.headers.get("Authorization"))
                if self._answered_wrongly():
                    return
                self._answer(fake.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.tokens.add(self.headers.get("Authorization"))
                if self.path.startswith(SYNCED_PATH):
                    fake.policies.append(self.headers.get(POLICY_HEADER))
                if self._answered_wrongly():
                    return
                content = json.loads(body or b"{}")
                if "prompt" in content:
                    fake.replica_of[str(content["prompt"])] = self.headers.get(REPLICA_HEADER)
                answer = fake.post(self.path, content)
                if answer is not None:
                    self._answer(answer)
                else:
                    self.connection.shutdown(socket.SHUT_RDWR)

            def _answered_wrongly(self) -> bool:
                with fake._lock:
                    status, body, remaining = fake.wrong.get(self.path, (200, None, 0))
                    fake.wrong[self.path] = (status, body, remaining - 1)
                if remaining > 0 and body is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                elif remaining > 0:
                    self._send(status, body)
                return remaining > 0

            def _answer(self, content: dict[str, Any] | bytes) -> None:
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                self._send(500 if self.path in fake.refuses else 200, body)

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # a client that gave up waits no longer
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def get(self, path: str) -> dict[str, Any]:
        """The answer."""
        if path == ACTIVITY_PATH:
            return {"completions": self.under_way}
        return {"data": [{"id": name} for name in self.serves]}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | bytes | None:
        """Return the answer, or None to close the connection without an answer."""
        with self._lock:
            self.calls.append(path)
            if body:
                self.asked.append(body)
            if self.loses.get(path, 0):
                self.loses[path] -= 1
                return None
        time.sleep(self.delay)
        if path.startswith("/pause"):
            self._running.clear()
        elif path == "/resume":
            self.queues.append(self.under_way)
            self._running.set()
        elif path.startswith(SYNCED_PATH):
            return {"success": True}
        elif "prompt" in body:
            return self._completions(body)
        elif body.get("method") == "grpo_config":
            return {"results": [[{"model_config": {"logprobs_mode": "processed_logprobs"}}]] * self.replicas}
        elif body.get("method") == "grpo_load":
            self.held = self.held if self.loads is None else self.loads
            self.sync = self.sync if self.keeps_sync else sync_of(body["kwargs"]["folder"])
        if body.get("method") == "grpo_weights":
            return {"results": [[self._report(replica)] for replica in range(self.replicas)]}
        return {"results": [[1]] * self.replicas}

    def _completions(self, body: dict[str, Any]) -> bytes:
        number = body["n"]
        with self._lock:
            self.under_way += number
            self.most_under_way = max(self.most_under_way, self.under_way)
        time.sleep(self.sampling_seconds)
        self._running.wait(10)
        with self._lock:
            self.under_way -= number
        token = body.get("seed", 1) % 97
        return pack_completions(
            flatten_completions([[token]] * number, None if body["logprobs"] is None else [[-0.5]] * number)
        )

    def _report(self, replica: int) -> dict[str, Any]:
        sync = self.sync - (replica in self.late_replicas)
        return {"parameters": {"w": [int(fingerprint(self.held)), "float32"]}, "packed": {}, "sync": sync}

    def methods(self) -> list[str]:
        """Return the called worker methods, in order."""
        return [request["method"] for request in self.asked if "method" in request]

    def sampled(self) -> list[dict[str, Any]]:
        """Return the requests for completions, sorted by prompt."""
        return sorted((request for request in self.asked if "prompt" in request), key=lambda request: request["prompt"])

    def close(self) -> None:
        """Stop listening; waiting requests are let go."""
        self._running.set()
        self._http.shutdown()
        self._http.server_close()
