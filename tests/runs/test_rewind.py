"""Rows of metrics.jsonl past a checkpoint are moved aside, not lost."""

from __future__ import annotations

import json

import pytest

from grpo_recipes.runs.rundir import move_rows_after, read_metrics


def write(folder, steps, torn=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + torn)


def steps(folder, name="metrics.jsonl"):
    path = folder / name
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("step", "torn", "kept", "moved"),
    [
        (3, "", [1, 2, 3], [4, 5]),
        (3, '{"step": 6, "re', [1, 2, 3], [4, 5]),
        (5, "", [1, 2, 3, 4, 5], []),
        (5, '{"step": 6, "re', [1, 2, 3, 4, 5], []),
        (9, "", [1, 2, 3, 4, 5], []),
        (0, "", [], [1, 2, 3, 4, 5]),
    ],
)
def test_rows_past_the_step_are_moved_and_a_torn_line_is_dropped(tmp_path, step, torn, kept, moved):
    write(tmp_path, range(1, 6), torn)
    assert move_rows_after(tmp_path, step) == len(moved)
    assert steps(tmp_path) == kept
    assert steps(tmp_path, "metrics.redone.jsonl") == moved
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99}\n')
    assert [row["step"] for row in read_metrics(tmp_path)] == [*kept, 99]


def test_rows_moved_twice_are_all_kept_aside(tmp_path):
    write(tmp_path, [1, 2, 3])
    move_rows_after(tmp_path, 2)
    write(tmp_path, [1, 2, 3, 4])
    move_rows_after(tmp_path, 2)
    assert steps(tmp_path, "metrics.redone.jsonl") == [3, 3, 4]


def test_rows_of_evaluations_and_samples_are_moved_with_them(tmp_path):
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        write(tmp_path, [2, 2, 4])
        (tmp_path / "metrics.jsonl").rename(tmp_path / name)
    write(tmp_path, [1, 2, 3, 4])
    assert move_rows_after(tmp_path, 2) == 2  # of metrics.jsonl
    for name in ("eval", "samples"):
        assert steps(tmp_path, f"{name}.jsonl") == [2, 2]
        assert steps(tmp_path, f"{name}.redone.jsonl") == [4]


def test_a_run_without_rows_has_nothing_to_move(tmp_path):
    assert move_rows_after(tmp_path, 3) == 0
    assert list(tmp_path.iterdir()) == []
