"""Every phase honors a stop request, and the resumed run equals the uninterrupted run, bit for bit on CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

from grpo_recipes.rewards.score import RewardWrapper
from grpo_recipes.runs import stop_request as stop_module
from grpo_recipes.runs.checkpoints import list_complete_checkpoints, parse_step
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import CutShort, StopRequest

from .scored_trainer import make_trainer, own_rewards, scored
from .stopped_runs import Moment, outcome, run
from .tiny_training import different_characters


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    result = outcome(folder, run(folder)[0])
    assert len({json.dumps(row["loss"]) for row in result["metrics"]}) == 5 and len(result["eval"]) == 3
    return result


@pytest.mark.parametrize(
    ("phase", "step", "generation", "saved"),
    [
        ("sample", 2, 1, 1),
        ("sample", 4, 2, 3),  # gradients of the first generation are dropped; an epoch has just ended
        pytest.param("score", 3, 2, 2, marks=pytest.mark.slow),
        pytest.param("evaluate", 2, 1, 2, marks=pytest.mark.slow),
        ("update", 3, 1, 3),  # the last step of an epoch
        pytest.param("save", 4, 1, 4, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_goes_on_as_if_left_alone(
    tmp_path: Path,
    whole: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    step: int,
    generation: int,
    saved: int,
) -> None:
    monkeypatch.setattr(stop_module, "POLL_SECONDS", 0.0)
    moment = Moment(stop_file(tmp_path).touch, phase, step, generation)

    _, stopped = run(tmp_path, moment)

    assert str(stopped) == f"stopped on request after step {saved}, state saved" and stopped.code == 75
    assert [parse_step(path) for path in list_complete_checkpoints(tmp_path / "checkpoints")] == [saved]
    assert phase != "sample" or moment.forwards <= 1  # of 8
    trainer, stopped = run(tmp_path)
    assert stopped is None and outcome(tmp_path, trainer) == whole


@pytest.mark.slow
def test_nothing_is_saved_before_the_first_step(tmp_path: Path, whole: dict[str, Any]) -> None:
    _, stopped = run(tmp_path, Moment(stop_file(tmp_path).touch, "begin", 1))
    assert str(stopped) == "stopped on request before the first step was completed; there is nothing to save"
    assert not (tmp_path / "metrics.jsonl").exists() and not list_complete_checkpoints(tmp_path / "checkpoints")
    assert outcome(tmp_path, run(tmp_path)[0]) == whole


@pytest.mark.slow
def test_the_checkpoint_stands_where_a_resumed_run_completed_no_step(tmp_path: Path, whole: dict[str, Any]) -> None:
    run(tmp_path, Moment(stop_file(tmp_path).touch, "evaluate", 2))

    _, stopped = run(tmp_path, Moment(stop_file(tmp_path).touch, "score", 3))  # the evaluation was made up for

    assert str(stopped) == "stopped on request before a step was completed; the newest checkpoint is checkpoint-2"
    assert outcome(tmp_path, run(tmp_path)[0]) == whole


def test_a_request_after_the_last_step_changes_nothing(tmp_path: Path, whole: dict[str, Any]) -> None:
    trainer, stopped = run(tmp_path, Moment(stop_file(tmp_path).touch, "update", 5))
    assert stopped is None and outcome(tmp_path, trainer) == whole


@pytest.mark.slow
def test_a_stop_on_start_is_before_the_first_evaluation(tmp_path: Path) -> None:
    _, stopped = run(tmp_path, Moment(stop_file(tmp_path).touch, "evaluate", 1), eval_on_start=True)
    assert "nothing to save" in str(stopped)
    run(tmp_path, eval_on_start=True)
    steps = [json.loads(line)["step"] for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert steps == [0, 2, 4, 5]


@pytest.mark.slow
def test_two_processes_stop_together(tmp_path: Path) -> None:
    run_ranks("trainers.stopped_runs", str(tmp_path))
    for rank in (0, 1):
        results = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        expected = results.pop("whole")
        assert sorted(results) == ["evaluate-1", "sample-1", "sample-2", "score-2"]
        for name, other in results.items():
            assert other.pop("stopped") == "stopped on request after step 2, state saved", name
            assert other == expected, (rank, name)


SLEEPS = """
import time

def own(completions):
    time.sleep(60 if "first call" not in completions[0] else 0)
    return [1.0] * len(completions)
"""


def sleeps(completions: list[Any]) -> list[float]:
    time.sleep(60)
    return [1.0] * len(completions)


@pytest.mark.parametrize("apart", [True, False], ids=["child process", "in process"])
def test_a_reward_that_takes_long_is_cut_short(tmp_path: Path, apart: bool) -> None:
    rewards = own_rewards(tmp_path, SLEEPS, reward_timeout=50.0) if apart else [RewardWrapper(sleeps, "own", "own")]
    stop = StopRequest(tmp_path)
    stop.listen()
    trainer = make_trainer(tmp_path, rewards, max_steps=2, stop=stop)
    asked_at: list[float] = []

    def ask() -> None:
        asked_at.append(time.monotonic())
        stop_file(tmp_path).touch()

    threading.Timer(1.5, ask).start()
    with pytest.raises(SystemExit, match="nothing to save"):
        trainer.train()
    assert time.monotonic() - asked_at[0] < 5


def test_a_request_ends_work_only_where_its_result_is_not_needed(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path)
    stop.listen()
    stop_file(tmp_path).touch()
    assert stop.requested() and not stop.cuts()
    with stop.interrupting():
        time.sleep(0.3)  # the benchmarks after training: not interrupted
    with stop.cutting_short():
        assert stop.cuts()
        with pytest.raises(CutShort), stop.interrupting():
            time.sleep(10)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_a_rank_alone_asks_for_the_same_as_to_the_launcher(tmp_path: Path, signum: int) -> None:
    stop = StopRequest(tmp_path)
    before = signal.signal(signum, lambda *_: None)  # the default handler would end the tests
    stop.listen()
    os.kill(os.getpid(), signum)
    assert stop.requested()
    signal.signal(signum, before)


def test_a_generate_of_the_models_own_stays_in_place(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [different_characters], max_steps=2)
    generate, called = trainer.model.generate, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        called.append(len(kwargs["stopping_criteria"]))
        return generate(*args, **kwargs)

    trainer.model.generate = counted
    trainer.train()
    assert called == [1, 1] and trainer.model.generate is counted

    del trainer.model.generate
    scored(trainer, prompts=1, each=8)
    assert "generate" not in vars(trainer.model)


def test_the_file_is_looked_at_ten_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, looks = StopRequest(tmp_path), []
    monkeypatch.setattr(
        stop, "_file", type("Noted", (), {"exists": lambda self: bool(looks.append(time.monotonic()))})()
    )
    with stop.cutting_short():
        end = time.monotonic() + 0.35
        while time.monotonic() < end:
            stop.cuts()
    assert 3 <= len(looks) <= 4


def test_a_forked_worker_still_dies_of_sigterm(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from grpo_recipes.runs.stop_request import StopRequest\n"
        "stop = StopRequest(Path(sys.argv[1])); stop.listen(); child = os.fork()\n"
        "if child == 0: time.sleep(30); os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGTERM); assert stop.requested()\n"
        "time.sleep(0.2); os.kill(child, signal.SIGTERM); sys.exit(os.waitpid(child, 0)[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    assert done.returncode == 15


@pytest.mark.slow
def test_what_was_restored_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, Moment(stop_file(tmp_path).touch, "score", 2))
    capsys.readouterr()
    run(tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("grpo: restored ")]
    assert [line.removeprefix("grpo: restored ").split(":")[0].split(" 0")[0].split(" -")[0] for line in lines] == [
        "optimizer and learning-rate schedule",
        "random states of Python, numpy and torch",
        "generation window",
        "metrics of steps not logged yet",
        "completions last shown",
        "running loss",
        "evaluation",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["grpo_window_0.pt", "rng_state.pth", "optimizer.pt", "scheduler.pt", "trainer_state.json"]
)
def test_a_missing_part_of_a_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    run(tmp_path, Moment(stop_file(tmp_path).touch, "score", 2))
    (checkpoint,) = list_complete_checkpoints(tmp_path / "checkpoints")
    marker = json.loads((checkpoint / "COMPLETE").read_text())
    del marker["files"][name], marker["digests"], marker["checksum"]  # the marker of an earlier version
    (checkpoint / "COMPLETE").write_text(json.dumps(marker))
    (checkpoint / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        run(tmp_path)


def test_the_launcher_is_told_each_phase(tmp_path: Path) -> None:
    file, phases = tmp_path / "processes" / "phase_0.json", []

    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        phases.append(json.loads(file.read_text()))
        return different_characters(completions)

    class Notes(Moment):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            phases.append(json.loads(file.read_text()))

    notes = Notes(lambda: None, "", 0)
    notes.__class__.__call__ = lambda self, **columns: reward(**columns)
    run(tmp_path, notes, max_steps=1)
    assert [(record["phase"], record["step"]) for record in phases[:3]] == [("score", 0), ("score", 0), ("update", 0)]
    assert {(record["phase"], record["step"]) for record in phases[3:]} == {("score", 1)}  # of the evaluation
    assert json.loads(file.read_text())["phase"] == "update"
    assert abs(phases[0]["since"] - time.time()) < 60
