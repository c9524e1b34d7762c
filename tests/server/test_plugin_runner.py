"""The way of GPUs: vLLM's own model runner and loader read the file that the trainer wrote."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_recipes.server import plugin
from grpo_recipes.server.plugin import WeightReport
from grpo_recipes.weights.file import write_weights
from grpo_recipes.weights.guard import compute_sent_fingerprint, find_differences


@pytest.mark.slow
def test_on_gpus_a_load_goes_through_model_runner_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G5: vLLM's own runner and loader read the file that the trainer wrote, and the report is about its tensors."""
    from vllm.config import LoadConfig
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    class Model(torch.nn.Linear):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            loaded = dict(weights)
            for name, tensor in loaded.items():
                self.get_parameter(name).data.copy_(tensor)
            return {*loaded}

    class Worker(WeightReport):
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=2
            ),  # like on GPUs, where no parameter is overwritten directly
            model_config=SimpleNamespace(use_mla=False, model="of-a-hub"),
        )

        def __init__(self) -> None:
            self.model_runner = GPUModelRunner.__new__(GPUModelRunner)
            self.model_runner.model = Model(4, 3)
            self.model_runner.encoder_cache = self.model_runner.pooling_runner = None
            self.model_runner.lora_config, self.model_runner.load_config = None, LoadConfig()
            self.model_runner.model_config = SimpleNamespace(model="of-a-hub", revision="main", quantization=None)

        def get_model(self) -> torch.nn.Module:
            return self.model_runner.get_model()

        def reload_weights(self, *args: Any, **kwargs: Any) -> None:  # like vLLM's worker for GPUs
            self.model_runner.reload_weights(*args, **kwargs)

    steps: list[str] = []
    monkeypatch.setattr(gpu_model_runner, "initialize_layerwise_reload", lambda _: steps.append("initialize"))
    monkeypatch.setattr(gpu_model_runner, "finalize_layerwise_reload", lambda *_: steps.append("finalize"))
    sent = {"weight": torch.arange(12.0).view(3, 4), "bias": torch.tensor([1.0, -2.0, 3.5])}
    write_weights(
        tmp_path, [(name, "float32", list(tensor.shape)) for name, tensor in sent.items()], iter(sent.items()), 7
    )
    worker = Worker()

    assert worker.grpo_load(str(tmp_path)) == 1

    report = worker.grpo_weights()
    assert steps == ["initialize", "finalize"] and report["sync"] == 7
    assert (
        find_differences(
            {name: int(compute_sent_fingerprint(name, tensor, report)) for name, tensor in sent.items()}, [report]
        )
        == []
    )
    assert worker.model_runner.model_config.model == str(tmp_path)


@pytest.mark.slow
def test_on_cpu_the_engine_sleeps_soon_after_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    def sleeps(seconds: float) -> bool:
        """Return whether a reader sleeps, seconds after its last message."""
        reader = SpinCondition(is_reader=True, context=mock.MagicMock(), notify_address="inproc://messages")
        reader.last_read, reader.poller = time.monotonic() - seconds, mock.Mock(poll=mock.Mock(return_value=[]))
        reader.wait()
        return reader.poller.poll.called

    monkeypatch.setattr(SpinCondition.__init__, "__defaults__", SpinCondition.__init__.__defaults__)
    busy = sleeps(0.5)
    plugin._sleep_between_messages()

    assert [busy, sleeps(0.5), sleeps(-60)] == [False, True, False]
