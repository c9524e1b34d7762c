"""Progress of a run: its phase, and the lines of steps, evaluations and sampled completions."""

from __future__ import annotations

import json
import os
import time

import pytest

from grpo_recipes.runs.progress import (
    Progress,
    find_current_activity,
    format_episode_metrics,
    format_evaluation,
    format_sample,
    format_unusual_totals,
)
from grpo_recipes.runs.rundir import SERVER_STATE, move_rows_after, write_json


def row(step, reward=0.5, last=100, **changes):
    phases = {f"seconds/{phase}": 0.1 for phase in ("sample", "score", "update", "sync")}
    facts = {"step": step, "max_steps": last, "reward": reward, "tokens_per_second": 1234.0, "seconds/step": 1.0}
    return json.dumps({**facts, **phases, **changes}) + "\n"


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def lines(progress):
    return [progress.line(row) for row in progress.rows.read_new()]


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_each_row_becomes_one_line_once(tmp_path, metrics):
    progress = Progress(tmp_path)
    assert lines(progress) == []
    append(metrics, row(1, 0.25) + row(2, 0.75))
    first, second = lines(progress)
    assert first.startswith("step 1/100  reward 0.250  1.00 s  left 0:0")
    assert second.startswith("step 2/100  reward 0.750")
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
    assert move_rows_after(tmp_path, 2) == 3  # the launcher also moves rows before it follows the file
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
def test_a_reward_that_is_not_a_number_is_shown(tmp_path, metrics, reward, shown):
    progress = Progress(tmp_path)
    append(metrics, row(1, reward))
    (line,) = lines(progress)
    assert shown in line


def test_the_time_left_is_extrapolated_from_the_steps_seen(tmp_path, metrics):
    progress = Progress(tmp_path)
    append(metrics, row(1, last=3601, **{"seconds/step": 2.0}))
    (line,) = lines(progress)
    assert line.endswith("left 2:00:00")


FULL = {"completions/mean_length": 1023.6, "kl": 0.01234, "entropy": 1.2345, "seconds/step": 123.4}


def line_of(folder, width=80, step=10_000, **changes):
    facts = {**FULL, **changes}
    return Progress(folder).line(json.loads(row(step, -0.527, 12_000, **facts)), width)


def test_the_line_of_a_long_run_has_length_and_kl_and_fits_80_columns(tmp_path):
    line = line_of(tmp_path)
    assert line.startswith("step 10000/12000  reward -0.527  length 1024  kl 0.012  123 s  left 68:")
    assert len(line) <= 80


def test_without_a_reference_the_line_has_the_entropy(tmp_path):
    line = line_of(tmp_path, kl=None)
    assert "  entropy 1.23  " in line and "kl" not in line and len(line) <= 80


@pytest.mark.parametrize(
    ("metric", "share", "message"),
    [
        ("rewards/no_verdict", 0.17, "unscored 17%"), ("rewards/no_verdict", 0.001, "unscored 1%"),
        ("completions/clipped_ratio", 0.62, "cut off 62%"),
        ("episodes/unfinished", 0.4, "unfinished 40%"), ("clip_ratio/region_mean", 0.2, "clipped 20%"),
        ("completions/clipped_ratio", 0.05, ""), ("clip_ratio/region_mean", 0.05, ""), ("rewards/no_verdict", 0.0, ""),
    ],
)  # fmt: skip
def test_what_is_not_trivial_is_in_the_line_which_still_fits(tmp_path, metric, share, message):
    line = line_of(tmp_path, **{metric: share})
    assert f"  {message}  left" in line if message else "%" not in line
    assert len(line) <= 80


def test_episodes_that_were_won_are_in_the_line_and_all_their_numbers_in_another(tmp_path):
    line = line_of(tmp_path, 100, **{"episodes/won": 0.456, "episodes/turns": 3.25})
    assert "  reward -0.527  won 46%  length" in line and len(line_of(tmp_path, **{"episodes/won": 0.456})) <= 80
    assert "  won 7.5  length" in line_of(tmp_path, 100, **{"episodes/won": 7.5})  # a user-defined count
    row = {"step": 3, "episodes/turns": 3.25, "episodes/won": 0.4567, "episodes/odd": "nan"}
    assert format_episode_metrics(row) == "turns 3.25  won 0.457" and format_episode_metrics({"step": 3}) == ""
    wild = {"episodes/\x1b[31mred\n": 1.0} | {f"episodes/{place}": 1.0 for place in range(300)}
    assert format_episode_metrics(wild).startswith("red 1  0 1") and format_episode_metrics(wild).endswith(
        "  10 1  and 289 more"
    )


def test_a_narrow_terminal_leaves_out_what_says_least(tmp_path):
    assert len(line_of(tmp_path, 70)) <= 70 and "length" in line_of(tmp_path, 70)
    assert line_of(tmp_path, 20).startswith("step 10000/12000  reward -0.527  left ")


def test_a_row_that_lacks_what_a_line_shows_has_a_line_all_the_same(tmp_path):
    assert Progress(tmp_path).line({"step": 3}) == "step 3/3  0.00 s  left 0:00:00"  # M17


def test_only_a_run_without_rewards_shows_its_loss(tmp_path):
    step = {"step": 3, "loss": 1.23456}
    progress = Progress(tmp_path)
    assert progress.line(step) == "step 3/3  loss 1.235  0.00 s  left 0:00:00"
    assert "reward 0.500" in progress.line(step | {"reward": 0.5})
    assert "loss" not in progress.line(step)  # it reuses completions


def test_an_evaluation_has_a_line_with_its_result():
    facts = {"step": 20, "eval_reward": 0.61234, "eval_completions/mean_length": 12.3, "prompts": 64, "seconds": 12.34}
    assert format_evaluation(facts) == "eval at step 20  reward 0.612  length 12  64 prompts  12.3 s"
    named = {"step": 20, "set": "hard", "eval_hard_reward": "nan", "prompts": 8, "seconds": 2.0}
    assert format_evaluation(named) == "eval_hard at step 20  8 prompts  2.00 s"


def test_a_sampled_completion_is_shown_without_control_characters_in_short_lines():
    sample = {"prompt": "p " * 200 + "7+7=", "completion": "\x1b[31mred\n\n" + "word " * 300 + "14", "reward": 0.5}
    other = {"prompt": "x", "completion": "", "reward": None}
    lines = format_sample({"step": 3, "samples": [sample, other]}, 0)
    assert lines[0] == "completion of step 3, reward 0.500:" and max(map(len, lines)) <= 80 and len(lines) < 13
    assert "\x1b" not in "".join(lines) and "  | red word" in lines[4] and lines[-1].endswith(" 14")
    assert any("7+7=" in line for line in lines)
    assert format_sample({"step": 3, "samples": [sample, other]}, 3)[1:] == ["  > x", "  | (empty)"]
    assert format_sample({"step": 3, "samples": []}, 0) == []


def test_what_was_not_trivial_over_all_steps_is_said_in_the_end():
    quiet = {"rewards/no_verdict": 0.0, "completions/clipped_ratio": 0.02}
    assert format_unusual_totals([quiet, {}]) == "" == format_unusual_totals([])
    loud = {"rewards/no_verdict": 0.02, "completions/clipped_ratio": 0.8}
    assert format_unusual_totals([quiet, loud]) == "unscored 1 %, cut off 41 %"


def test_the_phase_of_a_run_is_that_of_the_server_then_of_the_rank_furthest_behind(tmp_path):
    (tmp_path / "processes").mkdir()
    assert find_current_activity(tmp_path) == ("importing packages", 0.0)
    write_json(tmp_path / SERVER_STATE, {"epoch": 1, "state": "starting"})
    os.utime(tmp_path / SERVER_STATE, (50.0, 50.0))
    assert find_current_activity(tmp_path) == ("starting the server", 50.0)
    write_json(tmp_path / "processes/phase_0.json", {"phase": "start", "since": 60.0, "step": 0})
    assert find_current_activity(tmp_path) == ("starting the server", 50.0), "the trainer waits for it"
    write_json(tmp_path / "processes/phase_0.json", {"phase": "sample", "since": 60.0, "step": 1})
    assert find_current_activity(tmp_path) == ("sampling", 60.0), "it waits for the next server"
    (tmp_path / "processes/phase_0.json").unlink()
    write_json(tmp_path / SERVER_STATE, {"epoch": 1, "state": "ready"})
    assert (
        find_current_activity(tmp_path)[0] == "importing packages"
        and time.time() - find_current_activity(tmp_path)[1] < 60
    )
    for rank, name, step, since in ((0, "update", 3, 20.0), (1, "sample", 3, 10.0), (2, "sync", 4, 5.0)):
        write_json(tmp_path / f"processes/phase_{rank}.json", {"phase": name, "since": since, "step": step})
    for name in ("phase_x.json", "phase_9.json"):
        (tmp_path / "processes" / name).write_text("[]")
    assert find_current_activity(tmp_path) == ("sampling", 10.0)
