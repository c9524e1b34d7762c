"""A fake SGLang with real sampling: a transformers model behind the requests of a training.

SGLang itself does not run on CPU. Requests and answers follow its documentation: /v1/models, /generate with token ids
in and out, /update_weights_from_disk.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from rollouts.fake_openai import FakeServer
from safetensors.torch import load_file


class FakeSglang(FakeServer):
    """Sample from ``model``, and load new weights into it.

    Attributes:
        sampled: sampling parameters of each completion, in order.
        loads: how often weights were loaded.
        deaf: whether it says that it loaded weights, and does not.
        refuses_weights: whether it refuses to load weights.
        failing: how many of the requests after the next load get status 400.
    """

    def __init__(self, model: torch.nn.Module, name: str, eos: int):
        self.model, self.eos = model.eval(), eos
        self.sampled: list[dict[str, Any]] = []
        self.loads = self.failing = 0
        self.deaf = self.refuses_weights = False
        self._one_at_a_time = threading.Lock()
        super().__init__(name)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return SGLang's answer."""
        with self._one_at_a_time:
            return {"/update_weights_from_disk": self.load, "/generate": self.generate}[path](body)

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer /update_weights_from_disk."""
        if self.refuses_weights:
            return {"success": False, "message": "no such architecture", "num_paused_requests": 0}
        self.loads += 1
        if not self.deaf:
            (file,) = Path(body["model_path"]).glob("*.safetensors")
            self.model.load_state_dict(load_file(file), strict=False)
        self.fails += [400] * self.failing
        self.failing = 0
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer /generate with samples at the requested temperature."""
        how = body["sampling_params"]
        self.sampled.append(how)
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
        return {"text": "", "output_ids": [entry[1] for entry in scored], "meta_info": meta}
