"""`grpo status`, `grpo logs` and `grpo stop` of runs, without Slurm and with a fake Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.cli import jobs
from grpo_recipes.paths import shell_path
from grpo_recipes.plan.devices import Resources
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.rundir import NO_REQUEUE, Run, lock_run, new_run, read_json, stop_file, write_json
from grpo_recipes.slurm import client

CPU = Resources("cpu", (), 2)
# Commands that follow a run. The console adds `watch`.
FOLLOWING = [words for words in (("logs", "-f"), ("watch",)) if words[0] in cli.commands()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working folder with its own RUN_ROOT and without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setattr(client, "query", lambda *argv, **how: None)
    return tmp_path


@pytest.fixture
def fake_slurm(monkeypatch: pytest.MonkeyPatch):
    """``fake_slurm(state, reason)``: set the state of every job in a fake Slurm; None removes all jobs."""

    def say(state: str | None, reason: str = "None") -> None:
        def ask(*argv: str, seconds: float = 30.0) -> str | None:
            if state is None:
                return None
            if argv[0] == "squeue":
                return f"77|{state}|{reason}|/x/job.sh"
            return (
                f"JobId=77 JobState={state} Reason={reason} EndTime=2026-01-02T00:00:00 Command=/x/job.sh Comment=a b"
            )

        monkeypatch.setattr(client, "query", ask)

    return say


def make_run(folder: Path, name: str = "one", status: str = "running", steps: int = 0, job: str | None = None) -> Run:
    run = new_run(folder / "runs" / f"{name}-stamp", name, "stamp", CPU.facts())
    assert run is not None
    rows = [{"step": step, "max_steps": 10, "reward": 0.5, "seconds/step": 60.0} for step in range(1, steps + 1)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(run.folder / "summary.json", {"status": status, "smoke": True, "restarts": 0})
    logs = [{"role": role, "log": f"logs/{role}.log"} for role in ("server", "trainer")]
    write_json(run.folder / "plan.json", {"processes": logs, "batch": {"per_device": 1}})
    if job:
        write_json(run.folder / "job.json", {"job": job, "working_folder": str(folder)})
        (folder / "runs/.jobs").mkdir(exist_ok=True)
        (folder / "runs/.jobs" / job).write_text(str(run.folder))
    return run


def write_log(folder: Path, name: str, text: str) -> Path:
    path = folder / "logs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def run_command(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert cli.main(list(argv)) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_a_run_is_named_by_folder_name_job_or_last(folder, capsys) -> None:
    run = make_run(folder, status="completed", job="slurm-77")
    for which in (str(run.folder), run.folder.name, "77", "last"):
        assert f"run      runs/{run.folder.name}\nstate    completed\n" in run_command(capsys, "status", which)
    for which in ("78", "other", ""):
        assert "Fix: " in run_command(capsys, "status", which, code=2)


def test_a_run_name_without_its_time_names_the_newest_run(folder, capsys) -> None:
    make_run(folder, "first")
    assert cli.main(["stop", "first"]) == 2
    fix = "Fix: write first-stamp, the newest run with this run_name"
    assert f"first: is not a run directory (no run.json). {fix}" in capsys.readouterr().err
    assert cli.main(["status", "first-stamp"]) == 0


def test_a_task_of_an_array_is_named_by_its_number(folder, capsys) -> None:
    run = make_run(folder, status="completed", job="slurm-12_3")
    assert run.folder.name in run_command(capsys, "status", "12_3")


def test_an_array_job_is_told_by_its_tasks(folder, capsys) -> None:
    for task in (0, 10):
        make_run(folder, name=f"cell{task}", status="submitted", job=f"slurm-12_{task}")
    output = run_command(capsys, "stop", "12", code=2)
    assert (
        "12: is an array job of 2 runs. Fix: give the id of one run, e.g. 12_0, or stop all runs with scancel 12"
        in output
    )


def test_a_job_known_to_slurm_alone_is_found_by_its_script(folder, monkeypatch, capsys) -> None:
    run = make_run(folder)
    monkeypatch.setattr(client, "query", lambda *argv, **how: f"JobId=5 JobState=RUNNING Command={run.folder}/job.sh")
    assert run.folder.name in run_command(capsys, "status", "5")


@pytest.mark.parametrize("script", ["/x/job.sh", f"/{'a' * 300}/job.sh", "/dev/null/job.sh"])
def test_another_job_is_none_of_ours(folder, monkeypatch, capsys, script) -> None:
    monkeypatch.setattr(client, "query", lambda *argv, **how: f"JobId=5 JobState=RUNNING Command={script}")
    assert "5: no run of this job found. Fix: " in run_command(capsys, "stop", "5", code=2)


def test_status_tells_step_reward_time_left_and_logs(folder, capsys) -> None:
    run = make_run(folder, steps=4)
    write_log(folder, "trainer.log", "x\n")
    write_json(run.folder / "processes/phase_0.json", {"phase": "sample", "since": time.time() - 100, "step": 4})
    (run.folder / "eval.jsonl").write_text('{"step": 2, "eval_reward": 0.25, "prompts": 8, "seconds": 3.0}\n')
    best = {"best_step": 2, "best_eval_reward": 0.25, "evaluations_since_best": 1, "stopped_early": False}
    write_json(run.folder / "best.json", best)
    lock = lock_run(run)
    output = run_command(capsys, "status", "last")
    os.close(lock)
    assert "best     eval_reward 0.250 at step 2, then 1 evaluation without improvement\n" in output
    assert "phase    sampling for 10" in output and "eval     at step 2  reward 0.250  8 prompts  3.00 s\n" in output
    assert "phase " not in run_command(capsys, "status", "last"), "nothing runs any more"
    assert "state    running\n" in output and "step     4/10\n" in output and "reward   0.500" in output
    assert "left     about 0:06:00 of training\n" in output and "log      logs/trainer.log\n" in output


@pytest.mark.parametrize(
    ("status", "cause", "shown"),
    [("stopped", "", True), ("failed", "the server died", True), ("failed", "NotFinite: loss", False),
     ("completed", "", False)],
)  # fmt: skip
def test_status_shows_the_command_that_resumes_a_run(folder, capsys, status, cause, shown) -> None:
    run = make_run(folder, status=status, steps=4)
    assert "resume " not in run_command(capsys, "status", "last"), "without a checkpoint"
    write_json(run.folder / "summary.json", {"status": status, "cause": cause})
    staged = run.folder / "checkpoints/partial/checkpoint-4"
    staged.mkdir(parents=True)
    publish_checkpoint(staged, run.folder / "checkpoints", 4, 1)
    command = f"resume   grpo launch --resume {shell_path(run.folder)}\n"
    assert (command in run_command(capsys, "status", "last")) == shown


def test_status_of_an_ended_run_shows_what_launch_prints_at_its_end(folder, capsys) -> None:
    run = make_run(folder, status="completed", steps=4)
    (run.folder / "report.html").touch()
    write_json(run.folder / "run.json", {**run.identity, "command": "grpo launch my.yaml --seed 7"})
    lines = run_command(capsys, "status", "last").splitlines()
    if "chat" in cli.commands():  # the console writes the report and names the next command
        assert lines[-3] == f"report   runs/{run.folder.name}/report.html"
        assert lines[-1] == f"next     grpo chat runs/{run.folder.name}"
    assert f"model    runs/{run.folder.name}/model" in lines

    summary = {"status": "failed", "cause": "the vLLM server died before it was ready", "best_step": 2}
    write_json(run.folder / "summary.json", summary)
    *_, model, fix, again = run_command(capsys, "status", "last").splitlines()
    assert model == "model    no complete checkpoint"
    assert fix.startswith("fix      read its last lines above; grpo check --deep ")
    assert again == "next     grpo launch my.yaml --seed 7"


def test_status_of_a_run_that_never_started_shows_its_command(folder, capsys) -> None:
    run = make_run(folder, status="submitted")
    write_json(run.folder / "run.json", {**run.identity, "command": "grpo submit my.yaml --profile mysite"})
    output = run_command(capsys, "status", "last")
    assert output.endswith("next     grpo submit my.yaml --profile mysite\n") and "model " not in output


def test_status_shows_the_first_and_the_current_reward(folder, capsys) -> None:
    run = make_run(folder)
    rows = [{"step": step, "max_steps": 10, "reward": step / 10} for step in range(1, 11)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "reward   0.300 -> 0.800, means of the first and the last 5 of 10 steps\n" in run_command(
        capsys, "status", "last"
    )


def test_status_notes_what_the_metrics_give_reason_to(folder, capsys) -> None:
    run = make_run(folder, "completed", status="completed", steps=12)
    assert "note " not in run_command(capsys, "status", "last")
    path = run.folder / "metrics.jsonl"
    rows = [{**json.loads(row), "frac_reward_zero_std": 1} for row in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = run_command(capsys, "status", "last")
    assert "note     every completion got the reward 0.5 in 12 steps in a row" in output and ". Fix: " in output


def test_a_run_whose_launcher_is_gone_is_lost(folder, capsys) -> None:
    make_run(folder, steps=4)
    assert "state    lost: its launcher is gone\n" in run_command(capsys, "status", "last")


@pytest.mark.parametrize(
    ("status", "state", "expected"),
    [
        ("submitted", "PENDING", "waiting in the queue (Priority)"),
        ("submitted", "RUNNING", "starting"),
        ("submitted", "FAILED", "never started, its job is FAILED"),
        ("submitted", None, "never started"),
        ("running", "RUNNING", "running"),
        ("running", "TIMEOUT", "lost: its launcher is gone, its job is TIMEOUT"),
        ("stopped", "PENDING", "waiting in the queue (Priority)"),
        ("requeued", "PENDING", "waiting in the queue (Priority)"),
        ("completed", "COMPLETING", "completed"),
        ("failed", None, "failed"),
    ],
)
def test_state_of_a_run_with_a_job(folder, fake_slurm, capsys, status, state, expected) -> None:
    make_run(folder, status=status, job="slurm-77")
    fake_slurm(state, "Priority")
    assert f"state    {expected}\n" in run_command(capsys, "status", "last")
    table = run_command(capsys, "status")
    if state in ("PENDING", "RUNNING"):
        assert expected in table


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", ""),
        ("summary.json", "[]"),
        ("job.json", ""),
        ("metrics.jsonl", '{"step": 1\n{"step": 2}\n'),
        ("metrics.jsonl", '{"reward": 1}\n'),
    ],
)
def test_a_damaged_run_directory_is_told_and_hides_no_other(folder, capsys, file, content) -> None:
    make_run(folder, "right", "completed")
    run = make_run(folder, "wrong")
    (run.folder / file).write_text(content)
    assert f"runs/wrong-stamp/{file}: is damaged (" in run_command(capsys, "status", "wrong-stamp", code=2)
    table = run_command(capsys, "status")
    assert f"wrong-stamp  damaged: {file}" in table and "right-stamp  completed" in table


def test_a_recipe_that_is_not_a_mapping_is_told(folder, capsys) -> None:
    run = make_run(folder, status="completed", steps=12)
    (run.folder / "recipe.yaml").write_text("- a\n")
    assert "recipe.yaml: is damaged (not a YAML mapping)" in run_command(capsys, "status", "last", code=2)


def test_a_row_that_is_not_text_and_a_process_without_a_role_end_in_no_traceback(folder, capsys) -> None:
    run = make_run(folder)
    write_json(run.folder / "plan.json", {"processes": [{}]})
    assert "state    lost" in run_command(capsys, "status", "last")
    (run.folder / "metrics.jsonl").write_bytes(b'\xff\xfe\n{"step": 2}\n')
    assert "metrics.jsonl: is damaged (no row" in run_command(capsys, "status", "last", code=2)
    assert "damaged: metrics.jsonl" in run_command(capsys, "status")


def test_a_run_whose_identity_is_damaged_is_shown_and_stopped_all_the_same(folder, capsys) -> None:
    run = make_run(folder)
    (run.folder / "run.json").write_text("{")
    lock = lock_run(run)
    assert "state    running\n" in run_command(capsys, "status", "last")
    assert f"{run.folder.name}  running" in run_command(capsys, "status")
    assert "the run saves after the current step" in run_command(capsys, "stop", "last")
    assert stop_file(run.folder).exists()
    os.close(lock)


def test_rows_without_an_end_have_no_time_left(folder, capsys) -> None:
    run = make_run(folder)
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "seconds/step": 2.0}\n')
    lock = lock_run(run)
    assert "step     1/?\n" in run_command(capsys, "status", "last")
    os.close(lock)


@pytest.fixture
def silent_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Slurm's commands fail to reach its controller."""
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RUN_ROOT", str(folder / "runs"))
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    words = "Unable to contact slurm controller (connect failure)"
    for name in ("scontrol", "squeue", "sacct", "scancel"):
        (bin_folder / name).write_text(f"#!/bin/bash\necho '{name}: error: {words}' >&2; exit 1\n")
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("status", ["submitted", "running"])
def test_a_slurm_that_does_not_answer_is_no_end_of_a_run(folder, silent_slurm, capsys, status) -> None:
    make_run(folder, status=status, job="slurm-77")
    expected = f"{status}, but Slurm does not answer"
    assert f"state    {expected}\n" in run_command(capsys, "status", "last")
    assert expected in run_command(capsys, "status")
    if status == "submitted":
        assert "scancel: Unable to contact slurm controller" in run_command(capsys, "stop", "last", code=2)


def test_a_job_that_slurm_has_forgotten_is_over(folder, silent_slurm, capsys) -> None:
    make_run(folder, job="slurm-77")
    (folder / "bin/scontrol").write_text(
        "#!/bin/bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    )
    assert "state    lost: its launcher is gone\n" in run_command(capsys, "status", "last")


def test_the_table_has_a_line_a_run_the_newest_first(folder, capsys) -> None:
    assert "no runs found in runs. Start one with: grpo launch RECIPE" in run_command(capsys, "status")
    make_run(folder, "old", "completed", steps=3)
    os.utime(folder / "runs/old-stamp/summary.json", (1, 1))
    make_run(folder, "new", "failed")
    head, first, second = run_command(capsys, "status").splitlines()
    assert head.split() == ["run", "state", "job", "step", "reward", "left"]
    assert first.split() == ["new-stamp", "failed"]
    assert second.split() == ["old-stamp", "completed", "3/10", "0.500"]


def test_a_resumed_run_is_on_top_of_the_table(folder, capsys) -> None:
    for age, name in enumerate(("old", "new", "resumed")):
        run = make_run(folder, name, "completed")
        os.utime(run.folder / "run.json", (1000 - age, 1000 - age))
        os.utime(run.folder / "summary.json", (2000 + age, 2000 + age))
    (folder / "runs/old-stamp/summary.json").unlink()
    names = [line.split()[0] for line in run_command(capsys, "status").splitlines()]
    assert names == ["run", "resumed-stamp", "new-stamp", "old-stamp"]
    assert run_command(capsys, "status", "last").startswith("run      runs/old-stamp\n"), "last is the newest launch"


def test_logs_shows_the_last_lines_and_masks_secrets(folder, capsys) -> None:
    make_run(folder, status="completed")
    write_log(folder, "trainer.log", "".join(f"line {number}\n" for number in range(9)) + "hf_" + "a" * 20 + "\n")
    write_log(folder, "server.log", "served\n")
    output = run_command(capsys, "logs", "last", "-n", "2")
    assert output.startswith("==> logs/trainer.log <==\nline 8\n") and "aaaa" not in output and "line 7" not in output
    assert run_command(capsys, "logs", "last", "--server") == "==> logs/server.log <==\nserved\n"
    both = run_command(capsys, "logs", "last", "--server", "--trainer")
    assert "server.log" in both and "trainer.log" in both


def test_logs_of_run_api_and_of_all_environments(folder, capsys) -> None:
    run = make_run(folder, status="completed")
    roles = ("run-api", "server", "trainer", "environment-sums", "environment-more")
    for role in roles:
        write_log(folder, f"{role}.log", f"of {role}\n")
    write_json(run.folder / "plan.json", {"processes": [{"role": role, "log": f"logs/{role}.log"} for role in roles]})
    assert run_command(capsys, "logs", "last", "--run-api") == "==> logs/run-api.log <==\nof run-api\n"
    both = run_command(capsys, "logs", "last", "--environments")
    assert "of environment-sums\n" in both and "of environment-more\n" in both and "server" not in both
    assert all(f"log      logs/{role}.log\n" in run_command(capsys, "status", "last") for role in roles)
    (folder / "logs/run-api.log").unlink()
    assert "has no run-api log yet" in run_command(capsys, "logs", "last", "--run-api", code=2)


def test_what_the_launcher_printed_is_shown_by_default(folder, capsys) -> None:
    run = make_run(folder, status="completed", job="slurm-77")
    write_log(folder, "slurm_77.out", "of the job\n")
    write_log(folder, "trainer.log", "of the trainers\n")
    (run.folder / "launch.log").write_text("of the launcher\n")
    assert run_command(capsys, "logs", "last") == f"==> runs/{run.folder.name}/launch.log <==\nof the launcher\n"
    assert run_command(capsys, "logs", "last", "--slurm") == "==> logs/slurm_77.out <==\nof the job\n"
    both = run_command(capsys, "logs", "last", "--launch", "--trainer")
    assert "of the launcher" in both and "of the trainers" in both and "of the job" not in both


def test_progress_bars_and_colours_of_a_log_are_readable(folder, capsys) -> None:
    run = make_run(folder, status="completed")
    log = write_log(folder, "trainer.log", "a\r\n  0%|  |\r 50%|# |\r100%|##| 2/2\n\x1b[36mblue\x1b[0m\x07\n")
    log.write_bytes(log.read_bytes() + b" 10%|\r 20%|")  # an incomplete bar
    lock = lock_run(run)
    assert run_command(capsys, "logs", "last", "--trainer").splitlines()[1:] == ["a", "100%|##| 2/2", "blue"]
    os.close(lock)
    last = run_command(capsys, "logs", "last", "--trainer").splitlines()[-1]
    assert last == " 20%|", "the last line before the process died"


def test_logs_of_a_job_without_a_launcher_are_slurms_by_default(folder, capsys) -> None:
    make_run(folder, status="completed", job="slurm-77")
    write_log(folder, "slurm_77.out", "of the launcher\n")
    assert run_command(capsys, "logs", "77") == "==> logs/slurm_77.out <==\nof the launcher\n"


def test_a_log_that_is_not_there_yet_is_said(folder, capsys) -> None:
    make_run(folder, status="completed")
    assert "has no server log yet" in run_command(capsys, "logs", "last", "--server", code=2)
    assert "--lines: expected 0 or more, got -1" in run_command(capsys, "logs", "last", "-n", "-1", code=2)


def test_following_ends_with_the_run_and_takes_up_the_logs_of_a_new_attempt(folder, capsys, monkeypatch) -> None:
    from grpo_recipes.cli import follow

    monkeypatch.setattr(follow, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(jobs, "SLURM_SECONDS", 0.05)
    run = make_run(folder)
    log = write_log(folder, "trainer.log", "begun\n")
    lock = lock_run(run)

    def live() -> None:
        time.sleep(0.2)
        with log.open("a") as file:
            file.write("half a li")
            file.flush()
            time.sleep(0.2)
            file.write("ne\n")
        time.sleep(0.2)
        write_json(run.folder / "plan.json", {"processes": [{"role": "trainer", "log": "logs/second.log"}]})
        write_log(folder, "second.log", "second attempt\n")
        time.sleep(0.2)
        write_json(run.folder / "summary.json", {"status": "stopped"})
        os.close(lock)

    thread = threading.Thread(target=live)
    thread.start()
    output = run_command(capsys, "logs", "-f", "last", "--trainer")
    thread.join()
    lines = ["==> logs/trainer.log <==", "begun", "half a line", "==> logs/second.log <==", "second attempt"]
    assert output.splitlines() == [*lines, f"grpo: runs/{run.folder.name} has ended: stopped"]


def test_a_line_that_does_not_end_holds_nothing_up(folder, capsys, monkeypatch) -> None:
    from grpo_recipes.cli import follow

    monkeypatch.setattr(follow, "_MOST_BYTES", 100)
    run = make_run(folder)
    log = write_log(folder, "trainer.log", "begun\n")
    follower = follow.LogFollower(["trainer"], 5)
    follower.print_new(Run(run.folder))
    with log.open("a") as file:
        file.write("bar\r" * 100 + "\nafter\n")
    for _ in range(6):
        follower.print_new(Run(run.folder))
    assert capsys.readouterr().out.endswith("\nafter\n")


def test_stop_asks_to_save_and_forbids_the_requeue(folder, capsys) -> None:
    run = make_run(folder)
    lock = lock_run(run)
    assert "saves after the current step" in run_command(capsys, "stop", "last")
    assert stop_file(run.folder).exists() and (run.folder / NO_REQUEUE).exists()
    os.close(lock)


def test_a_run_that_is_over_is_not_stopped(folder, capsys) -> None:
    run = make_run(folder, status="completed")
    output = run_command(capsys, "stop", "last", code=2)
    assert f"has already ended (completed). Fix: see runs/{run.folder.name}" in output
    write_json(run.folder / "summary.json", {"status": "stopped"})
    output = run_command(capsys, "stop", "last", code=2)
    assert f"Fix: resume it with: grpo launch --resume runs/{run.folder.name}" in output
    assert not stop_file(run.folder).exists()


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("submitted", "PENDING"),
        ("requeued", "PENDING"),
        ("submitted", "RUNNING"),
        ("running", "PENDING"),  # its node died and Slurm requeued it: no process would see a request
    ],
)
def test_stop_takes_a_job_that_has_not_begun_out_of_the_queue(
    folder, fake_slurm, monkeypatch, capsys, status, state
) -> None:
    run = make_run(folder, status=status, job="slurm-77")
    fake_slurm(state)
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "scancel").write_text(f'#!/bin/bash\necho "$*" > {folder}/cancelled\n')
    (bin_folder / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    assert "job 77 was removed from the queue" in run_command(capsys, "stop", "last")
    assert (folder / "cancelled").read_text() == "77\n"
    assert read_json(run.folder / "summary.json")["status"] == "stopped"
    (bin_folder / "scancel").write_text("#!/bin/bash\necho 'scancel: error: Access denied' >&2; exit 1\n")
    assert "scancel: Access denied" in run_command(capsys, "stop", "last", code=2)


def test_stop_now_tells_the_launcher_twice(folder, capsys) -> None:
    run = make_run(folder)
    code = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "from grpo_recipes.runs.rundir import lock_run, find_run\n"
        "seen = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: seen.append(1))\n"
        "lock = lock_run(find_run(Path(), sys.argv[1]))\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(run.folder)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout.readline() == "ready\n"
    assert f"pid {launcher.pid}" in run_command(capsys, "stop", "last", "--now")
    assert launcher.wait(30) in (0, -signal.SIGTERM)


@pytest.mark.parametrize("state", ["TIMEOUT", "COMPLETED"])
def test_stop_reaches_a_run_that_continues_outside_its_ended_job(folder, fake_slurm, capsys, state) -> None:
    run = make_run(folder, status="stopped", job="slurm-77")
    fake_slurm(state)
    lock = lock_run(run)
    assert "stop requested: the run saves" in run_command(capsys, "stop", "last")
    assert stop_file(run.folder).exists() and read_json(run.folder / "summary.json")["status"] == "stopped"
    (run.folder / "lock").write_text("elsewhere 1\n")
    assert "the launcher runs on elsewhere" in run_command(capsys, "stop", "last", "--now", code=2)
    os.close(lock)


def test_stop_now_where_the_launcher_is_gone_and_its_guards_end_the_rest(folder, capsys) -> None:
    run = make_run(folder)
    lock = lock_run(run)  # a process guard holds the lock
    gone = subprocess.Popen(["true"])
    gone.wait()
    (run.folder / "lock").write_text(f"{socket.gethostname()} {gone.pid}\n")
    assert f"its launcher (pid {gone.pid})" in run_command(capsys, "stop", "last", "--now")
    os.close(lock)


def test_stop_now_does_not_reach_another_host(folder, capsys) -> None:
    run = make_run(folder)
    lock = lock_run(run)
    (run.folder / "lock").write_text("elsewhere 1\n")
    assert "the launcher runs on elsewhere" in run_command(capsys, "stop", "last", "--now", code=2)
    os.close(lock)


# --- jobs of `sbatch training.sh` without a run directory ------------------------------------------------------------


@pytest.fixture
def bare_job(folder, monkeypatch):
    """``bare_job(state)``: make Slurm show job 5, a checkout's training.sh, in this state; None removes the job."""
    checkout = folder / "checkout"
    (checkout / "src/grpo_recipes").mkdir(parents=True)

    def show(state: str | None, script: str = "training.sh", log: bool = True) -> Path:
        def ask(*argv: str, seconds: float = 30.0) -> str | None:
            requests.append(argv)
            if state is None or argv[0] == "sacct":
                return None
            if argv[0] == "squeue":
                return f"5|{state}|Priority|{checkout / script}" if state in ("PENDING", "RUNNING") else ""
            return (
                f"JobId=5 JobState={state} Reason=Priority Command={checkout / script} WorkDir={checkout} "
                f"StdErr={checkout}/logs/slurm_5.err StdIn=/dev/null StdOut={checkout}/logs/slurm_5.out Power="
            )

        path = checkout / "logs/slurm_5.err"
        path.parent.mkdir(exist_ok=True)
        if log and not path.exists():  # a log that is written again is empty for a moment
            path.write_text("loading modules\nsetup: the lock has changed, and a job installs nothing\nbye\n")
        monkeypatch.setattr(client, "query", ask)
        monkeypatch.setattr(client, "_run_command", lambda *argv, **how: requests.append(argv) or "")
        return path

    requests = show.asked = []
    return show


@pytest.mark.parametrize("script", ["training.sh", "run_atropos_grpo.sh", "slurm/train.slurm"])
def test_a_job_that_waits_has_a_status_before_it_has_a_run(folder, bare_job, capsys, script) -> None:
    """M4: a plain `sbatch training.sh` is known by its job id while it is pending."""
    bare_job("PENDING", script, log=False)
    assert (
        run_command(capsys, "status", "5")
        == "job      5 PENDING (Priority)\nstate    waiting in the queue (Priority)\n"
    )
    table = run_command(capsys, "status")
    assert re.search(rf"^\({Path(script).name}\) +waiting in the queue \(Priority\) +5\s*$", table, re.MULTILINE)
    assert " log yet" in run_command(capsys, "logs", "5", code=2)
    assert run_command(capsys, "stop", "5") == "grpo: job 5 was removed from the queue\n"
    assert ("scancel", "5") in bare_job.asked


@pytest.mark.parametrize("state", ["FAILED", None])
def test_a_job_that_failed_before_it_had_a_run_shows_its_cause(folder, bare_job, capsys, monkeypatch, state) -> None:
    """M4: the cause in logs/slurm_JOB.err is shown, also after Slurm has forgotten the job."""
    path = bare_job(state)
    monkeypatch.chdir(folder / "checkout")
    monkeypatch.setenv("RUN_ROOT", "runs")
    lines = run_command(capsys, "status", "5").splitlines()
    ending = "ended before its run directory existed" if state is None else "FAILED, without a run directory"
    assert lines[1:] == [
        f"state    {ending}",
        "cause    setup: the lock has changed, and a job installs nothing",
        "log      logs/slurm_5.err",
    ]
    assert run_command(capsys, "logs", "5") == f"==> logs/slurm_5.err <==\n{path.read_text()}"
    output = run_command(capsys, "stop", "5", code=2)
    assert "5: the job has already ended" in output and "Fix: see logs/slurm_5.err" in output


def test_a_job_whose_run_directory_is_not_there_yet_is_cancelled(folder, bare_job, capsys) -> None:
    """M4: a job that runs has no state to save before its run directory exists."""
    bare_job("RUNNING")
    assert "state    RUNNING, no run directory yet\n" in run_command(capsys, "status", "5")
    assert run_command(capsys, "stop", "5") == "grpo: job 5 was canceled; it had no run directory yet\n"


@pytest.mark.parametrize("command", FOLLOWING)
def test_following_a_job_without_a_run_waits_for_it_and_ends_with_it(
    folder, bare_job, capsys, monkeypatch, command
) -> None:
    """M4, R16: `logs -f` and `watch` of a pending job follow its run once it exists, and end if the job fails."""
    from grpo_recipes.cli import follow

    for module, name in ((follow, "POLL_SECONDS"), (jobs, "SLURM_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    bare_job("PENDING", log=False)

    def train() -> None:
        make_run(folder, status="completed", steps=2, job="slurm-5")
        bare_job("COMPLETED")

    timer = threading.Timer(0.5, train)
    timer.start()
    output = run_command(capsys, *command, "5")
    timer.join()
    assert output.startswith("grpo: job 5: waiting in the queue (Priority)\n") and "completed" in output
    (folder / "runs/.jobs/slurm-5").unlink()
    bare_job("PENDING")
    timer = threading.Timer(0.5, bare_job, ["FAILED"])
    timer.start()
    output = run_command(capsys, *command, "5")
    timer.join()
    assert output.endswith("grpo: job 5: setup: the lock has changed, and a job installs nothing\n")


def test_a_job_that_nobody_knows_is_rejected_even_if_slurm_is_silent(folder, silent_slurm, capsys) -> None:
    """M4: without an answer and a log, the command ends with the reason."""
    for name in ("status", "logs", "stop", *(words[0] for words in FOLLOWING)):
        assert "5: Slurm does not answer" in run_command(capsys, name, "5", code=2)


# --- Slurm does not answer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", FOLLOWING)
@pytest.mark.parametrize("status", ["completed", "failed", "stopped"])
def test_following_a_run_that_is_over_ends_though_slurm_does_not_answer(
    folder, silent_slurm, capsys, command, status
) -> None:
    """R16: the state of a finished run is in its directory."""
    make_run(folder, status=status, steps=2, job="slurm-77")
    assert status in run_command(capsys, *command, "last")


@pytest.mark.parametrize("command", FOLLOWING)
@pytest.mark.parametrize("status", ["submitted", "running"])
def test_following_gives_up_if_slurm_stays_silent_and_no_process_is_seen(
    folder, silent_slurm, capsys, monkeypatch, command, status
) -> None:
    """R16: a command that follows a run does not wait for Slurm without a limit."""
    from grpo_recipes.cli import follow

    for module, name, seconds in (
        (follow, "POLL_SECONDS", 0.05),
        (jobs, "SLURM_SECONDS", 0),
        (jobs, "SILENCE_SECONDS", 1),
    ):
        monkeypatch.setattr(module, name, seconds)
    run = make_run(folder, status=status, job="slurm-77")
    output = run_command(capsys, *command, "last", code=2)
    assert f"runs/{run.folder.name}: Slurm has not answered for" in output
    assert "Fix: repeat the command when squeue answers" in output
