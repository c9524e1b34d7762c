"""Run `grpo launch` from the command line to the start of fake processes, and test its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import launch_in

from grpo_recipes.cli import main
from grpo_recipes.errors import EXIT_CONFIG_ERROR, EXIT_STOPPED
from grpo_recipes.launch import run as launch_run
from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.nodes import NodeWorkers
from grpo_recipes.launch.processes import Ending
from grpo_recipes.paths import display_path
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.rundir import NO_REQUEUE, finish_summary, read_json

STOPPED = Ending(EXIT_STOPPED, "rank 0: stopped on request before a step")
DIED = "the vLLM server died before it was ready"


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Path]]:
    """``launched(words..., ending=...)``: exit code and run directory of a launch; fake processes leave server_log."""
    launch_in(tmp_path, monkeypatch)

    def launch(*words: str, ending: Ending = STOPPED, server_log: str = "") -> tuple[int, Path]:
        def fake_supervise(attempt: Attempt, stop: object) -> Ending:
            launch_run.print_start(attempt)
            Path(attempt.plan.process("server").log).write_text(server_log)
            attempt.scratch.remove()
            return ending

        monkeypatch.setattr(launch_run, "supervise", fake_supervise)
        code = main(["launch", *(words or ("recipes/smoke/grpo.yaml",))])
        (run,) = (tmp_path / "runs").glob("*-*")
        (run / "lock").unlink(missing_ok=True)  # this process has it, as a launch does until it ends
        return code, run

    return launch


def test_all_that_is_printed_is_in_the_log_of_the_run_which_grpo_logs_shows(launched, capsys):
    _, run = launched()
    first = capsys.readouterr().out
    launched("--resume", str(run), "--learning_rate", "2e-6")
    second = capsys.readouterr().out
    lines = (run / "launch.log").read_text().splitlines()
    heads = [place for place, line in enumerate(lines) if line[6:10].isdigit() and line.startswith("grpo: 20")]
    assert len(heads) == 2 and heads[0] == 0, "each attempt begins with its time and command"
    assert lines[1 : heads[1]] == first.splitlines() and lines[heads[1] + 1 :] == second.splitlines()
    assert "resuming" not in first and f"-> {run.relative_to(Path.cwd())}" in first
    assert main(["logs", "last"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("==> ") and shown[0].endswith("/launch.log <==") and shown[1:] == lines


def test_an_edit_of_the_recipe_that_a_launch_left_is_refused_or_noted(launched, capsys):
    _, run = launched()
    assert launched("--resume", str(run))[0] == EXIT_STOPPED
    assert "recipe.yaml was" not in capsys.readouterr().out
    recipe = run / "recipe.yaml"
    recipe.write_text(f"{recipe.read_text()}# x.yaml:3\nweight_decay: 0.5\n")
    assert launched("--resume", str(run))[0] == EXIT_CONFIG_ERROR
    assert (
        "recipe.yaml: was changed since the run wrote it. Fix: restore the file that the run" in capsys.readouterr().err
    )
    assert launched("--resume", str(run), "--allow-changed-code")[0] == EXIT_STOPPED
    assert "recipe.yaml was edited since the last attempt; the run uses the edited keys" in capsys.readouterr().out
    launched("--resume", str(run))
    assert "recipe.yaml was" not in capsys.readouterr().out, "once"


def test_a_stop_during_the_preparation_of_a_resume_is_for_this_attempt(launched, monkeypatch):
    """A job that Slurm has started again may prepare its attempt for minutes."""
    _, run = launched()
    for name in ("stop", NO_REQUEUE):
        (run / name).touch()
    make_plan = launch_run.make_plan

    def plan_after_stop(*arguments: object) -> object:
        (run / NO_REQUEUE).touch()
        return make_plan(*arguments)

    monkeypatch.setattr(launch_run, "make_plan", plan_after_stop)
    launched("--resume", str(run))
    assert (run / NO_REQUEUE).exists() and not (run / "stop").exists()


def test_a_completed_run_is_left_as_it_is_unless_something_is_to_be_done(launched, capsys):
    _, run = launched()
    finish_summary(run, status="completed", steps=60)
    (run / "model").mkdir()
    capsys.readouterr()
    assert launched("--resume", str(run))[0] == 0
    output = capsys.readouterr().out
    assert output == f"grpo: {display_path(run)} has completed its 60 steps; raise --max_steps to train further\n"
    assert read_json(run / "summary.json")["status"] == "completed"

    finish_summary(run, status="completed", steps=60, stopped_early=True)
    assert launched("--resume", str(run))[0] == 0
    assert "60 steps; raise --early_stopping_patience to train further" in capsys.readouterr().out
    assert launched("--resume", str(run), "--max_steps", "70")[0] == EXIT_STOPPED, "more steps"
    finish_summary(run, status="completed", published={"error": "no route"})
    assert launched("--resume", str(run))[0] == EXIT_STOPPED, "still to be published"
    finish_summary(run, status="completed", published=None)
    (run / "model").rmdir()
    assert launched("--resume", str(run))[0] == EXIT_STOPPED, "its model is gone"


def test_a_benchmark_is_printed_and_kept_where_it_was_asked_for(launched, capsys):
    """Also of the rows that an earlier attempt wrote, and of a run that has nothing left to do."""
    _, run = launched()
    rows = [{"step": step, "seconds/update": 2.0, "seconds/sync": 0.5, "syncs": 1} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finish_summary(run, status="completed", launch_seconds=9.0)
    (run / "model").mkdir()
    launched("--resume", str(run))
    assert "BENCHMARK" not in capsys.readouterr().out and not (run / "benchmark.json").exists()

    assert launched("--resume", str(run), "--benchmark")[0] == 0
    output = capsys.readouterr().out
    assert "BENCHMARK SUMMARY (file)\n" in output and "Avg sync time:         0.500s (x2 syncs)\n" in output
    assert read_json(run / "benchmark.json")["total_time_seconds"] == 9.0

    (run / "benchmark.json").unlink()
    for words, shown_again in ((("--max_steps", "70"), False), (("--max_steps", "80", "--benchmark"), True)):
        launched("--resume", str(run), *words)
        assert ("BENCHMARK SUMMARY (file)\n" in capsys.readouterr().out) == shown_again
        assert (run / "benchmark.json").exists() == shown_again
    assert read_json(run / "summary.json")["launch_seconds"] > 9.0, "of all attempts"


def test_update_rewards_takes_the_changed_file(launched, tmp_path, capsys):
    reward_file = tmp_path / "own.py"
    reward_file.write_text("def score(completions): return [0.0]\n")
    _, run = launched("recipes/smoke/grpo.yaml", "--reward_funcs", "own.py:score")
    assert launched("--resume", str(run), "--update-rewards")[0] == EXIT_CONFIG_ERROR, "nothing has changed"
    reward_file.write_text("def score(completions): return [1.0]\n")
    launched("--resume", str(run))
    assert "[0.0]" in (run / "rewards/own.py").read_text()
    launched("--resume", str(run), "--update-rewards")
    assert "[1.0]" in (run / "rewards/own.py").read_text()
    assert "grpo: note: --update-rewards: the run now uses the current own.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("OSError: [Errno 28] No space left on device", "find it with grpo doctor, then free space"),
        ("Bus error (core dumped)", "enlarge /dev/shm"),
        ("OSError: [Errno 24] Too many open files", "run ulimit -n 65536"),
        ('zmq.error.ZMQError: ipc path "/x" is longer than 107 characters', "set TMPDIR to a short path"),
        ("ValueError: a model of another kind", "read its last lines above; grpo check --deep /"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cause", [DIED, "the vLLM API server (pid 7) exited with code 1"])
def test_what_a_server_that_died_said_of_the_machine_is_the_fix(launched, capsys, cause, message, fix):
    if cause != DIED and "another kind" in message:
        fix = "read the reason in its log"
    code, _ = launched(ending=Ending(1, cause), server_log=f"INFO loading\n{message}\n")
    assert code == 1 and f"grpo: next    {fix}" in capsys.readouterr().out


def test_ports_that_rank_0_opens_are_asked_for_on_its_node(launched, monkeypatch):
    checked = []
    monkeypatch.setattr(
        NodeWorkers, "make_port_checker", lambda _, node: lambda port: checked.append((node, port)) or True
    )
    _, run = launched()
    ports = read_json(run / "plan.json")["ports"]
    assert checked == [(0, ports["group"]), (0, ports["main_process"])]


def completed(run: Path, steps: int = 6) -> None:
    """Make a run look as if it had completed these steps."""
    staged = run / "checkpoints" / "partial" / f"checkpoint-{steps}"
    staged.mkdir(parents=True)
    publish_checkpoint(staged, run / "checkpoints", steps, 1)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)))
    (run / "model").mkdir()
    finish_summary(run, status="completed")


def test_the_second_node_of_a_completed_run_ends_without_a_meeting(launched, capsys):
    """R12: a node that the user starts by hand for a completed run does not wait for node 0."""
    _, run = launched()
    completed(run)
    capsys.readouterr()
    nodes = ("--nodes", "2", "--node-rank", "1", "--master-addr", "192.0.2.1")
    assert launched("--resume", str(run), *nodes)[0] == 0
    assert "has completed its 6 steps" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [("--max_steps", "4"), ("--max_steps=6",), ("--max-steps", "1")])
def test_a_completed_run_that_is_asked_for_no_further_step_stays_completed(launched, capsys, steps):
    """R10: a smaller or equal max_steps starts nothing."""
    _, run = launched()
    completed(run)
    before = (run / "summary.json").read_bytes()
    capsys.readouterr()
    assert launched("--resume", str(run), *steps)[0] == 0
    assert "has completed its 6 steps; raise --max_steps to train further" in capsys.readouterr().out
    assert (run / "summary.json").read_bytes() == before
    assert launched("--resume", str(run), *steps, "--save_steps", "3")[0] == EXIT_STOPPED, (
        "another key may ask for work"
    )


@pytest.mark.parametrize(
    "flags", [("--num_train_epochs", "1"), ("--num_train_epochs=2",), ("--num-train-epochs", "0.5")]
)
def test_a_completed_run_that_is_asked_for_no_further_epoch_stays_completed(launched, capsys, flags):
    """R10: fewer or the same epochs start nothing either."""
    _, run = launched("recipes/smoke/grpo.yaml", "--max_steps", "-1", "--num_train_epochs", "2")
    completed(run)
    rows = "".join(json.dumps({"step": step, "epoch": step / 3}) + "\n" for step in range(1, 7))
    (run / "metrics.jsonl").write_text(rows)
    before = (run / "summary.json").read_bytes()
    capsys.readouterr()
    assert launched("--resume", str(run), *flags)[0] == 0
    assert "has completed its 6 steps; raise --num_train_epochs to train further" in capsys.readouterr().out
    assert (run / "summary.json").read_bytes() == before
    assert launched("--resume", str(run), "--num_train_epochs", "2.1")[0] == EXIT_STOPPED, "more epochs"


def test_epochs_that_max_steps_overrides_ask_for_no_further_step(launched, capsys):
    """R10: max_steps ends the run for any num_train_epochs."""
    _, run = launched("recipes/smoke/grpo.yaml", "--max_steps", "6")
    completed(run)
    capsys.readouterr()
    assert launched("--resume", str(run), "--num_train_epochs", "5")[0] == 0
    assert "has completed its 6 steps; raise --max_steps to train further" in capsys.readouterr().out


def test_a_resume_without_metrics_jsonl_is_rejected_unless_it_is_wanted(launched, capsys):
    """S10: deleting metrics.jsonl before a resume is noticed, and the advice works."""
    _, run = launched()
    completed(run)
    (run / "metrics.jsonl").unlink()
    capsys.readouterr()
    resume = ("--resume", str(run), "--max_steps", "9")
    assert launched(*resume)[0] == EXIT_CONFIG_ERROR
    output = capsys.readouterr().err
    assert "metrics.jsonl: not found, but checkpoint-6 was saved after 6 steps. Fix: restore the file, or add" in output
    assert launched(*resume, "--allow-changed-code")[0] == EXIT_STOPPED
    assert "metrics.jsonl has no rows for 6 of 6 steps; report and summary lack them" in capsys.readouterr().out


def test_rows_that_a_power_loss_took_are_noted_and_block_nothing(launched, capsys):
    """R9, S10: a checkpoint can be newer than the last whole row."""
    _, run = launched()
    completed(run)
    (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n' + "\0" * 300)
    capsys.readouterr()
    assert launched("--resume", str(run), "--max_steps", "9")[0] == EXIT_STOPPED
    assert "metrics.jsonl has no rows for 4 of 6 steps" in capsys.readouterr().out
