"""evidence/tabular_length.py: the length law and its repair in small, what rests where, and what its command writes."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from bench.scripts import script


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with script("tabular_length", threads=1, folder="evidence") as module:
        yield module


@pytest.fixture(scope="module")
def policy(bench: ModuleType) -> ModuleType:
    return sys.modules["tabular_policy"]


def alive(bench: ModuleType, arm: object, length: int, words: bool = False) -> float:
    task = bench.of_length(bench.make_task(8), length, words)
    return bench.ends(arm, task, (1, 2), 400)["modes"][0]


@pytest.mark.slow
def test_length_takes_the_effect_of_listwise_per_token_and_not_that_of_kappa(bench):
    short, long = (alive(bench, bench.per_token(length), length) for length in (3, 30))
    maxrl = alive(bench, bench.PLAIN["MaxRL"], 30)
    assert short > long + 1 and long < maxrl + 0.2
    kappa = bench.KAPPA["listwise, kappa 2"]
    assert alive(bench, kappa, 3) == alive(bench, kappa, 30) == alive(bench, bench.per_token(2), 2) > short
    short, middle, long = (alive(bench, kappa, length, words=True) for length in (3, 10, 100))
    assert middle == pytest.approx(short, abs=0.4) and long < short - 0.6


def test_listwise_per_token_comes_to_the_advantage_of_maxrl(bench):
    cosines = list(bench.cosines(bench.make_task(8), groups=30).values())
    assert cosines == sorted(cosines) and 0.8 < cosines[0] < 0.95 and cosines[-1] > 0.9999


@pytest.mark.slow
@pytest.mark.parametrize("kappa", [1, 3])
def test_listwise_rests_at_the_policy_of_most_entropy(bench, kappa):
    result = bench.rests(kappa, steps=1500)
    rights_P = bench.make_task(8, answers=24).right_PK.sum(1) * math.exp(kappa / 0.5)
    wrong_P = 24 - bench.make_task(8, answers=24).right_PK.sum(1)
    assert result["reward"] == pytest.approx(float((rights_P / (rights_P + wrong_P)).mean()), abs=5e-3)
    assert result["sampled_distance"] < 0.03 and result["expected_distance"] < 0.03
    assert result["step_at_rest"] < 1e-4 < 0.1 < result["step_at_start"]


def test_per_token_prefers_the_shorter_right_answer(bench):
    shares = {
        name: {length: row["longer"][0] for length, row in rows.items()}
        for name, rows in bench.unequal(8, (1, 2), 300).items()
    }
    assert shares["listwise, per token"]["3"] < 0.2 and shares["GRPO (mean over tokens)"]["3"] < 0.2
    assert 0.4 < shares["listwise, kappa 2"]["any"] < 0.6


def test_advantages_of_maxrl(policy):
    rewards_PG = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    expected_PG = torch.tensor([[1.0, 1, -1, -1], [3, -1, -1, -1], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(policy.maxrl_advantages(rewards_PG), expected_PG)


def test_advantages_of_pass_at_k_are_those_of_all_sets(policy):
    rewards_PG = torch.tensor([[0.0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 1]])
    advantages_PG = policy.pass_at_k_advantages(rewards_PG, 3)
    for rewards, advantages in zip(rewards_PG.tolist(), advantages_PG.tolist(), strict=True):
        combinations = list(itertools.combinations(range(6), 3))
        sets = [(set(members), max(rewards[member] for member in members)) for members in combinations]
        mean, deviation = (of([best for _, best in sets]) for of in (statistics.fmean, statistics.pstdev))
        expected = [statistics.fmean(best for members, best in sets if member in members) - mean for member in range(6)]
        assert advantages == pytest.approx([gain / deviation if deviation else 0.0 for gain in expected], abs=1e-6)


def test_kappa_follows_the_spread_of_the_group_and_has_a_floor(policy):
    logps_PG = torch.tensor([[-1.0, -3.0], [-1.0, -9.0]])
    found_P1 = policy.policy_temperature(logps_PG, 2.0, 1.0)
    assert found_P1.squeeze(1).tolist() == pytest.approx([2.0, 8 / math.sqrt(2)])
    assert policy.policy_temperature(logps_PG, 2.0, 0.0).tolist() == [[2.0], [2.0]]


def test_wordings_are_those_of_independent_tokens(bench):
    sums_W, logps_W = bench.binomial(2)
    assert sums_W.tolist() == pytest.approx([0.04, 0.36, 1.0])
    assert logps_W.exp().tolist() == pytest.approx([0.04, 0.16, 0.64])


def test_terms_of_kl_and_entropy_are_their_gradients(bench, policy):
    task = bench.make_task(3)
    logits_PK = torch.randn(3, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    logps_PK = logits_PK.log_softmax(1)
    kl = (logps_PK.exp() * (logps_PK - task.start_PK)).sum()
    entropy = -(logps_PK.exp() * logps_PK).sum()
    (0.7 * entropy - 0.3 * kl).backward()
    draws_PG, now = torch.full((3, 16), 0.5, dtype=torch.float64), policy.Policy.of(logits_PK.detach())
    arm = policy.Arm("dr_grpo")
    plain, terms = (policy.sampled_step(a, now, task, draws_PG) for a in (arm, replace(arm, kl=0.3, entropy=0.7)))
    torch.testing.assert_close(terms.gradient_PK - plain.gradient_PK, logits_PK.grad, atol=1e-12, rtol=0)


def test_the_command_writes_the_result_and_the_figure(bench, tmp_path, monkeypatch):
    out, figure = tmp_path / "result.json", tmp_path / "figure.svg"
    arguments = ["--prompts", "2", "--seeds", "2", "--steps", "2", "--out", out, "--figure", figure]
    monkeypatch.setattr(sys, "argv", ["tabular_length.py", *map(str, arguments)])
    monkeypatch.setattr(bench, "rests", lambda kappa, rests=bench.rests: rests(kappa, steps=2))
    bench.main()
    assert json.loads(out.read_text())["commit"]
    ElementTree.parse(figure)
