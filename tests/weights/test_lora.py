"""Test the bridge ``lora`` with a worker in this process: writing, loading and the weight guard."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.registry import ADAPTER
from grpo_recipes.server.plugin import WeightReport
from grpo_recipes.weights.lora import LoraClient
from grpo_recipes.weights.transport import BadAnswer

WIDTH, ROOM = 4, 8  # the model's width, and the largest LoRA rank of the server
PARTS = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in (*PARTS, "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))


def trained(**keys) -> nn.Module:
    """Return a model with an adapter on three of its four layers, without zero factors."""
    torch.manual_seed(0)
    base = nn.Module()
    base.attention = Attention()
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "o_proj"], **keys)
    model = get_peft_model(base, config)
    move(model)
    return model


def move(model: nn.Module) -> None:
    """As an optimizer does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()


class Worker(WeightReport):
    """A fake worker: vLLM's tables of adapters, filled from files as vLLM fills them."""

    def __init__(self, model: nn.Module):
        base = model.base_model.model.attention
        served = nn.Module()
        served.attention = nn.Module()
        fused = torch.cat(
            [getattr(base, part).base_layer.weight if part != "k_proj" else base.k_proj.weight for part in PARTS]
        )
        served.attention.qkv_proj, served.attention.o_proj = nn.Module(), nn.Module()
        for layer, weight in (("qkv_proj", fused), ("o_proj", base.o_proj.base_layer.weight)):
            inner = nn.Module()  # vLLM wraps a layer that can have an adapter like this
            inner.weight = nn.Parameter(weight.detach().clone())
            getattr(served.attention, layer).base_layer = inner
        served.packed_modules_mapping = {"qkv_proj": list(PARTS)}
        self.model, self.forgets = served, False
        modules = {f"attention.{name}": self._slots(count) for name, count in (("qkv_proj", 3), ("o_proj", 1))}
        packed = {"attention.qkv_proj": [f"attention.{part}" for part in PARTS]}
        manager = SimpleNamespace(modules=modules, packed_modules=packed, lora_index_to_id=[None])
        self.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))

    def _slots(self, count: int) -> SimpleNamespace:
        first, second = (
            tuple(torch.zeros(1, 1, *shape) for _ in range(count)) for shape in ((ROOM, WIDTH), (WIDTH, ROOM))
        )
        return SimpleNamespace(lora_a_stacked=first, lora_b_stacked=second)

    def get_model(self) -> nn.Module:
        return self.model

    def list_loras(self) -> set[int]:
        return {adapter for adapter in self.model_runner.lora_manager._adapter_manager.lora_index_to_id if adapter}

    def add_lora(self, request) -> bool:
        manager = self.model_runner.lora_manager._adapter_manager
        manager.lora_index_to_id[0] = request.lora_int_id
        if self.forgets:
            return True
        config = json.loads((Path(request.lora_path) / "adapter_config.json").read_text())
        rank, alpha = config["r"], config["lora_alpha"]
        scaling = alpha / (rank**0.5 if config["use_rslora"] else rank)
        tensors = load_file(Path(request.lora_path) / "adapter_model.safetensors")
        for name, module in manager.modules.items():
            parts = manager.packed_modules.get(name, [name])
            for part, first, second in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
                if (key := f"base_model.model.{part}.lora_A.weight") in tensors:
                    first[0, 0, :rank] = tensors[key]
                    second[0, 0, :, :rank] = tensors[key.replace("lora_A", "lora_B")] * scaling
        return True


class LocalClient(LoraClient):
    """Client of a server that is a worker in this process."""

    def __init__(self, worker: Worker, folder: Path):
        self.worker, self.asked, self.names, self.refuses = worker, [], ["run"], ""
        self._model, self._sync, self._lora_id, self._proven, self._epoch = None, 0, 0, 0, 1
        self._args, self.checksum_error = SimpleNamespace(use_cpu=True, weight_guard=True), None
        self._stopping, self.stop = False, SimpleNamespace(may_cut=False)
        self._state_file, self._run_dir = folder / "state.json", folder
        self.base_url, self.model, self.session = "http://here", "run", SimpleNamespace(post=self._post_adapter)

    def call_workers(self, method: str, **kwargs):
        self.asked.append(method)
        return [[getattr(self.worker, method)(**kwargs)]]

    def served_names(self) -> list[str]:
        return self.names

    def _post_adapter(self, url: str, json):
        self.asked.append((url, json))
        if self.refuses:
            return SimpleNamespace(status_code=400, text=self.refuses)
        self.names = ["run", ADAPTER]
        self.worker.add_lora(SimpleNamespace(lora_int_id=7, lora_path=json["lora_path"]))
        return SimpleNamespace(status_code=200, text="Success: LoRA adapter added successfully.")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    return tmp_path / "sync"


@pytest.mark.parametrize("keys", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_the_adapter_alone_travels_and_has_one_name(folder, tmp_path, keys):
    model = trained(**keys)
    client = LocalClient(Worker(model), tmp_path)
    client.sync_model(model)
    assert client.asked == [
        ("http://here/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder / "adapter")}),
        "grpo_adapters", "grpo_load_adapter", "grpo_weights", "grpo_adapter_weights",
    ]  # fmt: skip
    assert client.checksum_error is None and client.model == ADAPTER
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]

    move(model)
    client.asked.clear()
    client.sync_model(model)
    assert client.asked == ["grpo_load_adapter", "grpo_adapter_weights"] and client.checksum_error is None
    assert sorted(path.name for path in folder.iterdir()) == ["adapter", "adapter-2"]  # the one before is gone


def test_an_adapter_that_the_server_did_not_load_is_seen(folder, tmp_path):
    model = trained()
    client = LocalClient(Worker(model), tmp_path)
    client.worker.forgets = True
    client.sync_model(model)
    assert "'lora' bridge" in client.checksum_error and "attention.q_proj.lora_a" in client.checksum_error

    client.worker.forgets = False
    client.sync_model(model)
    assert client.checksum_error is None
    move(model)
    client.worker.forgets = True
    client.sync_model(model)  # one step old
    assert "attention.q_proj.lora_a, attention.q_proj.lora_b, " in client.checksum_error


def test_an_adapter_of_another_sync_is_seen_though_its_values_are_equal(folder, tmp_path):
    model = trained()
    client = LocalClient(Worker(model), tmp_path)
    client.sync_model(model)
    before = (folder / "adapter").resolve()
    client.worker.grpo_load_adapter(folder=str(before), lora_id=7)
    client._sync += 1
    client._verify()
    assert client.checksum_error.endswith("'lora' bridge: it has the weights of sync 1, and the trainer sent sync 2")


def test_a_server_without_the_scaling_is_seen(folder, tmp_path):
    model = trained()
    client = LocalClient(Worker(model), tmp_path)
    client.sync_model(model)
    for module in client.worker.model_runner.lora_manager._adapter_manager.modules.values():
        for second in module.lora_b_stacked:
            second.div_(1.5)
    client._verify()
    assert "lora_b" in client.checksum_error and "lora_a" not in client.checksum_error


def test_another_base_model_is_seen_at_the_first_sync(folder, tmp_path):
    model = trained()
    client = LocalClient(Worker(model), tmp_path)
    client.worker.model.attention.qkv_proj.base_layer.weight.data[0, 0] += 1
    client.sync_model(model)
    assert "attention.qkv_proj.weight" in client.checksum_error
    client.sync_model(model)
    assert client.checksum_error is not None  # it stays wrong, and is looked at again
    client.worker.model.attention.qkv_proj.base_layer.weight.data[0, 0] -= 1
    client._verify()
    assert client.asked[-2:] == ["grpo_weights", "grpo_adapter_weights"]


def test_a_new_server_is_told_the_name_and_its_base_is_compared(folder, tmp_path):
    model = trained()
    client = LocalClient(Worker(model), tmp_path)
    client.sync_model(model)
    client.worker, client.names, client._epoch = Worker(model), ["run"], 2
    client.asked.clear()
    client._resend()
    client._verify()
    assert client.asked[1:] == ["grpo_adapters", "grpo_load_adapter", "grpo_weights", "grpo_adapter_weights"]
    assert client.checksum_error is None


def test_completions_of_the_base_model_stay_its_own_through_a_restart(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RUN", "run")
    model = trained()
    client = LocalClient(Worker(model), tmp_path)
    client.sync_model(model)
    assert client.model == ADAPTER
    client.samples_base = True
    client.worker, client.names, client._epoch = Worker(model), ["run"], 2
    client._resend()
    assert client.model == "run"
    client.samples_base = False
    assert client.model == ADAPTER


def test_an_adapter_that_the_server_refuses_is_an_error_with_its_words(folder, tmp_path):
    model = trained()
    client = LocalClient(Worker(model), tmp_path)
    client.refuses = "LoRA rank 2 is greater than max_lora_rank 1."
    with pytest.raises(BadAnswer, match="answered 400: LoRA rank 2 is greater"):
        client._model = model
        client._write_adapter(model, folder / "adapter-1")
        client._resend()


@pytest.mark.parametrize(("rank", "room"), [(1, "1"), (2, "8"), (16, "16"), (33, "64"), (257, "320"), (512, "512")])
def test_the_server_makes_room_for_the_rank(planned, option, rank, room):
    server = planned(use_peft=True, weight_sync="lora", lora_r=rank, dtype="float32").process("server")
    assert option(server.argv, "--max-lora-rank") == room and "--enable-lora" in server.argv
    assert server.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    merged = planned(use_peft=True, weight_sync="file", lora_r=rank, dtype="float32").process("server")
    assert "--enable-lora" not in merged.argv and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in merged.environment


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_dora": True}, "can't be combined with use_dora"),
        ({"lora_modules_to_save": ["norm"]}, "can't be combined with lora_modules_to_save"),
        ({"lora_r": 513}, "lora_r 513 exceeds 512, the largest rank that vLLM serves. Fix: set lora_r: 512"),
    ],
)
def test_adapters_that_vllm_does_not_serve_are_refused(read, keys, message):
    (problem,) = check(read(use_peft=True, weight_sync="lora", **keys), {})
    assert message in str(problem)
    assert check(read(use_peft=True, weight_sync="file", **keys), {}) == []
