"""A run that does not learn gets one notice in time; a run that learns gets none."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.runs import health
from grpo_recipes.runs.health import _RULES, ENOUGH_STEPS, ENOUGH_STEPS_AT_END, Health, Notice, find_notices

Rows = list[dict[str, Any]]


def value_of(**changes: Any) -> Callable[[str], Any]:
    return lambda key: changes[key] if key in changes else catalogue()[key]["default"]


def healthy(steps: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Build metrics of a smoke run: reward from 0.5 to 0.95, fewer mixed groups, falling entropy, a linear rate."""
    noise = random.Random(seed)
    for step in range(1, steps + 1):
        done = step / steps
        yield {
            "step": step, "max_steps": steps, "loss": noise.gauss(0, 0.01), "grad_norm": 2 + noise.random(),
            "learning_rate": 1e-6 * (1 - (step - 1) / steps),
            "reward": 0.5 + 0.45 * (1 - math.exp(-4 * done)) + noise.gauss(0, 0.02),
            "frac_reward_zero_std": min(0.75, max(0.0, 0.7 * done + noise.gauss(0, 0.05))),
            "completions/clipped_ratio": max(0.0, 0.15 - done), "entropy": 1.2 * math.exp(-1.5 * done),
            "kl": 0.05 * done, "rewards/no_verdict": 0.0, "maxent/incorrect_mass": 0.45 * (1 - done),
        }  # fmt: skip


def changed(rows: Iterator[dict[str, Any]], begin: int = 1, end: int = 10**9, **metrics: Any) -> Rows:
    """Change metrics of the rows between two steps; ``a__b`` means ``a/b``."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [{**row, **named} if begin <= row["step"] <= end else row for row in rows]


def live(rows: Rows, **keys: Any) -> list[tuple[int, Notice]]:
    """Return the notices during the run, each with its step."""
    followed = Health(value_of(**keys))
    return [(row["step"], notice) for row in rows for notice in followed.add(row)]


@pytest.mark.parametrize("steps", [1, 4, ENOUGH_STEPS_AT_END, 8, ENOUGH_STEPS, 60, 1000])
@pytest.mark.parametrize("keys", [{}, {"maxent_objective": "listwise"}, {"fp16": True}])
def test_a_run_that_learns_gives_no_notice(steps: int, keys: dict[str, Any]) -> None:
    rows = list(healthy(steps))
    assert live(rows, **keys) == [] and find_notices(rows, value_of(**keys)) == []


def test_with_a_teacher_a_run_learns_without_rewards() -> None:
    rows = changed(healthy(60), reward=0.0, frac_reward_zero_std=1.0)
    assert {notice.name for _, notice in live(rows)} == {"zero reward"}
    assert live(rows, teacher_model_name_or_path="acme/teacher") == []


def test_a_hard_task_that_begins_at_0_gives_none_before_many_steps() -> None:
    hard = {"reward": 0.0, "frac_reward_zero_std": 1.0}
    assert live(changed(healthy(60), 1, ENOUGH_STEPS - 3, **hard)) == []
    ((step, notice),) = live(changed(healthy(60), 1, 30, **hard))
    assert step == ENOUGH_STEPS and notice.name == "zero reward"
    rows = changed(healthy(60), 1, 30, **hard)
    assert find_notices(rows, value_of()) == [], "it has learned since"


CASES = {
    "zero reward": ({"reward": 0.0}, {}, "the reward is 0 in 10 steps in a row, from step 1 on", True),
    "silent reward": (
        {"rewards__right__mean": 0.0, "rewards__form__mean": 0.3, "rewards__soft_overlong__mean": 0.0}, {},
        "right gave 0 in ", False,
    ),
    "no signal": ({"frac_reward_zero_std": 1.0}, {}, "all completions of each prompt got one reward in 10", True),
    "few signals": ({"frac_reward_zero_std": 0.9}, {}, "90 % of groups get one reward", False),
    "no gradient": ({"grad_norm": 0.0, "loss": 0.0}, {}, "exactly 0 in 10 steps in a row", True),
    "learning rate": ({"learning_rate": 0.0}, {}, "the learning rate is 0 in 10 steps in a row", True),
    "not finite": ({"loss": "nan"}, {}, "is not a number at step 1 (1 of 1 steps)", True),
    "kl": ({"kl": 1.5}, {"beta": 0.04}, "is 1.50 nats per token", True),
    "entropy": ({}, {}, "entropy fell from 1.2 to 0.01", True),
    "all cut off": ({"completions__clipped_ratio": 1}, {}, "every completion was clipped", True),
    "cut off": ({"completions__clipped_ratio": 0.4}, {}, "40 % of completions are clipped", False),
    "unscored": ({"rewards__no_verdict": 0.17}, {}, "17 % of completions have no score", False),
    "steep": ({"grad_norm": 500.0}, {}, "the gradient norm is 500", False),
    "wrong weights": (
        {"maxent__incorrect_mass": 0.8}, {"maxent_objective": "listwise"},
        "wrong answers in 100 % of the steps, and listwise", False,
    ),
    "tau at its limit": (
        {"maxent__tau": 0.001, "maxent__eff_rollouts": 9.0}, {"maxent_target_eff_rollouts": 4.0},
        "tau stays at maxent_tau_min (0.001) and maxent/eff_rollouts at 9: maxent_target_eff_rollouts (4) is out of",
        False,
    ),
}  # fmt: skip


def case(name: str, steps: int = 60) -> Rows:
    if name == "entropy":
        return changed(
            iter(changed(healthy(steps), 1, ENOUGH_STEPS_AT_END, entropy=1.2)), ENOUGH_STEPS_AT_END + 1, entropy=0.01
        )
    return changed(healthy(steps), **CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_each_way_not_to_learn_is_said_once_and_in_the_end(name: str) -> None:
    _, keys, message, serious = CASES[name]
    ((step, notice),) = live(case(name), **keys)
    assert notice.name == name and step == (1 if name == "not finite" else ENOUGH_STEPS)
    assert message in notice.text and notice.serious == serious and notice.fix in str(notice)
    (last,) = find_notices(case(name), value_of(**keys))
    assert (last.name, last.first, last.last) == (name, ENOUGH_STEPS_AT_END + 1 if name == "entropy" else 1, 60)


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in _RULES} == set(CASES)


def test_the_docs_name_each_rule_its_limit_and_whether_it_is_said_again_in_the_end() -> None:
    page = (
        (find_code_root() / "docs/troubleshooting.md")
        .read_text()
        .partition("## Runs that do not learn")[2]
        .partition("\n## ")[0]
    )
    for rule in _RULES:
        assert page.count(f"\n| **{rule.name}** |" if rule.serious else f"\n| {rule.name} |") == 1, rule.name
    limits = {
        "few signals": health.FEW_SIGNALS, "cut off": health.CUT_OFF, "unscored": health.UNSCORED,
        "entropy": health.COLLAPSED, "learning rate": health.LOW_RATE, "kl": health.HIGH_KL, "steep": health.STEEP,
    }  # fmt: skip
    for name, limit in limits.items():
        (row,) = [line for line in page.splitlines() if line.strip("|* ").startswith(f"{name}") and line[:1] == "|"]
        assert (f"{100 * limit:.0f} %" if limit < 1 else f"{limit:.0f}") in row, row
    assert page.count(f"{ENOUGH_STEPS} steps in a row") == 6 and f"{ENOUGH_STEPS_AT_END} steps at least" in page


@pytest.mark.parametrize("name", CASES)
def test_a_short_run_is_judged_when_it_is_over(name: str) -> None:
    rows = case(name, steps=ENOUGH_STEPS_AT_END + 3)
    keys = CASES[name][1]
    assert [notice.name for notice in find_notices(rows, value_of(**keys))] == [name]
    running = find_notices(rows, value_of(**keys), over=False)
    assert [notice.name for notice in running] == (["not finite"] if name == "not finite" else [])


def test_a_reward_that_is_the_same_for_every_completion_is_named() -> None:
    constant = {"reward": 0.25, "frac_reward_zero_std": 1, "grad_norm": 0.0}
    ((_, notice),) = live(changed(healthy(60), **constant))
    assert (
        notice.text == "every completion got the reward 0.25 in 10 steps in a row, from step 1 on: nothing is learned"
    )
    assert "grpo check-rewards" in notice.fix


def test_what_comes_back_after_it_was_gone_is_said_again() -> None:
    spells = [(1, 15), (20, 24), (40, 55)]  # the second phase starts too soon and is too short
    rows = list(healthy(80))
    for begin, end in spells:
        rows = changed(iter(rows), begin, end, frac_reward_zero_std=1.0)
    notices = live(rows)
    positions = [(step, notice.first) for step, notice in notices if notice.name == "no signal"]
    assert positions == [(ENOUGH_STEPS, 1), (40 + ENOUGH_STEPS - 1, 40)]


def test_a_level_begins_at_the_first_step_above_its_limit() -> None:
    rows = changed(healthy(60), 4, completions__clipped_ratio=0.9)
    ((step, notice),) = live(changed(iter(rows), 1, 3, completions__clipped_ratio=0.0))
    assert (step, notice.name, notice.first) == (ENOUGH_STEPS, "cut off", 4)


def test_what_flickers_is_said_once() -> None:
    rows = [{**row, "completions/clipped_ratio": 0.2 + 0.1 * (row["step"] // 9 % 2)} for row in healthy(300)]
    assert [notice.name for _, notice in live(rows)] == ["cut off"]


@pytest.mark.parametrize(
    ("rates", "expected_steps"),
    [
        ([1e-6 * step / 2000 for step in range(1, 1001)], []),  # a long warm-up that reaches a useful rate
        ([1e-6 * step / 10**6 for step in range(1, 1001)], [100]),
        ([1e-6] * 900 + [0.0] * 100, [900 + ENOUGH_STEPS]),
        ([1e-6 * (1 - step / 1000) ** 4 for step in range(1000)], []),  # ends near 0, as expected
    ],
)
def test_the_learning_rate_over_its_schedule(rates: list[float], expected_steps: list[int]) -> None:
    rows = [{"step": step, "max_steps": 1000, "learning_rate": rate} for step, rate in enumerate(rates, 1)]
    assert [step for step, _ in live(rows, learning_rate=1e-6)] == expected_steps


def test_fp16_may_skip_steps() -> None:
    rows = changed(healthy(60), 1, 3, grad_norm="inf")
    assert [notice.name for _, notice in live(rows)] == ["not finite"] and live(rows, fp16=True) == []


@pytest.mark.parametrize("name", ["listwise", "weighted_mle"])
def test_weight_on_wrong_answers_counts_where_the_policy_is_moved_towards_it(name: str) -> None:
    rows = changed(healthy(60), maxent__incorrect_mass=0.8)
    assert [notice.name for _, notice in live(rows, maxent_objective=name)] == ["wrong weights"]
    assert live(rows, maxent_objective="tempered") == live(rows) == []


@pytest.mark.parametrize(
    ("tau", "key", "measured", "message"),
    [
        (0.001, "eff_rollouts", 9.0, "set maxent_target_ratio instead, which any number of right answers can reach"),
        (1000.0, "eff_rollouts", 3.0, "lower maxent_target_eff_rollouts, or raise maxent_tau_max"),
        (0.001, "ratio", 2.0, "lower maxent_target_ratio, or lower maxent_tau_min"),
        (1000.0, "ratio", 6.0, "raise maxent_target_ratio, or raise maxent_tau_max"),
        (0.001, "eff_rollouts", 3.0, ""),  # the value can still rise
        (0.001, "ratio", 6.0, ""),
        (0.001, "ratio", 3.9, ""),  # close enough to the target
        (0.002, "eff_rollouts", 9.0, ""),
    ],
)
def test_tau_at_a_limit_is_told_where_its_target_is_beyond(tau: float, key: str, measured: float, message: str) -> None:
    metric = "maxent__target_ratio" if key == "ratio" else f"maxent__{key}"
    rows = changed(healthy(60), **{"maxent__tau": tau, metric: measured})
    notices = live(rows, **{f"maxent_target_{key}": 4.0})
    assert [message in notice.fix for _, notice in notices] == ([True] if message else [])
    assert live(changed(iter(rows), maxent__tau=0.5), **{f"maxent_target_{key}": 4.0}) == live(rows) == []


def test_steps_between_two_generations_say_nothing_of_rewards() -> None:
    between = [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in healthy(200)]
    rows = [{**row, "reward": 0.0, "frac_reward_zero_std": 1.0} if row["step"] % 4 == 1 else row for row in between]
    ((step, notice),) = live(rows)
    assert step == 4 * (ENOUGH_STEPS - 1) + 1 and notice.name == "zero reward"


@pytest.mark.parametrize("odd", [None, "nan", "inf", [], {}, True, math.nan, math.inf, -1, 1e308])
def test_rows_of_any_shape_are_read(odd: Any) -> None:
    rows = [dict.fromkeys(row, odd) for row in healthy(30)]
    rows += [{**row, name: odd} for row in healthy(30) for name in ("reward", "entropy", "learning_rate", "step")]
    for notice in find_notices([{}, *rows], value_of(maxent_objective="listwise", beta=0.1)):
        assert str(notice)


def test_a_row_costs_the_same_in_a_long_run() -> None:
    rows = list(healthy(20_000))
    long, began = Health(value_of()), time.process_time()
    for row in rows[:2_000]:
        long.add(row)
    first = time.process_time() - began
    for row in rows[2_000:18_000]:
        long.add(row)
    began = time.process_time()
    for row in rows[18_000:]:
        long.add(row)
    assert time.process_time() - began < 4 * first
