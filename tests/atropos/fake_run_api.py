"""A fake run-api for faults that the real server cannot produce on request: repeated errors, slow or cut answers."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

NO_BATCH: dict[str, Any] = {"batch": None}


class FakeRunApi:
    """Answers each path with the entries of ``script`` in order, then repeats the last entry.

    An answer is JSON with status 200, or a status with a text, or the name of a fault: ``silent`` never answers,
    ``slow`` sends a byte every tenth of a second, ``cut`` closes the connection within the answer.

    Attributes:
        script: answers by path.
        asked: times of the requests by path, from time.monotonic.
        bodies: posted JSON, by path.
    """

    def __init__(self, **script: list[Any]) -> None:
        self.script: dict[str, list[Any]] = {
            "/status": [{"current_step": 0, "queue_size": 0}], "/info": [{"batch_size": -1, "max_token_len": -1}],
        } | {f"/{path}": list(answers) for path, answers in script.items()}  # fmt: skip
        self.asked: dict[str, list[float]] = {}
        self.bodies: dict[str, list[Any]] = {}
        self._closing = threading.Event()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.asked.setdefault(self.path, []).append(time.monotonic())
                if body:
                    fake.bodies.setdefault(self.path, []).append(json.loads(body))
                answers = fake.script.get(self.path, [(404, "Not Found")])
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                with contextlib.suppress(ConnectionError):  # the client gave up and closed the connection
                    self._give(answer)

            do_POST = do_GET

            def _give(self, answer: Any) -> None:
                if answer == "silent":
                    fake._closing.wait(30)
                elif answer in ("slow", "cut"):
                    self._send(200, b"", 1000)
                    while answer == "slow" and not fake._closing.wait(0.1):
                        self.wfile.write(b" ")
                elif isinstance(answer, tuple):
                    self._send(answer[0], answer[1].encode())
                else:
                    self._send(200, json.dumps(answer).encode())

            def _send(self, status: int, body: bytes, length: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def close(self) -> None:
        """Stop the server and release waiting requests."""
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def fake_run_api(**script: list[Any]) -> Iterator[FakeRunApi]:
    """Yield a fake run-api with this script."""
    fake = FakeRunApi(**script)
    try:
        yield fake
    finally:
        fake.close()
