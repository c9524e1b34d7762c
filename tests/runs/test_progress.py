"""One line a step, read from a file that another process writes."""

from __future__ import annotations

import json

import pytest

from grpo_recipes.runs.rundir import Progress, move_rows_after


def row(step, reward=0.5, last=100, **more):
    phases = {f"seconds/{phase}": 0.1 for phase in ("sample", "score", "update", "sync")}
    facts = {"step": step, "max_steps": last, "reward": reward, "tokens_per_second": 1234.0, "seconds/step": 1.0}
    return json.dumps({**facts, **phases, **more}) + "\n"


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def lines(progress):
    return [progress.line(row) for row in progress.new_rows()]


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_each_row_becomes_one_line_once(tmp_path, metrics):
    progress = Progress(tmp_path)
    assert lines(progress) == []
    append(metrics, row(1, 0.25) + row(2, 0.75))
    first, second = lines(progress)
    assert first.startswith("step 1/100  reward 0.250  1234 tokens/s  sample 0.10s score 0.10s update 0.10s sync 0.10s")
    assert second.startswith("step 2/100  reward 0.750")
    assert "left 0:0" in first
    assert lines(progress) == []


def test_a_line_still_being_written_waits_for_its_end(tmp_path, metrics):
    progress, text = Progress(tmp_path), row(1)
    append(metrics, text[:20])
    assert lines(progress) == []
    append(metrics, text[20:])
    assert len(lines(progress)) == 1


def test_rows_of_an_earlier_attempt_are_not_shown_again(tmp_path, metrics):
    append(metrics, row(1) + row(2))
    progress = Progress(tmp_path)
    append(metrics, row(3))
    (line,) = lines(progress)
    assert line.startswith("step 3/100")


def test_steps_done_again_after_a_resume_are_shown(tmp_path, metrics):
    append(metrics, "".join(row(step) for step in range(1, 6)) + '{"step": 6, "torn')
    assert move_rows_after(tmp_path, 2) == 3  # as the launcher does before it follows the file
    progress = Progress(tmp_path)
    shown = lines(progress)
    for step in range(3, 9):
        append(metrics, row(step, entropy=0.123456789 * step))
        shown += lines(progress)
    assert [line.split("/")[0] for line in shown] == [f"step {step}" for step in range(3, 9)]


def test_text_beyond_ascii_does_not_shift_the_place_in_the_file(tmp_path, metrics):
    progress = Progress(tmp_path)
    append(metrics, json.dumps({**json.loads(row(1)), "note": "ääää"}, ensure_ascii=False) + "\n")
    assert len(lines(progress)) == 1
    append(metrics, row(2))
    assert [line.split("/")[0] for line in lines(progress)] == ["step 2"]


@pytest.mark.parametrize(("reward", "shown"), [(None, "reward none"), ("nan", "reward nan"), (1, "reward 1.000")])
def test_a_reward_that_is_no_number_is_shown_as_it_is(tmp_path, metrics, reward, shown):
    progress = Progress(tmp_path)
    append(metrics, row(1, reward))
    (line,) = lines(progress)
    assert shown in line


def test_the_time_left_is_extrapolated_from_the_steps_seen(tmp_path, metrics):
    progress = Progress(tmp_path)
    append(metrics, row(1, last=3601, **{"seconds/step": 2.0}))
    (line,) = lines(progress)
    assert line.endswith("left 2:00:00")
