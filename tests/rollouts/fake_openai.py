"""A small fake of vLLM's and SGLang's servers, which answers the requests of ``CompletionClient``.

The tokens of a completion are the length of its prompt and the seed of its request. A test therefore detects requests
that depend on anything else.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from typing import Any

END = 2


class FakeServer:
    """Answers requests and records them.

    Attributes:
        models: name -> source of the model, listed by /v1/models.
        asked: path and JSON of each POST, in order.
        authorized: the Authorization header of each request of any kind.
        fails: statuses of the next answers to POST; 0 closes the connection.
        refuses: prompts (their first token) that get status 400.
        broken: prompts (their first token) that get status 500 each time.
        content: the answer to send instead of completions.
        seconds: the time that an answer takes.
        most: requests that were in flight at the same time.
        starting: number of GETs that get 503 before the first answer.
        reply: pieces of its chat message; None breaks the stream off.
    """

    def __init__(self, *models: str) -> None:
        self.models = {name: f"/models/{name}" for name in models or ("tiny",)}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.authorized: list[str | None] = []
        self.fails: list[int] = []
        self.refuses: set[int] = set()
        self.broken: set[int] = set()
        self.content: Any = None
        self.seconds = 0.0
        self.most = self._now = 0
        self.starting = 0
        self.token: str | None = None
        self.reply: list[str | None] = ["hel", "lo"]
        self._lock = threading.Lock()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                authorization = self.headers.get("Authorization")
                fake.authorized.append(authorization)
                fake.starting -= 1
                if fake.starting >= 0:
                    return self._send(503, {"error": "starting"})
                if fake.token is not None and authorization != f"Bearer {fake.token}":
                    return self._send(401, {"error": "no"})
                cards = [{"id": name, "object": "model", "root": root} for name, root in fake.models.items()]
                return self._send(200, {"object": "list", "data": cards})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.authorized.append(self.headers.get("Authorization"))
                with fake._lock:
                    fake.asked.append((self.path, body))
                    fake._now += 1
                    fake.most = max(fake.most, fake._now)
                    status = fake.fails.pop(0) if fake.fails else 200
                time.sleep(fake.seconds)
                with fake._lock:
                    fake._now -= 1
                first = (body.get("prompt") or body.get("input_ids") or [0])[0]
                status = 400 if first in fake.refuses else 500 if first in fake.broken else status
                if status == 0:
                    self.close_connection = True
                elif status != 200:
                    self._send(status, {"error": {"message": f"told to answer {status}"}})
                elif body.get("stream"):
                    self._stream(body)
                else:
                    self._send(200, fake.content or fake.answer(self.path, body))

            def _send(self, status: int, content: Any) -> None:
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(data)

            def _stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                head = {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
                for piece in fake.reply:
                    if piece is None:
                        return
                    choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
                    self.wfile.write(f"data: {json.dumps({**head, 'choices': [choice]})}\n\n".encode())
                choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
                self.wfile.write(f"data: {json.dumps({**head, 'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of vLLM 0.31, or of SGLang's /generate."""
        if path == "/generate":
            ids, sampling = [len(body["input_ids"]), 7, END], body["sampling_params"]
            ids[1] = sampling.get("sampling_seed") or 7
            scored = [[-0.5 * index, token_id, None] for index, token_id in enumerate(ids)]
            ended = {"type": "stop", "matched": END}
            return {"text": f"said {ids[0]}", "meta_info": {"finish_reason": ended, "output_token_logprobs": scored}}
        seed = body.get("seed") or 7
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "stop_reason": None}
        if path == "/v1/chat/completions":
            ids = [len(body["messages"]), seed, END]
            content = [{"token": "x", "logprob": -0.5 * index, "top_logprobs": []} for index in range(3)]
            message = {"role": "assistant", "content": f"said {ids[0]}"}
            choice |= {"message": message, "token_ids": ids, "logprobs": {"content": content}}
        else:
            ids = [len(body["prompt"]), seed, END]
            scored = {"token_logprobs": [0.0, -0.5, -1.0], "tokens": ["x"] * 3, "text_offset": [0] * 3}
            choice |= {"text": f"said {ids[0]}", "token_ids": ids, "logprobs": scored}
        return {**head, "choices": [choice]}

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
