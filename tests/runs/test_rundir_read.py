"""Reading the files of a run directory."""

from __future__ import annotations

import fcntl

import pytest


def test_values_are_those_given_planned_or_default(make_run):
    run = make_run(learning_rate=2e-6, per_device_train_batch_size=64)
    assert run.value("learning_rate") == 2e-6
    assert run.value("per_device_train_batch_size") == run.plan["batch"]["per_device"] < 64
    assert run.value("reward_timeout") == 5.0
    assert run.value("num_generations") == 4


def test_logs_are_found_from_another_folder(make_run, monkeypatch):
    run = make_run(logs={"server": "hello", "trainer": "x" * 700_000 + "the end"})
    monkeypatch.chdir("/")
    assert run.texts["server"] == "hello"
    assert run.texts["trainer"].endswith("the end") and len(run.texts["trainer"]) == 600_000


def test_a_lock_that_is_held_is_a_running_launch(make_run):
    run = make_run(status="running")
    assert not run.is_running()
    with (run.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run.is_running()
    assert not run.is_running()


def test_metrics_that_are_no_numbers_are_left_out_of_the_mean(make_run, row):
    run = make_run(rows=[row(1, kl="nan"), row(2, kl=0.4), row(3, kl=0.2)])
    assert run.recent("kl") == pytest.approx(0.3)
    assert run.recent("no_such_metric") is None
    assert make_run().recent("kl") is None
