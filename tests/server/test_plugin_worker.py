"""Workers' reports add up to the trainer's weights, also if vLLM copies key and value heads between workers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from grpo_recipes.server.plugin import WeightReport
from grpo_recipes.weights.guard import compute_sent_fingerprint, find_differences

HEAD_SIZE, HEADS, KV_HEADS, WIDTH = 4, 8, 2, 16


class FakeQkvProjection(torch.nn.Module):
    """Holds the rows and attributes of a single worker's ``QKVParallelLinear``."""

    def __init__(self, weights: dict[str, torch.Tensor], rank: int, workers: int):
        super().__init__()
        self.tp_rank = rank
        self.num_kv_head_replicas = max(1, workers // KV_HEADS)
        self.num_heads = HEADS // workers
        self.head_size = HEAD_SIZE
        rows = [weights["q_proj"].chunk(workers)[rank]]
        shards = min(workers, KV_HEADS)
        rows += [weights[part].chunk(shards)[rank // self.num_kv_head_replicas] for part in ("k_proj", "v_proj")]
        self.weight = torch.nn.Parameter(torch.cat(rows).clone())


class FakeWorker(WeightReport):
    """One vLLM worker that holds one fused projection."""

    vllm_config = SimpleNamespace(model_config=SimpleNamespace(model="of-a-hub"))

    def __init__(self, weights: dict[str, torch.Tensor], rank: int, workers: int):
        self._model = torch.nn.Module()
        self._model.qkv_proj = FakeQkvProjection(weights, rank, workers)
        self._model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self._layer = torch.nn.Module()
        self._layer.layer = self._model
        self._layer.packed_modules_mapping = self._model.packed_modules_mapping

    def get_model(self) -> torch.nn.Module:
        return self._layer


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_reports_of_sharded_and_copied_heads_add_up(workers: int) -> None:
    torch.manual_seed(0)
    weights = {
        "q_proj": torch.randn(HEADS * HEAD_SIZE, WIDTH),
        "k_proj": torch.randn(KV_HEADS * HEAD_SIZE, WIDTH),
        "v_proj": torch.randn(KV_HEADS * HEAD_SIZE, WIDTH),
    }
    fleet = [FakeWorker(weights, rank, workers) for rank in range(workers)]
    report = fleet[0].grpo_weights()
    named = {f"layer.{name}.weight": tensor for name, tensor in weights.items()}
    streamed = {name: int(compute_sent_fingerprint(name, tensor, report)) for name, tensor in named.items()}

    assert find_differences(streamed, [worker.grpo_weights() for worker in fleet]) == []

    with torch.no_grad():
        stale = fleet[0].get_model().layer.qkv_proj.weight
        stale[-1, -1] = torch.nextafter(stale[-1, -1], torch.tensor(9.0))  # change a key or value element by 1 ulp
    assert find_differences(streamed, [worker.grpo_weights() for worker in fleet]) == ["layer.qkv_proj.weight"]


def test_a_load_gives_the_folder_to_vllm_and_counts() -> None:
    class FakeLoader(WeightReport):
        loaded: list[str] = []

        def _copy_weights(self, folder: str) -> bool:
            return False

        def reload_weights(self, weights_path: str) -> None:
            self.loaded.append(weights_path)

    worker = FakeLoader()
    assert [worker.grpo_load("/one"), worker.grpo_load("/two")] == [1, 2]
    assert worker.loaded == ["/one", "/two"]
