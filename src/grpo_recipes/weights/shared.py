"""Share weights by ``weight_sync: shared``: the optimizer writes the memory that the server computes with.

There is one copy of the weights. The server pauses while the optimizer writes.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from grpo_recipes.errors import translate_errors
from grpo_recipes.server.plugin import get_gpu_uuid, import_tensor, map_memory, match_rows, view_tensor
from grpo_recipes.server.wire import WORKERS_PATH
from grpo_recipes.trainer_protocol import Trainer
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.guard import compute_sent_fingerprint, describe_checksum_error, find_differences
from grpo_recipes.weights.transport import ServerError, ServerLate, run_in_thread

PAUSE = "shared/pause_seconds"  # metric in metrics.jsonl


class SharedClient(BridgeClient):
    """Make the trained model's parameters views of the server's memory: rows of fused parameters (q, k and v).

    No weights are transferred. While the optimizer writes, the server answers no request: it first finishes the
    requests under way, and afterwards it empties its prefix cache.
    """

    bridge = "shared"
    streams = False
    _model: nn.Module | None = None  # the trained model, once it shares the server's memory
    _gpu: torch.device | None = None  # the GPU with the shared memory; None on CPU
    _apart: Sequence[str] = ()  # the server's parameters that did not show values written by the trainer

    def attach(self, trainer: Trainer) -> None:
        """Pause the server around each optimizer step, and log the time of the pauses."""
        super().attach(trainer)
        trainer.add_callback(_PauseAroundStep(self, partial(trainer.add_metric, PAUSE)))

    def sync_model(self, model: nn.Module) -> None:
        """Move the model into the server's memory at the first call, and verify the server's values at every call."""
        with self._ignoring_failures_while_stopping():
            if self._model is None:
                self._model = model
                self._sync = 1  # the only sync: afterwards nothing is transferred
                self._repeat_through_restarts(self._resend)
            self._repeat_through_restarts(self._verify)

    def _resend(self) -> None:
        """Map the server's memory, and make the trained model's parameters views of it.

        With the weight guard, first write zeros and record which of the server's parameters do not show them.
        """
        folder, parameters = Path(os.environ["GRPO_SYNC_DIR"]), self._parameters()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"weights_of_server_{self._epoch}_{os.urandom(4).hex()}"
        try:
            ((layout,),) = self.call_workers("grpo_share", file=str(file), sync=self._sync)
            with self._translate_parse_errors(WORKERS_PATH):
                tensors = _open_server_tensors(layout, str(file), next(iter(parameters.values())))
                views = dict(_match_views(parameters, tensors, layout["packed"]))
        finally:
            file.unlink(missing_ok=True)  # the memory stays while one of the two processes has it mapped
        self._gpu = next(iter(parameters.values())).device if layout["gpu"] else None
        if self._args.weight_guard:  # before the first step, check that the server reads the values written here
            for view in views.values():
                view.zero_()
            self._finish_writing()
            (reports,) = self._request_reports()
            self._held, self._apart = reports[0], find_differences(dict.fromkeys(views, 0), reports)
        for name, parameter in parameters.items():
            parameter.data = views[name].copy_(parameter.data)
        self._finish_writing()

    def _finish_writing(self) -> None:
        """Wait until the GPU has finished its writes: the server's reads do not wait for this process."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained model's parameters by name, tied parameters once."""
        assert self._model is not None
        return dict(self._model.named_parameters())  # tied parameters once, as in vLLM

    def _verify(self) -> None:
        """With the guard, compare the server's values with the trainer's parameters, and set ``checksum_error``."""
        if self._args.weight_guard:
            # The server and this process compute fingerprints at the same time.
            reports = run_in_thread(self._request_reports)
            sent = {
                name: compute_sent_fingerprint(name, tensor, self._held) for name, tensor in self._parameters().items()
            }
            (server_reports,) = reports.result()
            wrong = self._apart or find_differences({name: int(value) for name, value in sent.items()}, server_reports)
            self.checksum_error = describe_checksum_error(self.bridge, [wrong], self._sync, [server_reports])

    def drain(self) -> None:
        """Pause the server before an optimizer step: it finishes its requests and queues new ones.

        Do nothing before the first sync.
        """
        if self._model is not None:
            with self._ignoring_failures_while_stopping():
                self._repeat_through_restarts(self._finish_requests)

    def _finish_requests(self) -> None:
        """Pause the server once it has no request left. Raise ServerError if that exceeds the time limit of a sync."""
        keys = ("weight_sync_timeout", "server_request_timeout")
        limit, key = min((getattr(self._args, key), key) for key in keys)
        cause = "'shared' waits before each step until the server has no request left, and one does not end"
        with translate_errors(ServerLate, lambda error: ServerError(f"{error} ({key}): {cause}")):
            self.pause("wait", timeout=limit)

    def release(self) -> None:
        """Resume the server after an optimizer step, with the new weights. Do nothing before the first sync."""
        if self._model is not None:
            self._finish_writing()
            with self._ignoring_failures_while_stopping():
                self._repeat_through_restarts(partial(self.resume, timeout=self._args.weight_sync_timeout))


@dataclass(eq=False)
class _PauseAroundStep(TrainerCallback):
    """A trainer callback that pauses the server while the optimizer writes, and reports the seconds of each pause."""

    client: SharedClient
    add_seconds: Callable[[float], None]
    """Receives the seconds of a pause."""
    seconds: float = 0.0
    """Time that the last call of ``on_pre_optimizer_step`` took."""

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Pause the server, and store how long that took."""
        start = time.perf_counter()
        self.client.drain()
        self.seconds = time.perf_counter() - start

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Resume the server, and report the seconds that pausing and resuming took together."""
        start = time.perf_counter()
        self.client.release()
        self.add_seconds(self.seconds + time.perf_counter() - start)


def _open_server_tensors(layout: Mapping[str, Any], file: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the server's parameters as tensors of this process: in the mapped ``file``, or on the parameter's GPU.

    Raise ServerError if server and trainer are on different devices.
    """
    locations, gpu = layout["parameters"], get_gpu_uuid(parameter)
    if layout["gpu"] != gpu:
        devices = f"the server computes on {layout['gpu'] or 'the CPU'}, rank 0 on {gpu or 'the CPU'}"
        problem = f"weight_sync: shared needs one device, and {devices}"
        raise ServerError(f"{problem}. Fix: write weight_sync: file")
    if gpu:
        return {name: import_tensor(location, parameter.device) for name, location in locations.items()}
    memory = map_memory(file)
    return {name: view_tensor(memory, location) for name, location in locations.items()}


def _match_views(
    parameters: Mapping[str, torch.Tensor], server_tensors: Mapping[str, torch.Tensor], packed: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each of the trainer's parameters and its view of the server's memory.

    Raise ServerError if the server has no matching parameter.
    """
    for name, server_name, view in match_rows(parameters, server_tensors, packed):
        if view is None:
            shape = f"{list(parameters[name].shape)} of {parameters[name].dtype}"
            problem = f"weight_sync: shared: the server has no parameter for the trainer's {name}"
            if server_name is not None:
                server_shape = f"{list(server_tensors[server_name].shape)} of {server_tensors[server_name].dtype}"
                part = f"which is not a part of the server's {server_name}, {server_shape}"
                problem = f"weight_sync: shared: {name} is {shape}, {part}"
            raise ServerError(f"{problem}. Fix: write weight_sync: file")
        yield name, view
