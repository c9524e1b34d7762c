"""Findings from metrics. Their names come from TRL."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from grpo_recipes.console.doctor import RUN, training
from grpo_recipes.console.doctor.examine import get_check_name
from grpo_recipes.runs import health

LEVEL = {get_check_name(check): check for check in training.LEVELS}


def rows_of(row, count: int = 6, **metrics):
    return [row(step, **metrics) for step in range(1, count + 1)]


def test_a_healthy_run_has_nothing_to_do(make_run, row):
    run = make_run(status="completed", rows=rows_of(row), logs={"server": "ready", "trainer": "done"})
    for check in RUN:
        assert check(run).status == "ok", (check.__name__, check(run))


def test_a_run_without_a_step_says_so(make_run):
    run = make_run()
    for check in (*training.LEVELS, training.phases, training.start):
        assert check(run).value == "no step was taken"


def test_a_reward_that_stays_zero(make_run, row):
    run = make_run(rows=rows_of(row, reward=0.0, completions__clipped_ratio=0.9))
    finding = LEVEL["reward"](run)
    assert finding.status == "problem" and "grpo check-rewards recipe.yaml" in finding.fix
    assert LEVEL["reward"](make_run(rows=[row(1, reward=0.0), row(2, reward=0.1)])).status == "ok"
    assert LEVEL["reward"](make_run(rows=rows_of(row, 2, reward=0.0))).status == "problem", "too short for a notice"


def test_groups_that_teach_nothing(make_run, row):
    finding = LEVEL["reward"](make_run(rows=rows_of(row, frac_reward_zero_std=0.97)))
    assert finding.status == "warning" and "97 %" in finding.value and "num_generations" in finding.fix


def test_a_run_in_which_nothing_can_be_learned_is_a_problem(make_run, row):
    finding = LEVEL["reward"](make_run(rows=rows_of(row, frac_reward_zero_std=1)))
    assert finding.status == "problem" and "every completion got the reward 0.5 in 6 steps in a row" in finding.value
    finding = LEVEL["gradients"](make_run(rows=rows_of(row, grad_norm=0.0)))
    assert finding.status == "problem" and "exactly 0 in 6 steps" in finding.value
    finding = LEVEL["gradients"](make_run(rows=rows_of(row, learning_rate=0.0)))
    assert finding.status == "problem" and "learning rate is 0 in 6 steps" in finding.value


def test_completions_that_are_cut_off(make_run, row):
    finding = LEVEL["truncated"](make_run(rows=rows_of(row, completions__clipped_ratio=0.8), max_completion_length=700))
    assert finding.status == "warning" and "max_completion_length (now 700)" in finding.fix
    assert LEVEL["truncated"](make_run(rows=rows_of(row, completions__clipped_ratio=0.2))).status == "ok"
    assert LEVEL["truncated"](make_run(rows=rows_of(row, completions__clipped_ratio=1.0))).status == "warning"


def test_a_very_high_kl(make_run, row):
    run = make_run(rows=rows_of(row, kl=4.0), beta=0.02, learning_rate=5e-5)
    finding = LEVEL["kl"](run)
    assert finding.status == "problem" and finding.value.startswith("4 -> 4; the KL divergence")
    for part in ("learning_rate (now 5e-05)", "beta (now 0.02", "init_kl_coeff", "chat_template", "system_prompt"):
        assert part in finding.fix, part
    assert LEVEL["kl"](make_run(rows=rows_of(row, kl=0.3))).status == "ok"
    assert LEVEL["kl"](make_run(rows=rows_of(row, kl="nan"))).value == "no value that is a number"
    without = [{key: value for key, value in metrics.items() if key != "kl"} for metrics in rows_of(row)]
    assert LEVEL["kl"](make_run(rows=without)).value == "not measured: beta is 0"


def test_an_entropy_that_collapses(make_run, row):
    run = make_run(rows=[row(1, entropy=0.6), *[row(step, entropy=0.001) for step in range(2, 9)]])
    assert LEVEL["entropy"](run).status == "warning"
    assert LEVEL["entropy"](make_run(rows=rows_of(row, entropy=0.004))).status == "ok", "it began there"


def test_a_tau_at_its_limit(make_run, row):
    keys = {"maxent_objective": "tempered", "maxent_target_eff_rollouts": 4.0}
    run = make_run(rows=rows_of(row, maxent__tau=0.001, maxent__eff_rollouts=9.0), **keys)
    finding = LEVEL["maxent"](run)
    assert finding.status == "warning" and finding.value.startswith("0.001 -> 0.001; tau stays at maxent_tau_min")
    assert "maxent_target_ratio" in finding.fix
    assert LEVEL["maxent"](make_run(rows=rows_of(row))).value == "not measured: no temperature, as in GRPO and MaxRL"


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_gradients_that_are_no_numbers(make_run, row, value):
    finding = LEVEL["gradients"](make_run(rows=[row(1), row(2, grad_norm=value), row(3, grad_norm=value)]))
    assert finding.status == "problem" and "step 2 (2 of 3 steps)" in finding.value
    assert LEVEL["gradients"](make_run(rows=[row(1, loss=value)])).status == "problem"


def test_gradients_that_are_steep(make_run, row):
    finding = LEVEL["gradients"](make_run(rows=rows_of(row, grad_norm=900.0), learning_rate=1e-4))
    assert finding.status == "warning" and "learning_rate (now 0.0001)" in finding.fix


def test_completions_without_a_verdict(make_run, row):
    finding = training.no_verdict(make_run(rows=rows_of(row, rewards__mine__no_verdict=0.3), reward_timeout=2.0))
    assert finding.status == "warning" and "rewards/mine/no_verdict 30%" in finding.value
    assert "reward_timeout (now 2 s)" in finding.fix and "slow_rewards.jsonl" in finding.fix
    game = {"environment": f"{Path(__file__).parents[2]}/rollouts/wild_environment.py:Sums", "dataset_name": None}
    played = make_run(
        rows=rows_of(row, rewards__mine__no_verdict=0.3), reward_funcs=["environment"], environment_timeout=7.0, **game
    )
    assert "correct the environment, or raise environment_timeout (now 7 s)" in training.no_verdict(played).fix
    assert training.no_verdict(make_run(rows=rows_of(row, rewards__mine__no_verdict=0.01))).status == "ok"
    assert training.no_verdict(make_run(rows=rows_of(row, rewards__mine__no_verdict=1.0))).status == "problem"


@pytest.mark.parametrize("nothing", [None, "nan"])  # TRL logs None
def test_a_reward_that_judges_nothing(make_run, row, nothing):
    run = make_run(rows=rows_of(row, rewards__mine__mean=nothing, rewards__mine__std=nothing, reward=nothing))
    finding = training.no_verdict(run)
    assert finding.status == "problem" and finding.value.startswith("mine scored nothing")
    single = training.no_verdict(make_run(rows=rows_of(row, rewards__mine__std=nothing)))
    assert single.status == "ok", "a single completion has no standard deviation"
    finding = LEVEL["reward"](run)
    assert finding.status == "problem" and finding.fix == "see the check no verdict"
    stopped = make_run(cause="rank 0: TooManyWithoutVerdict: 80% of the completions", reward_max_no_verdict=0.4)
    assert training.no_verdict(stopped).status == "problem"
    assert "reward_max_no_verdict (0.4)" in training.no_verdict(stopped).value
    assert training.no_verdict(make_run()).value == "no step was taken"


def test_a_reward_that_is_lost_halfway(make_run, row):
    finding = LEVEL["reward"](make_run(rows=[*rows_of(row)[:3], *rows_of(row, reward="nan")]))
    assert (finding.status, finding.value) == ("problem", "no value that is a number")


def test_a_server_that_computes_otherwise(make_run, row):
    finding = training.server_agreement(make_run(rows=rows_of(row, sampling__importance_sampling_ratio__mean=0.4)))
    assert finding.status == "warning" and "0.400" in finding.value and "one dtype" in finding.fix
    apart = rows_of(row, sampling__importance_sampling_ratio__mean=0.4)
    assert "learning_rate" in training.server_agreement(make_run(rows=apart, overlap_generation=True)).fix


@pytest.mark.parametrize(("phase", "advice"), [
    ("score", "seconds_max"), ("sync", "prompts_per_step"), ("evaluate", "eval_steps"), ("save", "save_steps"),
])  # fmt: skip
def test_a_phase_that_takes_most_of_the_time(make_run, row, phase, advice):
    finding = training.phases(make_run(rows=rows_of(row, **{f"seconds__{phase}": 40.0})))
    assert finding.status == "warning" and advice in finding.fix
    assert training.phases(make_run(rows=rows_of(row, seconds__sample=90.0))).status == "ok"


def test_a_slow_start_is_told_with_what_makes_data_slow(make_run, row):
    run = make_run(rows=rows_of(row))
    launched = (run.folder / "run.json").stat().st_mtime
    os.utime(run.folder / "metrics.jsonl", (launched, launched + 1000))
    finding = training.start(run)
    assert finding.status == "warning" and "before 6 steps" in finding.value
    assert "columns" in finding.fix and "grpo fetch" in finding.fix
    os.utime(run.folder / "metrics.jsonl", (launched, launched + 90))
    assert training.start(run).status == "ok"


def test_metrics_are_named_as_trl_and_we_write_them():
    import importlib.util

    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "trainer/grpo_trainer.py").read_text()
    trainers = Path(training.__file__).parents[2] / "trainers"
    source += "".join((trainers / name).read_text() for name in ("metrics.py", "checks.py", "maxent.py"))
    doctor_source = Path(training.__file__).read_text() + Path(health.__file__).read_text()
    names = set(re.findall(r'(?:recent|numbers|row\.get|_where)\("([^"]+)"', doctor_source))
    names |= set(health._METRICS) - {"maxent/incorrect_mass"}
    assert {"reward", "kl", "entropy", "completions/clipped_ratio", "frac_reward_zero_std"} <= names
    for name in names - {"grad_norm", "learning_rate", "seconds/step"}:
        assert f'"{name}"' in source, name
    assert "/no_verdict" in source
    assert set(training._PHASES) - {"update"} == set(re.findall(r'"(\w+)"', re.search(r"PHASES = \((.*)\)", source)[1]))


def test_the_limits_stand_in_one_place() -> None:
    from grpo_recipes.console.report import pages

    for module in (training, pages):
        text = Path(module.__file__).read_text()
        for metric in ("clipped_ratio", "frac_reward_zero_std", "entropy", "grad_norm", '"kl"'):
            for line in text.splitlines():
                assert metric not in line or (" > " not in line and " < " not in line), line
