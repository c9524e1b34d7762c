"""A fake GPU for the bridge ``shared``, and a server's worker that uses it in a separate process."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_recipes.server import plugin
from grpo_recipes.server.plugin import WeightReport
from grpo_recipes.weights import shared

HIDDEN, VOCABULARY, PADDED = 4, 10, 16
UUID = "00000000-1111-2222-3333-444444444444"


class FakeStorage:
    """Presents a tensor's memory as memory of GPU 0."""

    _untyped_storage = SimpleNamespace(device=torch.device("cuda", 0))

    def __init__(self, storage: torch.UntypedStorage):
        self._storage, self._weak_ref = storage, storage._weak_ref

    def _share_cuda_(self) -> tuple[Any, ...]:
        manager, handle, size = self._storage._share_filename_cpu_()
        return 0, handle, size, 0, manager, 0, b"event", True


class FakeGpu:
    """Replaces CUDA memory between processes with CPU memory, which torch shares by name.

    Only the calls to CUDA are fake. The export_tensor handle and its conversion to a tensor are torch's.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.events: list[str] = []  # a record of each wait for the GPU's work
        for module in (plugin, shared):
            patch.setattr(module, "get_gpu_uuid", lambda _: UUID)
        patch.setattr(torch.Tensor, "_typed_storage", lambda tensor: FakeStorage(tensor.untyped_storage()))
        patch.setattr(torch.UntypedStorage, "_new_shared_cuda", self._opened)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda _: self.events.append("synchronize"))

    def _opened(
        self, device: int | None, handle: bytes, size: int, offset: int, manager: bytes, *event: Any
    ) -> torch.UntypedStorage:
        assert (device, offset, event) == (None, 0, (0, b"event", True))  # this process's number of it: none, on CPU
        return torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)


class Layer(nn.Module):
    def __init__(self, **sizes: int):
        super().__init__()
        for name, rows in sizes.items():
            self.add_module(name, nn.Linear(HIDDEN, rows))


class Served(nn.Module):
    """A model as vLLM has it: fused, and with padded rows in the vocabulary."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(PADDED, HIDDEN)
        self.attention = Layer(qkv_proj=8)
        self.head = nn.Linear(HIDDEN, PADDED, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.data[VOCABULARY:] = 0


class Worker(WeightReport):
    def __init__(self) -> None:
        self.model = Served()

    def get_model(self) -> nn.Module:
        return self.model

    def values(self) -> dict[str, Any]:
        return {name: value.tolist() for name, value in self.model.named_parameters()}


def serve() -> None:
    """Answer calls of a worker's methods, a line of JSON each, until there are no more."""
    with pytest.MonkeyPatch.context() as patch:
        FakeGpu(patch)
        worker = Worker()
        for line in sys.stdin:
            call = json.loads(line)
            print(json.dumps(getattr(worker, call["method"])(**call["kwargs"])), flush=True)


if __name__ == "__main__":
    serve()
