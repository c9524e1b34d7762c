"""MaxEnt-GRPO training: gradients against losses written out here, limits, the reference, metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from grpo_recipes.errors import ConfigError
from grpo_recipes.rollouts.backends import Prompt, Sampling
from grpo_recipes.trainers.checks import compute_trainer_logps
from grpo_recipes.trainers.grpo import GRPOTrainer

from .fixed_completions import (
    GROUP,
    LONGEST,
    generation,
    make_trainer,
    pure_accuracy_math,
    rows_of,
    tokens_mod_5,
    weights_of,
)

INF = math.inf


def sequence_logps(module: torch.nn.Module, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the summed log-probs and lengths of the completions from the logits, row by row."""
    sums, lengths = [], []
    for prompt, prompt_mask, completion, mask in zip(
        output["prompt_ids"], output["prompt_mask"], output["completion_ids"], output["completion_mask"], strict=True
    ):
        prompt, completion = prompt[prompt_mask.bool()], completion[mask.bool()]
        logits = module(torch.cat([prompt, completion]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        sums.append(logits.log_softmax(-1)[torch.arange(len(completion)), completion].sum())
        lengths.append(len(completion))
    return torch.stack(sums), torch.tensor(lengths)


def expected_rewards(output: dict[str, Any]) -> list[float | None]:
    rows = zip(output["completion_ids"], output["completion_mask"].bool(), strict=True)
    return tokens_mod_5(completion_ids=[ids[mask].tolist() for ids, mask in rows])


def q_weights(rewards: list[float | None], refs: list[float], keys: dict[str, Any]) -> list[float]:
    """Compute sections 1.2 and 1.3 of the programme for one group. No verdict means no weight."""
    temperature, epsilon = keys.get("maxent_q_temperature", 1.0), keys.get("maxent_q_epsilon", 1e-6)
    tau, beta = keys["maxent_tau"], keys.get("maxent_beta", 0.0)
    known = [place for place, reward in enumerate(rewards) if reward is not None]
    masses = {place: math.exp(rewards[place] / temperature) for place in known}
    floored = {place: mass / sum(masses.values()) * (1 - epsilon * GROUP) + epsilon for place, mass in masses.items()}
    q = {place: mass / sum(floored.values()) for place, mass in floored.items()}
    scores = {place: (math.log(q[place]) + beta * refs[place]) / (tau + beta) for place in known}
    total = sum(math.exp(score) for score in scores.values())
    return [math.exp(scores[place]) / total if place in scores else 0.0 for place in range(len(rewards))]


def written_loss(trainer: GRPOTrainer, output: dict[str, Any], reference: torch.nn.Module, keys: dict[str, Any]):
    """Compute the recipe's objective as a loss over this batch, with gradients only through the policy's log-probs."""
    logps, lengths = sequence_logps(trainer.model, output)
    with torch.no_grad():
        refs, _ = sequence_logps(reference, output)
    if keys.get("maxent_length_normalize_ref", True):
        refs = refs / lengths
    policy = logps / lengths if keys.get("maxent_length_normalize_policy", True) else logps
    rewards, losses = expected_rewards(output), []
    for start in range(0, len(rewards), GROUP):
        of = slice(start, start + GROUP)
        group = rewards[of]
        known = torch.tensor([reward is not None for reward in group])
        if keys["maxent_objective"] == "tempered":
            losses.append(tempered_loss(group, logps[of], lengths[of], keys))
            continue
        if keys["maxent_objective"] == "maxrl":
            losses.append(maxrl_loss(group, logps[of]))
            continue
        w = torch.tensor(q_weights(group, refs[of].tolist(), keys))
        if keys["maxent_objective"] == "weighted_mle":
            losses.append(-(w * policy[of]).sum())
        elif kappa := keys.get("maxent_policy_temperature", 3.5):
            spread = logps[of][known].detach().double().std(correction=0).item() if known.any() else 0.0
            kappa = max(kappa, keys.get("maxent_policy_spread", 0.0) * spread)
            log_s = (logps[of] / kappa).masked_fill(~known, -INF).log_softmax(0).masked_fill(~known, 0.0)
            losses.append(-(w * log_s).sum() * kappa / LONGEST)
        else:
            log_s = policy[of].masked_fill(~known, -INF).log_softmax(0).masked_fill(~known, 0.0)
            losses.append(-(w * log_s).sum())
    return torch.stack(losses).mean()


def tempered_loss(
    rewards: list[float | None], logps: torch.Tensor, lengths: torch.Tensor, keys: dict[str, Any]
) -> torch.Tensor:
    """Section 1.7: mean over the group of N * w * advantage * sum of log-probs / T_max, on-policy."""
    known = [place for place, reward in enumerate(rewards) if reward is not None]
    mean = sum(rewards[place] for place in known) / max(len(known), 1)
    advantages = {place: rewards[place] - mean for place in known}
    scaled = keys.get("maxent_utility", "advantage") == "length_scaled"
    utilities = {place: advantages[place] * (lengths[place].item() / LONGEST if scaled else 1) for place in known}
    if keys["maxent_tau"] == 0:
        best = [place for place in known if utilities[place] > max(utilities.values()) - 1e-9]
        w = {place: 1 / len(best) if place in best else 0.0 for place in known}
    else:
        masses = {place: math.exp(utility / keys["maxent_tau"]) for place, utility in utilities.items()}
        w = {place: mass / sum(masses.values()) for place, mass in masses.items()}
    terms = [len(known) * w[place] * advantages[place] * logps[place] / LONGEST for place in known]
    return -sum(terms) / len(rewards)


def maxrl_loss(rewards: list[float | None], logps: torch.Tensor) -> torch.Tensor:
    """MaxRL: mean over the group of (reward / mean reward - 1) * sum of log-probs / T_max, on-policy."""
    known = [place for place, reward in enumerate(rewards) if reward is not None]
    mean = sum(rewards[place] for place in known) / max(len(known), 1)
    if not mean:
        return logps.sum() * 0
    return -sum((rewards[place] / mean - 1) * logps[place] / LONGEST for place in known) / len(rewards)


SUM = {"maxent_length_normalize_policy": False}
PER_TOKEN = {"maxent_policy_temperature": 0.0}
REFERENCE = {"maxent_beta": 0.7}


@pytest.mark.parametrize(
    "keys",
    [
        {"maxent_objective": "weighted_mle", "maxent_tau": 0.2, **SUM},
        {
            "maxent_objective": "weighted_mle",
            "maxent_tau": 0.2,
            **SUM,
            **REFERENCE,
            "maxent_length_normalize_ref": False,
        },
        {"maxent_objective": "weighted_mle", "maxent_tau": 0.2, **REFERENCE},
        {
            "maxent_objective": "listwise",
            "maxent_tau": 0.2,
            "maxent_q_temperature": 0.3,
            "maxent_q_epsilon": 0.1,
            **REFERENCE,
        },
        {"maxent_objective": "listwise", "maxent_tau": 0.2, **REFERENCE, **PER_TOKEN},
        {"maxent_objective": "listwise", "maxent_tau": 0.2, **PER_TOKEN, **SUM},
        {"maxent_objective": "listwise", "maxent_tau": 0.2, "maxent_policy_temperature": 2.0},
        {
            "maxent_objective": "listwise",
            "maxent_tau": 0.2,
            "maxent_policy_temperature": 0.5,
            "maxent_policy_spread": 1.5,
        },
        {"maxent_objective": "maxrl"},
        {"maxent_objective": "tempered", "maxent_tau": 0.3},
        {"maxent_objective": "tempered", "maxent_tau": 0.0},
        {"maxent_objective": "tempered", "maxent_tau": 0.05, "maxent_utility": "length_scaled"},
    ],
    ids=lambda keys: "-".join(str(value) for value in keys.values()),
)
def test_the_gradient_is_that_of_the_loss_written_out(tmp_path: Path, model: str, keys: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, model, **keys)
    reference = make_trainer(tmp_path / "other", model, GRPOTrainer).model
    with torch.no_grad():  # the policy has left the reference
        trainer.model.model.embed_tokens.weight.mul_(1.05)
    output = generation(trainer, prompts=3)
    assert None in expected_rewards(output) and len(set(output["completion_mask"].sum(1).tolist())) > 2

    written_loss(trainer, output, reference, keys).backward()
    expected = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, output).backward()
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert largest > 1e-4
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=2e-6 * max(1, largest), rtol=2e-5), name


def test_tempered_at_infinite_tau_is_dr_grpo_bit_for_bit(tmp_path: Path, model: str) -> None:
    stock = make_trainer(tmp_path / "stock", model, GRPOTrainer, loss_type="dr_grpo", scale_rewards="none")
    before = weights_of(stock)
    stock.train()
    tempered = make_trainer(tmp_path / "ours", model, maxent_objective="tempered", maxent_tau=INF)
    tempered.train()
    expected = weights_of(stock)
    for name, weight in weights_of(tempered).items():
        assert torch.equal(weight, expected[name]) and not torch.equal(weight, before[name]), name
    row = rows_of(tmp_path / "ours")[0]
    assert (row["maxent/tau"], row["maxent/target_ratio"]) == ("inf", 1.0)
    assert (tempered.state.log_history[0]["maxent/tau"], tempered.state.log_history[0]["step"]) == ("inf", 1)


def test_maxrl_wants_rewards_that_are_not_negative(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, rewards=(pure_accuracy_math,), maxent_objective="maxrl")
    output = generation(trainer, prompts=3)
    advantages = output["advantages"].view(-1, GROUP)
    right = torch.tensor(pure_accuracy_math([ids[mask.bool()].tolist() for ids, mask in zip(
        output["completion_ids"], output["completion_mask"], strict=True)])).view(-1, GROUP)  # fmt: skip
    share = right.mean(1, keepdim=True)
    assert torch.allclose(advantages, torch.where(share > 0, right / share.clamp(min=1e-9) - 1, 0.0), atol=1e-6)
    assert "maxent/tau" not in trainer._metrics["train"]

    def penalty(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [-1.0] * len(completion_ids)

    negative = make_trainer(tmp_path / "negative", model, rewards=(penalty,), maxent_objective="maxrl")
    with pytest.raises(ConfigError, match=r"maxrl: rewards must be at least 0, not -1.*rescale the reward"):
        generation(negative)


def test_a_reference_at_beta_0_is_the_initial_model(tmp_path: Path, model: str) -> None:
    initial = weights_of(make_trainer(tmp_path / "new", model, GRPOTrainer))
    trainer = make_trainer(tmp_path, model, maxent_objective="listwise", maxent_beta=1.0)
    assert (trainer.beta, trainer.args.beta) == (0.0, 0.0)
    trainer.train()
    assert any(not torch.equal(weight, initial[name]) for name, weight in weights_of(trainer).items())
    for name, parameter in trainer.ref_model.named_parameters():
        assert torch.equal(parameter, initial[name]), name
    row = rows_of(tmp_path)[0]
    assert row["maxent/beta"] == 1.0 and "kl" not in row  # no KL in the loss
    assert "ref_per_token_logps" not in generation(trainer)


def test_the_beta_of_the_loss_is_not_that_of_the_target(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, maxent_objective="listwise", beta=1.0)
    trainer.train()
    rows = rows_of(tmp_path)
    assert rows[0]["maxent/beta"] == 0.0 and rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] > 1e-6
    both = make_trainer(tmp_path / "both", model, maxent_objective="listwise", beta=1.0, maxent_beta=1.0)
    difference = generation(both)["advantages"] - generation(trainer)["advantages"]
    assert difference.abs().max() > 1e-3


def test_no_reference_is_built_where_nothing_reads_one(tmp_path: Path, model: str) -> None:
    for place, keys in enumerate([{"maxent_objective": "listwise"}, {"maxent_objective": "tempered"}]):
        assert make_trainer(tmp_path / str(place), model, **keys).ref_model is None


def test_under_lora_the_base_model_is_the_reference(tmp_path: Path, model: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    keys = {"maxent_objective": "weighted_mle", "maxent_beta": 1.0}
    adapted = make_trainer(tmp_path, model, peft_config=config, learning_rate=5.0, **keys)
    before = weights_of(adapted)
    adapted.train()
    changed = {name for name, weight in weights_of(adapted).items() if not torch.equal(weight, before[name])}
    assert changed and all("lora_" in name for name in changed)

    whole = make_trainer(tmp_path / "whole", model, **keys)
    whole.state.global_step = adapted.state.global_step  # the same completions
    moved, fresh = generation(adapted), generation(whole)
    assert (compute_trainer_logps(adapted, moved) - compute_trainer_logps(whole, fresh)).abs().max() > 1e-2
    assert torch.allclose(moved["advantages"], fresh["advantages"], atol=1e-5)


def test_a_completion_masked_as_truncated_gets_no_weight(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, maxent_objective="weighted_mle", mask_truncated_completions=True)
    output = generation(trainer, prompts=3)
    masked = output["completion_mask"].sum(1) == 0
    assert 0 < masked.sum() < len(masked) and not output["advantages"][masked].any()
    sums = output["advantages"].view(-1, GROUP).sum(1)
    assert torch.allclose(sums, torch.full_like(sums, GROUP))


def test_tables_and_samples_show_the_advantages_trained_on(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, maxent_objective="weighted_mle", maxent_tau=0.5, max_steps=1)
    advantages = generation(trainer)["advantages"]
    assert list(trainer._logs["advantages"]) == advantages.tolist()
    assert (advantages >= 0).all()  # GRPO's would have both signs
    (row,) = rows_of(tmp_path, "samples.jsonl")
    assert {sample["advantage"] for sample in row["samples"]} <= {round(value, 4) for value in advantages.tolist()}


def test_a_generation_that_fails_leaves_the_trainer_as_it_was(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, model, maxent_objective="listwise", maxent_beta=1.0)
    trainer.model.train()
    output = generation(trainer, prompts=1)
    config = trainer.generation_config

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    for name in ("_generate_single_turn", "_get_per_token_logps_and_entropies"):
        monkeypatch.setattr(trainer, name, fail)
    for call in (
        lambda: trainer.sample_and_score([dict(trainer.train_dataset[0]) for _ in range(GROUP)]),
        lambda: compute_trainer_logps(trainer, output),
        lambda: trainer.rollouts.sample([Prompt([1], 7)], Sampling(1, 1.0, 4)),
    ):
        with pytest.raises(RuntimeError, match="out of memory"):
            call()
    assert trainer.beta == 0.0 and trainer.model.training and trainer.generation_config is config


def test_a_checkpoint_keeps_what_the_warning_watches(tmp_path: Path, model: str) -> None:
    """The names are those from the first release, because older checkpoints must resume."""
    trainer = make_trainer(tmp_path, model, maxent_objective="tempered")
    trainer.train()
    trainer._warned = True
    state = trainer.checkpoints.state()
    assert state["on_wrong"] == list(trainer._on_wrong) != [] and state["warned"]
    trainer._on_wrong.append((5.0, 6.0))
    trainer._warned = False
    watched = trainer._on_wrong
    trainer.checkpoints.restore(state)
    assert trainer._on_wrong is watched and list(watched) == state["on_wrong"] and trainer._warned


def test_evaluation_is_not_weighed(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, maxent_objective="listwise", maxent_beta=1.0)
    stock = make_trainer(tmp_path / "stock", model, GRPOTrainer, scale_rewards="none")
    outputs = []
    for candidate in (trainer, stock):
        candidate.model.eval()
        outputs.append(
            candidate._generate_and_score_completions([dict(candidate.train_dataset[0]) for _ in range(GROUP)])
        )
    assert torch.equal(outputs[0]["advantages"], outputs[1]["advantages"])
    assert not [name for name in trainer._metrics["eval"] if name.startswith("maxent/")]


def test_metrics_of_weights_are_those_of_the_groups(tmp_path: Path, model: str) -> None:
    keys = {"maxent_objective": "weighted_mle", "maxent_tau": 0.4}
    size = {"per_device_train_batch_size": 5 * GROUP}
    trainer = make_trainer(tmp_path, model, rewards=(pure_accuracy_math,), **size, **keys)
    output = generation(trainer, prompts=5)
    w = (output["advantages"].double() / GROUP).view(-1, GROUP)
    right = torch.tensor(trainer._logs["rewards"]["pure_accuracy_math"]).view(-1, GROUP) == 1
    both = right.any(1) & ~right.all(1)
    entropy = -torch.xlogy(w, w).sum(1)[both]  # in the others rewards are equal, and at any tau the weights
    assert 0 < both.sum() < 5
    ratios = [w[p][right[p]].mean() / w[p][~right[p]].mean() for p in range(5) if both[p]]
    expected = {
        "weight_entropy": entropy.mean(),
        "weight_entropy_min": entropy.min(),
        "weight_entropy_max": entropy.max(),
        "eff_rollouts": entropy.exp().mean(),
        "incorrect_mass": w.masked_fill(right, 0).sum(1).mean(),
        "target_ratio": sum(ratios) / len(ratios),
        "tau": 0.4,
        "beta": 0.0,
    }
    for name, value in expected.items():
        assert trainer._metrics["train"][f"maxent/{name}"] == [pytest.approx(float(value), rel=1e-5)], name


def test_an_accuracy_reward_without_a_verdict_calls_nothing_wrong(tmp_path: Path, model: str) -> None:
    def math_verify(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        """Fail to parse the reference answer of the first group, and of the second group's last completion."""
        rows = range(len(completion_ids))
        return [None if row < GROUP or row == 2 * GROUP - 1 else float(row == GROUP) for row in rows]

    def taste(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [row / 10 for row in range(len(completion_ids))]

    trainer = make_trainer(tmp_path, model, rewards=(math_verify, taste), maxent_tau=2.0)
    advantages = generation(trainer)["advantages"].view(-1, GROUP)
    assert advantages.abs().min() > 0  # all of them learn
    rewards = torch.arange(2 * GROUP, dtype=torch.float64)[GROUP:] / 10
    rewards[0] += 1.0
    weights = ((rewards - rewards.mean()) / 2.0).softmax(0)
    metrics = trainer._metrics["train"]
    assert metrics["maxent/incorrect_mass"] == [pytest.approx(weights[1:3].sum().item(), rel=1e-5)]
    assert metrics["maxent/target_ratio"] == [pytest.approx((weights[0] / weights[1:3].mean()).item(), rel=1e-5)]
    (wrong, pushed) = trainer._on_wrong[0]
    assert wrong == 0.0 < pushed


def test_groups_that_tell_nothing_leave_no_metric_of_weights(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, rewards=(lambda completions, **_: [0.5] * len(completions),))
    generation(trainer)
    metrics = trainer._metrics["train"]
    assert {name for name in metrics if name.startswith("maxent/")} == {"maxent/tau", "maxent/beta"}


@pytest.mark.parametrize(
    ("keys", "warned"),
    [
        ({"maxent_objective": "weighted_mle", "maxent_tau": 5.0}, True),
        ({"maxent_objective": "weighted_mle", "maxent_tau": 0.01, "maxent_q_temperature": 0.1}, False),
    ],
)
def test_learning_from_wrong_answers_is_said_once(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], warned: bool
) -> None:
    def mostly_wrong(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(place % GROUP == 0) for place in range(len(completion_ids))]

    trainer = make_trainer(tmp_path, model, rewards=(mostly_wrong,), **keys)
    for _ in range(9):
        generation(trainer)
    assert "grpo: " not in capsys.readouterr().out
    for _ in range(4):
        generation(trainer)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("grpo: ")]
    assert len(lines) == int(warned)
    assert all("on wrong answers" in line and "lower maxent_tau" in line for line in lines)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"loss_type": "bnpo"}, "loss_type: expected .*, got bnpo"),
        ({"scale_rewards": "batch"}, "scale_rewards: expected .*, got batch"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
    ],
)
def test_a_loss_that_is_not_the_objectives_is_refused(
    tmp_path: Path, model: str, keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        make_trainer(tmp_path, model, **keys)
