"""A fake OpenAI-compatible judge with the test's grades, delay and number of failures."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeJudge:
    """Grades "10" an answer that has the solution of its prompt, "0" any other, after ``seconds``.

    The first ``failures`` requests fail, and later ones with the probability ``failing``.
    """

    def __init__(self, seconds: float = 0.0, failures: int = 0, key: str = "planted", failing: float = 0.0):
        self.seconds, self.failures, self.key, self.failing = seconds, failures, key, failing
        self.random = random.Random(0)
        self.requests = self.now = self.most = 0  # taken in all, at the moment, at most at one moment
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, path: str, authorization: str | None, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of the answer to a request."""
        with self.lock:
            self.requests, self.now = self.requests + 1, self.now + 1
            self.most = max(self.most, self.now)
            fails = self.requests <= self.failures or self.random.random() < self.failing
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
        if fails or path != "/v1/chat/completions":
            return 500, {"error": {"message": "no"}}
        if authorization != f"Bearer {self.key}":
            return 401, {"error": {"message": f"no such key: {authorization}"}}
        text = body["messages"][-1]["content"]
        solution, reply = re.findall(r"(?:Solution|Answer): (.*)", text)
        grade = "I cannot say" if "?" in reply else "10" if solution in reply else "0"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": grade}}
        return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}

    @contextmanager
    def running(self) -> Iterator[FakeJudge]:
        """Serve inside, at ``url``."""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = judge.answer(self.path, self.headers["Authorization"], body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        with Server(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self.url = f"http://127.0.0.1:{server.server_port}/v1"
            yield self
            server.shutdown()
