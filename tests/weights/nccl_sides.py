"""The two sides of the ``nccl`` bridge as separate programs, with gloo instead of NCCL and without CUDA.

    python nccl_sides.py receive WORKERS REPLICAS  # a server with vLLM's own receiver in each worker of each replica
    python nccl_sides.py join URL RUN_DIR          # a trainer's rank that joins the server's group, and then ends

The server prints its address.

Only vLLM's ``PyNcclCommunicator``, its CUDA streams, and the size of its buffers (1 GB) are replaced. TRL's client and
vLLM's rendezvous, packing and engine are real.
"""

from __future__ import annotations

import datetime
import socket
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from grpo_recipes.server.plugin import fingerprint
from weights.fake_server import FakeServer

BUFFER_BYTES = 64  # a broadcast as soon as there is more than this
GLOO_SECONDS = 60.0  # NCCL has no limit
PARAMETERS = {
    "embed.weight": torch.arange(24.0).view(6, 4),
    "layers.0.norm.weight": torch.linspace(-1, 1, 4, dtype=torch.bfloat16),
    "layers.0.up.weight": torch.arange(30, dtype=torch.float16).view(2, 3, 5) / 7,
    "layers.1.norm.weight": torch.tensor([[3.5, 1, 2, 0]], dtype=torch.bfloat16),
    "steps": torch.tensor([[1, -2], [1 << 40, 4]]),
    "head.weight": torch.arange(24.0).view(4, 6).flip(0) / 3,
}


class Gloo:
    """Stands in for PyNcclCommunicator: real bytes between the ranks that met at its store."""

    def __init__(self, group: StatelessProcessGroup, device: object) -> None:
        limit = datetime.timedelta(seconds=GLOO_SECONDS)
        self.group = group
        self._gloo = distributed.ProcessGroupGloo(group.store, group.rank, group.world_size, limit)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()


class NoStream:
    """Stands in for a CUDA stream."""

    def synchronize(self) -> None:
        pass


def without_cuda(replace: Any) -> None:
    """Let ``replace``, setattr or pytest's, put gloo in NCCL's place, and buffers of ``BUFFER_BYTES``."""
    replace(pynccl, "PyNcclCommunicator", Gloo)
    replace(packed_tensor, "_get_streams", lambda device, buffers: (NoStream(),) * buffers)
    replace(torch.accelerator, "current_device_index", lambda: 0)
    replace(packed_tensor.packed_nccl_broadcast_producer, "__defaults__", (BUFFER_BYTES, 2))


class Worker:
    """A worker of the server: vLLM's engine with a model that records the parameters in order."""

    def __init__(self, replica: int, rank: int, workers: int) -> None:
        self.begin()
        parallel = SimpleNamespace(data_parallel_index=replica, world_size=workers, rank=rank)
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        self.engine = NCCLWeightTransferEngine(None, config, torch.device("cpu"), self)

    def begin(self, fails_at: int = -1, stands_at: int = -1, drops: bool = False, keeps_sync: bool = False) -> None:
        """Forget all weights. From now on the model raises or hangs at that buffer, or drops parameters.

        With ``keeps_sync`` it does not record the number of the sync.
        """
        self.sync, self.keeps_sync, self.stands_at = 0, keeps_sync, stands_at
        self.held = {name: torch.zeros_like(tensor) for name, tensor in PARAMETERS.items()}
        self.loads: list[list[str]] = []  # names, by buffer
        self.fails_at, self.drops = fails_at, drops

    def load_weights(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        """Take what vLLM's engine unpacked from a buffer."""
        if len(self.loads) == self.fails_at:
            raise ValueError("this worker takes no more")
        if len(self.loads) == self.stands_at:
            threading.Event().wait()
        self.loads.append([name for name, _ in pairs])
        self.held.update({} if self.drops else {name: tensor.clone() for name, tensor in pairs})

    def init(self, body: dict[str, Any]) -> None:
        """Join the trainer's group."""
        self.engine.init_transfer_engine(self.engine.parse_init_info(body["init_info"]))
        self.engine.packed_buffer_size_bytes = BUFFER_BYTES

    def update(self, body: dict[str, Any]) -> None:
        """Receive weights."""
        self.engine.receive_weights(self.engine.parse_update_info(body["update_info"]))

    def count(self, body: dict[str, Any]) -> None:
        """Record the number of the sync."""
        self.sync = self.sync if self.keeps_sync else body["kwargs"]["sync"]

    def report(self) -> dict[str, Any]:
        """Return the same report as ``grpo_weights``."""
        kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self.held.items()}
        parameters = {name: [int(fingerprint(tensor)), kinds[name]] for name, tensor in self.held.items()}
        return {"parameters": parameters, "packed": {}, "sync": self.sync}


class Receiver(FakeServer):
    """A server whose replicas have ``workers`` workers each.

    ``/order`` makes it forget and fail, ``/seen`` returns what there was.
    """

    def __init__(self, port: int, workers: int, replicas: int) -> None:
        self._sizes = (workers, replicas)
        self.workers = [Worker(replica, rank, workers) for replica in range(replicas) for rank in range(workers)]
        self.hangs: set[str] = set()  # paths that are never answered
        super().__init__(port)

    def get(self, path: str) -> dict[str, Any]:
        """Return the answer to a GET."""
        return {"world_size": len(self.workers)} if path == "/get_world_size" else super().get(path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer to a POST."""
        if path == "/seen":
            return self._seen()
        if path == "/order":
            return self._begin(**body)
        answer = super().post(path, body)
        if path in self.hangs:
            threading.Event().wait()
        if path in self.refuses:
            return {"error": f"refused {path}"}
        if body.get("method") == "grpo_config":
            return self._results([{"weight_transfer_config": {"backend": "nccl"}} for _ in self.workers])
        if body.get("method") == "grpo_count":
            return self._results([worker.count(body) for worker in self.workers])
        if body.get("method") == "grpo_weights":
            return self._results([worker.report() for worker in self.workers])
        work = {"/init_weight_transfer_engine": Worker.init, "/update_weights": Worker.update}.get(path)
        if work:
            try:
                with ThreadPoolExecutor() as pool:
                    list(pool.map(lambda worker: work(worker, body), self.workers))
            except Exception as error:  # vLLM answers it with 500
                self.refuses.add(path)
                return {"error": repr(error)}
        return answer

    def _results(self, results: list[Any]) -> dict[str, Any]:
        """Return the answer with the results of all workers: a list for each replica."""
        workers, replicas = self._sizes
        return {"results": [results[replica * workers :][:workers] for replica in range(replicas)]}

    def _begin(self, refuses: Iterable[str] = (), hangs: Iterable[str] = (), **faults: Any) -> dict[str, Any]:
        self.refuses, self.hangs = set(refuses), set(hangs)
        self.calls, self.asked, self.tokens = [], [], set()
        for worker in self.workers:
            worker.begin(**faults)
        return {}

    def _seen(self) -> dict[str, Any]:
        parameters = [{name: values(tensor) for name, tensor in worker.held.items()} for worker in self.workers]
        loads = [worker.loads for worker in self.workers]
        return {
            "calls": self.calls,
            "asked": self.asked,
            "tokens": list(self.tokens),
            "held": parameters,
            "loads": loads,
        }


def values(tensor: torch.Tensor) -> list[Any]:
    """Return a tensor for JSON."""
    return [str(tensor.dtype), list(tensor.shape), tensor.double().flatten().tolist()]


def join(url: str, run_dir: Path) -> None:
    """Be a rank of the run, as far as the group for the weights."""
    from grpo_recipes.recipe.configs import GRPOConfig
    from grpo_recipes.runs.stop_request import StopRequest
    from grpo_recipes.trainers.rank import recording_rank
    from grpo_recipes.weights.nccl import NcclClient

    with recording_rank(run_dir):
        args = GRPOConfig(output_dir=str(run_dir), use_cpu=True, bf16=False, report_to="none")
        stop = StopRequest(run_dir)
        client = NcclClient(args=args, run_dir=run_dir, seed=None, stop=stop, base_url=url, group_port=free_port())
        client.init_communicator("cuda")


def free_port() -> int:
    """Return a port for a group to meet at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    without_cuda(setattr)
    if sys.argv[1] == "receive":
        print(Receiver(0, *map(int, sys.argv[2:4])).url, flush=True)
        threading.Event().wait()
    join(sys.argv[2], Path(sys.argv[3]))
