"""The bridge by NCCL: TRL's sender and vLLM's receiver, as they are, with gloo in NCCL's place and no CUDA streams."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import distributed

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from grpo_recipes.weights.client import NcclClient
from weights.fake_server import WEIGHT, FakeServer


class Gloo:
    """Stands in for vLLM's PyNcclCommunicator: real bytes between two ranks."""

    def __init__(self, store: distributed.Store, rank: int) -> None:
        self._group = distributed.ProcessGroupGloo(store, rank, 2)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()


class NoStream:
    def synchronize(self) -> None:
        pass


class Receiver(FakeServer):
    """Receives weights with vLLM's own engine, whose model is the tensor ``held``."""

    engine: NCCLWeightTransferEngine

    def post(self, path: str, asked: dict[str, Any]) -> dict[str, Any] | None:
        if path == "/update_weights":
            self.engine.receive_weights(NCCLWeightTransferUpdateInfo(**asked["update_info"]))
        return super().post(path, asked)

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            assert name == "w"
            self.held = tensor.clone()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, buffers: (NoStream(),) * buffers)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    fake = Receiver()
    yield fake
    fake.close()


@pytest.fixture
def client(connect, server):
    store, ends = distributed.HashStore(), {}
    joins = [threading.Thread(target=lambda rank=rank: ends.update({rank: Gloo(store, rank)})) for rank in (0, 1)]
    for join in joins:
        join.start()
    for join in joins:
        join.join(30)
    made = connect(client=NcclClient)
    made.communicator = ends[0]
    server.engine = NCCLWeightTransferEngine.__new__(NCCLWeightTransferEngine)
    server.engine.model, server.engine.model_update_group, server.engine.device = server, ends[1], "cpu"
    server.engine.packed, server.engine.packed_buffer_size_bytes, server.engine.packed_num_buffers = True, 1 << 20, 2
    return made


def send(client: NcclClient, tensor: torch.Tensor) -> None:
    client.update_named_params([("w", "float32", list(tensor.shape))], iter([("w", tensor)]))


def test_what_is_sent_is_what_the_server_holds_and_the_guard_agrees(client, server):
    for number in (1, 2):
        send(client, WEIGHT + number)
        assert torch.equal(server.held, WEIGHT + number)
        assert client.checksum_error is None
    update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [call.partition("?")[0] for call in server.calls if call.partition("?")[0] in update] == update * 2


def test_a_receiver_that_drops_them_is_noticed(client, server, monkeypatch):
    monkeypatch.setattr(server, "load_weights", lambda pairs: None)
    send(client, WEIGHT + 1)
    assert "nccl" in client.checksum_error and torch.equal(server.held, WEIGHT)
