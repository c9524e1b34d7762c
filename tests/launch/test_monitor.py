"""What is said of each step while a run goes on."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from grpo_recipes.launch.monitor import Monitor
from grpo_recipes.runs.health import MANY


@pytest.fixture
def watch(read, tmp_path):
    """``watch()``: of an attempt whose run directory is the test's."""
    recipe = read()

    def make() -> Monitor:
        attempt = SimpleNamespace(run=SimpleNamespace(folder=tmp_path), recipe=recipe, publisher=None)
        return Monitor(attempt, SimpleNamespace(can_save=None))

    return make


def append(folder, first, last, **metrics):
    facts = {"max_steps": 40, "reward": 0.0, "tokens_per_second": 1.0, "seconds/step": 1.0, **metrics}
    facts |= {f"seconds/{phase}": 0.1 for phase in ("sample", "score", "update", "sync")}
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, **facts}) + "\n" for step in range(first, last + 1))


def said(watched, capsys):
    watched.show_progress()
    return capsys.readouterr().out.splitlines()


def test_a_note_stands_below_the_step_with_which_it_appears_and_is_said_once(watch, tmp_path, capsys):
    watched = watch()
    append(tmp_path, 1, MANY - 1)
    assert all(line.startswith("step ") for line in said(watched, capsys))
    append(tmp_path, MANY, MANY + 5)
    lines = said(watched, capsys)
    assert lines[0].startswith(f"step {MANY}/40") and lines[1].startswith("grpo: note: the reward is 0 in 10 steps")
    assert len(lines) == 7 and sum("note" in line for line in lines) == 1


def test_a_resumed_run_goes_on_from_all_rows(watch, tmp_path, capsys):
    append(tmp_path, 1, MANY - 1)
    watched = watch()
    append(tmp_path, MANY, MANY)
    assert "grpo: note: the reward is 0 in 10 steps" in said(watched, capsys)[1]
    again = watch()
    append(tmp_path, MANY + 1, MANY + 3)
    assert not any("note" in line for line in said(again, capsys)), "it was said before"


def test_rows_that_were_moved_aside_do_not_count(watch, tmp_path, capsys):
    append(tmp_path, 1, MANY - 1)
    watched = watch()
    (tmp_path / "metrics.jsonl").write_text("")
    watched.start_again()
    append(tmp_path, 1, MANY - 1)
    assert not any("note" in line for line in said(watched, capsys))


def test_a_request_to_stop_is_passed_on_to_the_other_nodes_once(read, tmp_path):
    sent = []
    workers = SimpleNamespace(send=lambda order: sent.append(order))
    attempt = SimpleNamespace(run=SimpleNamespace(folder=tmp_path), recipe=read(), publisher=None, workers=workers)
    watched = Monitor(attempt, stop := SimpleNamespace(can_save=None, requested=False, look=lambda: None))
    watched.tick()
    assert sent == []
    stop.requested = True
    watched.tick()
    watched.tick()
    assert sent == ["stop"]
