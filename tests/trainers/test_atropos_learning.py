"""Learning from Atropos groups: trained tokens, their advantages, and the policy they are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos.group import Group, to_trajectories
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer

from .atropos_groups import generation, gradient, group, like_the_trainer, make_trainer
from .tiny_training import GROUP

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def with_advantages(original: Group, advantages: list[float]) -> Group:
    """Set the same advantage at each token of a row."""
    rows = [[advantage] * len(tokens) for advantage, tokens in zip(advantages, original.tokens, strict=True)]
    return Group.from_json({**original.to_json(), "advantages": rows})


def leave_the_reference(trainer: GRPOTrainer, by: float = 0.01) -> None:
    """Move the weights away from the reference, so that the KL penalty has a gradient."""
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=noise)


def shown(trainer: GRPOTrainer, *groups: Group) -> dict[str, Any]:
    """Return the generation made from these groups."""
    trainer.source._client._make = lambda _: list(groups)
    return generation(trainer, len(groups))


# --- the policy that sampled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "ratio", "learns"),
    [(-1.0, 1.5, True), (-1.0, 0.5, False), (1.0, 1.5, False), (1.0, 0.5, True), (-1.0, 1.0, True), (1.0, 1.0, True)],
)
def test_the_loss_is_clipped_where_it_must_be(
    tmp_path: Path, model: str, advantage: float, ratio: float, learns: bool
) -> None:
    """Tokens that the policy already made less likely are not pushed further down, and vice versa."""
    trainer = make_trainer(tmp_path, model)
    batch = with_advantages(like_the_trainer(trainer, group("a"), ratio), [advantage] * GROUP)
    output = shown(trainer, batch)
    slope = gradient(trainer, output)
    direction = slope if learns else torch.randn(len(slope), generator=torch.Generator().manual_seed(0))
    direction = direction / direction.norm()

    def loss_at(step: float) -> float:
        parameters, place = list(trainer.model.parameters()), 0
        with torch.no_grad():
            for parameter in parameters:
                parameter += step * direction[place : place + parameter.numel()].view_as(parameter)
                place += parameter.numel()
            loss = trainer.compute_loss(trainer.model, output).item()
            place = 0
            for parameter in parameters:
                parameter -= step * direction[place : place + parameter.numel()].view_as(parameter)
                place += parameter.numel()
        return loss

    finite_difference = (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3
    assert finite_difference == pytest.approx((slope @ direction).item(), rel=0.02, abs=1e-5)
    assert (slope.norm() > 1e-2) == learns and (slope.abs().max() > 0) == learns


@pytest.mark.parametrize("keys", [{}, {"gradient_accumulation_steps": 1, "steps_per_generation": 2}], ids=str)
def test_the_old_policy_is_the_one_that_sampled(tmp_path: Path, model: str, keys: dict[str, Any]) -> None:
    """The same holds if TRL computes its own old policy, and no correction is added on top."""
    per_device = 8 // keys.get("steps_per_generation", 1)
    trainer = make_trainer(tmp_path, model, per_device_train_batch_size=per_device, **keys)
    first, second = group("a", turns=2), group("b")
    output = shown(trainer, first, second)
    rows = [*to_trajectories(first), *to_trajectories(second)]
    for place, row in enumerate(rows):
        length = len(row.completion_ids)
        assert output["prompt_ids"][place, -len(row.prompt_ids) :].tolist() == row.prompt_ids.tolist()
        assert output["completion_ids"][place, :length].tolist() == row.completion_ids.tolist()
        assert output["old_per_token_logps"][place, :length].tolist() == row.logprobs.tolist()
        assert output["tool_mask"][place, :length].tolist() == row.mask.astype(int).tolist()
        assert output["completion_mask"][place].sum() == length
    assert torch.equal(output["sampling_per_token_logps"], output["old_per_token_logps"])
    assert "importance_sampling_ratio" not in output and "fresh" not in output and "temperature" not in output


def test_what_was_not_sampled_has_no_gradient(tmp_path: Path, model: str) -> None:
    """Replacing environment tokens changes no bit of the gradient. Replacing policy tokens does."""
    trainer = make_trainer(tmp_path, model, beta=0.1)
    trainer.args.trim_padding = False  # the model is given the rows that the loss has
    output = shown(trainer, *(like_the_trainer(trainer, group(name, turns=3), 1.05) for name in "ab"))
    leave_the_reference(trainer)
    read = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    trained = output["tool_mask"].bool() & output["completion_mask"].bool()

    def as_it_was(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "input_ids": read}

    def gradient_of(changed_BT: torch.Tensor) -> torch.Tensor:
        ids = torch.where(changed_BT, (output["completion_ids"] + 1) % 64, output["completion_ids"])
        return gradient(trainer, {**output, "completion_ids": ids})

    assert (~trained & output["completion_mask"].bool()).sum() > 8
    trainer.model.register_forward_pre_hook(as_it_was, with_kwargs=True)
    for loss in LOSSES:
        trainer.loss_type = loss
        plain = gradient_of(trained & False)
        assert plain.abs().max() > 0, loss
        assert torch.equal(gradient_of(~trained), plain), loss
        assert not torch.allclose(gradient_of(trained), plain), loss


# --- advantages ------------------------------------------------------------------------------------------------------


def test_scores_become_advantages_as_trl_makes_them(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model)
    output = shown(trainer, group("a", (3.0, 1.0, 1.0, 1.0)), group("b", (2.0, 2.0, 2.0, 2.0)))
    scores = torch.tensor([3.0, 1.0, 1.0, 1.0])
    expected = (scores - scores.mean()) / (scores.std() + 1e-4)
    assert output["advantages"].tolist() == pytest.approx([*expected.tolist(), 0.0, 0.0, 0.0, 0.0])
    assert trainer._metrics["train"]["reward"] == [1.75]
    assert trainer._metrics["train"]["rewards/environment/mean"] == [1.75]


def test_token_advantages_are_used_as_they_are_beside_groups_of_scores(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, report_samples=8)
    first, second = group("a", turns=2), group("b")
    advantages = [[place + 10.0 * index for place in range(len(row))] for index, row in enumerate(second.tokens)]
    output = shown(trainer, first, Group.from_json({**second.to_json(), "advantages": advantages}))
    scalar = torch.tensor(first.scores)
    scalar = (scalar - scalar.mean()) / (scalar.std() + 1e-4)
    assert output["advantages"].shape == output["completion_ids"].shape
    for place in range(GROUP):
        assert output["advantages"][place].tolist() == pytest.approx(
            [scalar[place].item()] * len(output["advantages"][0])
        )
    means = []
    for place, row in enumerate(to_trajectories(second), start=GROUP):
        expected = advantages[place - GROUP][len(row.prompt_ids) :]  # a single turn: all of it is trained on
        assert output["advantages"][place, : len(expected)].tolist() == expected
        means.append(sum(expected) / len(expected))
    assert list(trainer._logs["advantages"]) == pytest.approx([*scalar.tolist(), *means])
    gradient(trainer, output)


def test_token_advantages_that_are_all_equal_are_those_of_scores(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, beta=0.05)
    by_score = shown(trainer, group("a"), group("b", (0.0, 0.0, 1.0, 0.0)))
    both = [group("a"), group("b", (0.0, 0.0, 1.0, 0.0))]
    scalars = by_score["advantages"].view(2, GROUP).tolist()
    by_token = shown(trainer, *(with_advantages(batch, values) for batch, values in zip(both, scalars, strict=True)))
    for loss in LOSSES:
        trainer.loss_type = loss
        expected = gradient(trainer, by_score)
        torch.testing.assert_close(gradient(trainer, by_token), expected, rtol=1e-5, atol=1e-7)


def test_the_recipe_may_normalise_token_advantages(tmp_path: Path, model: str) -> None:
    advantages = [1.0, -1.0, 3.0, 0.5]
    normalized = with_advantages(group("a"), advantages)
    trainer = make_trainer(tmp_path, model, atropos_normalize_advantages=True)
    output = shown(trainer, normalized, with_advantages(group("b"), [2.0] * GROUP))
    rows = to_trajectories(normalized)
    spread = numpy.concatenate([row.advantages[row.mask] for row in rows]).std()
    assert output["advantages"][:GROUP, 0].tolist() == pytest.approx(
        [advantage / spread for advantage in advantages], rel=1e-5
    )
    assert output["advantages"][GROUP:, 0].tolist() == [2.0] * GROUP  # equal ones have no spread to divide by


@pytest.mark.parametrize("by_token", [False, True], ids=["scores", "token advantages"])
def test_a_trajectory_whose_advantage_is_set_to_zero_has_no_gradient(
    tmp_path: Path, model: str, by_token: bool
) -> None:
    """The KL penalty gives it no gradient either, and the other rows learn as if its advantage were 0."""
    zeroed = {"overrides": [{}, {"set_advantage_to_zero": True}, {}, {}]}
    plain = with_advantages(group("a"), [1.0, -1.0, 0.5, 2.0]) if by_token else group("a")
    trainer = make_trainer(tmp_path, model, beta=0.3)
    output = shown(trainer, Group.from_json({**plain.to_json(), **zeroed}), group("b"))
    leave_the_reference(trainer)
    row = to_trajectories(plain)[1]
    assert output["advantages"][1].abs().max() == 0 and output["advantages"][0].abs().max() > 0
    assert trainer._logs["advantages"][1] == 0.0
    assert output["num_items_in_batch"] == sum(
        label != -100 for batch in (plain, group("b")) for mask in batch.masks for label in mask
    )
    changed_ids = output["completion_ids"].clone()
    changed_ids[1, : len(row.completion_ids)] = (changed_ids[1, : len(row.completion_ids)] + 1) % 64
    for loss in LOSSES:
        trainer.loss_type = loss
        expected = gradient(trainer, output)
        assert expected.abs().max() > 0
        assert torch.equal(gradient(trainer, {**output, "completion_ids": changed_ids}), expected), loss
        if loss in ("grpo", "dr_grpo", "dapo", "luspo"):  # these do not divide by the trained tokens
            trainer.beta = 0.0
            without = gradient(trainer, output)
            unmasked = {**output, "tool_mask": output["tool_mask"].clone()}
            unmasked["tool_mask"][1, : len(row.mask)] = torch.from_numpy(row.mask).int()
            torch.testing.assert_close(gradient(trainer, unmasked), without, rtol=1e-5, atol=1e-7)
            trainer.beta = 0.3


# --- temperatures ----------------------------------------------------------------------------------------------------


def test_each_row_is_compared_at_the_temperature_that_it_was_sampled_at(tmp_path: Path, model: str) -> None:
    """For the sampling policy, the ratio is 1 and the KL to an identical reference is 0."""
    trainer = make_trainer(tmp_path, model, beta=0.1)
    hot = like_the_trainer(trainer, group("a", generation_params={"temperature": 1.5, "policy_version": 0}), 1.0, 1.5)
    cold = like_the_trainer(trainer, group("b", generation_params={"temperature": 0.5, "policy_version": 0}), 1.0, 0.5)
    output = shown(trainer, hot, cold)
    assert output["temperature"].tolist() == [1.5] * GROUP + [0.5] * GROUP
    trainer._metrics["train"].clear()
    assert gradient(trainer, output).abs().max() > 0
    metrics = trainer._metrics["train"]
    assert metrics["kl"] == [pytest.approx(0.0, abs=1e-6)] and metrics["clip_ratio/region_mean"] == [0.0]
    del output["temperature"]
    trainer._metrics["train"].clear()
    gradient(trainer, output)
    assert trainer._metrics["train"]["clip_ratio/region_mean"][0] > 0.05  # the value at a single temperature
    assert trainer._metrics["train"]["kl"][0] > 1e-3


def test_the_temperature_of_a_trajectory_wins_and_a_greedy_one_counts_as_1(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, temperature=0.8)
    overrides = {"overrides": [{}, {"temperature": 0.5}, {"temperature": 0}, {}]}
    first = Group.from_json({**group("a", generation_params={"temperature": 0.8}).to_json(), **overrides})
    output = shown(trainer, first, group("b"))
    assert output["temperature"].tolist() == [0.8, 0.5, 1.0, 0.8, 0.8, 0.8, 0.8, 0.8]


# --- MaxEnt ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["listwise", "weighted_mle", "tempered"])
def test_maxent_learns_from_groups_of_scores(tmp_path: Path, model: str, objective: str) -> None:
    keys = {"maxent_objective": objective, "beta": 0.05} | ({"maxent_beta": 0.5} if objective != "tempered" else {})
    trainer = make_trainer(tmp_path, model, kind=MaxEntGRPOTrainer, **keys)
    zeroed = {"overrides": [{"set_advantage_to_zero": True}, {}, {}, {}]}
    output = shown(trainer, Group.from_json({**group("a").to_json(), **zeroed}), group("b"))
    assert output["advantages"].shape == (2 * GROUP,) and output["advantages"].abs().max() > 0
    assert output["advantages"][0] == 0  # it has no weight, though its score is the best
    assert gradient(trainer, output).abs().max() > 0


def test_maxent_refuses_advantages_that_a_group_brings(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, kind=MaxEntGRPOTrainer, maxent_objective="tempered")
    with pytest.raises(
        ConfigError, match="a group has its own advantages, but MaxEnt computes advantages from the scores"
    ):
        shown(trainer, group("a"), with_advantages(group("b"), [1.0] * GROUP))


def test_listwise_starts_from_the_policy_of_now(tmp_path: Path, model: str) -> None:
    """It does not start from the sampling policy, although the ratio is computed against its log-probs."""
    keys = {"kind": MaxEntGRPOTrainer, "maxent_objective": "listwise"}
    trainer = make_trainer(tmp_path, model, **keys)
    both = [shown(trainer, group("a"), group("b"))]
    both.append(shown(trainer, *(like_the_trainer(trainer, group(name), 2.0) for name in "ab")))
    assert torch.equal(both[0]["advantages"], both[1]["advantages"])
    assert not torch.equal(both[0]["old_per_token_logps"], both[1]["old_per_token_logps"])
