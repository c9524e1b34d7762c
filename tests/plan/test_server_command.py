"""The server's command and environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest

from grpo_recipes.plan.commands import has_trl_serve, server_command, server_environment


def command(recipe, device: str = "cuda") -> list[str]:
    return server_command(recipe, "the/model", "run-abcd", "127.0.0.1", 8123, device)


@pytest.fixture
def versions(monkeypatch):
    """``versions(vllm=..., trl=...)`` replaces the versions of installed packages."""

    def set_versions(**installed: str | None) -> None:
        def version(name: str) -> str:
            if installed.get(name) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return set_versions


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("vllm", [None, "0.31.0"])
def test_every_server_is_named_bound_guarded_and_reports_its_weights(read, option, versions, device, vllm):
    versions(vllm=vllm, trl="1.16.0")
    argv = command(read(dtype="bfloat16"), device)
    assert option(argv, "--host") == "127.0.0.1"
    assert option(argv, "--port") == "8123"
    assert option(argv, "--served-model-name") == "run-abcd"
    assert option(argv, "--model") == "the/model"
    assert option(argv, "--dtype") == "bfloat16"
    assert option(argv, "--max-model-len") == "2048"
    middleware = [value for flag, value in itertools.pairwise(argv) if flag == "--middleware"]
    # A request meets the last middleware first, so a client without the token gets no information.
    assert middleware == [
        "grpo_recipes.server.completions.AddServerEndpoints",
        "grpo_recipes.server.middleware.ReportActivity",
        "grpo_recipes.server.middleware.RequireToken",
    ]
    assert option(argv, "--worker-extension-cls") == "grpo_recipes.server.plugin.WeightReport"
    assert not [text for text in argv if "token" in text.lower() and "RequireToken" not in text]
    assert "--api-key" not in argv


def test_the_named_classes_exist():
    for name in ("grpo_recipes.server.middleware", "grpo_recipes.server.completions", "grpo_recipes.server.plugin"):
        assert importlib.util.find_spec(name) is not None


def test_trls_own_command_where_its_vllm_is_installed(read, versions):
    versions(vllm="0.31.0", trl="1.16.0")
    argv = command(read())
    assert argv[:2] == [str(Path(sys.executable).with_name("trl")), "vllm-serve"]
    module = [sys.executable, "-P", "-m", "grpo_recipes.server.serve"]
    assert command(read(), "cpu")[:4] == module  # it lets the plan set the KV cache
    versions(vllm=None, trl="1.16.0")
    assert argv[2:] == command(read())[4:]


@pytest.mark.parametrize("installed", [{"vllm": None, "trl": "1.16.0"}, {"vllm": "0.31.0", "trl": "2.0.0"}])
def test_the_module_where_trls_command_does_not_work(read, versions, installed):
    versions(**installed)
    assert not has_trl_serve()
    assert command(read())[:4] == [sys.executable, "-P", "-m", "grpo_recipes.server.serve"]


@pytest.mark.parametrize("vllm", [None, "0.31.0"])
def test_what_trls_trainer_needs_of_every_server(read, option, versions, vllm):
    versions(vllm=vllm, trl="1.16.0")
    argv = command(read())
    assert option(argv, "--logprobs-mode") == "processed_logprobs"
    assert option(argv, "--max-logprobs") == "-1"
    assert json.loads(option(argv, "--weight-transfer-config")) == {"backend": "nccl"}
    assert "--enable-scale-out" in argv


def test_what_depends_on_the_device(read, option):
    assert option(command(read(), "cuda"), "--gpu-memory-utilization") == "0.9"
    cpu = command(read(), "cpu")
    assert "--enforce-eager" in cpu and "--no-enable-chunked-prefill" in cpu
    assert "--no-enable-chunked-prefill" not in command(read(), "cuda")
    assert "--enforce-eager" not in command(read(), "cuda")
    assert "--enforce-eager" in command(read(vllm_enforce_eager=True), "cuda")  # R13
    assert "--gpu-memory-utilization" not in cpu and "--weight-transfer-config" not in cpu


@pytest.mark.parametrize(
    ("keys", "flag", "value"),
    [
        ({"vllm_tensor_parallel_size": 2}, "--tensor-parallel-size", "2"),
        ({"model_revision": "abc"}, "--revision", "abc"),
        ({"trust_remote_code": True}, "--trust-remote-code", None),
        ({"vllm_max_model_length": 4096}, "--max-model-len", "4096"),
        ({"vllm_max_num_seqs": 96}, "--max-num-seqs", "96"),  # P1
    ],
)
def test_keys_that_reach_the_server(read, option, keys, flag, value):
    argv = command(read(**keys))
    assert flag in argv
    assert value is None or option(argv, flag) == value
    without = command(read(vllm_max_model_length=None))
    assert flag not in without


@pytest.mark.parametrize(
    ("device", "seed_server", "seeded"),
    [
        ("cpu", None, True),
        ("cpu", False, False),
        ("cuda", None, False),
        ("cuda", True, True),
    ],
)
def test_seeded_requests_are_taken_in_the_order_of_prompts(read, option, device, seed_server, seeded):
    argv = command(read(seed_server=seed_server), device)
    assert ("--scheduling-policy" in argv) is seeded
    assert not seeded or option(argv, "--scheduling-policy") == "priority"


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "float32", "bf16": True}, "bfloat16"),
        ({"dtype": "float32"}, "bfloat16"),  # TRL's default
        ({"dtype": "float32", "bf16": False, "fp16": True}, "float16"),
        ({"dtype": "float32", "bf16": False}, "float32"),
        ({"dtype": "bfloat16", "bf16": False}, "bfloat16"),
        ({"dtype": "float32", "bf16": True, "weight_sync": "shared"}, "float32"),  # one copy for both
        ({"dtype": None}, "auto"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_server_computes_in_the_precision_of_the_trainer(read, option, device, keys, dtype):
    """G4: in float32, vLLM has no FlashAttention and needs twice the KV cache."""
    assert option(command(read(**keys), device), "--dtype") == dtype


def test_a_model_without_dtype_is_served_as_its_own(read, option):
    assert option(command(read(dtype=None)), "--dtype") == "auto"


def test_the_servers_environment():
    cuda, cpu = server_environment("cuda", None, {}), server_environment("cpu", 20073, {})
    assert cuda["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_PORT" not in cuda and cpu["VLLM_PORT"] == "20073"
    assert set(cuda) - {"VLLM_USE_FLASHINFER_SAMPLER"} < set(cpu)
    for environment in (cuda, cpu):
        assert int(environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]) > 7 * 24 * 3600  # a step may take long; 5 s by default
        assert environment["GRPO_SERVER"] == "1"


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        ({"vllm_max_model_length": 4096, "max_prompt_length": 100, "max_completion_length": 20}, "4096"),
        ({"vllm_max_model_length": None, "max_prompt_length": 100, "max_completion_length": 20}, "120"),
    ],
)
def test_the_longest_sequence_follows_from_the_recipes_limits(read, option, keys, limit):
    assert option(command(read(**keys), "cpu"), "--max-model-len") == limit


@pytest.mark.parametrize(
    ("resources", "parallel", "bound"),
    [
        ({"device": "cpu"}, 1, None),
        ({"device": "cpu"}, 2, "nobind"),
        ({"device": "cpu", "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}, 2, "0|1"),
        ({}, 2, None),
    ],
)
def test_workers_of_one_cpu_server_share_its_cores_unless_the_user_binds_them(planned, resources, parallel, bound):
    server = planned(vllm_tensor_parallel_size=parallel, **resources).process("server")
    assert server.environment.get("VLLM_CPU_OMP_THREADS_BIND") == bound
