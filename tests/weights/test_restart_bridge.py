"""The bridge ``restart`` against a fake of the server and of the launcher's file of its state."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from grpo_recipes.runs.rundir import NEWEST_MODEL
from grpo_recipes.weights.restart import RestartClient
from weights.fake_server import WEIGHT, sync_of


class Part:
    """A fake configuration or tokenizer."""

    def __init__(self, name: str):
        self.name = name

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / self.name).write_text("{}")


@pytest.fixture
def launcher(tmp_path, server):
    """A fake launcher: for each new model its server holds what ``holds`` makes of the weights that were written."""
    fake = SimpleNamespace(epoch=1, models=[], holds=lambda weights: weights, seen=[], keeps_sync=False)
    link, ended = tmp_path / "sync" / NEWEST_MODEL, threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            if link.exists() and (model := str(link.resolve())) not in fake.models:
                fake.models.append(model)
                fake.epoch += 1
                fake.seen.append(sorted(path.name for path in Path(model).iterdir()))
                write(tmp_path, fake.epoch, "starting", model)
                time.sleep(0.1)
                server.held = fake.holds(load_file(f"{model}/model.safetensors")["w"])
                server.sync = server.sync if fake.keeps_sync else sync_of(model)
                write(tmp_path, fake.epoch, "ready", model)

    thread = threading.Thread(target=look)
    thread.start()
    yield fake
    ended.set()
    thread.join()


def write(folder: Path, epoch: int, state: str, model: str) -> None:
    partial = folder / "processes" / "partial"
    partial.write_text(json.dumps({"epoch": epoch, "state": state, "model": model}))
    partial.replace(folder / "processes" / "server_state.json")


def sync(client: RestartClient, weights: torch.Tensor) -> None:
    client.update_named_params([("w", "float32", [2, 3])], iter([("w", weights)]))


def joined(connect) -> RestartClient:
    client = connect(client=RestartClient)
    model = SimpleNamespace(
        config=Part("config.json"),
        generation_config=Part("generation_config.json"),
        get_input_embeddings=lambda: SimpleNamespace(num_embeddings=97),
    )
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    client.attach(SimpleNamespace(accelerator=accelerator, model=model, processing_class=Part("tokenizer.json")))
    return client


def test_each_sync_is_a_complete_model_and_a_new_server(connect, server, launcher, tmp_path):
    client = joined(connect)
    sync(client, WEIGHT + 1)
    assert client.checksum_error is None and torch.equal(server.held, WEIGHT + 1)
    assert launcher.seen == [["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]]
    sync(client, WEIGHT + 2)
    assert client.checksum_error is None and launcher.epoch == 3 and torch.equal(server.held, WEIGHT + 2)
    assert sorted(path.name for path in (tmp_path / "sync").iterdir()) == ["model-2", NEWEST_MODEL]


def test_a_server_that_has_the_weights_is_left_alone(connect, launcher, tmp_path):
    client = joined(connect)
    sync(client, WEIGHT)
    assert client.checksum_error is None and launcher.models == [] and list((tmp_path / "sync").iterdir()) == []


def test_without_the_guard_every_sync_is_a_new_server(connect, server, launcher):
    client = connect(client=RestartClient, weight_guard=False)
    sync(client, WEIGHT)
    assert len(launcher.models) == 1 and "grpo_weights" not in server.methods()


def test_a_server_with_the_old_model_is_seen(connect, launcher):
    client = joined(connect)
    launcher.holds = lambda weights: weights - 1
    with pytest.raises(Exception, match="'restart' bridge") as error:
        sync(client, WEIGHT + 1)
        raise RuntimeError(client.checksum_error)
    assert "holds other values than the trainer in w" in str(error.value)


def test_a_server_with_the_model_of_another_sync_is_seen_though_its_values_are_equal(connect, launcher):
    client = joined(connect)
    launcher.keeps_sync = True
    sync(client, WEIGHT + 1)
    assert client.checksum_error.endswith("'restart' bridge: it has the weights of sync 0, and the trainer sent sync 1")


def test_a_server_that_never_comes_ends_the_wait_with_an_error(connect, monkeypatch):
    monkeypatch.setattr("grpo_recipes.weights.client._MARGIN_SECONDS", 0.0)
    client = connect(client=RestartClient, vllm_server_timeout=1.0)
    with pytest.raises(RuntimeError, match="the vLLM server was not ready again after 1 s"):
        sync(client, WEIGHT + 1)


def test_the_plan_renews_the_server_of_this_bridge_alone(planned):
    for bridge, renewed in (("restart", True), ("file", False)):
        server, trainer = planned(weight_sync=bridge).processes
        assert (server.renewed, trainer.renewed) == (renewed, False)
