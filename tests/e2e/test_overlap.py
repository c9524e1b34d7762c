"""overlap_generation through the real launcher and the real server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_forgetful_proxy import FakeForgetfulProxy
from one_by_one import Bench
from real_runs import LEARNS, REPOSITORY, Launch, same_rows, weights_hash
from test_exact_ranks import copy_until
from test_guard import install_fake_packing, make_smoke, other_tied_model
from test_server_restarts import EVALUATED, engine_of

from grpo_recipes.runs.rundir import read_metrics

OVERLAP = ("--overlap_generation", "true")
SHORT = (*OVERLAP, "--prompts_per_step", "4", "--num_generations", "8", "--save_steps", "1", "--save_total_limit", "20")

SMALL = ("--prompts_per_step", "8", "--num_generations", "8")
WITH = {
    "ddp": (),  # the whole batch, which shows that it learns
    "listwise": (
        str(REPOSITORY / "recipes/smoke/maxent.yaml"), "--maxent_objective", "listwise", "--maxent_beta", "0.5", *SMALL,
    ),
    "lora": ("--use_peft", "--lora_target_modules", "all-linear", "--learning_rate", "2e-3", *SMALL),
    "zero2": ("--accelerator", "zero2", *SMALL),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_and_says_that_it_is_off_policy(launch: Callable[..., Launch]) -> None:
    run = launch(*OVERLAP, *LEARNS)
    assert run.wait(800) == 0, run.output
    assert run.summary()["final_reward"] > run.summary()["initial_reward"] + 0.25
    rows = run.rows()
    assert [row["rollouts/steps_off_policy"] for row in rows] == [0] + [1] * 29
    assert rows[0]["sampling/sampling_logp_difference/mean"] < 1e-4
    assert all(row["sampling/sampling_logp_difference/mean"] > 1e-4 for row in rows[1:10])  # of other weights
    assert "one step off-policy" in run.output
    assert "one step off-policy" in (run.run_dir / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_server_a_stop_and_a_kill_change_nothing(launch: Callable[..., Launch]) -> None:
    flags = (*SHORT, *EVALUATED, "--max_steps", "14")
    alone = launch(*flags, "--run_name", "alone", folder="alone")
    assert alone.wait(600) == 0, alone.output

    other = launch(*flags, "--run_name", "other", folder="other")
    other.wait_for_step(3)
    os.kill(engine_of(other), signal.SIGKILL)
    other.wait_for_step(6)
    other.process.send_signal(signal.SIGUSR1)
    assert other.wait(300) == 75, other.output
    other = launch("--resume", str(other.run_dir), folder="other", by_exec=True)
    other.wait_for_step(9)
    for process in other.processes():
        process.kill()
    other.process.wait(60)
    other = launch("--resume", str(other.run_dir), folder="other", by_exec=True)
    assert other.wait(600) == 0, other.output
    assert "generation sampled ahead" in other.log("trainer")
    assert same_rows(other, alone)
    assert weights_hash(other) == weights_hash(alone)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("keys", WITH.values(), ids=WITH)
def test_two_ranks_go_on_from_a_checkpoint_as_if_left_alone(
    launch: Callable[..., Launch], keys: tuple[str, ...]
) -> None:
    flags = (*keys, *OVERLAP, "--num_processes", "2", "--max_steps", "12", "--save_steps", "7")
    alone = launch(*flags, "--run_name", "alone", folder="alone")
    assert alone.wait(800) == 0, alone.output
    rows = alone.rows()
    assert [row["rollouts/steps_off_policy"] for row in rows] == [0] + [1] * 11
    assert rows[0]["sampling/sampling_logp_difference/mean"] < 1e-4
    assert all(row["sampling/sampling_logp_difference/mean"] > 1e-4 for row in rows[1:])  # of other weights
    rewards = [row["reward"] for row in rows]
    assert keys or sum(rewards[-3:]) > sum(rewards[:3]) + 0.15, rewards
    copy = copy_until(alone, 7, alone.folder.parent / "copy")
    continued = launch("--resume", str(copy), folder="copy", by_exec=True)
    assert continued.wait(800) == 0, continued.output
    assert "resuming from checkpoint-7" in continued.output
    assert same_rows(continued, alone)
    assert weights_hash(continued) == weights_hash(alone)


@pytest.mark.slow
def test_weights_that_did_not_arrive_stop_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *OVERLAP, "--dtype", "bfloat16", "--learning_rate", "1e-6")
    with bench.server() as url:
        proxy = FakeForgetfulProxy(url, honest=2)
        code, output = bench.train(proxy.port)
        proxy.close()
    assert code != 0
    (cause,) = bench.causes()
    assert "it has the weights of sync 2, and the trainer sent sync 3; step 2 was not taken" in cause, output
    assert [row["step"] for row in read_metrics(bench.run_dir)] == [1, 2]


@pytest.mark.slow
def test_a_server_that_computes_with_other_weights_stops_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *OVERLAP, "--model_name_or_path", "smoke:sums-tied")
    make_smoke("sums-tied", tied=True)
    install_fake_packing(tmp_path)
    with bench.server(model=other_tied_model(tmp_path), VLLM_PLUGINS="fake_packing", PYTHONPATH=str(tmp_path)):
        code, _ = bench.train()
    assert code != 0
    (cause,) = bench.causes()
    assert "WeightsDiffer: the server computes with other weights than the trainer's" in cause
    measured = re.search(r"difference\| ([\d.e+-]+) on the first batch", cause)
    assert measured is not None and float(measured[1]) > 0.1
    assert read_metrics(bench.run_dir) == []
