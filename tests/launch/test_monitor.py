"""Lines printed for each step of a run, and the detection of a stalled rank or server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for

from grpo_recipes.launch import monitor
from grpo_recipes.launch.hooks import AllHooks, RunHooks
from grpo_recipes.launch.monitor import (
    Monitor,
    RankStallDetector,
    ServerStallDetector,
    dump_stacks,
    stale_compile_lock,
)
from grpo_recipes.launch.nodes import NodeWorkers
from grpo_recipes.launch.processes import find_rank_pids
from grpo_recipes.launch.readiness import Activity
from grpo_recipes.process.tree import is_stopped
from grpo_recipes.runs.health import ENOUGH_STEPS
from grpo_recipes.runs.progress import Phase, read_phases
from grpo_recipes.runs.rundir import write_json

pytestmark = pytest.mark.alone


@pytest.fixture
def watch(read, tmp_path):
    """``watch()``: a monitor of an attempt. Its run directory is the test's folder."""
    recipe = read()

    def make(hooks: RunHooks | None = None) -> Monitor:
        attempt = SimpleNamespace(run=SimpleNamespace(folder=tmp_path), recipe=recipe, hooks=hooks)
        return Monitor(attempt, SimpleNamespace(set_save_condition=lambda _: None))

    return make


def append(folder, first, last, **metrics):
    facts = {"max_steps": 40, "reward": 0.0, "tokens_per_second": 1.0, "seconds/step": 1.0, **metrics}
    facts |= {f"seconds/{phase}": 0.1 for phase in ("sample", "score", "update", "sync")}
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, **facts}) + "\n" for step in range(first, last + 1))


def said(watched, capsys):
    watched.print_progress()
    return capsys.readouterr().out.splitlines()


def test_a_note_stands_below_the_step_with_which_it_appears_and_is_said_once(watch, tmp_path, capsys):
    watched = watch()
    append(tmp_path, 1, ENOUGH_STEPS - 1)
    assert [line.split("/")[0] for line in said(watched, capsys)] == [f"step {step}" for step in range(1, ENOUGH_STEPS)]
    append(tmp_path, ENOUGH_STEPS, ENOUGH_STEPS + 5)
    lines = said(watched, capsys)
    assert lines[0].startswith(f"step {ENOUGH_STEPS}/40") and lines[1].startswith(
        "grpo: note: the reward is 0 in 10 steps"
    )
    assert len(lines) == 7 and sum("note" in line for line in lines) == 1


def test_a_resumed_run_goes_on_from_all_rows(watch, tmp_path, capsys):
    append(tmp_path, 1, ENOUGH_STEPS - 1)
    watched = watch()
    append(tmp_path, ENOUGH_STEPS, ENOUGH_STEPS)
    assert "grpo: note: the reward is 0 in 10 steps" in said(watched, capsys)[1]
    resumed = watch()
    append(tmp_path, ENOUGH_STEPS + 1, ENOUGH_STEPS + 3)
    lines = said(resumed, capsys)
    assert len(lines) == 3 and not any("note" in line for line in lines), "it was said before"


def test_the_page_of_a_running_run_takes_a_fiftieth_of_the_time_and_lines_fit_the_terminal(
    watch, tmp_path, monkeypatch, capsys
):
    clock, pages = [1000.0], []

    class SlowPage(RunHooks):
        def on_progress(self, run_dir) -> None:
            pages.append(clock[0])
            clock[0] += 2.0

    monkeypatch.setattr(monitor, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: clock[0]}))
    monkeypatch.setattr(monitor, "columns", lambda: 50)
    watched = watch(hooks=SlowPage())
    append(tmp_path, 1, 3, kl=0.1, **{"completions/mean_length": 100.0})
    assert max(map(len, said(watched, capsys))) <= 50
    for moment in range(1000, 1310):
        clock[0] = max(clock[0], float(moment))
        watched._call_hooks(clock[0])
        watched._hooks.join()
    assert pages == [1000.0, 1100.0, 1200.0, 1300.0]


def test_rows_that_were_moved_aside_do_not_count(watch, tmp_path, capsys):
    append(tmp_path, 1, ENOUGH_STEPS - 1)
    watched = watch()
    (tmp_path / "metrics.jsonl").write_text("")
    watched.reset()
    append(tmp_path, 1, ENOUGH_STEPS - 1)
    lines = said(watched, capsys)
    assert len(lines) == ENOUGH_STEPS - 1 and not any("note" in line for line in lines)


def test_evaluations_have_a_line_and_completions_one_every_so_many_steps(read, tmp_path, capsys):
    def shown(**keys: int) -> list[str]:
        attempt = SimpleNamespace(run=SimpleNamespace(folder=tmp_path), recipe=read(**keys))
        watched = Monitor(attempt, SimpleNamespace(set_save_condition=lambda _: None))
        with (tmp_path / "eval.jsonl").open("a") as file:
            file.write(json.dumps({"step": 20, "eval_reward": 0.5, "prompts": 8, "seconds": 1}) + "\n")
        with (tmp_path / "samples.jsonl").open("a") as file:
            for step in range(1, 13):
                samples = [{"prompt": "7+7=", "completion": completion, "reward": 1.0} for completion in ("14", "15")]
                file.write(json.dumps({"step": step, "samples": samples}) + "\n")
        return said(watched, capsys)

    lines = shown(show_completion_steps=5)
    assert lines[0] == "eval at step 20  reward 0.500  8 prompts  1.00 s"
    heads = [f"completion of step {step}, reward 1.000:" for step in (1, 6, 11)]
    assert [line for line in lines if line.startswith("completion")] == heads
    assert lines[1:4] == [heads[0], "  > 7+7=", "  | 14"] and lines[6] == "  | 15", "another one each time"
    assert len(shown(show_completion_steps=0)) == 1


def test_what_became_of_the_prompts_is_said(watch, tmp_path, capsys):
    watched = watch()
    row = {"step": 0, "said": ["138 prompts (200 read, 62 dropped)", "evaluating on 5"], "read": 200, "too_long": 62}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    assert said(watched, capsys) == ["grpo: 138 prompts (200 read, 62 dropped)", "grpo: evaluating on 5"]


def test_the_start_is_said_phase_by_phase_and_the_page_is_written_while_the_run_goes_on(
    read, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(monitor, "_PHASE_SECONDS", 0)
    pages, live = [], []
    done = threading.Event()

    class Page(RunHooks):
        def on_progress(self, run_dir) -> None:
            pages.append(run_dir)
            done.wait(30)

    monkeypatch.setattr(monitor.OUTPUT, "show_live", live.append)
    attempt = SimpleNamespace(run=SimpleNamespace(folder=tmp_path), recipe=read(), hooks=AllHooks([Page()]))
    watched = Monitor(attempt, SimpleNamespace(set_save_condition=lambda _: None, requested=False, check=lambda: None))
    (tmp_path / "processes").mkdir()
    write_json(tmp_path / "processes/server_state.json", {"epoch": 1, "state": "starting"})
    watched.tick()
    watched.tick()
    write_json(tmp_path / "processes/server_state.json", {"epoch": 1, "state": "ready"})
    watched.tick()
    for since, name in enumerate(("start", "sample", "update", "sample")):
        write_json(tmp_path / "processes/phase_0.json", {"phase": name, "since": since, "step": 0})
        watched.tick()
    assert capsys.readouterr().out.splitlines() == [
        "grpo: now starting the server",
        "grpo: now importing packages (starting the server took 0 s)",
        "grpo: now loading model and data (importing packages took 0 s)",
        "grpo: now sampling (loading model and data took 0 s)",
        "grpo: now updating (sampling took 0 s)",
        "grpo: now sampling (updating took 0 s)",
    ]
    assert pages == [] and live[-1] == "sampling 0 s"
    append(tmp_path, 1, 2)
    write_json(tmp_path / "processes/phase_0.json", {"phase": "update", "since": 9, "step": 2})
    watched.tick()
    watched.tick()
    assert "now" not in capsys.readouterr().out, "steps are said instead"
    wait_for(lambda: pages == [tmp_path], "the page, which is not written at every look")
    assert live[-1] == "updating 0 s, step 2/40 done"
    monkeypatch.setattr(monitor, "_HOOK_SECONDS", 0)
    watched.tick()
    assert pages == [tmp_path], "only one page at a time, and the launcher keeps checking"
    done.set()


def test_a_request_to_stop_is_passed_on_to_the_other_nodes_once(read, tmp_path):
    sent = []
    workers = SimpleNamespace(send=lambda order: sent.append(order))
    attempt = SimpleNamespace(run=SimpleNamespace(folder=tmp_path), recipe=read(), workers=workers, hooks=AllHooks([]))
    watched = Monitor(
        attempt, stop := SimpleNamespace(set_save_condition=lambda _: None, requested=False, check=lambda: None)
    )
    watched.tick()
    assert sent == []
    stop.requested = True
    watched.tick()
    watched.tick()
    assert sent == ["stop"]


def test_phases_too_long_for_slurms_signal_are_noted_once(read, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(monitor, "read_job_end_time", lambda environment: time.time() + 1e6)
    monkeypatch.setattr(monitor, "_PHASE_SECONDS", 0)
    append(tmp_path, 1, 1, **{"seconds/evaluate": 400.0})
    attempt = SimpleNamespace(run=SimpleNamespace(folder=tmp_path), recipe=read(), hooks=AllHooks([]))
    watched = Monitor(attempt, SimpleNamespace(set_save_condition=lambda _: None, requested=False, check=lambda: None))
    watched.tick()
    watched.tick()
    assert (
        capsys.readouterr().out.count("grpo: note: phases take up to 400 s, so the signal 300 s before the time limit")
        == 1
    )


def test_the_other_nodes_dump_stacks_when_a_rank_stalls(read, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(monitor, "_DUMP_SECONDS", 0)
    workers = SimpleNamespace(request_stacks=lambda with_ranks: sent.append(with_ranks) or ["7 on node 1"])
    attempt = SimpleNamespace(
        hooks=AllHooks([]),
        run=SimpleNamespace(folder=tmp_path),
        recipe=read(),
        workers=workers,
        environment={},
        plan=SimpleNamespace(mode="server"),
    )
    watched = Monitor(attempt, SimpleNamespace(set_save_condition=lambda _: None, requested=False, check=lambda: None))
    watched.groups["trainer"] = SimpleNamespace(process=SimpleNamespace(trains=True, ready=""), log=tmp_path / "log")
    (tmp_path / "processes").mkdir()
    write_json(tmp_path / "processes/phase_0.json", {"phase": "sample", "since": 1.5, "step": 2})
    assert watched.tick() is None and sent == []
    later = time.monotonic() + 100_000
    monkeypatch.setattr(monitor, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: later}))
    ending = watched.tick()
    assert ending is not None and ending.failed_rank == 0 and sent == [True]
    assert ending.cause.endswith("; stopped by a signal (SIGSTOP): pid 7 on node 1")


def phase(name: str, rank: int = 0, step: int = 3, since: float = 0.0) -> Phase:
    return Phase(rank, name, step, since)


def test_phases_are_read_by_rank(tmp_path):
    (tmp_path / "processes").mkdir()
    for rank in (10, 2):
        write_json(tmp_path / f"processes/phase_{rank}.json", {"phase": "score", "since": 1.5, "step": rank})
    (tmp_path / "processes/phase_3.json").touch()  # an empty file, from a full disk
    assert read_phases(tmp_path) == [Phase(2, "score", 2, 1.5), Phase(10, "score", 10, 1.5)]


@pytest.mark.parametrize("name", ["sync", "connect"])
def test_a_transfer_of_weights_and_its_rendezvous_have_a_limit_of_their_own(name):
    ranks = RankStallDetector(3600, 600)
    assert ranks.find_stall([phase(name), phase("sample", 1)], now=0) is None
    assert ranks.find_stall([phase(name), phase("sample", 1)], now=600) is None
    assert ranks.find_stall([phase(name), phase("sample", 1)], now=601) == (phase(name), 601)


def test_a_transfer_is_no_longer_than_any_other_phase():
    ranks = RankStallDetector(10, 600)
    assert ranks.find_stall([phase("sync")], now=0) is None
    assert ranks.find_stall([phase("sync")], now=11) == (phase("sync"), 11)


@pytest.mark.parametrize(
    ("server", "limits", "message"),
    [
        (True, {"weight_sync_timeout": 20}, "(weight_sync_timeout 20)"),
        (True, {"stall_timeout": 20}, "(stall_timeout 20)"),  # the shorter limit ended the run
        (False, {"weight_sync_timeout": 20}, ""),
    ],
)
def test_a_transfer_that_waits_for_the_next_server_is_not_late(read, tmp_path, monkeypatch, server, limits, message):
    monkeypatch.setattr(monitor, "_DUMP_SECONDS", 0)
    attempt = SimpleNamespace(
        hooks=AllHooks([]),
        run=SimpleNamespace(folder=tmp_path), recipe=read(**limits), environment={},
        workers=NodeWorkers(1), plan=SimpleNamespace(mode="server", bridge="file"),
        server_address=lambda: ("127.0.0.1", 1, "token"),
    )  # fmt: skip
    watched = Monitor(attempt, SimpleNamespace(set_save_condition=lambda _: None, requested=False, check=lambda: None))
    watched.groups["trainer"] = SimpleNamespace(process=SimpleNamespace(trains=True, ready=""), log=tmp_path / "log")
    if server:
        process, state = SimpleNamespace(trains=False, ready="serving", renewed=False), SimpleNamespace(pid=None)
        watched.groups["server"] = SimpleNamespace(
            process=process, log=tmp_path / "log", state=lambda: state, members=[None]
        )
    (tmp_path / "processes").mkdir()
    write_json(tmp_path / "processes/phase_0.json", {"phase": "sync", "since": 1.5, "step": 2})
    assert watched.tick() is None
    later = time.monotonic() + 30
    monkeypatch.setattr(monitor, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: later}))
    ending = watched.tick()
    assert (ending is not None) == bool(message)
    if message:
        assert f"phase sync after step 2 for 30 s {message} in the 'file' bridge" in ending.cause


def test_a_rank_in_one_phase_for_longer_than_the_limit_stands():
    ranks = RankStallDetector(10)
    assert ranks.find_stall([phase("sample")], now=0) is None
    assert ranks.find_stall([phase("sample")], now=10) is None
    assert ranks.find_stall([phase("sample")], now=11) == (phase("sample"), 11)


@pytest.mark.parametrize("new", [phase("score"), phase("sample", step=4), phase("sample", since=5.0)])
def test_a_rank_that_goes_on_does_not_stand(new):
    ranks = RankStallDetector(10)
    ranks.find_stall([phase("sample")], now=0)
    assert ranks.find_stall([new], now=11) is None


@pytest.mark.parametrize(("name", "multiple"), [("update", 1), ("save", 2), ("evaluate", 6), ("end", 24)])
def test_some_phases_may_last_longer(name, multiple):
    ranks = RankStallDetector(10)
    ranks.find_stall([phase(name)], now=0)
    assert ranks.find_stall([phase(name)], now=10 * multiple) is None
    assert ranks.find_stall([phase(name)], now=10 * multiple + 1) is not None


def test_ranks_that_never_tell_a_phase_stand_in_the_start():
    ranks = RankStallDetector(10)
    ranks.find_stall([], now=0)
    late = ranks.find_stall([], now=11)
    assert late is not None and late[0].name == "start"


def test_of_several_the_one_furthest_behind_is_named():
    ranks = RankStallDetector(10)
    behind, waiting = phase("score", rank=1), phase("update", rank=0)
    ranks.find_stall([phase("score", rank=0), behind], now=0)
    ranks.find_stall([waiting, behind], now=1)
    late = ranks.find_stall([waiting, behind], now=20)
    assert late is not None and late[0].rank == 1


def test_of_several_in_one_phase_the_one_that_a_signal_stopped_is_named():
    ranks = RankStallDetector(10)
    both = [phase("sample", rank=0), phase("sample", rank=1)]
    ranks.find_stall(both, now=0)
    late = ranks.find_stall(both, now=20, stopped=[1])
    assert late is not None and late[0].rank == 1


def test_the_clocks_of_ranks_do_not_count():
    ranks = RankStallDetector(10)
    ranks.find_stall([phase("sample", since=-1e9)], now=0)
    assert ranks.find_stall([phase("sample", since=-1e9)], now=5) is None


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
    assert server.find_stall(first, [phase("sample")], now=0) is None
    assert server.find_stall(second, [phase("sample")], now=9) is None
    seconds = server.find_stall(second, [phase("sample")], now=19)
    assert (seconds is not None) == stands


def test_a_new_phase_of_a_rank_is_movement_too():
    server = ServerStallDetector(10)
    server.find_stall(Activity(5, 1), [phase("sync")], now=0)
    server.find_stall(Activity(5, 1), [phase("sample")], now=9)
    assert server.find_stall(Activity(5, 1), [phase("sample")], now=18) is None
    assert server.find_stall(Activity(5, 1), [phase("sample")], now=20) == 11


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
        message = dump_stacks(tmp_path, [child.pid for child in children])
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert "endless" in (tmp_path / "stacks/rank_0.txt").read_text()
    assert message.startswith("; stacks of rank_0.txt in ")
    assert message.endswith(f"; stopped by a signal (SIGSTOP): pid {children[1].pid}")


def test_a_stopped_engine_is_named(tmp_path):
    program = tmp_path / "VLLM::EngineCore_DP1"
    program.symlink_to(Path("/bin/sleep").resolve())
    engine = subprocess.Popen([program, "60"])
    try:
        os.kill(engine.pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(engine.pid), "a stopped process")
        message = dump_stacks(tmp_path, [engine.pid])
    finally:
        engine.kill()
        engine.wait()
    assert message == f"; stopped by a signal (SIGSTOP): pid {engine.pid} (EngineCore_DP1)"


def test_only_ranks_that_live_on_this_node_are_asked_for_stacks(tmp_path):
    (tmp_path / "processes").mkdir()
    write_json(tmp_path / "processes/rank_0.json", {"pid": os.getpid(), "rank": 0})
    write_json(tmp_path / "processes/rank_1.json", {"pid": os.getpid(), "rank": 1, "exit": 0})
    write_json(tmp_path / "processes/rank_2.json", {"pid": 2**22 + 1, "rank": 2})
    write_json(tmp_path / "processes/rank_3.json", {"pid": os.getpid(), "rank": 3, "node": 1})
    assert find_rank_pids(tmp_path) == {0: os.getpid()}


@pytest.mark.parametrize("folder", ["cpu_adam", "py311_cu128/cpu_adam"])
def test_an_old_compile_lock_is_named_with_the_command_that_mends_it(tmp_path, folder):
    lock = tmp_path / folder / "lock"
    lock.parent.mkdir(parents=True)
    assert stale_compile_lock(tmp_path, time.time()) is None
    lock.touch()
    assert stale_compile_lock(tmp_path, time.time() - 60) is None
    message = stale_compile_lock(tmp_path, time.time() + 1)
    assert message is not None and message.endswith(f"rm {lock}")
