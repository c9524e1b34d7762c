"""R11: environments in other terminals get access settings, and an unmodified environment samples with them."""

from __future__ import annotations

import dataclasses
import json
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("atroposlib")

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.server_handling.vllm_server import VLLMServer

from atropos.envs.by_hand import Alone, Sums
from grpo_recipes import smoke
from grpo_recipes.extensions.atropos.access import SETTINGS, grant_access, revoke_access
from grpo_recipes.extensions.atropos.group import Group, find_group_problem
from grpo_recipes.extensions.atropos.processes import ENVIRONMENT_TOKEN, ROLES
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.recipe import Recipe

from .fake_vllm import FakeVllm, Sampled, save_tokenizer

GROUPS = {
    "dataset_name": None, "atropos_api_url": "http://127.0.0.1:8460/", "reward_funcs": ["environment"], "max_steps": 10,
    "num_generations": 4, "max_prompt_length": 16, "max_completion_length": 8,
}  # fmt: skip
TOKENIZER = smoke.build_tokenizer()


@pytest.fixture
def names(tmp_path: Path) -> Names:
    return Names(tmp_path, "run", "run-abcd", "stamp")


def settings(names: Names) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((names.run_dir / SETTINGS).read_text())
    return values


def test_only_the_user_can_read_the_files_and_they_go_with_the_launch(
    read: Callable[..., Recipe], planned: Callable[..., Plan], names: Names
) -> None:
    command = grant_access(read(**GROUPS), planned(**GROUPS, weight_sync="file"), names)
    assert command is not None and command.endswith(f"serve --config {names.run_dir / SETTINGS}")
    files = [names.run_dir / name for name in (ENVIRONMENT_TOKEN, SETTINGS)]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert {server["api_key"] for server in settings(names)["openai"]} == {files[0].read_text()}
    assert grant_access(read(**GROUPS), planned(**GROUPS), names) == command  # from the next attempt
    revoke_access(names.run_dir)
    assert not any(file.exists() for file in files) and not any(names.run_dir.glob(".*"))


def test_environments_of_the_launch_alone_need_none(
    read: Callable[..., Recipe], planned: Callable[..., Plan], names: Names
) -> None:
    keys = {**GROUPS, "atropos_api_url": None, "atropos_environment": "arithmetic"}
    assert grant_access(read(**keys), planned(**keys), names) is None and not any(names.run_dir.glob("*_*"))
    assert ROLES.server_variables(read(**keys), names) == {}
    server = planned(**keys, weight_sync="file").process("server")
    assert server is not None and "GRPO_ENVIRONMENT_TOKEN_FILE" not in server.environment


@pytest.mark.parametrize(("bridge", "model"), [("file", "run-abcd"), ("lora", "grpo-adapter")])
def test_settings_are_what_trainer_and_environment_must_share(
    read: Callable[..., Recipe], planned: Callable[..., Plan], names: Names, bridge: str, model: str
) -> None:
    keys = {**GROUPS, "weight_sync": bridge, "use_peft": bridge == "lora"}
    plan = planned(**keys, vllm_server_port=9001)
    grant_access(read(**keys), plan, names)
    values = settings(names)
    assert values["env"] == {
        "tokenizer_name": plan.model, "group_size": 4, "max_token_length": 24,
        "rollout_server_url": "http://127.0.0.1:8460", "total_steps": 10**12,
    }  # fmt: skip
    first, second = values["openai"]
    assert first == second and first["base_url"] == "http://127.0.0.1:9001/v1"
    assert (first["server_type"], first["model_name"], first["tokenizer_name"]) == ("vllm", model, plan.model)
    server = plan.process("server")
    assert server is not None and server.environment["GRPO_ENVIRONMENT_TOKEN_FILE"].endswith(ENVIRONMENT_TOKEN)
    assert json.loads(server.environment["GRPO_SAMPLING"])["temperature"] == 1.0
    assert not any(
        first["api_key"] in str(value) for process in plan.processes for value in (process.argv, process.environment)
    )


class GeneratesGroups(FakeVllm):
    """Answers ``/generate`` like our server."""

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        every = [self.samples(body["prompt"]["prompt_token_ids"], number) for number in range(body["n"])]
        logprobs = [[[{token: -0.5}] for token in ids] for ids, _, _ in every]
        return {"logprobs": logprobs, "finish_reasons": [reason for _, _, reason in every]}


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    def answer(prompt: list[int], number: int) -> Sampled:
        return [*TOKENIZER.encode(f"<answer>{number}</answer>"), TOKENIZER.eos_token_id], [], "stop"

    fake = GeneratesGroups(answer)
    yield fake
    fake.close()


@pytest.mark.parametrize("kind", [Sums, Alone])
def test_an_unmodified_environment_reads_the_settings_and_samples_a_group(
    kind: type[BaseEnv], read: Callable[..., Recipe], planned: Callable[..., Plan], names: Names, tmp_path: Path,
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One server outside a list: atroposlib ignores its address."""
    plan = planned(**GROUPS, weight_sync="file")
    (folder := tmp_path / "tokenizer").mkdir()
    plan = dataclasses.replace(
        plan, model=save_tokenizer(folder), ports=dataclasses.replace(plan.ports, server=vllm.port)
    )
    grant_access(read(**GROUPS), plan, names)
    vllm.token = settings(names)["openai"][0]["api_key"]
    groups = []

    async def collect_one(environment: Any) -> None:
        assert {type(server) for server in environment.server.servers} == {VLLMServer}
        group, _ = await environment.collect_trajectories((1, 2))
        groups.append(group)

    monkeypatch.setattr(BaseEnv, "env_manager", collect_one)
    monkeypatch.setattr(sys, "argv", ["by_hand.py", "serve", "--config", str(names.run_dir / SETTINGS)])
    serve = kind.get_cli_serve_config_cls()(config=str(names.run_dir / SETTINGS))
    serve.run()
    (group,) = groups
    assert len(group["tokens"]) == 4 and group["scores"].count(1.0) == 1
    assert find_group_problem(Group.from_json(group), size=4, longest=64, vocabulary=300) is None
    assert [request["max_tokens"] for request in vllm.asked] == [24]
