"""The end of an attempt: its summary, and whether Slurm is asked to start the run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from types import SimpleNamespace

import pytest

from grpo_recipes.errors import EXIT_STOPPED, ConfigError
from grpo_recipes.launch import attempt as attempts
from grpo_recipes.launch.attempt import Attempt, create_log, end_without_attempt, finish_attempt, prepare_attempt
from grpo_recipes.launch.hooks import AllHooks, RunHooks
from grpo_recipes.launch.processes import Ending
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.types import Names
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.rundir import NO_REQUEUE, Run, read_json, write_json
from grpo_recipes.slurm.client import SlurmJob

JOB = SlurmJob(7, "cluster", 1, None)
STOPPED = Ending(EXIT_STOPPED, "rank 0: stopped on request after step 5, state saved")


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Install a fake scontrol that obeys, and return the file with its arguments."""
    program = tmp_path / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\nkill -TERM $PPID\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    yield tmp_path / "asked"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def attempt(read, planned, tmp_path):
    """``attempt(idle=..., saved=..., KEY=VALUE)``: an attempt that started at step 4 and saved ``saved``."""

    def make(idle: int = 0, saved: int = 5, phase: str = "sample", trained: int | None = None, **keys) -> Attempt:
        folder = tmp_path / "run"
        (folder / "checkpoints").mkdir(parents=True)
        staged = tmp_path / f"checkpoint-{saved}"
        staged.mkdir()
        publish_checkpoint(staged, folder / "checkpoints", saved, 1)
        write_json(folder / "summary.json", {"status": "running", "restarts": 1, "idle_attempts": idle,
            "idle_trained": idle if trained is None else trained})  # fmt: skip
        (folder / "processes").mkdir()
        write_json(folder / "run.json", {"command": "grpo launch my.yaml --seed 7"})
        write_json(folder / "processes/phase_0.json", {"phase": phase, "since": 1.0, "step": 4})
        run = Run(folder)
        recipe = read(**keys)
        names = Names(folder, "mine", "mine-abcd", "stamp")
        scratch = Scratch(tmp_path / "disk", tmp_path / "memory")
        return Attempt(run, recipe, planned(recipe=recipe), names, scratch, {}, "", workers=None, first_step=4)

    return make


class Recorder(RunHooks):
    """Hooks that record the status of the run, and whether the job was requeued, at each call."""

    def __init__(self, requeue) -> None:
        self.ended: list[tuple[str, bool]] = []
        self.models: list[str] = []
        self._requeue = requeue

    def on_end(self, run_dir) -> list[str]:
        self.ended.append((Run(run_dir).summary["status"], self._requeue.exists()))
        return ["a line of the end"]

    def on_model(self, run_dir) -> str:
        self.models.append(Run(run_dir).summary["status"])
        return ", with a note of the model"


@pytest.fixture
def recorder(scontrol) -> Recorder:
    return Recorder(scontrol)


def summary_of(attempt: Attempt) -> dict:
    return read_json(attempt.run.folder / "summary.json")


def test_a_run_stopped_to_go_on_later_is_requeued(attempt, scontrol, capsys):
    current = attempt()
    assert finish_attempt(current, STOPPED, wants_requeue=True, job=JOB).code == 75
    assert summary_of(current)["status"] == "requeued" and summary_of(current)["idle_attempts"] == 0
    assert scontrol.read_text() == "requeue 7\n"
    out = capsys.readouterr().out
    assert "grpo: job 7 is requeued and continues in the same run directory" in out and "continue with" not in out


@pytest.mark.parametrize(
    ("ending", "wants_requeue", "job"),
    [
        (STOPPED, False, JOB),
        (STOPPED, True, None),
        (Ending(1, "rank 0: ValueError", 0), True, JOB),
        (Ending(0), True, JOB),
    ],
    ids=["to-end", "outside-slurm", "failed", "done"],
)
def test_nothing_else_is(attempt, scontrol, ending, wants_requeue, job):
    current = attempt()
    assert finish_attempt(current, ending, wants_requeue, job).code == ending.code
    assert summary_of(current)["status"] == {0: "completed", 1: "failed", 75: "stopped"}[ending.code]
    assert not scontrol.exists()


def test_the_prepared_prompts_are_deleted_after_a_completed_run(attempt):
    current = attempt()
    folder = current.run.folder / "prompts/train-1"
    folder.mkdir(parents=True)
    finish_attempt(current, STOPPED, wants_requeue=False, job=None)
    assert folder.exists()
    finish_attempt(current, Ending(0), wants_requeue=False, job=None)
    assert not folder.parent.exists() and current.run.folder.exists()


def test_hooks_get_the_model_at_the_final_end_of_a_run_only(attempt, recorder, capsys):
    current = attempt()
    current.hooks = AllHooks([recorder])
    for ending in (STOPPED, Ending(1, "rank 0: ValueError", 0)):
        finish_attempt(current, ending, wants_requeue=False, job=None)
        assert recorder.models == []
    assert "grpo: a line of the end" in capsys.readouterr().out
    assert finish_attempt(current, Ending(0), wants_requeue=False, job=None).code == 0
    assert recorder.models == ["completed"] and [status for status, _ in recorder.ended][-1] == "completed"
    assert capsys.readouterr().out.endswith("/model, with a note of the model\n")


def test_grpo_stop_keeps_it_from_coming_back(attempt, scontrol, capsys):
    current = attempt()
    (current.run.folder / NO_REQUEUE).touch()
    finish_attempt(current, STOPPED, wants_requeue=True, job=JOB)
    assert summary_of(current)["status"] == "stopped" and not scontrol.exists()
    assert "grpo: not requeued: grpo stop was called" in capsys.readouterr().out


@pytest.mark.parametrize(("most", "done", "status"), [(3, 2, "requeued"), (2, 2, "stopped"), (0, 0, "stopped")])
def test_max_requeues_bounds_it(attempt, scontrol, capsys, most, done, status):
    current = attempt(max_requeues=most)
    finish_attempt(current, STOPPED, wants_requeue=True, job=SlurmJob(7, "cluster", 1, None, restarts=done))
    assert summary_of(current)["status"] == status
    told = f"not requeued: the job was requeued {done} times (max_requeues {most})"
    assert (told in capsys.readouterr().out) == (status == "stopped")


@pytest.mark.parametrize(("idle", "status"), [(0, "requeued"), (1, "stopped")])
def test_two_attempts_in_a_row_without_a_new_checkpoint_are_enough(attempt, scontrol, capsys, idle, status):
    current = attempt(idle=idle, saved=4)
    finish_attempt(current, STOPPED, wants_requeue=True, job=JOB)
    assert ("2 attempts in a row made no new step" in capsys.readouterr().out) == (status == "stopped")
    assert summary_of(current)["status"] == status and summary_of(current)["idle_attempts"] == idle + 1


@pytest.mark.parametrize(("idle", "status"), [(1, "requeued"), (8, "requeued"), (9, "stopped")])
def test_attempts_that_were_stopped_while_they_started_end_a_job_late(attempt, scontrol, capsys, idle, status):
    current = attempt(idle=idle, saved=4, phase="start", trained=0)
    finish_attempt(current, STOPPED, wants_requeue=True, job=JOB)
    assert summary_of(current)["status"] == status and summary_of(current)["idle_trained"] == 0
    assert ("10 attempts in a row made no new step" in capsys.readouterr().out) == (status == "stopped")


def test_logs_are_the_users_alone(tmp_path):
    umask = os.umask(0o022)
    try:
        assert stat.S_IMODE(os.stat(create_log(str(tmp_path / "server.log"))).st_mode) == 0o600
    finally:
        os.umask(umask)


def test_when_scontrol_fails_the_run_is_stopped_and_says_how_to_go_on(attempt, recorder, tmp_path, capsys):
    (tmp_path / "bin/scontrol").write_text("#!/bin/bash\necho no such job >&2; exit 1\n")
    current = attempt()
    current.hooks = AllHooks([recorder])
    assert finish_attempt(current, STOPPED, wants_requeue=True, job=JOB).code == 75
    assert summary_of(current)["status"] == "stopped"
    assert recorder.ended[-1] == ("stopped", False), "the report shows it too"
    out = capsys.readouterr().out
    assert "grpo: not requeued: scontrol requeue 7: no such job" in out and "grpo launch --resume" in out


@pytest.mark.parametrize(("wants_requeue", "requeues"), [(True, True), (False, False)])
def test_before_there_is_a_run_the_job_is_requeued_all_the_same(scontrol, wants_requeue, requeues):
    assert end_without_attempt(Ending(75, "stopped on request"), wants_requeue, JOB) == 75
    assert scontrol.exists() == requeues


@pytest.mark.parametrize(("most", "done", "requeues"), [(0, 0, False), (3, 2, True), (None, 100, False)])
def test_max_requeues_bounds_jobs_that_are_stopped_before_an_attempt(attempt, scontrol, capsys, most, done, requeues):
    """Slurm's signal comes at once if the job's time is shorter than its lead."""
    current = attempt() if most is None else attempt(max_requeues=most)
    run, recipe = (None, None) if most is None else (current.run, current.recipe)
    end_without_attempt(STOPPED, True, SlurmJob(7, "cluster", 1, None, restarts=done), run, recipe)
    out = capsys.readouterr().out
    assert scontrol.exists() == requeues != (f"not requeued: the job was requeued {done} times" in out)
    assert ("no run directory yet" in out) == (most is None)


def test_logs_of_one_second_have_names_of_their_own(tmp_path):
    names = [create_log(str(tmp_path / "liv_train_mine_stamp.log")) for _ in range(3)]
    assert [name.rpartition("/")[2] for name in names] == [
        "liv_train_mine_stamp.log", "liv_train_mine_stamp-2.log", "liv_train_mine_stamp-3.log"
    ]  # fmt: skip


def write_rows(current: Attempt, **metrics: object) -> None:
    rows = [{"step": step, "max_steps": 12, "reward": 0.5, **metrics} for step in range(1, 13)]
    (current.run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_completed_run_that_learned_nothing_says_so_once_in_the_end(attempt, capsys):
    current = attempt()
    write_rows(current, frac_reward_zero_std=1)
    finish_attempt(current, Ending(0), wants_requeue=False, job=None)
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("grpo: note: ")]
    assert "every completion got the reward 0.5 in 12 steps in a row" in note and ". Fix: " in note


def test_what_is_only_worth_a_look_is_left_to_the_report(attempt, capsys):
    current = attempt()
    write_rows(current, **{"completions/clipped_ratio": 0.4})
    finish_attempt(current, Ending(0), wants_requeue=False, job=None)
    assert "grpo: note: " not in capsys.readouterr().out


def test_a_run_whose_numbers_broke_is_started_anew_and_not_resumed(attempt, capsys):
    current = attempt()
    finish_attempt(
        current, Ending(1, "rank 0: NotFinite: loss nan in step 6. Fix: lower it", 0), wants_requeue=False, job=None
    )
    out = capsys.readouterr().out
    assert "failed with exit code 1: rank 0: NotFinite: loss nan in step 6. Fix: lower it" in out
    again = "grpo: next    start a new run with that change (grpo launch my.yaml --seed 7), since"
    assert again in out and "--resume" not in out and out.count("grpo launch") == 1
    assert summary_of(current)["cause"].startswith("rank 0: NotFinite")


def test_a_run_without_a_checkpoint_is_started_again_with_its_command(attempt, capsys):
    current = attempt()
    shutil.rmtree(current.run.folder / "checkpoints")
    finish_attempt(current, Ending(1, "the vLLM server died before it was ready"), wants_requeue=False, job=None)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("grpo: next    read its last lines above; grpo check --deep ")
    assert last.endswith("; then grpo launch my.yaml --seed 7")


def test_a_run_whose_reward_failed_is_resumed_with_the_edited_file_alone(attempt, capsys):
    current = attempt(saved=4)
    cause = "rank 0: RewardFailed: reward 'own.py:score' raised ValueError: no"
    finish_attempt(current, Ending(1, cause, 0), wants_requeue=False, job=None)
    out = capsys.readouterr().out
    assert "grpo: next    fix own.py" in out and "--update-rewards" in out and out.count("--resume") == 1


def test_a_damaged_row_hides_neither_how_the_run_ended_nor_its_exit_code(attempt, capsys):
    current = attempt()
    (current.run.folder / "metrics.jsonl").write_text(
        '{"step": 1, "reward": 1.0}\nno row\n{"step": 3, "reward": 3.0}\n'
    )
    assert finish_attempt(current, Ending(7, "rank 0: ValueError", 0), wants_requeue=False, job=None).code == 7
    summary = summary_of(current)
    assert (summary["status"], summary["exit_code"], summary["steps"]) == ("failed", 7, 3)
    out = capsys.readouterr().out
    ending = [line.removeprefix("grpo: ") for line in out.splitlines()[-4:]]
    assert ending[0].startswith("status  failed with exit code 7: rank 0: ValueError")
    assert ending[1] == "reward  2.000, mean of 3 steps"
    assert ending[2].startswith("model   ") and ending[2].endswith("/checkpoint-5 (newest checkpoint)")
    assert ending[3].startswith("next    ")


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        ({"steps": 0}, "no step was completed"),
        ({"steps": 2}, "none in 2 steps"),
        ({"steps": 1, "first": 0.5, "last": 0.5}, "0.500, mean of 1 step"),
        ({"steps": 7, "first": 0.4, "last": 0.5}, "0.500, mean of the last 5 of 7 steps"),
        ({"steps": 10, "first": 0.5, "last": 0.9}, "0.500 -> 0.900, means of the first and the last 5 of 10 steps"),
        ({"steps": 60, "first": 0.5, "last": 0.9, "initial_eval_reward": 0.4, "final_eval_reward": 0.8},
         "0.500 -> 0.900, means of the first and the last 5 of 60 steps; evaluated 0.400 -> 0.800"),
        ({"steps": 1, "first": 0.5, "last": 0.5, "initial_eval_reward": 0.4, "final_eval_reward": 0.8, "best_step": 1,
          "best_eval_reward": 0.85}, "0.500, mean of 1 step; evaluated 0.400 -> 0.800, best 0.850 at step 1"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_is_said_with_the_window_of_its_means(summary, text):
    rewards = {"initial_reward": summary.pop("first", None), "final_reward": summary.pop("last", None)}
    assert attempts.describe_rewards({**summary, **rewards}) == text


def test_shares_that_are_not_trivial_are_said_in_the_end(attempt, capsys):
    current = attempt()
    write_rows(current, **{"completions/clipped_ratio": 0.62, "rewards/no_verdict": 0.04})
    finish_attempt(current, Ending(0), wants_requeue=False, job=None)
    assert "grpo: over all steps: unscored 4 %, cut off 62 %\n" in capsys.readouterr().out


@pytest.fixture
def resumed(planned, read, tmp_path, monkeypatch):
    """``resumed()``: prepare an attempt at a run that was stopped at step 2, on a separate node."""
    (tmp_path / "node").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "run/processes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "node"))
    run, recipe = Run(tmp_path / "run"), read(run_root=str(tmp_path))
    write_json(run.folder / "run.json", {"run_name": "mine", "wandb_id": "abcd"})
    write_json(run.folder / "summary.json", {"status": "stopped", "restarts": 1})
    for name in ("metrics.jsonl", "eval.jsonl"):
        (run.folder / name).write_text('{"step": 1}\n{"step": 2}\n')
    write_json(run.folder / "processes/rank_0.json", {"rank": 0})
    names, plan = Names(run.folder, "mine", "mine-abcd", "stamp"), planned(recipe=recipe)
    workers = SimpleNamespace(begin=lambda *_: None)
    return lambda: prepare_attempt(run, recipe, plan, names, Resources("cpu", (), 2), workers)


def files_in(folder) -> dict:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "summary.json"])
def test_a_resume_that_is_refused_changes_nothing(resumed, tmp_path, name):
    path = tmp_path / "run" / name
    path.write_text("no row\n" + path.read_text())
    before = files_in(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}: is damaged"):
        resumed()
    assert files_in(tmp_path) == before


def test_an_attempt_that_cannot_begin_leaves_no_scratch(resumed, tmp_path, monkeypatch):
    def full(path, content) -> None:
        if path.name == "summary.json":
            raise OSError(28, "No space left on device")
        write_json(path, content)

    monkeypatch.setattr(attempts, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        resumed()
    assert list((tmp_path / "node").iterdir()) == []


def test_a_resumed_attempt_goes_on_from_the_rows_that_are_left(resumed, tmp_path):
    current = resumed()
    current.scratch.remove()
    assert current.resume_note.endswith(
        "starting again from step 0; 2 later rows of metrics.jsonl moved to metrics.redone.jsonl"
    )
    assert summary_of(current)["status"] == "running" and summary_of(current)["restarts"] == 2
    assert summary_of(current)["resumed_at"] == [0]  # no checkpoint


def test_each_attempt_notes_the_step_it_went_on_after(resumed, tmp_path):
    (tmp_path / "run/checkpoints").mkdir()
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        publish_checkpoint(tmp_path / f"checkpoint-{step}", tmp_path / "run/checkpoints", step, 1)
        resumed().scratch.remove()
    assert read_json(tmp_path / "run/summary.json")["resumed_at"] == [1, 2]


def test_the_report_is_written_after_the_requeue(attempt, recorder):
    current = attempt()
    current.hooks = AllHooks([recorder])
    finish_attempt(current, STOPPED, wants_requeue=True, job=JOB)
    assert recorder.ended == [("requeued", True)]
