"""The bridge ``shared``: one copy of the weights, which the trainer's optimizer writes and the server computes with."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from grpo_recipes.errors import translate
from grpo_recipes.server.plugin import gpu_of, imported, mapped_memory, own_rows, tensor_in
from grpo_recipes.weights.client import BridgeClient, run_in_thread
from grpo_recipes.weights.guard import checksum_error, differing, sent_fingerprint
from grpo_recipes.weights.transport import ServerError, ServerLate

PAUSE = "shared/pause_seconds"  # in metrics.jsonl


class SharedClient(BridgeClient):
    """The trained model's parameters are views of the server's memory, of fused ones (q, k and v) the rows.

    Nothing travels. The server answers no request while the optimizer writes: it finishes those in flight before, and
    forgets their prefixes after.
    """

    bridge = "shared"
    streams = False

    def __init__(self, **kwargs: Any):
        self._model: nn.Module | None = None  # the trained model, once it shares the server's memory
        self._gpu: torch.device | None = None  # whose memory is shared; None on CPU
        self._apart: list[str] = []  # parameters of the server that did not show what was written into them
        super().__init__(**kwargs)

    def attach(self, trainer: Any) -> None:
        """Be called around each optimizer step, and have its row tell how long the server was waited for."""
        trainer.add_callback(_Drained(self, lambda seconds: trainer._metrics["train"][PAUSE].append(seconds)))

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the memory is shared at the first sync."""

    def sync_model(self, model: nn.Module) -> None:
        """Share the memory with the server if that is to be done, and compare what both have in it."""
        with self._excused_when_stopping():
            if self._model is None:
                self._model = model
                self._sync = 1  # the only one: afterwards nothing travels
                self._through_restarts(self._resend)
            self._through_restarts(self._verify)

    def _resend(self) -> None:
        """Have the server give its parameters' memory, and the trained model move in with it."""
        folder, parameters = Path(os.environ["GRPO_SYNC_DIR"]), self._parameters()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"weights_of_server_{self._epoch}_{os.urandom(4).hex()}"
        try:
            (layout,) = self.call_workers("grpo_share", file=str(file), sync=self._sync)
            with self._reading("/collective_rpc"):
                held = _held(layout, str(file), next(iter(parameters.values())))
                views = dict(_views(parameters, held, layout["packed"]))
        finally:
            file.unlink(missing_ok=True)  # the memory stays while one of the two has it
        self._gpu = next(iter(parameters.values())).device if layout["gpu"] else None
        if self._args.weight_guard:  # what is written here must be read there, before the first step as well
            for view in views.values():
                view.zero_()
            self._finish_writing()
            self._held, *others = self._reports()
            self._apart = differing(dict.fromkeys(views, 0), [self._held, *others])
        for name, parameter in parameters.items():
            parameter.data = views[name].copy_(parameter.data)
        self._finish_writing()

    def _finish_writing(self) -> None:
        """Wait until a GPU has written what it was told to: the server's reads do not wait for this process's work."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)

    def _parameters(self) -> dict[str, nn.Parameter]:
        assert self._model is not None
        return dict(self._model.named_parameters())  # tied ones once, as vLLM has them

    def _verify(self) -> None:
        if self._args.weight_guard:
            reports = run_in_thread(self._reports)  # while the server takes its fingerprints, ours are taken here
            own = {name: sent_fingerprint(name, one, self._held) for name, one in self._parameters().items()}
            held = reports.result()
            wrong = self._apart or differing({name: int(value) for name, value in own.items()}, held)
            self.checksum_error = checksum_error(self.bridge, wrong, self._sync, held)

    def drain(self) -> None:
        """Let the server finish what it has, and hold back what comes."""
        if self._model is not None:
            with self._excused_when_stopping():
                self._through_restarts(self._finish_requests)

    def _finish_requests(self) -> None:
        """Pause the server once it has no request left; ServerError where that takes longer than a sync may."""
        keys = ("weight_sync_timeout", "server_request_timeout")
        limit, key = min((getattr(self._args, key), key) for key in keys)
        cause = "'shared' waits before each step until the server has no request left, and one does not end"
        with translate(ServerLate, lambda error: ServerError(f"{error} ({key}): {cause}")):
            self.pause("wait", timeout=limit)

    def release(self) -> None:
        """Let the server continue, with the new weights and without prefixes computed with the old ones."""
        if self._model is not None:
            self._finish_writing()
            with self._excused_when_stopping():
                self._through_restarts(partial(self.resume, timeout=self._args.weight_sync_timeout))


class _Drained(TrainerCallback):
    """No request is under way at the server while the optimizer writes into its memory."""

    def __init__(self, client: SharedClient, note: Callable[[float], None]):
        self._client, self._note = client, note
        self._seconds = 0.0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        began = time.perf_counter()
        self._client.drain()
        self._seconds = time.perf_counter() - began

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        began = time.perf_counter()
        self._client.release()
        self._note(self._seconds + time.perf_counter() - began)


def _held(layout: Mapping[str, Any], file: str, own: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the server's parameters as tensors of this process: in the mapped ``file``, or on the GPU of ``own``."""
    places, gpu = layout["parameters"], gpu_of(own)
    if layout["gpu"] != gpu:
        what = f"weight_sync: shared: the server computes on {layout['gpu'] or 'the CPU'}, rank 0 on {gpu or 'the CPU'}"
        raise ServerError(f"{what}, and they share the memory of one device. Fix: write weight_sync: file")
    if gpu:
        return {name: imported(place, own.device) for name, place in places.items()}
    memory = mapped_memory(file)
    return {name: tensor_in(memory, place) for name, place in places.items()}


def _views(
    parameters: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor], packed: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a view of the server's memory for each of the trainer's parameters, by its name."""
    for name, place, view in own_rows(parameters, held, packed):
        if view is None:
            ours = f"{list(parameters[name].shape)} of {parameters[name].dtype}"
            what = f"weight_sync: shared: the server has no parameter for the trainer's {name}"
            if place is not None:
                theirs = f"{list(held[place].shape)} of {held[place].dtype}"
                what = f"weight_sync: shared: {name} is {ours}, which is not a part of the server's {place}, {theirs}"
            raise ServerError(f"{what}. Fix: write weight_sync: file")
        yield name, view
