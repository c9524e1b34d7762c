"""Flags of the guide's batch scripts, as `grpo` accepts them."""

from __future__ import annotations

import json

import pytest

from grpo_recipes import cli
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys

MATH = str(find_code_root() / "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*environment_keys(), *READ_VARIABLES} - {"CACHE_ROOT", "GRPO_HOME"}:
        monkeypatch.delenv(name, raising=False)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert cli.main(["plan", MATH, "--gpus", "4", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_task_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "--task", "grpo")["task"] == "grpo"


@pytest.mark.parametrize(
    ("flag", "value", "where"),
    [
        ("--vllm-group-port", "9001", "group"),
        ("--vllm_group_port", "9001", "group"),
        ("--vllm_server_port", "9001", "server"),
        ("--main-process-port", "9001", "main_process"),
    ],
)
def test_ports_are_flags_with_hyphens_or_underscores(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, where: str
) -> None:
    assert planned(capsys, flag, value)["ports"][where] == int(value)


def test_gpus_of_one_server_are_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    server, trainer = planned(capsys, "--vllm_tensor_parallel_size", "2")["processes"]
    assert (len(server["gpus"]), len(trainer["gpus"])) == (2, 2)


def test_model_and_accelerator_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--model_name_or_path", "a/model", "--accelerator", "zero3")
    assert (plan["model"], plan["accelerator"]) == ("a/model", "zero3")


def test_the_default_server_has_the_guides_values(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys)
    server, trainer = (process["argv"] for process in plan["processes"])
    for flag, value in {
        "--model": "Qwen/Qwen2.5-1.5B-Instruct",
        "--port": "8000",
        "--max-model-len": "2048",
        "--gpu-memory-utilization": "0.9",
    }.items():
        assert server[server.index(flag) + 1] == value
    assert trainer[trainer.index("--main_process_port") + 1] == "29525"
