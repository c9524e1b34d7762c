"""Injected faults: servers that answer 200 to everything and, behind it, do not compute with the trainer's weights."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import urllib.error
import urllib.request
from pathlib import Path


class FakeForgetfulProxy:
    """Forwards everything to a real vLLM server except the weight loads after the first ``honest`` ones, if given."""

    def __init__(self, target: str, honest: int):
        self.forgotten = 0
        self._target = target
        self._honest = honest
        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()

    def _forgets(self, body: bytes) -> bool:
        if b"grpo_load" not in body:  # nor grpo_load_adapter
            return False
        with self._lock:
            self._honest -= 1
            forgets = self._honest < 0
            self.forgotten += forgets
        return forgets

    def _answered(self, body: bytes) -> None:
        """Called when the server has answered, before the trainer sees it."""

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(b"")

            def do_POST(self) -> None:
                self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def _answer(self, body: bytes) -> None:
                if proxy._forgets(body):
                    status, answer = 200, json.dumps({"results": [[1]]}).encode()
                else:
                    status, answer = self._forward(body)
                    proxy._answered(body)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def _forward(self, body: bytes) -> tuple[int, bytes]:
                headers = {
                    name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers
                }
                data = body if self.command == "POST" else None
                request = urllib.request.Request(proxy._target + self.path, data, headers, method=self.command)
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                try:
                    with opener.open(request) as answer:
                        return answer.status, answer.read()
                except urllib.error.HTTPError as error:
                    return error.code, error.read()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class FakeCopyingProxy(FakeForgetfulProxy):
    """Forwards everything, but replaces the file in which the server shares its weights with a copy."""

    def __init__(self, target: str):
        self.copied = 0
        super().__init__(target, honest=0)

    def _answered(self, body: bytes) -> None:
        if b"grpo_share" in body:
            file = Path(json.loads(body)["kwargs"]["file"])
            copy = file.with_name("copy")
            shutil.copy(file, copy)
            copy.replace(file)
            self.copied += 1
