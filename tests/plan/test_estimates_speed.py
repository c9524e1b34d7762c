"""Speed of earlier runs: which runs count, and the estimate from them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from grpo_recipes.plan import speed
from grpo_recipes.plan.speed import find_speed
from grpo_recipes.plan.types import Names


@pytest.fixture
def past(planned, tmp_path):
    """``past(seconds, name=..., KEY=VALUE)``: an earlier run; ``past.speed(...)``: the estimate for a new run."""
    plan = planned()
    count = iter(range(1000))

    def make(seconds, name="fine", rows=None, **changes):
        number = next(count)
        folder = tmp_path / "runs" / f"{name}-{number}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"run_name": name}))
        (folder / "plan.json").write_text(json.dumps({**plan.as_json(), **changes}))
        told = rows or [{"step": step, "seconds/step": seconds if step > 1 else 99.0} for step in range(1, 6)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
        return folder

    def speed(walltime=None, plan=plan, name="fine"):
        return find_speed(plan, Names(tmp_path / f"runs/{name}-now", name, name, "now"), walltime)

    make.speed, make.plan = speed, plan
    return make


def test_the_median_of_earlier_runs_without_their_first_step(past):
    for seconds in (2.0, 4.0, 9.0):
        past(seconds)
    speed = past.speed(3600)
    assert (speed.seconds, speed.runs, speed.steps) == (4.0, 3, 900)
    assert str(speed) == "4 s per step in 3 earlier runs: about 900 steps in 1:00:00"
    assert str(past.speed()) == "4 s per step in 3 earlier runs: 900 steps per hour"
    assert (past.speed().walltime, past.speed().steps) == (None, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"model": "other"},
        {"flavour": "cpu"},
        {"mode": "colocate"},
        {"replicas": 2},
        {"task": "maxent"},
        {"batch": None},
        {"batch": {"completions": 48, "world_size": 1, "tokens": None}},
    ],
)
def test_a_run_of_another_kind_does_not_count(changes, past):
    past(5.0, **changes)
    assert past.speed().seconds is None
    assert "no earlier run" in str(past.speed(60))


def test_a_plan_of_before_replicas_has_one(past):
    plan = past.plan.as_json()
    del plan["replicas"]
    (past(5.0) / "plan.json").write_text(json.dumps(plan))
    assert past.speed().seconds == 5.0


def test_only_the_newest_runs_count(past):
    for seconds in (100.0, 100.0, 100.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        past(seconds)
    assert (past.speed().seconds, past.speed().runs) == (1.0, 5)


def test_of_a_longer_name_no_run_counts_or_takes_the_place_of_one(past, monkeypatch):
    monkeypatch.setattr(speed, "_MOST_RUNS", 2)
    for name in ("fine", "fine-b", "fine-b", "fine-b"):
        past(2.0 if name == "fine" else 9.0, name=name)
    assert (past.speed().seconds, past.speed().runs) == (2.0, 1)
    for seconds in (4.0, 4.0):
        past(seconds)
    assert (past.speed().seconds, past.speed().runs) == (4.0, 2)


def test_a_name_is_no_pattern(past):
    past(2.0, name="fine[1]")
    assert past.speed(name="fine[1]").runs == 1


def test_a_run_with_another_number_of_trainers_does_not_count(past):
    past(5.0)
    assert past.speed(plan=replace(past.plan, batch=replace(past.plan.batch, world_size=1))).runs == 0


@pytest.mark.parametrize("name", ["run.json", "plan.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b'"text"\n3\n{"step": "x", "seconds/step": []}\n'])
def test_malformed_files_are_skipped(name, content, past):
    (past(3.0) / name).write_bytes(content)
    past(5.0)
    assert past.speed().seconds == 5.0


def test_folders_without_a_run_and_missing_files_are_skipped(past, tmp_path):
    (tmp_path / "runs/notes").mkdir(parents=True)
    (past(3.0) / "metrics.jsonl").unlink()
    past(5.0, rows=[{"step": 1, "seconds/step": 9.0}])  # its only step is the first
    past(5.0, rows=[{"step": 3, "seconds/step": 0}, {"loss": 1}])
    assert past.speed().runs == 0


def test_a_run_root_that_is_not_there_has_no_runs(past):
    assert past.speed().runs == 0


def test_a_torn_last_row_is_left_out(past):
    folder = past(3.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "seconds/st')
    assert past.speed().seconds == 3.0


def test_of_a_long_run_the_last_rows_count(past):
    rows = [{"step": step, "seconds/step": 9.0 if step < 90_000 else 2.0} for step in range(1, 100_001)]
    folder = past(2.0, rows=rows)
    assert (folder / "metrics.jsonl").stat().st_size > 3_000_000
    assert past.speed().seconds == 2.0
