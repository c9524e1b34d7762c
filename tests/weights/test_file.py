"""Test the bridge ``file``: safetensors reads the written weights, and a worker copies the weights vLLM would load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from grpo_recipes.server.plugin import WeightReport
from grpo_recipes.weights import file
from grpo_recipes.weights.file import write_weights

TENSORS = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "matrix": torch.randn(5, 7).t(),  # not contiguous
    "half": torch.randn(4, 4, dtype=torch.float16),
    "one": torch.tensor(2.5),
    "none": torch.zeros(0, 3),
    "double": torch.randn(2, dtype=torch.float64),
}


def metadata(tensors):
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]


def test_safetensors_reads_what_is_written(tmp_path):
    write_weights(tmp_path / "sync", metadata(TENSORS), iter(TENSORS.items()))
    read = load_file(tmp_path / "sync/model.safetensors")
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())
    assert [path.name for path in (tmp_path / "sync").iterdir()] == ["model.safetensors"]


def test_a_tensor_is_written_in_the_dtype_that_was_said(tmp_path):
    write_weights(tmp_path, [("w", "bfloat16", [2])], iter([("w", torch.tensor([1.0, 2.0]))]))
    assert load_file(tmp_path / "model.safetensors")["w"].tolist() == [1.0, 2.0]


def test_a_reader_never_finds_a_part(tmp_path):
    write_weights(tmp_path, metadata({"w": torch.zeros(4)}), iter([("w", torch.zeros(4))]))
    both = {"w": torch.ones(4), "v": torch.ones(4)}

    def broken():
        yield "w", both["w"]
        raise RuntimeError("the trainer dies here")

    with pytest.raises(RuntimeError, match="dies here"):
        write_weights(tmp_path, metadata(both), broken())
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(AssertionError, match="expected w, got v"):
        write_weights(tmp_path, metadata(both), iter(reversed(both.items())))
    with pytest.raises(ValueError, match="shorter"):
        write_weights(tmp_path, metadata(both), iter([("w", both["w"])]))
    assert not (tmp_path / "model.safetensors").exists()
    write_weights(tmp_path, metadata(both), iter(both.items()))
    assert load_file(tmp_path / "model.safetensors")["v"].tolist() == [1.0] * 4


def test_the_file_before_is_written_over_and_counts_as_room(tmp_path, monkeypatch):
    large, small = {"w": torch.zeros(1000)}, {"w": torch.ones(10)}
    write_weights(tmp_path, metadata(large), iter(large.items()))
    before = (tmp_path / "model.safetensors").stat()
    monkeypatch.setattr(file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    for tensors in (small, {"w": torch.ones(2)}):
        write_weights(tmp_path, metadata(tensors), iter(tensors.items()))
        assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], tensors["w"])
    after = (tmp_path / "model.safetensors").stat()
    assert after.st_ino == before.st_ino and after.st_size < before.st_size


def test_weights_that_do_not_fit_are_refused_before_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"No space left on device: 4 kB of weights do not fit into .*, 1 kB free. Fix: "):
        write_weights(tmp_path / "sync", [("w", "float32", [1000])], iter([("w", torch.zeros(1000))]))
    assert list((tmp_path / "sync").iterdir()) == []


class Worker(WeightReport):
    """A worker with a fused layer and a padded vocabulary, which notes what vLLM itself would be asked to load."""

    def __init__(self, parallel: int = 1, mla: bool = False, model: str = "of-a-hub"):
        self.model, self.reloaded = nn.Module(), []
        self.model.embed = nn.Embedding(8, 4)
        self.model.qkv_proj = nn.Linear(4, 6)
        self.model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self.root = nn.Module()
        self.root.layer = self.model
        self.root.packed_modules_mapping = self.model.packed_modules_mapping
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=parallel),
            model_config=SimpleNamespace(use_mla=mla, model=model),
        )

    def get_model(self) -> nn.Module:
        return self.root

    def sync(self) -> int:
        """The number of the sync that a question of the guard is answered with."""
        return int(self.grpo_weights()["sync"])

    def reload_weights(self, weights_path: str) -> None:
        self.reloaded.append(weights_path)


def weights() -> dict[str, torch.Tensor]:
    parts = {"v_proj": 1, "q_proj": 3, "k_proj": 2}
    tensors = {f"layer.{name}.weight": torch.randn(rows, 4) for name, rows in parts.items()}
    tensors |= {f"layer.{name}.bias": torch.randn(rows) for name, rows in parts.items()}
    return {**tensors, "layer.embed.weight": torch.randn(7, 4)}


def test_a_worker_copies_each_tensor_to_its_rows(tmp_path):
    worker, sent = Worker(), weights()
    before = worker.model.embed.weight[7].clone()
    save_file(sent, tmp_path / "model.safetensors")
    assert worker.grpo_load(str(tmp_path)) == 1 and worker.reloaded == []
    for kind in ("weight", "bias"):
        fused = torch.cat([sent[f"layer.{part}_proj.{kind}"] for part in "qkv"])
        assert torch.equal(getattr(worker.model.qkv_proj, kind), fused)
    assert torch.equal(worker.model.embed.weight[:7], sent["layer.embed.weight"])
    assert torch.equal(worker.model.embed.weight[7], before)


def change(**changes):
    return lambda sent: {**sent, **changes}


@pytest.mark.parametrize(
    ("worker", "changed"),
    [
        (Worker(parallel=2), change()),
        (Worker(mla=True), change()),
        (Worker(), change(**{"layer.unknown.weight": torch.zeros(2, 2)})),
        (Worker(), change(**{"layer.embed.weight": torch.zeros(7, 4, dtype=torch.bfloat16)})),
        (Worker(), change(**{"layer.embed.weight": torch.zeros(9, 4)})),
        (Worker(), lambda sent: {name: tensor for name, tensor in sent.items() if "embed" not in name}),
    ],
    ids=["sharded", "mla", "another-name", "another-dtype", "too-many-rows", "not-all"],
)
def test_what_has_no_place_of_its_own_is_left_to_vllm(tmp_path, worker, changed):
    before = {name: tensor.clone() for name, tensor in worker.root.state_dict().items()}
    save_file(changed(weights()), tmp_path / "model.safetensors")
    worker.grpo_load(str(tmp_path))
    assert worker.reloaded == [str(tmp_path)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.root.state_dict().items())


def test_a_worker_says_which_sync_its_weights_are_of(tmp_path):
    worker = Worker()
    assert worker.sync() == 0
    for number, parts in ((3, weights()), (4, change(**{"layer.unknown.weight": torch.zeros(2, 2)})(weights()))):
        write_weights(tmp_path, metadata(parts), iter(parts.items()), number)
        worker.grpo_load(str(tmp_path))
        assert worker.sync() == number
    assert worker.reloaded == [str(tmp_path)]  # by vLLM, which is not asked for the number either
    assert Worker(model=str(tmp_path)).sync() == 4  # the bridge restart starts a server like this
    save_file(weights(), tmp_path / "model.safetensors")
    worker.grpo_load(str(tmp_path))
    assert worker.sync() == 0
