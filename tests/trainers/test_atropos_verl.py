"""YAML settings of verl's Atropos integration, from the file to the training step that they change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from grpo_recipes.extensions.atropos.group import Group
from grpo_recipes.recipe import merge_recipe
from grpo_recipes.trainers.grpo import GRPOTrainer

from .atropos_groups import generation, gradient, group, like_the_trainer, make_trainer
from .fixed_completions import rows_of
from .test_atropos_learning import leave_the_reference, shown, with_advantages
from .tiny_training import GROUP

ACTOR = {
    "use_kl_loss": False, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "clip_ratio": 0.2,
    "loss_agg_mode": "token-mean", "ppo_mini_batch_size": 2 * GROUP,
}  # fmt: skip
DATA = {"train_batch_size": 2 * GROUP, "max_prompt_length": 512, "max_response_length": 1024}
# Keys of the launch, which have become others when a trainer reads them.
OF_THE_LAUNCH = ("reward_funcs", "prompts_per_step", "use_vllm", "vllm_mode")


def trainer_of(folder: Path, model: str, actor: dict[str, Any] | None = None, **data: Any) -> GRPOTrainer:
    """Make a trainer from a verl file with these settings in addition to the settings above."""
    file = {
        "algorithm": {"adv_estimator": "grpo_atropos"},
        "actor_rollout_ref": {"actor": {**ACTOR, **(actor or {})}, "rollout": {"name": "atropos", "n": GROUP}},
        "data": {**DATA, **data},
    }
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "theirs.yaml").write_text(yaml.safe_dump(file))
    recipe, problems = merge_recipe(folder / "theirs.yaml")
    assert problems == []
    keys = {
        key: option.value for key, option in recipe.values.items() if recipe.is_set(key) and key not in OF_THE_LAUNCH
    }
    return make_trainer(folder, model, **keys)


def loss_of(trainer: GRPOTrainer, output: dict[str, Any]) -> float:
    return trainer.compute_loss(trainer.model, output).item()


@pytest.mark.parametrize(
    ("clip_ratio", "ratio", "learns"), [(0.2, 1.15, True), (0.1, 1.15, False), (0.2, 1.25, False), (0.3, 1.25, True)]
)
def test_the_clip_ratio_says_from_where_nothing_is_learned(
    tmp_path: Path, model: str, clip_ratio: float, ratio: float, learns: bool
) -> None:
    trainer = trainer_of(tmp_path, model, {"clip_ratio": clip_ratio})
    both = [with_advantages(like_the_trainer(trainer, group(name), ratio), [1.0] * GROUP) for name in "ab"]
    assert (gradient(trainer, shown(trainer, *both)).abs().max() > 0) == learns


@pytest.mark.parametrize("coefficient", [0.001, 0.1])
def test_low_var_kl_is_added_to_the_loss_with_its_coefficient(tmp_path: Path, model: str, coefficient: float) -> None:
    """With equal scores, the loss contains only the KL term."""
    trainer = trainer_of(tmp_path, model, {"use_kl_loss": True, "kl_loss_coef": coefficient})
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    leave_the_reference(trainer, by=0.2)
    same = [like_the_trainer(trainer, group(name, (1.0,) * GROUP)) for name in "ab"]
    output = shown(trainer, *same)
    estimates = []
    for batch in same:
        for tokens, mask, logprobs in zip(batch.tokens, batch.masks, batch.inference_logprobs or [], strict=True):
            with torch.no_grad():
                of_reference = reference(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
            for place, label in enumerate(mask):
                if label != -100:
                    apart = of_reference[place - 1, label] - logprobs[place]
                    estimates.append(apart.exp() - apart - 1)
    expected = coefficient * torch.stack(estimates).mean().item()
    assert expected > 1e-2 * coefficient and loss_of(trainer, output) == pytest.approx(expected, rel=1e-3)
    assert gradient(trainer, output).abs().max() > 0
    without = trainer_of(tmp_path / "without", model, {"kl_loss_coef": coefficient})
    leave_the_reference(without, by=0.2)
    assert gradient(without, shown(without, *same)).abs().max() == 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_mode_says_whether_tokens_or_trajectories_count_alike(tmp_path: Path, model: str, mode: str) -> None:
    trainer = trainer_of(tmp_path, model, {"loss_agg_mode": mode})
    advantages = [1.0, -2.0, 3.0, 0.5]
    both = [with_advantages(like_the_trainer(trainer, group(name)), advantages) for name in "ab"]
    lengths = torch.tensor([sum(label != -100 for label in mask) for batch in both for mask in batch.masks])
    advantages_R = torch.tensor(advantages * 2)
    assert lengths.unique().numel() > 2
    of_tokens, of_rows = (lengths * advantages_R).sum().item() / lengths.sum().item(), advantages_R.mean().item()
    assert abs(of_tokens - of_rows) > 0.05
    expected = -(of_tokens if mode == "token-mean" else of_rows)
    assert loss_of(trainer, shown(trainer, *both)) == pytest.approx(expected, rel=1e-4)


def longer(tokens: int) -> Group:
    """Make a group with this many tokens in its first trajectory. Three tokens do not come from the policy."""
    columns = group("long").to_json()
    missing = tokens - len(columns["tokens"][0])
    for name, value in (("tokens", 70), ("masks", 70), ("inference_logprobs", -5.5)):
        columns[name][0] = [*columns[name][0], *[value] * missing]
    return Group.from_json(columns)


def test_both_lengths_together_bound_a_trajectory(tmp_path: Path, model: str) -> None:
    trainer = trainer_of(tmp_path, model)
    output = shown(trainer, longer(512 + 1024), group("b"))
    assert trainer.source._client.asked[0]["longest"] == 512 + 1024
    assert output["completion_ids"].shape[1] == 512 + 1024 - 3  # not a token is cut
    shorter = trainer_of(tmp_path / "shorter", model, max_prompt_length=8, max_response_length=24)
    generation(shorter)
    assert shorter.source._client.asked[0]["longest"] == 8 + 24


def test_a_mini_batch_of_the_whole_batch_is_one_step(tmp_path: Path, model: str) -> None:
    trainer = trainer_of(tmp_path, model)
    trainer.train()
    assert [request["step"] for request in trainer.source._client.asked] == [0, 1]
    assert all(request["groups"] == 2 for request in trainer.source._client.asked)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]
    twice = trainer_of(tmp_path / "twice", model, {"ppo_epochs": 2})
    twice.train()
    assert [request["step"] for request in twice.source._client.asked] == [0]  # two steps on one batch
