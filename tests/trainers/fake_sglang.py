"""A fake SGLang that samples for real: a model of transformers behind the requests that a training makes.

SGLang itself does not run on CPU. What it is asked and answers is that of its documentation: /v1/models, /generate with
token ids in and out, /update_weights_from_disk.
"""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class FakeSglang:
    """Samples from ``model``, and loads other weights into it.

    Attributes:
        asked: sampling parameters of each request of a completion, in order.
        loads: how often weights were loaded.
        deaf: whether it says that it loaded weights, and does not.
        refuses: whether it refuses to load weights.
        broken: of so many requests of completions that come next, the first token's prompt is not answered.
        most: requests in flight at the same time.
    """

    def __init__(self, model: torch.nn.Module, name: str, eos: int):
        self.model, self.name, self.eos = model.eval(), name, eos
        self.asked: list[dict[str, Any]] = []
        self.loads = self.broken = self.most = self._now = 0
        self.deaf = self.refuses = False
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": fake.name, "object": "model", "root": fake.name}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._counting:
                    fake._now += 1
                    fake.most = max(fake.most, fake._now)
                answers = {"/update_weights_from_disk": fake.load, "/generate": fake.generate}
                with fake._lock:
                    status, content = answers[self.path](body)
                with fake._counting:
                    fake._now -= 1
                self._send(status, content)

            def _send(self, status: int, content: Any) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def load(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer /update_weights_from_disk."""
        if self.refuses:
            return 400, {"success": False, "message": "no such architecture", "num_paused_requests": 0}
        self.loads += 1
        if not self.deaf:
            (file,) = Path(body["model_path"]).glob("*.safetensors")
            self.model.load_state_dict(load_file(file), strict=False)
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer /generate, from the distribution at the asked temperature."""
        how = body["sampling_params"]
        if self.broken:
            self.broken -= 1
            return 400, {"error": {"message": "told to fail"}}
        self.asked.append(how)
        draw = torch.Generator().manual_seed(how.get("sampling_seed", 0))
        ids, scored = list(body["input_ids"]), []
        while len(scored) < how["max_new_tokens"]:
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            logprobs = (logits / (how["temperature"] or 1.0)).log_softmax(-1)
            greedy = how["temperature"] == 0
            token = int(logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=draw))
            ids.append(token)
            scored.append([float(logprobs[token]), token, None])
            if token == self.eos:
                break
        kind = "stop" if ids[-1] == self.eos else "length"
        meta = {"finish_reason": {"type": kind}, "output_token_logprobs": scored, "completion_tokens": len(scored)}
        return 200, {"text": "", "output_ids": [one[1] for one in scored], "meta_info": meta}

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
