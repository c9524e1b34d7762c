"""How a run continues after a lost server or a stop request: real processes, but fake server and trainers."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from other_user import needs_root, other_user

from grpo_recipes.fetch import built_in
from grpo_recipes.launch import run as launch_run
from grpo_recipes.launch.monitor import StopSignals
from grpo_recipes.launch.processes import Child, Ending, Group, wait_for_ending
from grpo_recipes.launch.run import supervise
from grpo_recipes.plan.types import OnLoss, Process
from grpo_recipes.process.tree import is_alive
from grpo_recipes.runs.checkpoints import list_complete_checkpoints
from grpo_recipes.runs.rundir import read_json, read_metrics, stop_file
from launch.fake_run import FakeRun


def test_a_bridge_that_reconnects_gets_a_new_server_at_the_old_address_and_the_run_goes_on(fake_run, capsys):
    run = fake_run()

    def kill() -> None:
        run.wait_for_step(2)
        assert run.state() == {"epoch": 1, "state": "ready"}
        trainer = read_json(run.folder / "processes/trainer.json")
        token = run.attempt.scratch.token_file.read_text()
        run.kill("server")
        run.wait_until(lambda: run.state() == {"epoch": 2, "state": "ready"})
        assert len({"token", token, run.attempt.scratch.token_file.read_text()}) == 3  # each server has its own
        assert read_json(run.folder / "processes/trainer.json") == trainer

    assert run.then(kill).end() == Ending(0)
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, 9))
    assert run.summary()["server_restarts"] == 1
    assert "was killed by signal 9: only the server is started again (1 of 2)" in capsys.readouterr().out
    assert run.state()["state"] == "gone"


@needs_root
def test_a_server_whose_port_another_user_took_moves_to_another_port(fake_run, tmp_path, capsys):
    """R6: between two servers, another user listens on the port. It gets no request, and the run completes."""
    run = fake_run()
    first = run.attempt.plan.ports.server
    received = []

    def kill() -> None:
        run.wait_for_step(2)
        with run.held(), other_user(first, tmp_path / "received") as user:  # the other user tries repeatedly
            guard = psutil.Process(read_json(run.folder / "processes/server.json")["guard"])
            guard.suspend()  # the launcher waits for it before it starts the next server
            run.kill("server")
            user.wait()
            guard.resume()
            run.wait_until(lambda: run.state() == {"epoch": 2, "state": "ready"})
            received.extend(user.received)

    assert run.then(kill).end() == Ending(0)
    assert received == []
    last = run.attempt.plan.ports.server
    assert last != first and len(read_metrics(run.folder)) == 8
    assert run.summary()["server_restarts"] == 1
    output = capsys.readouterr().out
    assert f"port {first} (vllm_server_port) was taken by another process (pid " in output
    assert f"); using {last}" in output


def test_a_server_keeps_its_port_if_the_old_listener_ends_a_little_later(fake_run, capsys):
    run = fake_run()
    first = run.attempt.plan.ports.server

    def kill() -> None:
        run.wait_for_step(2)
        with run.held():
            guard = psutil.Process(read_json(run.folder / "processes/server.json")["guard"])
            guard.suspend()  # the launcher waits for it before it starts the next server
            server = read_json(run.folder / "processes/server.json")["pid"]
            run.kill("server")
            run.wait_until(lambda: not psutil.pid_exists(server) or psutil.Process(server).status() == "zombie")
            with socket.create_server(("127.0.0.1", first)):
                guard.resume()
                time.sleep(1.5)
            run.wait_until(lambda: run.state() == {"epoch": 2, "state": "ready"})

    assert run.then(kill).end() == Ending(0)
    assert run.attempt.plan.ports.server == first and run.summary()["server_restarts"] == 1
    assert "was taken" not in capsys.readouterr().out


@needs_root
def test_a_server_whose_port_is_taken_while_it_starts_is_started_again_on_another(fake_run, tmp_path, capsys):
    """R6: the launcher sees the other listener before it sends anything."""
    run = fake_run(server="late-server")
    first = run.attempt.plan.ports.server
    with other_user(first, tmp_path / "received") as user:

        def go() -> None:
            user.wait()
            (run.folder / "go").touch()

        assert run.then(go).end() == Ending(0)
        assert user.received == []
    last = run.attempt.plan.ports.server
    assert last != first and f"); using {last}" in capsys.readouterr().out


def test_a_server_is_started_again_with_each_model_that_the_trainer_names(fake_run, tmp_path, capsys):
    run = fake_run(steps=20, bridge="restart")
    commands = []

    def ready(epoch: int, number: int) -> None:
        state = {"epoch": epoch, "state": "ready", "model": str(tmp_path / f"sync/model-{number}")}
        run.wait_until(lambda: run.state() == state)
        commands.append(psutil.Process(read_json(run.folder / "processes/server.json")["pid"]).cmdline()[-1])

    def name(number: int) -> None:
        folder = tmp_path / f"sync/model-{number}"
        folder.mkdir(parents=True)
        (tmp_path / "link").symlink_to(folder)
        (tmp_path / "link").replace(tmp_path / "sync/newest_model")

    def train() -> None:
        run.wait_for_step(2)
        assert run.state() == {"epoch": 1, "state": "ready"}
        trainer = read_json(run.folder / "processes/trainer.json")
        name(1)
        ready(2, 1)
        run.kill("server")
        ready(3, 1)  # a server that dies restarts with the same model
        name(2)
        ready(4, 2)
        assert read_json(run.folder / "processes/trainer.json") == trainer

    assert run.then(train).end() == Ending(0)
    assert [Path(path).name for path in commands] == ["model-1", "model-1", "model-2"]
    assert run.summary()["server_restarts"] == 1  # the server that died
    assert capsys.readouterr().out.count("started again") == 1


def test_without_reconnecting_both_go_on_from_the_newest_checkpoint(fake_run, capsys):
    run = fake_run(bridge="nccl")

    def kill() -> None:
        run.wait_for_step(2)
        first = read_json(run.folder / "processes/trainer.json")
        run.kill("server")
        run.wait_until(lambda: run.state()["epoch"] == 2)
        run.wait_until(lambda: (read_json(run.folder / "processes/trainer.json") or first) != first)

    assert run.then(kill).end() == Ending(0)
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, 9))
    out = capsys.readouterr().out
    assert "server and trainers are started again from the newest checkpoint (1 of 2)" in out
    assert "resuming from checkpoint-" in out


def damage_and_kill(run: FakeRun, selection: slice) -> None:
    """Stop the trainer's steps, damage the selected checkpoints (oldest first), and kill the server."""
    run.wait_for_step(3)
    (run.folder / "hang").touch()
    time.sleep(0.4)
    for checkpoint in list_complete_checkpoints(run.folder / "checkpoints")[selection]:
        (checkpoint / "COMPLETE").write_text("null")
    run.kill("server")


@pytest.mark.slow
def test_a_restart_passes_over_a_damaged_checkpoint_and_says_so(fake_run, capsys):
    run = fake_run(bridge="nccl")

    def damage() -> None:
        damage_and_kill(run, slice(-1, None))
        run.wait_until(lambda: run.state().get("epoch") == 2)
        (run.folder / "hang").unlink()

    assert run.then(damage).end() == Ending(0)
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, 9))
    out = capsys.readouterr().out
    (aside,) = (run.folder / "checkpoints").glob("*.damaged")
    step = int(aside.stem.rpartition("-")[2])
    assert f"checkpoint-{step} is damaged: COMPLETE is damaged; renamed to {aside.name}, resuming from " in out
    assert f"resuming from checkpoint-{step - 1}; 1 later rows" in out


def test_a_restart_without_a_usable_checkpoint_ends_the_run_with_one_line(fake_run, capsys):
    run = fake_run(bridge="nccl")
    run.then(lambda: damage_and_kill(run, slice(None)))
    with StopSignals() as stop:
        ending = supervise(run.attempt, stop)
    assert ending.code == 1 and "contains no checkpoint that can be resumed: checkpoint-" in ending.cause
    assert "Traceback" not in capsys.readouterr().err


def test_a_server_whose_guard_was_killed_is_ended_before_the_next_one_starts(fake_run):
    run = fake_run()
    first: dict = {}

    def kill() -> None:
        run.wait_for_step(2)
        first.update(read_json(run.folder / "processes/server.json"))
        os.kill(first["guard"], signal.SIGKILL)
        run.wait_until(lambda: run.state().get("epoch") == 2)

    assert run.then(kill).end() == Ending(0)
    assert not is_alive(first["pid"]) and run.summary()["server_restarts"] == 1


@pytest.mark.parametrize(
    ("script", "code", "how"), [("exit 3", 3, "exited with code 3"), ("kill -9 $$", 137, "was killed by signal 9")]
)
@pytest.mark.parametrize("key", ["model_name_or_path", "dataset_name", "eval_dataset_name"])
def test_a_smoke_task_that_could_not_be_made_ends_the_run_with_its_code(
    fake_run, monkeypatch, tmp_path, script, code, how, key
):
    monkeypatch.setattr(built_in, "smoke_command", lambda *_: (tmp_path / "smoke", ["sh", "-c", script]))
    run = fake_run()
    user_keys = {"model_name_or_path": "own", "dataset_name": "own.jsonl", "eval_dataset_name": None}
    attempt = replace(run.attempt, recipe=user_keys | {key: "smoke:sums"})
    assert launch_run.make_smoke_task(attempt, StopSignals()) == Ending(code, f"python -m grpo_recipes.smoke {how}")


def test_a_smoke_task_is_made_once_for_a_model_of_the_users_own(fake_run, monkeypatch, tmp_path):
    script = 'mkdir -p "$0"; echo >> "$0/made"'
    monkeypatch.setattr(
        built_in, "smoke_command", lambda name, _: (tmp_path / name, ["sh", "-c", script, str(tmp_path / name)])
    )
    run = fake_run()
    names = {"model_name_or_path": "own", "dataset_name": "smoke:sums", "eval_dataset_name": "smoke:sums"}
    assert launch_run.make_smoke_task(replace(run.attempt, recipe=names), StopSignals()) is None
    assert [path.name for path in tmp_path.glob("smoke:*")] == ["smoke:sums"]
    assert (tmp_path / "smoke:sums/made").read_text() == "\n"
    (tmp_path / "smoke:sums/COMPLETE").touch()
    assert launch_run.make_smoke_task(replace(run.attempt, recipe=names), StopSignals()) is None
    assert (tmp_path / "smoke:sums/made").read_text() == "\n"


@pytest.mark.parametrize("how", ["grpo stop", "Ctrl-C"])
def test_a_request_to_stop_ends_the_creation_of_the_smoke_model(fake_run, monkeypatch, tmp_path, how):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background test run ignores it
    script = 'echo $$ > "$0"; while :; do sleep 0.1; done'
    pid_file = tmp_path / "pid"
    command = ["bash", "-c", script, str(pid_file)]
    monkeypatch.setattr(built_in, "smoke_command", lambda *_: (tmp_path / "smoke", command))
    run = fake_run(model_name_or_path="smoke:sums")
    requested_at = []

    def stop() -> None:
        run.wait_until(lambda: pid_file.exists() and pid_file.read_text().strip())
        requested_at.append(time.monotonic())
        if how == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        else:
            stop_file(run.folder).touch()

    ending = run.then(stop).end(whole=True)
    signal.signal(signal.SIGINT, before)

    assert time.monotonic() - requested_at[0] < 4  # 2 s on a quiet machine
    assert not is_alive(int(pid_file.read_text()))
    stopped = "stopped on request before this attempt had anything to save"
    assert ending == (Ending(75, stopped) if how == "grpo stop" else Ending(130, "stopped by SIGINT"))


def test_server_restarts_0_ends_the_run_with_the_server(fake_run):
    run = fake_run(server_restarts=0)

    def kill() -> None:
        run.wait_for_step(1)
        run.kill("server")

    ending = run.then(kill).end()
    assert ending.code == 137 and "the vLLM API server" in ending.cause
    assert "server_restarts" not in run.summary()


def test_a_server_that_was_never_ready_is_not_started_again(fake_run, capsys):
    run = fake_run(server="no-such-command")
    run.attempt.plan = replace(run.attempt.plan, weight_bytes=20 * 10**9, server_timeout=1200)
    ending = run.end()
    assert ending.code == 1 and ending.cause == "the vLLM server died before it was ready"
    assert run.state() == {"epoch": 1, "state": "gone"}
    line = "grpo: waiting for the vLLM server, at most 1200 s: it reads 20.0 GB of weights, loads the model"
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_that_makes_no_token_is_replaced(fake_run, capsys):
    run = fake_run(server_stall_timeout=1.0)

    def hang() -> None:
        run.wait_for_step(2)
        (run.folder / "hang").touch()
        run.wait_until(lambda: run.state().get("epoch") == 2)
        (run.folder / "hang").unlink()

    assert run.then(hang).end() == Ending(0)
    assert "(server_stall_timeout 1)" in capsys.readouterr().out
    assert run.summary()["server_restarts"] == 1


@pytest.mark.slow
def test_a_server_that_is_stopped_is_replaced(fake_run):
    run = fake_run(steps=200, server_stall_timeout=1.0)

    def stop() -> None:
        run.wait_for_step(2)
        run.kill("server", signal.SIGSTOP)
        run.wait_until(lambda: run.state().get("epoch") == 2)
        stop_file(run.folder).touch()

    assert run.then(stop).end().code == 75
    assert run.summary()["server_restarts"] == 1


def test_a_rank_that_stands_still_ends_the_run(fake_run, tmp_path):
    lock = tmp_path / "extensions/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    ending = fake_run(phase="start", stall_timeout=1.0).end()
    assert (ending.code, ending.failed_rank) == (1, 0), ending
    assert ending.cause.startswith("rank 0 has been in phase start after step 0 for ")
    assert ending.cause.endswith(f"rm {lock}")


# A third role. Its process notes the state of the server when it starts.
TOY = """
import json, os, pathlib, time
run = pathlib.Path(os.environ["GRPO_RUN_DIR"])
path = run / "processes/server_state.json"
state = json.loads(path.read_text())["state"] if path.exists() else "none"
with (run / "toy").open("ab", buffering=0) as file:
    file.write(f"{state}\\n".encode())
time.sleep(300)
"""


def toy(tmp_path: Path, on_loss: OnLoss) -> Process:
    return Process(
        "toy", [sys.executable, "-c", TOY], {}, (), str(tmp_path / "toy.log"), 0, ("server",), on_loss=on_loss
    )


def kill_toy(run: FakeRun) -> None:
    run.wait_for_step(2)
    # Trainers do not wait for it on a busy machine.
    run.wait_until(
        lambda: run.records("toy")[0] and (run.folder / "toy").is_file() and (run.folder / "toy").read_text()
    )
    run.kill("toy")


def test_a_role_of_its_own_starts_in_the_order_of_the_plan_and_its_loss_can_fail_the_run(
    fake_run, tmp_path, monkeypatch
):
    started: list[str] = []

    class RecordedChild(Child):
        def __init__(self, process: Process, *arguments) -> None:
            started.append(process.role)
            super().__init__(process, *arguments)

    monkeypatch.setattr(launch_run, "Child", RecordedChild)
    run = fake_run(steps=200, last=[toy(tmp_path, "fail")])
    ending = run.then(lambda: kill_toy(run)).end()
    assert [process.role for process in run.attempt.plan.processes] == ["server", "trainer", "toy"]
    assert started == ["server", "toy", "trainer"]
    assert (run.folder / "toy").read_text() == "ready\n", "it waited for the server"
    assert ending.code == 137 and ending.log == tmp_path / "toy.log"
    (record,) = run.records("toy")
    assert ending.cause == f"the toy process (pid {record['pid']}) was killed by signal 9"
    assert "server_restarts" not in run.summary()


def test_a_role_of_its_own_can_be_restarted_alone(fake_run, tmp_path, capsys, monkeypatch):
    run = fake_run(steps=100, last=[toy(tmp_path, "restart")])  # 10 s, in which a busy machine starts the role again
    before: list = []
    orders: list[list[str]] = []

    def recorded(groups: Sequence[Group], *arguments) -> Ending:
        orders.append([group.process.role for group in groups])
        return wait_for_ending(groups, *arguments)

    monkeypatch.setattr(launch_run.processes, "wait_for_ending", recorded)

    def kill() -> None:
        run.wait_for_step(1)
        before.extend(run.records("server", "trainer"))
        kill_toy(run)
        run.wait_until(lambda: len((run.folder / "toy").read_text().splitlines()) == 2)
        assert run.records("server", "trainer") == before

    assert run.then(kill).end() == Ending(0)
    assert "was killed by signal 9: only the toy is started again (1 of 2)" in capsys.readouterr().out
    assert orders == [["server", "toy", "trainer"]] * 2, "the order of the plan, also after a restart"
    assert run.state() == {"epoch": 1, "state": "gone"}


@pytest.mark.slow
def test_a_role_of_its_own_can_be_restarted_with_the_trainers(fake_run, tmp_path, capsys):
    run = fake_run(steps=20, last=[toy(tmp_path, "restart with trainers")])
    before: list = []

    def kill() -> None:
        run.wait_for_step(1)
        before.extend(run.records("server", "trainer"))
        kill_toy(run)
        run.wait_until(lambda: (run.records("trainer")[0] or before[1]) != before[1])
        assert run.records("server") == before[:1]

    assert run.then(kill).end() == Ending(0)
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, 21))
    out = capsys.readouterr().out
    assert "toy and trainers are started again from the newest checkpoint (1 of 2)" in out
    assert "resuming from checkpoint-" in out


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_while_trainers_train_has_them_save(fake_run, signum):
    run = fake_run(steps=200)

    def ask() -> None:
        run.wait_for_step(1)  # sooner than the launcher's next look at the phases
        os.kill(os.getpid(), signum)

    ending = run.then(ask).end()
    assert (ending.code, ending.cause) == (75, "rank 0: stopped on request")


def test_a_server_that_scancel_ended_with_the_rest_is_not_to_blame(fake_run):
    run = fake_run(steps=200)

    def cancel() -> None:
        run.wait_for_step(2)
        os.kill(os.getpid(), signal.SIGTERM)
        run.kill("server", signal.SIGTERM)

    assert run.then(cancel).end().cause == "rank 0: stopped on request"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_before_there_is_anything_to_save_a_signal_ends_it_at_once(fake_run, signum, code):
    run = fake_run(phase="start")

    def ask() -> None:
        run.wait_until(lambda: (run.folder / "processes/phase_0.json").exists())
        os.kill(os.getpid(), signum)

    assert run.then(ask).end().code == code


def test_a_request_by_file_while_the_server_starts_ends_it_at_once(fake_run):
    run = fake_run()
    stop_file(run.folder).touch()
    assert run.end().code == 75
    assert read_metrics(run.folder) == []


def waiting(run: FakeRun) -> None:
    """Wait until the trainers run and the server starts: each writes its record after its process has started."""
    run.wait_until((run.folder / "processes/phase_0.json").exists)
    run.wait_until(lambda: all("pid" in record for record in run.records("server", "trainer")))
    assert run.state() == {"epoch": 1, "state": "starting"}


def test_trainers_start_beside_the_server_and_wait_for_it(fake_run, capsys):
    run = fake_run(phase="sample", server="late-server")

    def let_it_serve() -> None:
        waiting(run)
        assert read_metrics(run.folder) == []
        (run.folder / "go").touch()

    assert run.then(let_it_serve).end() == Ending(0)
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, 9))
    assert "server ready after" in capsys.readouterr().out


@pytest.mark.slow
def test_a_server_that_dies_while_trainers_wait_for_it_is_to_blame(fake_run):
    run = fake_run(phase="start", server="late-server")
    trainers = []

    def kill() -> None:
        waiting(run)
        trainers.extend(run.records("trainer"))
        run.kill("server")

    ending = run.then(kill).end(whole=True)
    assert (ending.code, ending.cause) == (137, "the vLLM server died before it was ready")
    assert ending.log == run.folder / "s.log" and run.state() == {"epoch": 1, "state": "gone"}
    assert not any(is_alive(trainer["pid"]) for trainer in trainers) and "server_restarts" not in run.summary()


def test_trainers_that_die_before_the_server_is_ready_end_the_run_at_once(fake_run):
    run = fake_run(phase="start", server="late-server")

    def kill() -> None:
        waiting(run)
        run.kill("trainer")

    ending = run.then(kill).end(whole=True)
    assert ending.code == 137 and ending.log == run.folder / "t.log"
    assert not is_alive(run.records("server")[0]["pid"])


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGUSR1, 75),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (None, 75),
    ],
)
def test_a_request_to_stop_while_trainers_wait_for_the_server_ends_all_at_once(fake_run, signum, code):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has it ignored
    run = fake_run(phase="start", server="late-server")

    def ask() -> None:
        waiting(run)
        os.kill(os.getpid(), signum) if signum else stop_file(run.folder).touch()

    assert run.then(ask).end(whole=True).code == code
    assert not any(is_alive(process["pid"]) for process in run.records("server", "trainer"))


@pytest.mark.slow
def test_trainers_that_wait_for_the_server_do_not_stand_still(fake_run):
    run = fake_run(phase="start", server="late-server", stall_timeout=1.0)
    states = []

    def let_it_serve() -> None:
        waiting(run)
        time.sleep(2.5)
        states.append(run.state()["state"])
        (run.folder / "go").touch()

    assert "in phase start" in run.then(let_it_serve).end().cause
    assert states == ["starting"]


@pytest.mark.slow
def test_what_is_lost_while_the_server_starts_is_started_again_with_the_trainers(fake_run, tmp_path):
    run = fake_run(server="late-server", first=[replace(toy(tmp_path, "restart with trainers"), after=())])
    before: list = []

    def kill() -> None:
        run.wait_until((run.folder / "toy").exists)
        waiting(run)
        before.extend(run.records("toy", "server", "trainer"))
        run.kill("toy")
        run.wait_until(lambda: run.began_again({"toy": before[0], "server": before[1], "trainer": before[2]}))
        (run.folder / "go").touch()

    assert run.then(kill).end() == Ending(0)
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, 9))
