"""Test the bridge ``shared`` with a worker in this process: shared parameters and rejected setups."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_recipes.server import plugin
from grpo_recipes.server.plugin import WeightReport, map_memory
from grpo_recipes.weights import shared
from grpo_recipes.weights.shared import SharedClient
from grpo_recipes.weights.transport import ServerError
from weights import fake_gpu
from weights.fake_gpu import HIDDEN, PADDED, VOCABULARY, FakeGpu, Layer, Worker


class Trained(nn.Module):
    """A model as transformers has it, with tied embeddings."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention = Layer(v_proj=2, k_proj=2, q_proj=4)  # not in vLLM's order
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)


class LocalClient(SharedClient):
    """Client of a server that is a worker in this process."""

    def __init__(self, worker: Worker, folder: Path, weight_guard: bool = True):
        self.worker, self.asked, self._model, self._apart, self._epoch = worker, [], None, [], 1
        self._gpu = None
        self._args, self.checksum_error, self._sync, self._stopping = (
            SimpleNamespace(
                weight_guard=weight_guard, use_cpu=True, weight_sync_timeout=600.0, server_request_timeout=1800.0
            ),
            None,
            0,
            0,
        )
        self.stop, self._state_file = SimpleNamespace(may_cut=False), folder / "state.json"
        self.base_url = "here"

    def call_workers(self, method: str, **kwargs):
        self.asked.append(method)
        return [[json.loads(json.dumps(getattr(self.worker, method)(**kwargs)))]]

    def pause(self, mode: str, timeout: float | None = None) -> None:
        self.asked.append(f"pause {mode}")

    def resume(self, timeout: float | None = None) -> None:
        self.asked.append("resume")


def fake_trainer(callbacks: list[Any], metrics: dict[str, list[float]]) -> Any:
    """Return a trainer that collects callbacks and metrics."""
    embeddings = SimpleNamespace(num_embeddings=97)
    return SimpleNamespace(
        model=SimpleNamespace(get_input_embeddings=lambda: embeddings),
        add_callback=callbacks.append,
        add_metric=lambda name, value: metrics[name].append(value),
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


@pytest.fixture(params=["cpu", "gpu"])
def client(request, tmp_path, monkeypatch):
    if request.param == "gpu":
        request.getfixturevalue("gpu")
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    return LocalClient(Worker(), tmp_path)


def test_after_the_first_sync_server_and_trainer_have_one_copy(client, tmp_path):
    model = Trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    client.sync_model(model)

    assert client.checksum_error is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    served = client.worker.model
    with torch.no_grad():  # like an optimizer
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 1.0)
    fused = served.attention.qkv_proj
    parts = [getattr(model.attention, name) for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(fused.weight, torch.cat([part.weight for part in parts]))
    assert torch.equal(fused.bias, torch.cat([part.bias for part in parts]))
    assert torch.equal(served.embed.weight[:VOCABULARY], model.embed.weight)
    assert served.embed.weight[VOCABULARY:].abs().sum() == 0 and served.head.weight is served.embed.weight
    assert model.head.weight is model.embed.weight
    assert list((tmp_path / "sync").iterdir()) == []  # no name is left to remove

    client.asked.clear()
    client.sync_model(model)
    assert client.asked == ["grpo_weights"] and client.checksum_error is None


def test_a_server_that_computes_with_a_copy_of_its_own_is_seen_at_the_first_sync(client, monkeypatch):
    share, originals = WeightReport.grpo_share, []

    def apart(self, file, sync):
        layout = share(self, file, sync)
        originals.append(self.model.attention.qkv_proj.bias.data)  # CUDA keeps memory that another process uses
        self.model.attention.qkv_proj.bias.data = self.model.attention.qkv_proj.bias.data.clone()
        return layout

    monkeypatch.setattr(WeightReport, "grpo_share", apart)
    model = Trained()
    # The same values on both sides: a comparison of values would find nothing before the first step.
    client.sync_model(model)
    assert "'shared' bridge" in client.checksum_error and "attention.qkv_proj.bias" in client.checksum_error
    client.sync_model(model)
    assert client.checksum_error is not None


def test_weights_that_change_on_one_side_alone_are_seen(client):
    model = Trained()
    client.sync_model(model)
    model.attention.k_proj.weight.data = model.attention.k_proj.weight.data + 1
    client.sync_model(model)
    assert "attention.qkv_proj.weight" in client.checksum_error


def test_both_sides_take_their_fingerprints_at_the_same_time(client, monkeypatch):
    model, taking, take, call = Trained(), threading.Event(), shared.compute_sent_fingerprint, client.call_workers
    client.sync_model(model)

    def take_here(*args):
        taking.set()
        return take(*args)

    def call_workers(method, **kwargs):
        assert taking.wait(10)
        return call(method, **kwargs)

    monkeypatch.setattr(shared, "compute_sent_fingerprint", take_here)
    monkeypatch.setattr(client, "call_workers", call_workers)
    client.sync_model(model)
    assert client.checksum_error is None


def test_a_server_that_shared_with_nobody_is_seen_though_its_values_are_equal(client):
    client.sync_model(Trained())
    client.worker._grpo_sync = 0  # the number of a server that was started with these weights
    client._verify()
    assert client.checksum_error.endswith("'shared' bridge: it has the weights of sync 0, and the trainer sent sync 1")


def test_without_the_guard_nothing_is_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    client = LocalClient(Worker(), tmp_path, weight_guard=False)
    client.sync_model(Trained())
    assert client.asked == ["grpo_share"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.to(torch.bfloat16), r"is \[.*\] of torch.bfloat16, which is not a part of .*float32"),
        (lambda model: setattr(model, "extra", nn.Linear(1, 1)), "no parameter for the trainer's extra.weight"),
        (lambda model: setattr(model, "embed", nn.Embedding(PADDED + 1, HIDDEN)), r"embed.weight is \[17, 4\]"),
    ],
)
def test_a_model_that_vllm_keeps_otherwise_is_refused_with_another_bridge(client, tmp_path, change, message):
    model = Trained()
    change(model)
    with pytest.raises(ServerError, match=message + ".*Fix: write weight_sync: file"):
        client.sync_model(model)
    assert list((tmp_path / "sync").iterdir()) == []


def test_a_new_server_gets_the_weights_of_now_and_shares_them(client):
    model = Trained()
    client.sync_model(model)
    with torch.no_grad():
        model.embed.weight.fill_(3.0)
    client.worker = Worker()
    client._resend()
    client._verify()
    assert client.checksum_error is None
    with torch.no_grad():
        model.embed.weight.fill_(4.0)
    assert client.worker.model.embed.weight[0, 0] == 4.0 and model.embed.weight[0, 0] == 4.0


def test_the_server_finishes_its_requests_before_a_step_and_waits_for_its_end(client):
    callbacks = []
    metrics = defaultdict(list)
    client.attach(fake_trainer(callbacks, metrics))
    (callback,) = callbacks
    callback.on_pre_optimizer_step(None, None, None)
    callback.on_optimizer_step(None, None, None)
    assert client.asked == []  # nothing is shared yet
    client.sync_model(Trained())
    client.asked.clear()
    callback.on_pre_optimizer_step(None, None, None)
    assert client.asked == ["pause wait"]
    callback.on_optimizer_step(None, None, None)
    assert client.asked == ["pause wait", "resume"]
    assert len(metrics["shared/pause_seconds"]) == 2  # a step each


@pytest.mark.parametrize("other", [5.0, 0.2], ids=["the-limit-of-a-sync", "the-limit-of-a-request"])
def test_a_request_that_does_not_end_ends_the_run_within_the_limit_of_a_sync(connect, server, other):
    client = connect(client=SharedClient, weight_sync_timeout=0.4, server_request_timeout=other)
    client._model = Trained()
    (client._run_dir / "processes/server_state.json").write_text('{"epoch": 1, "state": "ready"}')  # of a launcher
    server.delay = 2.0
    limit, key = ("0.4", "weight_sync_timeout") if other > 1 else ("0.2", "server_request_timeout")
    message = (
        rf"did not answer /pause\?mode=wait within {limit} s \({key}\): 'shared' waits before each step .* not end$"
    )
    began = time.monotonic()
    with pytest.raises(ServerError, match=message):
        client.drain()
    with pytest.raises(ServerError, match=r"did not answer /resume within"):
        client._state_file.unlink()  # without a launcher the client does not wait for a restart
        client.release()
    assert time.monotonic() - began < 2


def test_a_row_tells_how_long_the_server_was_waited_for(client, monkeypatch):
    callbacks, metrics = [], defaultdict(list)
    client.attach(fake_trainer(callbacks, metrics))
    clock = 0.0

    def passes(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(shared, "time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr(client, "drain", lambda: passes(0.5))
    monkeypatch.setattr(client, "release", lambda: passes(0.25))
    for _ in range(2):
        callbacks[0].on_pre_optimizer_step(None, None, None)
        passes(8.0)  # the optimizer
        callbacks[0].on_optimizer_step(None, None, None)
    assert metrics["shared/pause_seconds"] == [0.75, 0.75]


def test_memory_is_reserved_when_it_is_mapped(tmp_path):
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    with pytest.raises(OSError):
        map_memory(str(tmp_path / "large"), 8192)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)
    map_memory(str(tmp_path / "small"), 4096)
    assert (tmp_path / "small").stat().st_blocks * 512 >= 4096 and (tmp_path / "small").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        map_memory(str(tmp_path / "small"), 4096)


class OtherProcess:
    """A worker with methods that run in a separate process."""

    def __init__(self) -> None:
        program, pipe = [sys.executable, "-m", fake_gpu.__name__], subprocess.PIPE
        self.process = subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parents[1])

    def __getattr__(self, method: str) -> Any:
        def call(**kwargs: Any) -> Any:
            assert self.process.stdin and self.process.stdout
            print(json.dumps({"method": method, "kwargs": kwargs}), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())

        return call


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    worker = OtherProcess()
    with worker.process as process:
        yield worker
        process.stdin.close()


@pytest.mark.slow
def test_a_gpus_memory_of_another_process_is_written_where_it_is(gpu, other, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    client, model = LocalClient(other, tmp_path), Trained()
    client.sync_model(model)
    assert client.checksum_error is None and client._apart == []

    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 1.0)
    values = other.values()
    parts = [getattr(model.attention, name) for name in ("q_proj", "k_proj", "v_proj")]
    assert values["attention.qkv_proj.weight"] == torch.cat([part.weight for part in parts]).tolist()
    assert values["attention.qkv_proj.bias"] == torch.cat([part.bias for part in parts]).tolist()
    assert values["embed.weight"] == model.embed.weight.tolist() + [[0.0] * HIDDEN] * (PADDED - VOCABULARY)
    client.sync_model(model)
    assert client.checksum_error is None


def test_on_a_gpu_the_server_keeps_its_parameters_where_they_are(gpu, tmp_path):
    """CUDA graphs have their addresses."""
    worker = Worker()
    before = [parameter.untyped_storage()._cdata for parameter in worker.model.parameters()]
    worker.grpo_share(file=str(tmp_path / "none"), sync=1)
    assert [parameter.untyped_storage()._cdata for parameter in worker.model.parameters()] == before
    assert not (tmp_path / "none").exists()


def test_no_handle_is_a_pickle(gpu, tmp_path):
    """Whoever takes the port of a dead server must not be able to run code in the trainer."""
    worker = Worker()
    places = worker.grpo_share(file=str(tmp_path / "none"), sync=1)["parameters"]
    assert all(type(value) in (str, int, bool, list) for place in places.values() for value in place.values())
    place = {**places["embed.weight"], "tensor_cls": "os.system", "storage_cls": "os.system"}
    assert type(plugin.import_tensor(place, torch.device("cpu"))) is torch.Tensor


def test_a_gpu_has_written_all_before_the_server_is_asked_to_read(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    client = LocalClient(Worker(), tmp_path)
    client.asked = gpu.events
    client.sync_model(Trained())
    assert gpu.events == ["grpo_share", "synchronize", "grpo_weights", "synchronize", "grpo_weights"]
    gpu.events.clear()
    client.drain()
    client.release()
    assert gpu.events == ["pause wait", "synchronize", "resume"]


@pytest.mark.parametrize(("rank_gpu", "message"), [("another", "rank 0 on another"), (None, "rank 0 on the CPU")])
def test_the_memory_of_another_gpu_is_refused(gpu, tmp_path, monkeypatch, rank_gpu, message):
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    monkeypatch.setattr(shared, "get_gpu_uuid", lambda _: rank_gpu)
    with pytest.raises(
        ServerError, match=f"the server computes on {fake_gpu.UUID}, {message}.*Fix: write weight_sync: f"
    ):
        LocalClient(Worker(), tmp_path).sync_model(Trained())
