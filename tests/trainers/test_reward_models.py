"""Reward models in real trainers: their scores, also on two ranks, and models that can't be a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo_recipes import smoke
from grpo_recipes.errors import ConfigError
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.reward_models import load_reward_tokenizer

from . import reward_model_ranks
from .fixed_completions import generation, make_trainer, rows_of, tokens_mod_5, weights_of
from .tiny_training import save_random_model, save_reward_model


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a reward model and return its folder."""
    return str(save_reward_model(tmp_path_factory.mktemp("scorers") / "scorer"))


def test_scores_are_those_of_transformers(tmp_path: Path, model: str, scorer: str) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, rewards=(tokens_mod_5, scorer), reward_weights=[1.0, 2.0])
    rows = generation(trainer)
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    judge = AutoModelForSequenceClassification.from_pretrained(scorer)
    expected = []
    for prompt, ids, mask in zip(rows["prompt_ids"], rows["completion_ids"], rows["completion_mask"], strict=True):
        text = tokenizer.decode(prompt) + tokenizer.decode(ids[mask.bool()], skip_special_tokens=True) + smoke.END
        with torch.no_grad():
            expected.append(judge(**tokenizer(text, return_tensors="pt")).logits.item())
    assert trainer.reward_func_names == ["tokens_mod_5", "scorer"]
    assert max(expected) - min(expected) > 1e-3
    assert trainer.rewards_BR[:, 1].tolist() == pytest.approx(expected, abs=1e-5)


def test_it_trains_and_keeps_its_weights_and_the_name_of_the_recipe(tmp_path: Path, model: str, scorer: str) -> None:
    asset = {"kind": "model", "id": "acme/judge", "path": scorer}
    write_json(tmp_path / "sources.json", {"sources": [asset]})
    trainer = make_trainer(tmp_path, model, GRPOTrainer, rewards=("acme/judge",))
    before = [parameter.clone() for parameter in trainer.reward_funcs[0].parameters()]
    trainer.train()
    assert all(row["grad_norm"] > 1e-4 and "rewards/judge/mean" in row for row in rows_of(tmp_path))
    assert all(map(torch.equal, before, trainer.reward_funcs[0].parameters()))
    assert not any(parameter.requires_grad for parameter in trainer.reward_funcs[0].parameters())


def test_two_ranks_equal_one(tmp_path: Path, model: str, scorer: str) -> None:
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "model").symlink_to(model)
    keys = {"reward_models": [scorer], "per_device_train_batch_size": 6}
    (folder / "keys.json").write_text(json.dumps(keys))
    run_ranks("trainers.fixed_completions", str(folder))
    rewards = (tokens_mod_5, scorer)
    alone = make_trainer(tmp_path, model, GRPOTrainer, rewards, per_device_train_batch_size=12)
    alone.train()
    after = weights_of(alone)
    for rank in (0, 1):
        for name, weight in torch.load(folder / f"rank_{rank}.pt")["weights"].items():
            assert torch.allclose(weight, after[name.removeprefix("module.")], rtol=0, atol=1e-6), name
    for row, two in zip(rows_of(tmp_path), rows_of(folder / "two"), strict=True):
        assert two["rewards/scorer/mean"] == pytest.approx(row["rewards/scorer/mean"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("accelerator", ["fsdp2", "zero3"])
def test_ranks_with_sharded_models_get_the_scores_of_one(
    tmp_path: Path, model: str, scorer: str, accelerator: str
) -> None:
    expected = reward_model_ranks.train(tmp_path / "one", model, scorer, ranks=1)
    folder = str(tmp_path / "two")
    outputs = run_ranks("trainers.reward_model_ranks", folder, model, scorer, accelerator=accelerator, seconds=540)
    for output in outputs:
        logged = [list(map(float, line.split()[1:])) for line in output.splitlines() if line.startswith("logged ")]
        for values, row in zip(logged, expected, strict=True):
            assert values == pytest.approx([row[name] for name in reward_model_ranks.NAMES], rel=1e-3)
    assert len({row["rewards/scorer/mean"] for row in expected}) == len(expected)


def test_a_model_that_can_not_be_a_reward_is_rejected(tmp_path: Path, model: str, scorer: str) -> None:
    with pytest.raises(ConfigError, match=r"^reward_funcs: 'x' can't be a reward: expected a model for sequence"):
        load_reward_tokenizer("x", str(save_random_model(tmp_path / "policy")), False)
    with pytest.raises(ConfigError, match="expected a model with 1 label, got 3"):
        load_reward_tokenizer("x", str(save_reward_model(tmp_path / "classes", labels=3)), False)
    plain = save_reward_model(tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="the tokenizer of 'x' has no chat template"):
        load_reward_tokenizer("x", str(plain), False)
