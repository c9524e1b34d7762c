"""A training with an external server: a fake SGLang. tests/e2e/test_external.py has the real vLLM."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import smoke
from grpo_recipes.trainers.checks import TooManyWithoutVerdict
from grpo_recipes.weights.guard import WeightsDiffer
from grpo_recipes.weights.transport import ServerError

from .fake_sglang import FakeSglang
from .tiny_training import train

NAME = "the/model"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSglang]:
    tokenizer = smoke.build_tokenizer()
    fake = FakeSglang(smoke.build_model(tokenizer), NAME, tokenizer.eos_token_id)
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text(yaml.safe_dump({"model_name_or_path": NAME}))
    (tmp_path / "run/plan.json").write_text(json.dumps({"model": "/fetched/the-model"}))
    yield fake
    fake.close()


def run(server: FakeSglang, tmp_path: Path, folder: str = "run", **keys: Any) -> Any:
    defaults = {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": f"{server.url}/v1",
        "server_backend": "sglang_server", "server_request_timeout": 20.0, "vllm_server_timeout": 5.0,
        "logging_steps": 1,
    }  # fmt: skip
    return train(tmp_path / folder, **defaults | keys)


def rows(tmp_path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


def test_weights_reach_the_server_and_its_log_probs_are_the_trainers(server: FakeSglang, tmp_path: Path) -> None:
    trainer, _ = run(server, tmp_path, max_steps=3, steps_per_generation=1, learning_rate=1e-2)
    assert server.loads == 3
    metrics = rows(tmp_path)
    # The server's model began with other weights, and was trained in between: every row was sampled with the trainer's.
    assert [row["sampling/sampling_logp_difference/max"] < 1e-4 for row in metrics] == [True] * 3
    assert all("rollouts/failed" in row and row["rollouts/failed"] == 0 for row in metrics)
    served = dict(server.model.named_parameters())
    moved = [(served[name] - weight).abs().max().item() for name, weight in trainer.model.named_parameters()]
    assert 0 < max(moved) < 0.05  # the last step is not sent


def test_every_sampling_field_of_training_and_evaluation_is_sent(server: FakeSglang, tmp_path: Path) -> None:
    run(
        server, tmp_path, max_steps=1, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2,
        max_completion_length=3, vllm_importance_sampling_correction=False, eval_strategy="steps", eval_steps=1,
        eval_temperature=0.4, eval_top_p=0.5, eval_max_completion_length=2, num_generations_eval=2,
        per_device_eval_batch_size=2,
    )  # fmt: skip
    common = {"min_p": 0.1, "top_k": 5, "repetition_penalty": 1.2}
    training = common | {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 3}
    evaluation = common | {"temperature": 0.4, "top_p": 0.5, "max_new_tokens": 2}
    plain = {"min_p": 0.0, "top_k": -1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0}
    sent = [{key: value for key, value in request.items() if key in training} for request in server.sampled]
    assert sent.count(training) == 16 and sent.count(evaluation) == 10
    guard_requests = [fields for fields in sent if fields not in (training, evaluation)]
    assert guard_requests and all(
        fields == plain | {"max_new_tokens": 32} for fields in guard_requests
    )  # requests of the weight guard
    seeds = [request["sampling_seed"] for request in server.sampled]
    assert len({*seeds}) == len(seeds)


def test_no_more_requests_are_in_flight_than_the_recipe_says(server: FakeSglang, tmp_path: Path) -> None:
    server.seconds = 0.05  # an answer takes, so that requests meet
    run(server, tmp_path, max_steps=1, max_concurrent_requests=3)
    assert server.most == 3


def test_a_server_that_keeps_its_old_weights_ends_the_run(server: FakeSglang, tmp_path: Path) -> None:
    server.deaf = True
    with pytest.raises(WeightsDiffer, match="external"):
        run(server, tmp_path, max_steps=4, steps_per_generation=1, learning_rate=1e-2)


def test_the_weights_of_the_last_step_are_looked_at_too(server: FakeSglang, tmp_path: Path) -> None:
    trainer, _ = run(server, tmp_path, max_steps=2, steps_per_generation=1, learning_rate=1e-2)
    trainer.serve_final_weights()
    trainer.state.global_step += 1  # acts like a finished step
    next(trainer.model.parameters()).data.add_(0.5)
    server.deaf = True
    with pytest.raises(WeightsDiffer, match="no benchmark was run"):
        trainer.serve_final_weights()


@pytest.mark.slow
def test_the_seed_of_evaluations_alone_decides_what_they_draw(server: FakeSglang, tmp_path: Path) -> None:
    keys = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "eval_max_completion_length": 2}
    drawn = []
    for place, (seed, eval_seed) in enumerate(((1, 11), (2, 11), (1, 12), (11, None))):
        server.sampled.clear()
        shutil.copytree(tmp_path / "run", tmp_path / f"run{place}")
        run(server, tmp_path, f"run{place}", seed=seed, eval_sampling_seed=eval_seed, **keys)
        drawn.append(sorted(request["sampling_seed"] for request in server.sampled if request["max_new_tokens"] == 2))
    assert len(drawn[0]) == 20
    assert drawn[0] == drawn[1] == drawn[3] != drawn[2]


@pytest.mark.slow
def test_a_server_that_refuses_weights_ends_the_run(server: FakeSglang, tmp_path: Path) -> None:
    server.refuses_weights = True
    with pytest.raises(ServerError, match="no such architecture"):
        run(server, tmp_path, max_steps=1)


def test_a_completion_that_failed_is_left_out_and_counted(server: FakeSglang, tmp_path: Path) -> None:
    server.failing = 3
    trainer, _ = run(server, tmp_path, max_steps=4, max_concurrent_requests=1, entropy_coef=0.1)
    metrics = rows(tmp_path)
    assert metrics[0]["rollouts/failed"] == pytest.approx(3 / 16)
    assert trainer.state.global_step == 4


def test_nothing_is_learned_from_what_stands_for_a_failed_completion(server: FakeSglang, tmp_path: Path) -> None:
    """Token 0 is in no completion. Learning from it would move its log-prob more than weight decay does."""
    from grpo_recipes.rollouts import external

    losses = []
    for token in (0, 7):
        external._PLACEHOLDER = ([token], [0.0])
        try:
            server.failing = 3
            (tmp_path / "run/metrics.jsonl").unlink(missing_ok=True)
            run(server, tmp_path, max_steps=4, max_concurrent_requests=1, entropy_coef=0.1)
        finally:
            external._PLACEHOLDER = ([0], [0.0])
        losses.append([row["grad_norm"] for row in rows(tmp_path)])
    assert losses[0] == losses[1]


def test_too_many_failures_end_the_run(server: FakeSglang, tmp_path: Path) -> None:
    server.failing = 12
    with pytest.raises(TooManyWithoutVerdict, match="did not return 75% of the completions of step 1"):
        run(server, tmp_path, max_steps=1, max_concurrent_requests=1)


def test_another_model_is_refused(server: FakeSglang, tmp_path: Path) -> None:
    server.models = {"another/model": "another/model"}
    with pytest.raises(Exception, match="serves 'another/model', not 'the/model'"):
        run(server, tmp_path, max_steps=1)
