"""The bridge by NCCL as far as it goes without a GPU: TRL's client here, vLLM's receiver in a process, gloo between."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from rank_processes import start_module
from waiting import wait_for

pytest.importorskip("vllm")

from grpo_recipes.launch import monitor
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.launch.monitor import Monitor
from grpo_recipes.launch.nodes import NodeWorkers
from grpo_recipes.server.plugin import choose_unit, fingerprint
from grpo_recipes.server.wire import WORKERS_PATH
from grpo_recipes.weights import client as weights_client
from grpo_recipes.weights.nccl import NcclClient
from grpo_recipes.weights.transport import BadAnswer, ServerError, run_in_thread
from weights import nccl_sides
from weights.nccl_sides import PARAMETERS, values

TOKEN = {"Authorization": "Bearer the-token"}
INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
METADATA = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in PARAMETERS.items()]
# One more is packed as soon as a buffer holds more than BUFFER_BYTES.
BUFFERS = [
    ["embed.weight"],
    ["layers.0.norm.weight", "layers.0.up.weight"],
    ["layers.1.norm.weight", "steps", "head.weight"],
]


class Server:
    """A receiver in a separate process."""

    def __init__(self, workers: int, replicas: int, output: Path) -> None:
        output.touch()
        sizes = (str(workers), str(replicas))
        self.process = start_module("weights.nccl_sides", "receive", *sizes, variables=environment(), output=output)
        wait_for(lambda: "\nhttp://" in f"\n{output.read_text()}", "the server", 120)
        self.url = next(line for line in output.read_text().splitlines() if line.startswith("http://"))

    def order(self, **orders: Any) -> None:
        """Clear its records and weights, and make it fail from now on as ordered. Without orders, it works."""
        requests.post(f"{self.url}/order", json=orders, headers=TOKEN, timeout=10).raise_for_status()

    def seen(self) -> SimpleNamespace:
        """Return its recorded requests and the weights of its workers."""
        return SimpleNamespace(**requests.post(f"{self.url}/seen", json={}, headers=TOKEN, timeout=10).json())


def environment(**variables: str) -> dict[str, str]:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent / "src")])
    return {**os.environ, "PYTHONPATH": path, "VLLM_HOST_IP": "127.0.0.1", **variables}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, int], Server]]:
    """``servers(WORKERS, REPLICAS)``: a server with so many workers in each replica.

    Each is started once while it lives: a start takes seconds.
    """
    started: dict[tuple[int, int], Server] = {}

    def of(*sizes: int) -> Server:
        if sizes not in started or not started[sizes].process.is_alive():
            started[sizes] = Server(*sizes, tmp_path_factory.mktemp("server") / "output.txt")
        return started[sizes]

    yield of
    for server in started.values():
        server.process.kill()
        server.process.join()


@pytest.fixture(params=[(1, 1)])
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    """The numbers of workers in a replica, and of replicas."""
    return request.param


@pytest.fixture
def server(servers: Callable[[int, int], Server], sizes: tuple[int, int]) -> Server:
    running = servers(*sizes)
    running.order()
    return running


@pytest.fixture
def client(connect: Any, server: Server, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> NcclClient:
    """Return a client that has not joined a group yet."""
    nccl_sides.without_cuda(monkeypatch.setattr)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    nccl_client = connect(client=NcclClient, server_request_timeout=20.0, vllm_data_parallel_size=sizes[1])
    assert isinstance(nccl_client, NcclClient)
    nccl_client.group_port = nccl_sides.free_port()
    return nccl_client


def send(client: NcclClient, changed: str = "") -> None:
    """Send all parameters, one of them perhaps changed."""
    tensors = [(name, tensor + 1 if name == changed else tensor) for name, tensor in PARAMETERS.items()]
    client.update_named_params(METADATA, iter(tensors))


def steps(calls: list[str]) -> list[str]:
    """Return the requests that belong to the transfer."""
    return [call for call in calls if call in (INIT, START, UPDATE, FINISH)]


@pytest.mark.parametrize(
    "sizes",
    [(1, 1), pytest.param((2, 1), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)],
    indirect=True,
    ids=str,
)
def test_weights_arrive_whole_in_order_and_through_several_buffers(client, server, sizes):
    """All workers of all replicas are in the group, and rank 0 is the trainer."""
    workers = sizes[0] * sizes[1]
    client.init_communicator("cuda")
    for changed in ("", "steps"):
        send(client, changed)
        assert client.checksum_error is None
        expected = {name: values(tensor + 1 if name == changed else tensor) for name, tensor in PARAMETERS.items()}
        records = server.seen()
        assert records.held == [expected] * workers
        assert [list(parameters) for parameters in records.held] == [list(PARAMETERS)] * workers
    assert records.loads == [BUFFERS * 2] * workers


class Copies:
    """Stands in for the NCCL group: a broadcast copies the bytes that the memory holds at that moment."""

    def __init__(self) -> None:
        self.received: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.received.append(tensor.clone())


def test_a_transfer_starts_after_the_optimizer_has_written(client, monkeypatch):
    """G1: vLLM's side streams do not wait for the default stream, on which the optimizer writes."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in PARAMETERS.items()}
    queued = [partial(weights[name].copy_, tensor) for name, tensor in PARAMETERS.items()]  # on the default stream

    def synchronize() -> None:
        while queued:
            queued.pop(0)()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(client, "_post", lambda url, **kwargs: {})
    monkeypatch.setattr(client, "call_workers", lambda method, **kwargs: [])
    client.communicator = Copies()
    client._held = {"parameters": {}, "packed": {}}
    client._send(METADATA, client._compute_fingerprints(iter(weights.items())))

    written = torch.cat([tensor.contiguous().view(torch.uint8).view(-1) for tensor in PARAMETERS.values()])
    assert torch.equal(torch.cat(client.communicator.received), written)
    expected = {name: int(fingerprint(tensor, choose_unit(tensor))) for name, tensor in PARAMETERS.items()}
    assert client._sent_values() == expected
    client.communicator = None


def test_the_fingerprint_of_a_tensor_on_a_gpu_is_requested_in_the_stream_that_gathers_it(client, monkeypatch):
    """vLLM selects another stream after each buffer, and another stream does not wait for FSDP's gathering."""
    events: list[str] = []
    client._held = {"parameters": {}, "packed": {}}
    monkeypatch.setattr(weights_client, "compute_sent_fingerprint", lambda name, *_: events.append(f"hash {name}") or 1)
    on_gpu = SimpleNamespace(is_cpu=False)

    for name, _ in client._compute_fingerprints(iter([("a", on_gpu), ("b", on_gpu)])):
        events.append(f"pack {name}")

    assert events == ["hash a", "pack a", "hash b", "pack b"] and client._sent_values() == {"a": 1, "b": 1}


def test_the_protocol(client, server):
    client.init_communicator("cuda")
    send(client)
    records = server.seen()
    assert steps(records.calls) == [INIT, START, UPDATE, FINISH]
    (group,) = [request["init_info"] for request in records.asked if "init_info" in request]
    address = {"master_address": "127.0.0.1", "master_port": client.group_port}
    assert group == {**address, "rank_offset": 1, "world_size": 2, "packed": True}
    (update,) = [request["update_info"] for request in records.asked if "update_info" in request]
    names, dtypes, shapes = (list(column) for column in zip(*METADATA, strict=True))
    assert update == {"names": names, "dtype_names": dtypes, "shapes": shapes}
    assert records.tokens == [TOKEN["Authorization"]]


def test_the_engine_is_paused_during_a_transfer(client, server):
    """Atropos' environments send requests at any time, and vLLM's parameters are on the meta device until the end."""
    client.init_communicator("cuda")
    send(client)
    calls = server.seen().calls
    transfer = calls[calls.index(START) - 1 :]
    assert transfer == ["/pause?mode=keep", START, UPDATE, FINISH, WORKERS_PATH, "/resume", WORKERS_PATH]


def test_weights_that_the_server_drops_are_noticed(client, server):
    client.init_communicator("cuda")
    server.order(drops=True)
    send(client)
    assert "'nccl' bridge" in client.checksum_error and "embed.weight" in client.checksum_error


def test_workers_of_another_sync_are_noticed(client, server):
    client.init_communicator("cuda")
    server.order(keeps_sync=True)
    send(client)
    assert client.checksum_error.endswith("'nccl' bridge: it has the weights of sync 0, and the trainer sent sync 1")


@pytest.mark.parametrize(("path", "calls"), [(START, [START]), (FINISH, [START, UPDATE, FINISH])])
def test_a_step_that_the_server_refuses_ends_the_transfer_and_is_asked_once(client, server, capfd, path, calls):
    client.init_communicator("cuda")
    server.order(refuses=[path])
    with pytest.raises(BadAnswer, match=rf"answered 500: .*refused {path}.*\(in {path}; log: "):
        send(client)
    records = server.seen()
    assert steps(records.calls) == calls and "/resume" not in records.calls
    assert f"grpo: the vLLM server at {server.url} answered 500" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "message"), [({"refuses": [UPDATE]}, "refused"), ({"fails_at": 1}, "takes no more")])
def test_a_worker_that_fails_leaves_a_reason_though_the_collective_waits_for_it(
    client, server, capfd, monkeypatch, fault, message
):
    monkeypatch.setattr(nccl_sides, "GLOO_SECONDS", 5.0)
    client.init_communicator("cuda")
    server.order(**fault)
    with pytest.raises((RuntimeError, ServerError)):  # the server's, or gloo's after its limit; NCCL has none
        send(client)
    records = server.seen()
    assert steps(records.calls) == [START, UPDATE]
    assert records.loads == [BUFFERS[: fault.get("fails_at", 0)]]
    assert message in next(line for line in capfd.readouterr().out.splitlines() if line.startswith("grpo: "))


def test_a_server_without_the_transfer_is_refused_before_any_group(client, server, monkeypatch):
    monkeypatch.setattr(client, "call_workers", lambda method: [[{"weight_transfer_config": None}]])
    with pytest.raises(RuntimeError, match="no weight-transfer engine"):
        client.init_communicator("cuda")
    assert steps(server.seen().calls) == []


def test_a_server_that_is_killed_in_the_middle_of_a_transfer_ends_it_with_its_cause(client, server, capfd):
    client.init_communicator("cuda")
    server.order(stands_at=1)

    def kill() -> None:
        while server.seen().loads != [BUFFERS[:1]]:
            time.sleep(0.05)
        server.process.kill()
        server.process.join()

    killed = run_in_thread(kill)
    began = time.monotonic()
    with pytest.raises((RuntimeError, ServerError)):  # gloo's, which sees the death at once, or the server's
        send(client)
    killed.result(timeout=10)
    assert time.monotonic() - began < nccl_sides.GLOO_SECONDS / 2
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("grpo: ")]
    assert len(lines) == 1 and "lost the connection to the vLLM server in /update_weights" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("orders", [{"hangs": [INIT]}, {"refuses": [INIT]}], ids=["hangs", "refuses"])
def test_a_rendezvous_that_never_comes_ends_within_its_limit(server, connect, read, tmp_path, monkeypatch, orders):
    """A real rank waits for a server that never joins, and the launcher's monitor runs next to it."""
    monkeypatch.setattr(monitor, "_DUMP_SECONDS", 1)
    server.order(**orders)
    log = tmp_path / "rank.log"
    with log.open("w") as output:
        program = [sys.executable, nccl_sides.__file__, "join", server.url, str(tmp_path)]
        rank = subprocess.Popen(program, stdout=output, stderr=output, env=environment(RANK="0"))
    try:
        deadline = time.monotonic() + 60
        while INIT not in server.seen().calls:
            assert rank.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        attempt = SimpleNamespace(
            hooks=AllHooks([]), run=SimpleNamespace(folder=tmp_path),
            recipe=read(weight_sync_timeout=2), environment={},
            workers=NodeWorkers(1), plan=SimpleNamespace(mode="server", bridge="nccl"),
            server_address=lambda: ("127.0.0.1", 1, "the-token"),
        )  # fmt: skip
        watched = Monitor(
            attempt, SimpleNamespace(set_save_condition=lambda _: None, requested=False, check=lambda: None)
        )
        watched.groups["trainer"] = SimpleNamespace(process=SimpleNamespace(trains=True, ready=""), log=log)
        serving, state = SimpleNamespace(trains=False, ready="serving", renewed=False), SimpleNamespace(pid=None)
        watched.groups["server"] = SimpleNamespace(process=serving, log=log, state=lambda: state, members=[None])
        began, ending = time.monotonic(), None
        while ending is None and time.monotonic() < began + 30:
            ending = watched.tick()
            time.sleep(0.1)
        assert ending is not None and time.monotonic() - began < 10
        assert "rank 0 has been in phase connect after step 0" in ending.cause
        assert "(weight_sync_timeout 2) in the 'nccl' bridge" in ending.cause
        assert "init_communicator" in (tmp_path / "stacks/rank_0.txt").read_text()
        assert server.seen().calls.count(INIT) == 1
        if "refuses" in orders:
            assert "answered 500" in log.read_text()
    finally:
        rank.kill()
        rank.wait()
