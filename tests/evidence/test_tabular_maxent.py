"""evidence/tabular_maxent.py: its gradients are right, it is deterministic, and its one command writes both files."""

from __future__ import annotations

import importlib
import json
import math
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

from grpo_recipes.paths import find_code_root

ONE_PG = torch.tensor([[1.0, 0.0]])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(find_code_root() / "evidence"))
    return importlib.import_module("tabular_maxent")


@pytest.fixture
def policy(bench: ModuleType) -> ModuleType:
    return sys.modules["tabular_policy"]


def test_a_step_is_the_gradient_of_advantage_times_log_probability(bench, policy):
    task = bench.make_task(3)
    start = policy.Policy.of(task.start_PK)
    draws_PG = torch.rand(3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arms = [arm for kind in bench.TAUS for arm in bench.grid(kind)[:1]]
    for arm in [*bench.SHOWN, bench.Arm("listwise", 0.2, beta=0.3), *arms]:
        logits_PK = task.start_PK.clone().requires_grad_()
        logps_PK = logits_PK.log_softmax(1)
        answers_PG = torch.searchsorted(logps_PK.detach().exp().cumsum(1), draws_PG)
        groups = policy.Groups(
            answers_PG,
            task.right_PK.gather(1, answers_PG).double(),
            logps_PK.detach().gather(1, answers_PG),
            task.start_PK.gather(1, answers_PG),
            task.lengths_PK.gather(1, answers_PG),
        )
        advantages_PG, _ = policy.weigh(arm, groups)
        assert advantages_PG.abs().max() > 0
        (advantages_PG * logps_PK.gather(1, answers_PG)).mean(1).sum().backward()
        step = policy.sampled_step(arm, start, task, draws_PG)
        torch.testing.assert_close(step.gradient_PK, logits_PK.grad, atol=1e-12, rtol=0)


def test_the_expected_update_is_that_of_a_very_large_group(bench, policy, monkeypatch):
    task = bench.make_task(3, answers=12)
    start = policy.Policy.of(task.start_PK)
    even_G = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    # Below 1 / group size.
    monkeypatch.setattr(policy, "EPSILON", 1e-12)
    for arm in bench.SHOWN:
        sampled = policy.sampled_step(arm, start, task, even_G.repeat(3, 1)).gradient_PK
        expected = policy.expected_step(arm, start, task).gradient_PK
        torch.testing.assert_close(sampled, expected, atol=2e-4, rtol=0)
    with pytest.raises(ValueError, match="no expected update"):
        policy.expected_step(bench.Arm("seed", 1.0), start, task)


def test_the_same_arguments_give_the_same_result(bench):
    task = bench.make_task(2)
    arms = [*bench.SHOWN, *bench.PLACEBOS]
    first, second = (bench.run_arms(arms, task, (1, 2), 4) for _ in range(2))
    assert first == second
    assert first["grpo"]["final"] != first["grpo, again"]["final"]
    assert first["tempered, tau 1000"]["less_dr_grpo"]["reward"][0] == pytest.approx(0, abs=1e-3)


def test_the_command_writes_the_result_and_the_figure(bench, tmp_path, monkeypatch, capsys):
    out, figure = tmp_path / "result.json", tmp_path / "assets" / "figure.svg"
    arguments = ["--prompts", "1", "--seeds", "2", "--steps", "2", "--out", str(out), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", ["tabular_maxent.py", *arguments])
    bench.main()
    result = json.loads(out.read_text())
    assert set(result["baselines"]) == {"random", "untrained", "constant"}
    assert result["conclusions"] == bench.conclusions(result)
    assert result["conclusions"][0] in capsys.readouterr().out
    assert all(len(arm["runs"]["reward"]) == 2 for name, arm in result["arms"].items() if "expected" not in name)
    ElementTree.parse(figure)


def close(actual: torch.Tensor, expected: list[float], tolerance: float) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def test_mode_adaptive_tau(policy):
    close(policy.mode_adaptive_tau(0.05, torch.tensor([1, 2, 4])), [0.0721347520, 0.0455119613, 0.0310667467], 1e-7)
    assert torch.equal(
        policy.mode_adaptive_tau(0.05, torch.tensor([0])), policy.mode_adaptive_tau(0.05, torch.tensor([1]))
    )


def test_semantic_entropy_scale(policy):
    logps_PG = torch.tensor([[-0.1, -0.2, -0.3, -0.4]], dtype=torch.float64)
    scale_P, entropy_P = policy.semantic_entropy_scale(logps_PG, [["a", "a", "b", None]], alpha=1.0)
    close(scale_P, [0.58102754], 1e-8)
    close(entropy_P, [0.99964136], 1e-8)


def test_semantic_entropy_ignores_what_it_does_not_know(policy):
    logps_PG = torch.tensor(
        [[-0.1, math.nan, -0.3, -0.4], [math.nan] * 4, [-1.0, math.nan, math.nan, math.nan]], dtype=torch.float64
    )
    keys = [["a", "a", "b", None]] + [["a"] * 4] * 2
    scale_P, entropy_P = policy.semantic_entropy_scale(logps_PG, keys, alpha=1.0)
    alone_P, alone_entropy_P = policy.semantic_entropy_scale(logps_PG[:1, [0, 2, 3]], [["a", "b", None]], alpha=1.0)
    torch.testing.assert_close(scale_P, torch.cat([alone_P, torch.ones(2, dtype=torch.float64)]), atol=1e-12, rtol=0)
    torch.testing.assert_close(
        entropy_P, torch.cat([alone_entropy_P, torch.zeros(2, dtype=torch.float64)]), atol=1e-12, rtol=0
    )
    assert torch.equal(policy.semantic_entropy_scale(logps_PG, keys, alpha=0.0)[0], torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda policy: policy.mode_adaptive_tau(-1.0, torch.tensor([1])), "tau must be at least 0"),
        (lambda policy: policy.semantic_entropy_scale(ONE_PG, [["a", "b"]], -1.0), "alpha must be at least 0"),
        (lambda policy: policy.semantic_entropy_scale(ONE_PG, [["a"]], 1.0), "keys must be 1 rows of 2"),
        (lambda policy: policy.semantic_entropy_scale(ONE_PG * math.inf, [["a"] * 2], 1.0), "must be finite"),
    ],
)
def test_a_value_out_of_its_range_is_an_error(policy, call, message):
    with pytest.raises(ValueError, match=message):
        call(policy)
