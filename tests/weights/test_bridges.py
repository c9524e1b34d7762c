"""Where we plug into TRL: these fail when TRL's client changes, before a run does."""

from __future__ import annotations

import inspect
import json

import pytest

pytest.importorskip("trl")

from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.registry import SYNC_METHODS
from grpo_recipes.weights.bridges import CLIENTS, trl_building_client
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.generation import Generation
from grpo_recipes.weights.nccl import NcclClient

SIGNATURES = {
    "__init__": ["self", "base_url", "host", "server_port", "group_port", "connection_timeout"],
    "check_server": ["self", "total_timeout", "retry_interval"],
    "init_communicator": ["self", "device"],
    "update_named_params": ["self", "metadata", "named_params"],
    "reset_prefix_cache": ["self"],
    "close_communicator": ["self"],
    "get_server_info": ["self"],
    "_post": ["self", "url", "kwargs"],
    "generate": [
        "self", "prompts", "features", "n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "max_tokens", "logprobs", "structured_outputs_regex", "generation_kwargs",
    ],
}  # fmt: skip


@pytest.mark.parametrize("method", SIGNATURES)
def test_trls_client_takes_what_we_know(method):
    assert list(inspect.signature(getattr(VLLMClient, method)).parameters) == SIGNATURES[method]


@pytest.mark.parametrize("bridge", CLIENTS.values(), ids=CLIENTS.keys())
@pytest.mark.parametrize("method", [name for name in SIGNATURES if name not in ("__init__", "generate")])
def test_a_bridge_can_be_called_as_trls_client_is(bridge, method):
    parameters = list(inspect.signature(getattr(VLLMClient, method)).parameters)
    assert list(inspect.signature(getattr(bridge, method)).parameters) == parameters


def test_trl_builds_its_client_by_name_when_it_is_called():
    assert vllm_generation.VLLMClient is VLLMClient
    source = inspect.getsource(vllm_generation.VLLMGeneration)
    assert source.count("VLLMClient(") == 1
    assert "VLLMClient" in vllm_generation.VLLMGeneration._init_vllm.__code__.co_names


def test_trls_generation_gives_the_client_keywords_only():
    source = inspect.getsource(vllm_generation.VLLMGeneration)
    call = " ".join(source.split("VLLMClient(")[1].split(")")[0].split())
    assert call == "base_url=base_url, group_port=self.group_port, connection_timeout=self.server_timeout"


@pytest.mark.parametrize("name", CLIENTS)
def test_trl_builds_our_generation_and_client_only_inside(name, monkeypatch):
    built = []
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda _: built.append(vllm_generation.VLLMClient))
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda generation: generation._init_vllm())
    with trl_building_client(CLIENTS[name], seed=7):
        grpo_trainer.VLLMGeneration()
    (client,) = built
    assert client.func is CLIENTS[name] and client.keywords == {"seed": 7}
    assert vllm_generation.VLLMClient is VLLMClient and grpo_trainer.VLLMGeneration is VLLMGeneration


def test_trls_generation_is_back_after_an_exception():
    with pytest.raises(RuntimeError, match="inside"), trl_building_client(CLIENTS["file"]):
        raise RuntimeError("inside")
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


def test_wrappers_run_around_a_sync_and_the_last_one_is_the_outermost(monkeypatch):
    calls = []
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda _: calls.append("sync"))

    def around(name):
        return lambda sync: lambda: (calls.append(name), sync())

    generation = object.__new__(Generation)
    for name in ("inner", "outer"):
        generation.wrap_sync(around(name))
    generation.sync_weights()
    assert calls == ["outer", "inner", "sync"]


def test_every_bridge_is_a_choice_of_the_key_and_says_its_name():
    assert {"auto", *CLIENTS} == set(catalogue()["weight_sync"]["choices"]) == {"auto", *SYNC_METHODS}
    for name, bridge in CLIENTS.items():
        assert bridge.bridge == name and issubclass(bridge, BridgeClient)


def test_the_keys_the_trainer_hands_on_are_trls():
    for name in ("vllm_server_host", "vllm_server_port", "vllm_group_port", "vllm_server_timeout", "vllm_mode"):
        assert hasattr(GRPOConfig, name), name


def test_the_rendezvous_of_nccl_is_a_phase_of_its_own(tmp_path, monkeypatch):
    """A fake TRL client reads the phase that the launcher would see while NCCL waits."""
    phases = []

    def phase() -> str:
        return json.loads((tmp_path / "processes/phase_0.json").read_text())["phase"]

    monkeypatch.setattr(VLLMClient, "init_communicator", lambda client, device: phases.append(phase()))
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "processes").mkdir()
    client = object.__new__(NcclClient)
    client._run_dir = tmp_path
    client.init_communicator(0)
    assert phases == ["connect"] and phase() == "start"
