"""Damage every state file of a run and run every command that reads it: torn, swapped, foreign, missing, a folder."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_folders import launch_in

from grpo_recipes.cli import commands, main
from grpo_recipes.errors import EXIT_STOPPED, ConfigError
from grpo_recipes.launch import run as launch_run
from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.processes import Ending, find_rank_pids
from grpo_recipes.launch.verification import Verification
from grpo_recipes.runs.checkpoints import find_newest_complete, publish_checkpoint
from grpo_recipes.runs.progress import read_phases
from grpo_recipes.runs.rundir import read_json

CHECKPOINT = [
    "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "grpo_window_0.pt", "trainer_state.json",
    "order_of_data.json", "controllers.json",
]  # fmt: skip
STATE = [
    "launch.log", "publish/result.json",
    "run.json", "plan.json", "summary.json", "recipe.yaml", "digests.json", "sources.json", "job.json", "lock",
    "metrics.jsonl", "eval.jsonl", "samples.jsonl", "slow_rewards.jsonl", "benchmarks.json", "tracked.json", "stop",
    "prompts.jsonl", "no_requeue",
    "processes/server.json", "processes/trainer.json", "processes/rank_0.json", "processes/phase_0.json",
    "processes/server_state.json", "checkpoints", "processes", "publish", "rewards", "callbacks", "code.patch",
    *(f"checkpoints/checkpoint-6/{name}" for name in (*CHECKPOINT, "COMPLETE")), "checkpoints/checkpoint-6",
]  # fmt: skip
EXTRA = [
    "checkpoints/checkpoint-best",
    "checkpoints/checkpoint-6.bak",
    "checkpoints/checkpoint-99",
    "processes/rank_x.json",
    "processes/phase_x.json",
    "report.html",
]
FOREIGN = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b'{"step": "x"}',
    b"7",
    b'"text"',
    b"\x00\xff\xfe",
    b"{" * 3000,
    b"a: [b",
    b"- 1\n- 2\n",
    b'{"processes": 3, "batch": []}',
    b'{"files": [], "digests": 1}',
    b"NaN",
]
Damage = Callable[[Path], None]


def as_folder(path: Path) -> None:
    remove(path)
    path.mkdir(parents=True)
    (path / "inside").write_text("x")


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def tear(path: Path) -> None:
    if path.is_file():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return damage


def swap(other: str) -> Damage:
    def damage(path: Path) -> None:
        folder = next(parent for parent in path.parents if parent.name == "run")
        if (folder / other).is_file():
            write((folder / other).read_bytes())(path)

    return damage


DAMAGES: dict[str, Damage] = {
    "gone": remove, "torn": tear, "folder": as_folder, "swapped": swap("run.json"), "rows": swap("metrics.jsonl"),
    **{repr(content[:12]): write(content) for content in FOREIGN},
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, pytest.MonkeyPatch]]:
    """Create a run with fake processes that stopped after step 6; yield its folder and its environment."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        launch_in(folder, patch)
        patch.setattr(launch_run, "supervise", fake_processes)
        assert main(["launch", "recipes/smoke/grpo.yaml", "--max_steps", "9"]) == EXIT_STOPPED
        (run_folder,) = (folder / "runs").iterdir()
        run_folder.rename(folder / "run")
        yield folder, patch


COMMANDS = [
    words
    for words in (
        ["status", "RUN"], ["status"], ["logs", "RUN"], ["doctor", "--run", "RUN"], ["report", "RUN"], ["stop", "RUN"],
        ["launch", "--resume", "RUN"],
    )
    if words[0] in commands()
]  # fmt: skip


def fake_processes(attempt: Attempt, stop: object) -> Ending:
    """Write the files of processes that stopped after step 6."""
    folder = attempt.run.folder
    rows = [{"step": step, "max_steps": 9, "reward": 0.5, "seconds/step": 1.0} for step in range(1, 7)]
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "slow_rewards.jsonl"):
        (folder / name).write_text("".join(json.dumps({**row, "eval_reward": 0.5}) + "\n" for row in rows))
    for step in (3, 6):
        staged = folder / "checkpoints" / "partial" / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        for name in CHECKPOINT:
            (staged / name).write_text(f"{name} of step {step}")
        publish_checkpoint(staged, folder / "checkpoints", step, 1)
    (folder / "prompts.jsonl").write_text('{"step": 0, "said": ["9 prompts"], "read": 10, "too_long": 1}\n')
    (folder / "tracked.json").write_text('{"wandb": "https://wandb.ai/team/maths/runs/abc"}')
    for name in ("server", "trainer"):
        (folder / f"processes/{name}.json").write_text('{"pid": 1, "guard": 1, "exit": 0}')
    (folder / "processes/rank_0.json").write_text(
        '{"pid": 1, "rank": 0, "node": 0, "exit": 75, "cause": "x", "time": 1}'
    )
    (folder / "processes/phase_0.json").write_text('{"phase": "save", "since": 1, "step": 6}')
    (folder / "processes/server_state.json").write_text('{"epoch": 1, "state": "gone"}')
    attempt.scratch.remove()
    return Ending(EXIT_STOPPED, "rank 0: stopped on request after step 6, state saved")


def ask(folder: Path, patch: pytest.MonkeyPatch, name: str, damage: Damage, *commands: list[str]) -> None:
    """Damage one file in a copy of the run and run these commands; a resume stops before it starts processes."""
    copy, checkpoints = folder / "copy" / "run", []

    def fake_supervise(attempt: Attempt, stop: object) -> Ending:
        with Verification(attempt.run.folder / "checkpoints") as verification:
            verification.wait(lambda: None)
        checkpoints.append(find_newest_complete(attempt.run.folder / "checkpoints"))
        attempt.scratch.remove()
        return Ending(EXIT_STOPPED, "rank 0: stopped on request")

    patch.setattr(launch_run, "supervise", fake_supervise)
    patch.setenv("RUN_ROOT", str(copy.parent))
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(folder / "run", copy)
    damage(copy / name)
    for argv in commands:
        output = io.StringIO()
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            code = main([str(copy) if word == "RUN" else word for word in argv])
        assert code in (0, 2, EXIT_STOPPED) and "Traceback" not in output.getvalue(), output.getvalue()
    for checkpoint in filter(None, checkpoints):
        assert bytes_of(checkpoint) == bytes_of(folder / "run" / "checkpoints" / checkpoint.name), (
            "changed bytes resumed"
        )
    read_phases(copy), find_rank_pids(copy)  # a launcher reads them while its processes write


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@given(
    name=st.sampled_from([*STATE, *EXTRA]),
    damage=st.sampled_from([*DAMAGES]) | st.binary(max_size=60),
    at=st.sampled_from(COMMANDS),
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_no_damage_ends_in_a_traceback_or_resumes_changed_bytes(
    whole: tuple[Path, pytest.MonkeyPatch], name: str, damage: str | bytes, at: list[str]
) -> None:
    ask(*whole, name, DAMAGES[damage] if isinstance(damage, str) else write(damage), at)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STATE, *EXTRA])
def test_no_damage_of_a_kind_does_in_any_command(whole: tuple[Path, pytest.MonkeyPatch], name: str) -> None:
    resumes = [words for words in COMMANDS if words[0] == "launch"]
    for damage in DAMAGES.values():
        ask(*whole, name, damage, *(words for words in COMMANDS if words not in resumes))
        ask(*whole, name, damage, *resumes)  # in another copy: it changes many files


def test_the_commands_do_start_and_read_a_run_that_is_whole(whole: tuple[Path, pytest.MonkeyPatch], capsys) -> None:
    folder, patch = whole
    for at in COMMANDS:
        ask(folder, patch, "nothing.json", lambda path: None, at)
    assert not (folder / "copy" / "run" / "checkpoints" / "checkpoint-6.damaged").exists()


def test_a_folder_in_the_place_of_a_file_is_named(whole: tuple[Path, pytest.MonkeyPatch], capsys) -> None:
    folder, _ = whole
    ask(*whole, "summary.json", as_folder, ["doctor", "--run", "RUN"])
    with pytest.raises(ConfigError, match=r"summary\.json: cannot be used \(Is a directory\)\. Fix: restore it"):
        read_json(folder / "copy" / "run" / "summary.json")


def resumed(whole: tuple[Path, pytest.MonkeyPatch], fake: Callable[..., Ending]) -> str:
    """Resume a copy of the run with these processes; return the output."""
    folder, patch = whole
    shutil.rmtree(folder / "copy", ignore_errors=True)
    shutil.copytree(folder / "run", folder / "copy" / "run")
    (folder / "copy" / "run" / "stop").touch()  # for the previous attempt
    patch.setattr(launch_run, "supervise", fake)
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        main(["launch", "--resume", str(folder / "copy" / "run")])
    return output.getvalue()


@pytest.mark.parametrize("stop_requested", [False, True])
def test_a_stop_before_an_attempt_begins_reaches_it_and_an_older_one_does_not(
    whole, monkeypatch, stop_requested
) -> None:
    stop_seen = []

    def fake_supervise(attempt: Attempt, stop: object) -> Ending:
        attempt.scratch.remove()
        stop_seen.append((attempt.run.folder / "stop").exists())
        return Ending(EXIT_STOPPED, "x")

    def look_while_stopped(folder: Path) -> None:  # after the run is claimed
        if stop_requested:
            assert main(["stop", str(folder.parent)]) == 0

    monkeypatch.setattr(launch_run, "require_checkpoint", look_while_stopped)
    resumed(whole, fake_supervise)
    assert stop_seen == [stop_requested]


def test_an_end_with_a_damaged_row_says_what_a_resume_needs(whole) -> None:
    def fake_supervise(attempt: Attempt, stop: object) -> Ending:
        attempt.scratch.remove()
        with (attempt.run.folder / "metrics.jsonl").open("a") as rows:
            rows.write('no row\n{"step": 7}\n')
        return Ending(EXIT_STOPPED, "x")

    output = resumed(whole, fake_supervise)
    assert "next    grpo launch --resume copy/run, once the damaged row of metrics.jsonl is corrected" in output
