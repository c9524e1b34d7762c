"""What is said of each step while a run goes on, and which rank or server is stalled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from grpo_recipes.launch import monitor
from grpo_recipes.launch.monitor import (
    Monitor,
    Phase,
    RankStallDetector,
    ServerStallDetector,
    dump_stacks,
    read_phases,
    stale_compile_lock,
)
from grpo_recipes.launch.processes import rank_pids
from grpo_recipes.plan.ports import Activity
from grpo_recipes.runs.health import MANY
from grpo_recipes.runs.rundir import write_json

pytestmark = pytest.mark.alone


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


def test_phases_too_long_for_slurms_signal_are_noted_once(read, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(monitor, "job_end_time", lambda environment: time.time() + 1e6)
    monkeypatch.setattr(monitor, "_PHASE_SECONDS", 0)
    append(tmp_path, 1, 1, **{"seconds/evaluate": 400.0})
    attempt = SimpleNamespace(run=SimpleNamespace(folder=tmp_path), recipe=read(), publisher=None)
    watched = Monitor(attempt, SimpleNamespace(can_save=None, requested=False, look=lambda: None))
    watched.tick()
    watched.tick()
    assert capsys.readouterr().out.count("grpo: note: with phases of 400 s the signal 300 s before the time limit") == 1


def test_the_other_nodes_dump_stacks_when_a_rank_stalls(read, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(monitor, "_DUMP_SECONDS", 0)
    workers = SimpleNamespace(send=lambda order: sent.append(order))
    attempt = SimpleNamespace(
        run=SimpleNamespace(folder=tmp_path), recipe=read(), publisher=None, workers=workers, environment={}
    )
    watched = Monitor(attempt, SimpleNamespace(can_save=None, requested=False, look=lambda: None))
    watched.groups["trainer"] = SimpleNamespace(process=SimpleNamespace(trains=True, ready=""), log=tmp_path / "log")
    (tmp_path / "processes").mkdir()
    write_json(tmp_path / "processes/phase_0.json", {"phase": "sample", "since": 1.5, "step": 2})
    assert watched.tick() is None and sent == []
    later = time.monotonic() + 100_000
    monkeypatch.setattr(monitor.time, "monotonic", lambda: later)
    ending = watched.tick()
    assert ending is not None and ending.failed_rank == 0 and sent == ["stacks"]


def phase(name: str, rank: int = 0, step: int = 3, since: float = 0.0) -> Phase:
    return Phase(rank, name, step, since)


def test_phases_are_read_by_rank(tmp_path):
    (tmp_path / "processes").mkdir()
    for rank in (10, 2):
        write_json(tmp_path / f"processes/phase_{rank}.json", {"phase": "score", "since": 1.5, "step": rank})
    (tmp_path / "processes/phase_3.json").touch()  # as a full disk leaves it
    assert read_phases(tmp_path) == [Phase(2, "score", 2, 1.5), Phase(10, "score", 10, 1.5)]


def test_a_rank_in_one_phase_for_longer_than_the_limit_stands():
    ranks = RankStallDetector(10)
    assert ranks.look([phase("sample")], now=0) is None
    assert ranks.look([phase("sample")], now=10) is None
    assert ranks.look([phase("sample")], now=11) == (phase("sample"), 11)


@pytest.mark.parametrize("new", [phase("score"), phase("sample", step=4), phase("sample", since=5.0)])
def test_a_rank_that_goes_on_does_not_stand(new):
    ranks = RankStallDetector(10)
    ranks.look([phase("sample")], now=0)
    assert ranks.look([new], now=11) is None


@pytest.mark.parametrize(("name", "multiple"), [("update", 1), ("save", 2), ("evaluate", 6), ("end", 24)])
def test_some_phases_may_last_longer(name, multiple):
    ranks = RankStallDetector(10)
    ranks.look([phase(name)], now=0)
    assert ranks.look([phase(name)], now=10 * multiple) is None
    assert ranks.look([phase(name)], now=10 * multiple + 1) is not None


def test_ranks_that_never_tell_a_phase_stand_in_the_start():
    ranks = RankStallDetector(10)
    ranks.look([], now=0)
    late = ranks.look([], now=11)
    assert late is not None and late[0].name == "start"


def test_of_several_the_one_furthest_behind_is_named():
    ranks = RankStallDetector(10)
    behind, waiting = phase("score", rank=1), phase("update", rank=0)
    ranks.look([phase("score", rank=0), behind], now=0)
    ranks.look([waiting, behind], now=1)
    late = ranks.look([waiting, behind], now=20)
    assert late is not None and late[0].rank == 1


def test_of_several_in_one_phase_the_one_that_a_signal_stopped_is_named():
    ranks = RankStallDetector(10)
    both = [phase("sample", rank=0), phase("sample", rank=1)]
    ranks.look(both, now=0)
    late = ranks.look(both, now=20, stopped=[1])
    assert late is not None and late[0].rank == 1


def test_the_clocks_of_ranks_do_not_count():
    ranks = RankStallDetector(10)
    ranks.look([phase("sample", since=-1e9)], now=0)
    assert ranks.look([phase("sample", since=-1e9)], now=5) is None


@pytest.mark.parametrize(
    ("first", "second", "stands"),
    [
        (Activity(5, 1), Activity(5, 1), True),
        (Activity(5, 1), Activity(6, 1), False),
        (Activity(5, 0), Activity(5, 0), False),
        (Activity(5, 1), None, True),
        (None, None, True),
    ],
    ids=["no-token", "tokens", "idle", "silent-meanwhile", "silent"],
)
def test_a_server_stands_that_makes_no_token_or_gives_no_answer(first, second, stands):
    server = ServerStallDetector(10)
    assert server.look(first, [phase("sample")], now=0) is None
    assert server.look(second, [phase("sample")], now=9) is None
    seconds = server.look(second, [phase("sample")], now=19)
    assert (seconds is not None) == stands


def test_a_new_phase_of_a_rank_is_movement_too():
    server = ServerStallDetector(10)
    server.look(Activity(5, 1), [phase("sync")], now=0)
    server.look(Activity(5, 1), [phase("sample")], now=9)
    assert server.look(Activity(5, 1), [phase("sample")], now=18) is None
    assert server.look(Activity(5, 1), [phase("sample")], now=20) == 11


WRITES_STACKS = """
import faulthandler, signal, sys, time
faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "a"), all_threads=True)
print("ready", flush=True)
def endless():
    while True:
        time.sleep(0.01)
endless()
"""


def test_processes_leave_their_stacks_and_stopped_ones_are_named(tmp_path):
    (tmp_path / "stacks").mkdir()
    argv = [sys.executable, "-c", WRITES_STACKS]
    children = [
        subprocess.Popen([*argv, str(tmp_path / f"stacks/rank_{rank}.txt")], stdout=subprocess.PIPE) for rank in (0, 1)
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        os.kill(children[1].pid, signal.SIGSTOP)
        time.sleep(0.1)
        (tmp_path / "stacks/old.txt").touch()
        os.utime(tmp_path / "stacks/old.txt", (1, 1))
        os.utime(tmp_path / "stacks/rank_1.txt", (1, 1))
        said = dump_stacks(tmp_path, [child.pid for child in children])
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert "endless" in (tmp_path / "stacks/rank_0.txt").read_text()
    assert said.startswith("; stacks of rank_0.txt in ")
    assert said.endswith(f"; stopped by a signal (SIGSTOP): pid {children[1].pid}")


def test_only_ranks_that_live_on_this_node_are_asked_for_stacks(tmp_path):
    (tmp_path / "processes").mkdir()
    write_json(tmp_path / "processes/rank_0.json", {"pid": os.getpid(), "rank": 0})
    write_json(tmp_path / "processes/rank_1.json", {"pid": os.getpid(), "rank": 1, "exit": 0})
    write_json(tmp_path / "processes/rank_2.json", {"pid": 2**22 + 1, "rank": 2})
    write_json(tmp_path / "processes/rank_3.json", {"pid": os.getpid(), "rank": 3, "node": 1})
    assert rank_pids(tmp_path) == {0: os.getpid()}


@pytest.mark.parametrize("folder", ["cpu_adam", "py311_cu128/cpu_adam"])
def test_an_old_compile_lock_is_named_with_the_command_that_mends_it(tmp_path, folder):
    lock = tmp_path / folder / "lock"
    lock.parent.mkdir(parents=True)
    assert stale_compile_lock(tmp_path, time.time()) is None
    lock.touch()
    assert stale_compile_lock(tmp_path, time.time() - 60) is None
    said = stale_compile_lock(tmp_path, time.time() + 1)
    assert said is not None and said.endswith(f"rm {lock}")
