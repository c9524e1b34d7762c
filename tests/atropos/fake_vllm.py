"""A small fake of the run's vLLM: completions in the shape of ``/v1/completions``, and its failures."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_recipes import smoke

Sampled = tuple[list[int], list[float], str]  # token ids, log-probs, finish reason


def save_tokenizer(folder: Path) -> str:
    """Save the smoke model's tokenizer to a folder and return its path."""
    smoke.build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    return str(folder)


class FakeVllm:
    """Answers requests with the completions of ``samples`` and records the requests.

    Attributes:
        samples: returns a completion for the prompt's token ids and the number in the request.
        policy: the number in X-Grpo-Policy; None leaves the header out.
        asked: the JSON of each request that was answered with completions, in order.
        authorized: the Authorization header of each request.
        fails: statuses of the next answers to POST; 0 closes the connection.
        content: the JSON of the next answer, instead of completions.
        token: the bearer token that requests need; None accepts every request.
    """

    def __init__(self, samples: Callable[[list[int], int], Sampled], port: int = 0) -> None:
        self.samples = samples
        self.policy: int | None = 0
        self.asked: list[dict[str, Any]] = []
        self.authorized: list[str | None] = []
        self.fails: list[int] = []
        self.content: dict[str, Any] | None = None
        self.token: str | None = None
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200 if self.path == "/health" else 404, b"{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                authorization = self.headers.get("Authorization")
                fake.authorized.append(authorization)
                status = fake.fails.pop(0) if fake.fails else 200
                status = 401 if fake.token is not None and authorization != f"Bearer {fake.token}" else status
                if status == 0:
                    self.connection.shutdown(socket.SHUT_RDWR)
                elif status != 200:
                    self._send(status, b'{"error": {"message": "told to fail"}}')
                else:
                    fake.asked.append(body)
                    content, fake.content = fake.content, None
                    answer = fake.completions if self.path == "/v1/completions" else fake.chat
                    self._send(200, json.dumps(content or answer(body)).encode())

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                if fake.policy is not None:
                    self.send_header("X-Grpo-Policy", str(fake.policy))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client has ended
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        """Build the answer of vLLM 0.31 to ``return_token_ids`` and ``logprobs``."""
        choices = []
        for number in range(body.get("n", 1)):
            ids, logprobs, reason = self.samples(body["prompt"], number)
            scored = {"text_offset": [0] * len(ids), "token_logprobs": logprobs, "tokens": ["x"] * len(ids)}
            choice = {"index": number, "text": "x", "finish_reason": reason, "stop_reason": None, "logprobs": scored}
            choices.append({**choice, "token_ids": ids, "prompt_token_ids": body["prompt"]})
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        return {**head, "choices": choices, "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Build a chat completion with the text ``hello``."""
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
        head = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return {**head, "choices": [choice]}

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
