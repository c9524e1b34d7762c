"""Test the other duties of an Atropos source: it numbers weights and reconnects to a restarted server."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from grpo_recipes import smoke
from grpo_recipes.extensions.atropos.access import SETTINGS
from grpo_recipes.extensions.atropos.group import Group, to_trajectories
from grpo_recipes.extensions.atropos.rollouts import AtroposRollouts, _to_messages
from grpo_recipes.recipe.configs import GRPOConfig, ScriptArguments
from grpo_recipes.recipe.sources import rollout_class


def source(folder: Path, **keys: Any) -> AtroposRollouts:
    script_args = ScriptArguments(atropos_environment="arithmetic", max_prompt_length=8)
    return AtroposRollouts(script_args, GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, **keys), folder)


class FakeGeneration:
    """As much of a generation as a source uses."""

    def __init__(self, client: Any, sync: Any) -> None:
        self.vllm_client, self.sync_weights = client, sync

    def wrap_sync(self, wrapper: Any) -> None:
        self.sync_weights = wrapper(self.sync_weights)


def trainer_with_server(main: bool = True) -> Any:
    """Return the parts of a trainer that deal with the server; ``calls`` lists the requests with their number."""
    calls: list[Any] = []
    client = SimpleNamespace(policy_version=None, reconnect=lambda: calls.append("reconnect"))
    client.expect_other_clients = lambda expected: setattr(client, "has_other_clients", expected)
    client.set_policy_version = lambda step: setattr(client, "policy_version", step)
    generation = FakeGeneration(client, lambda: calls.append(("sync", client.policy_version)))
    return SimpleNamespace(
        use_vllm=True,
        calls=calls,
        accelerator=SimpleNamespace(is_main_process=main),
        state=SimpleNamespace(global_step=0),
        preemption=SimpleNamespace(stop=SimpleNamespace(cuts=lambda: len(calls) > 1)),
        vllm_generation=generation,
    )


def test_every_sync_carries_the_step_of_its_weights(tmp_path: Path) -> None:
    trainer = trainer_with_server()
    source(tmp_path).attach(trainer)
    for step in (0, 1, 7):
        trainer.state.global_step = step
        trainer.vllm_generation.sync_weights()
    assert trainer.calls == [("sync", 0), ("sync", 1), ("sync", 7)]


@pytest.mark.parametrize("has_run_api", [True, False])
def test_the_client_knows_whether_environments_ask_its_server_after_the_training(
    tmp_path: Path, has_run_api: bool
) -> None:
    """Environments of the launch's own run-api end with the launch."""
    roles = ["run-api", "server", "trainer"] if has_run_api else ["server", "trainer"]
    (tmp_path / "plan.json").write_text(json.dumps({"processes": [{"role": role} for role in roles]}))
    trainer = trainer_with_server()
    source(tmp_path).attach(trainer)
    assert trainer.vllm_generation.vllm_client.has_other_clients is not has_run_api


def test_ranks_without_a_client_send_as_before(tmp_path: Path) -> None:
    trainer = trainer_with_server(main=False)
    source(tmp_path).attach(trainer)
    trainer.vllm_generation.sync_weights()
    assert trainer.calls == [("sync", None)]


def test_a_server_that_was_started_again_is_seen_to_while_groups_are_waited_for(tmp_path: Path) -> None:
    trainer = trainer_with_server()
    rollouts = source(tmp_path)
    assert [rollouts._reconnect_and_check_stop(trainer) for _ in range(2)] == [False, True]
    assert trainer.calls == ["reconnect", "reconnect"]


@pytest.mark.parametrize("refused", [0, 7])
def test_requests_without_the_token_are_the_likely_reason_that_no_groups_come(tmp_path: Path, refused: int) -> None:
    """R11: an environment in another terminal gets 401 for ever; nothing else shows why it sends no group."""
    trainer, rollouts = trainer_with_server(), source(tmp_path)
    client, urls = trainer.vllm_generation.vllm_client, list[str]()
    answer = SimpleNamespace(json=lambda: {"requests": 0, "refused": refused})
    client.base_url = "http://127.0.0.1:8000"
    client.session = SimpleNamespace(get=lambda url, timeout: urls.append(url) or answer)
    assert rollouts._explain_wait(trainer) == "" and not urls  # this launch starts its environments itself
    (tmp_path / SETTINGS).touch()
    reason = rollouts._explain_wait(trainer)
    assert urls == ["http://127.0.0.1:8000/grpo/activity"] and bool(reason) == bool(refused)
    if refused:
        assert reason.startswith("the vLLM server rejected 7 requests with a missing or wrong token. Fix: ")
        assert reason.endswith(f"serve --config {tmp_path / SETTINGS}")


def test_a_recipe_with_atropos_has_this_source_and_no_correction_beside_the_ratio(tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert args.vllm_importance_sampling_correction
    assert rollout_class(partial(getattr, ScriptArguments())) is None and args.vllm_importance_sampling_correction
    script_args = ScriptArguments(atropos_environment="dataset")
    assert isinstance(rollout_class(partial(getattr, script_args))(script_args, args, tmp_path), AtroposRollouts)
    assert not args.vllm_importance_sampling_correction


@pytest.mark.parametrize(
    ("prompt", "completion", "most", "expected"),
    [(8, 24, None, 32), (8, 24, 100, 32), (None, 24, 100, 100), (None, 24, None, 512)],
)
def test_a_trajectory_is_as_long_as_the_recipe_allows(
    tmp_path: Path, prompt: int | None, completion: int, most: int | None, expected: int
) -> None:
    rollouts = source(tmp_path, max_completion_length=completion, vllm_max_model_length=most)
    rollouts._script.max_prompt_length = prompt
    config = SimpleNamespace(max_position_embeddings=512)
    trainer = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)))
    assert rollouts._limit_trajectory(trainer) == expected


def test_a_completion_reads_as_turns_of_the_policy_and_of_the_environment() -> None:
    tokenizer = smoke.build_tokenizer()
    texts = ["1+1=", "2", "and 2+2=", "4"]
    ids = [tokenizer(text).input_ids for text in texts]
    tokens = [token for part in ids for token in part] + [tokenizer.eos_token_id]
    trained = [*numpy.repeat([False, True, False, True], [len(part) for part in ids]).tolist(), True]
    masks = [token if is_trained else -100 for token, is_trained in zip(tokens, trained, strict=True)]
    logprobs = [-1.0 if is_trained else 1.0 for is_trained in trained]
    plain = {"tokens": [tokens], "masks": [masks], "scores": [1.0], "inference_logprobs": [logprobs]}
    (row,) = to_trajectories(Group.from_json(plain))
    assert _to_messages(row, tokenizer) == [
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2+2="},
        {"role": "assistant", "content": "4"},
    ]
