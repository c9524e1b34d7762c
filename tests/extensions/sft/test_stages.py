"""Several recipes in one launch: each starts from the model before it, and a resume continues at the right one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import launch_in

from grpo_recipes.cli import main
from grpo_recipes.errors import EXIT_CONFIG_ERROR, EXIT_STOPPED
from grpo_recipes.launch import run as launch_run
from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.monitor import StopSignals
from grpo_recipes.launch.processes import Ending
from grpo_recipes.launch.resolve import POINTERS
from grpo_recipes.runs.rundir import read_json, stop_file

PAIR = ("recipes/smoke/sft.yaml", "recipes/smoke/sft_grpo.yaml")
DONE, STOPPED = Ending(0), Ending(EXIT_STOPPED, "rank 0: stopped on request after step 1, state saved")
Launched = Callable[..., tuple[int, list[Attempt]]]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """``launched(words..., endings=...)``: exit code and attempts of a launch whose processes are fake."""
    launch_in(tmp_path, monkeypatch)

    def launch(*words: str, endings: tuple[Ending, ...], stops: bool = False) -> tuple[int, list[Attempt]]:
        attempts, left = [], list(endings)

        def fake_supervise(attempt: Attempt, stop: StopSignals) -> Ending:
            attempts.append(attempt)
            attempt.scratch.remove()
            if stops:
                stop.request = stop_file(attempt.run.folder)
                stop.request.touch()
            ending = left.pop(0)
            if ending.code == 0:
                (attempt.run.folder / "model").mkdir(exist_ok=True)
                (attempt.run.folder / "model/config.json").write_text("{}")
            return ending

        monkeypatch.setattr(launch_run, "supervise", fake_supervise)
        code = main(["launch", *words])
        assert not left
        return code, attempts

    return launch


def model_of(attempt: Attempt) -> str:
    argv = attempt.plan.process("trainer").argv
    return str(argv[argv.index("--model_name_or_path") + 1])


def test_the_second_recipe_starts_from_the_first_ones_model(launched: Launched) -> None:
    code, (first, second) = launched(*PAIR, "--max_steps", "3", endings=(DONE, DONE))
    assert code == 0
    assert (first.plan.task, second.plan.task) == ("sft", "grpo")
    assert model_of(second) == str(first.run.folder / "model")
    assert [attempt.recipe.batch.max_steps for attempt in (first, second)] == [3, 3]
    assert [process.role for process in second.plan.processes] == ["server", "trainer"]
    assert not first.run.is_running()


def test_a_failure_of_the_first_ends_the_launch(launched: Launched) -> None:
    code, attempts = launched(*PAIR, endings=(Ending(3, "rank 0: broken"),))
    assert code == 3 and len(attempts) == 1


def test_a_resume_continues_at_the_recipe_that_was_stopped(launched: Launched) -> None:
    code, (first, second) = launched(*PAIR, endings=(DONE, STOPPED))
    assert code == EXIT_STOPPED
    code, (again,) = launched("--resume", str(second.run.folder), endings=(STOPPED,))
    assert again.run.folder == second.run.folder and model_of(again) == model_of(second)
    code, attempts = launched("--resume", str(first.run.folder), endings=(DONE,))
    assert code == 0 and [attempt.run.folder for attempt in attempts] == [second.run.folder]


def test_a_resume_of_the_first_continues_with_the_second(launched: Launched) -> None:
    _, (first,) = launched(*PAIR, "--seed", "7", endings=(STOPPED,))
    code, (again, second) = launched("--resume", "last", endings=(DONE, DONE))
    assert code == 0 and again.run.folder == first.run.folder
    assert model_of(second) == str(first.run.folder / "model") and second.recipe.batch.seed == 7


def test_a_requeued_job_continues_at_the_right_recipe(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c", "SLURM_JOB_NUM_NODES": "1"}
    for name, text in job.items():
        monkeypatch.setenv(name, text)
    _, (first,) = launched(*PAIR, endings=(STOPPED,))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    _, (again, second) = launched(*PAIR, endings=(DONE, STOPPED))
    assert again.run.folder == first.run.folder != second.run.folder
    assert (first.run.folder.parent / POINTERS / "c-7").read_text() == str(second.run.folder)
    code, (last,) = launched(*PAIR, endings=(DONE,))
    assert code == 0 and last.run.folder == second.run.folder


def test_a_stop_at_the_end_of_the_first_does_not_start_the_second(launched: Launched) -> None:
    code, (first,) = launched(*PAIR, endings=(DONE,), stops=True)
    assert code == EXIT_STOPPED
    summary = read_json(first.run.folder / "summary.json")
    assert summary["cause"] == "stopped on request before the next recipe"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("missing.yaml",), "recipe 'missing.yaml' not found"),
        ((PAIR[1], "--model_name_or_path", "m/m"), "--model_name_or_path: would apply to every recipe. Fix: set "),
        ((PAIR[1], "--beta", "0.1"), "beta does nothing with task: sft"),
    ],
)
def test_a_fault_of_any_recipe_is_found_before_the_first_run(
    launched: Launched, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, attempts = launched(PAIR[0], *words, endings=())
    assert code == EXIT_CONFIG_ERROR and not attempts
    assert message in capsys.readouterr().err


def test_a_dry_run_prints_every_plan(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    code, attempts = launched(*PAIR, "--dry-run", endings=())
    out = capsys.readouterr().out
    assert code == 0 and not attempts
    assert out.count("recipe     ") == 2 and "(sft, src/sft.py)" in out and "(grpo, src/grpo.py)" in out
