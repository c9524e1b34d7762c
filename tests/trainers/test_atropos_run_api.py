"""A training on groups that a test posts to the real run-api."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from atropos.run_api import RunApi, run_api

from grpo_recipes.extensions.atropos.client import AtroposError, NoLogprobs
from grpo_recipes.trainers.grpo import GRPOTrainer

from .atropos_groups import group, make_trainer
from .fixed_completions import rows_of

pytest.importorskip("atroposlib")


@pytest.fixture(scope="module")
def module_api() -> Iterator[RunApi]:
    with run_api() as api:
        yield api


@pytest.fixture
def api(module_api: RunApi) -> RunApi:
    module_api.reset()
    return module_api


def trainer_of(api: RunApi, folder: Path, model: str, **keys: Any) -> GRPOTrainer:
    """Make a trainer that gets run-api and its plan from the launcher."""
    trainer = make_trainer(folder, model, atropos_api_url=api.url, **keys)
    trainer.source._client = None
    processes = [{"role": "environment-sums", "log": "logs/liv_env-sums.log"}, {"role": "trainer", "log": "no"}]
    (folder / "plan.json").write_text(json.dumps({"processes": processes}))
    return trainer


@contextmanager
def posting(api: RunApi, trainer: GRPOTrainer, **fields: Any) -> Iterator[None]:
    """Post groups of the trainer's step whenever fewer than two wait, like a started environment."""
    over = threading.Event()

    def post() -> None:
        number = 0
        while not over.wait(0.02):
            if api.get("/info").json()["batch_size"] != -1 and api.get("/status").json()["queue_size"] < 2:
                number += 1
                params = {"policy_version": trainer.state.global_step}
                plain = group(f"{number}", generation_params=params).to_json()
                assert api.post("/scored_data", {**plain, **fields}).ok

    poster = threading.Thread(target=post, daemon=True)
    poster.start()
    try:
        yield
    finally:
        over.set()
        poster.join()


def test_it_registers_learns_and_registers_again_where_it_goes_on(
    module_api: RunApi, tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, "atropos_batch_max_wait_time": 60.0}
    module_api.restart()
    trainer = trainer_of(module_api, tmp_path, model, **keys)
    with posting(module_api, trainer):
        trainer.train()
    assert module_api.get("/info").json() == {"batch_size": 8, "max_token_len": 8 + 24 + 1}
    assert module_api.get("/status").json()["current_step"] >= 3
    output = capfd.readouterr().out
    assert "grpo: Atropos API connectivity confirmed" in output
    assert output.count("grpo: Trainer successfully registered with UUID: ") == 1
    assert output.count("grpo: Successfully retrieved batch with 2 items") >= 3

    module_api.restart()  # the launcher restarts it with the trainers
    resumed = trainer_of(module_api, tmp_path, model, **{**keys, "max_steps": 5})
    with posting(module_api, resumed):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoints/checkpoint-3"))
    assert module_api.get("/status").json()["current_step"] >= 5
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert 0 < row["atropos/api_seconds"] < 30 and row["atropos/wait_seconds"] > 0
        assert row["atropos/batches_per_minute"] > 0 and row["atropos/tokens_per_second"] > 0
        assert 0 <= row["atropos/staleness_max"] <= 4 and row["atropos/rejected"] == 0


def test_a_wait_without_groups_ends_with_all_that_was_seen(api: RunApi, tmp_path: Path, model: str) -> None:
    trainer = trainer_of(api, tmp_path, model, atropos_batch_max_wait_time=0.5)
    with pytest.raises(AtroposError) as error:
        trainer.train()
    told = str(error.value)
    assert told.startswith("Maximum wait time (0.5s) exceeded: no environment has joined, and no group ever came\n")
    assert "\nFailed to retrieve batch from Atropos after all retry attempts\n" in told
    assert f"/info: {{'batch_size': 8, 'max_token_len': {8 + 24 + 1}}}" in told
    assert "log of environment-sums: logs/liv_env-sums.log" in told and "trainer" not in told


def test_groups_without_log_probs_end_the_run_before_its_first_step(api: RunApi, tmp_path: Path, model: str) -> None:
    trainer = trainer_of(api, tmp_path, model, atropos_batch_max_wait_time=60.0)
    with (
        posting(api, trainer, inference_logprobs=None),
        pytest.raises(NoLogprobs, match=r"GRPO requires inference_logprobs .* --openai.server_type vllm"),
    ):
        trainer.train()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_run_api_that_is_not_there_ends_the_run(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, atropos_api_url="http://127.0.0.1:9", atropos_timeout=0.5)
    trainer.source._client = None
    with pytest.raises(AtroposError, match=r"Atropos API not reachable at http://127\.0\.0\.1:9"):
        trainer.train()
