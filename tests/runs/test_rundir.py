"""The run directory: identity, finding it again, its lock, its rows, and the summary recomputed from them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources
from grpo_recipes.runs import code_version
from grpo_recipes.runs.rundir import (
    Run,
    describe_code_change,
    find_run,
    finish_summary,
    lock_run,
    move_rows_after,
    new_run,
    read_json,
    read_launcher,
    read_metrics,
    timestamp,
    wait_for_end,
    write_json,
)
from grpo_recipes.slurm.client import SlurmJob

CPU = Resources("cpu", (), 2)


def write_rows(folder, rewards, torn=""):
    rows = [{"step": step, "reward": reward, "seconds/sample": 0.5} for step, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


def test_a_new_run_has_a_private_folder_and_an_identity(tmp_path):
    run = new_run(tmp_path / "deep" / "runs" / "mine-20260101-000000", "mine", "20260101-000000", CPU.facts())
    assert run.folder == tmp_path / "deep/runs/mine-20260101-000000"
    assert stat.S_IMODE(run.folder.stat().st_mode) == 0o700
    identity = json.loads((run.folder / "run.json").read_text())
    assert identity == run.identity and run.name == "mine"
    assert identity["timestamp"] == "20260101-000000"
    assert identity["job"] is None and identity["pid"] == os.getpid()
    assert re.fullmatch(r"[0-9a-f]{8}", identity["wandb_id"])
    assert {"torch", "trl", "transformers"} <= set(identity["versions"])
    if (find_code_root() / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}", identity["code"]["commit"])
    assert (run.folder / "code.patch").exists()


@pytest.mark.parametrize(
    ("program", "command"),
    [("/env/bin/grpo", "grpo"), ("grpo.py", f"python {find_code_root() / 'src/grpo.py'}"), ("main.py", "grpo")],
)
def test_a_run_records_its_command_with_the_entry_script(tmp_path, monkeypatch, program, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [program, "--seed", "7"])
    run = new_run(tmp_path / "run", "name", "stamp", Resources("cpu", (), 2).facts())
    assert run.identity["command"] == f"{command} --seed 7"


def test_a_run_of_a_job_names_the_job(tmp_path):
    resources = Resources("cpu", (), 2, SlurmJob(7, "cluster", 1, None))
    assert new_run(tmp_path / "mine-stamp", "mine", "stamp", resources.facts()).identity["job"] == "cluster-7"


def test_a_folder_of_another_launch_is_not_taken(tmp_path):
    assert new_run(tmp_path / "mine-stamp", "mine", "stamp", CPU.facts()) is not None
    assert new_run(tmp_path / "mine-stamp", "mine", "stamp", CPU.facts()) is None


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path):
    root = tmp_path / "runs"
    root.write_text("")
    with pytest.raises(ConfigError, match="run_root"):
        new_run(root / "mine-stamp", "mine", "stamp", CPU.facts())


def test_a_timestamp_is_sortable_and_fits_a_file_name():
    assert re.fullmatch(r"\d{8}-\d{6}", timestamp())


def test_the_last_run_and_a_named_run_are_found(tmp_path):
    first, second = new_run(tmp_path / "b-1", "b", "1", CPU.facts()), new_run(tmp_path / "a-2", "a", "2", CPU.facts())
    os.utime(first.folder / "run.json", (1, 1))
    assert find_run(tmp_path, "last") == second
    os.utime(second.folder / "run.json", (0, 0))
    assert find_run(tmp_path, "last") == first
    assert find_run(tmp_path / "elsewhere", str(second.folder)) == second


@pytest.mark.parametrize("which", ["last", "no-such-folder", ".", "", "/dev/null", "a" * 300])
def test_a_folder_that_is_not_a_run_is_refused(tmp_path, monkeypatch, which):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        find_run(tmp_path, which)
    assert refused.value.problems[0].where == "--resume"


@pytest.mark.parametrize(
    ("key", "message"), [("commit", "made at commit other"), ("patch_sha256", "uncommitted"), ("lock_sha256", "locks")]
)
def test_a_change_of_the_code_is_noticed(tmp_path, key, message):
    run = new_run(tmp_path / "mine-stamp", "mine", "stamp", CPU.facts())
    if describe_code_change(run) is not None:
        pytest.skip("the tree is being edited while the tests run")
    run.identity["code"][key] = "other"
    assert message in describe_code_change(run)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20])
def test_rewards_of_the_summary_are_the_first_and_the_last_5_rows(tmp_path, count):
    rewards = [0.1 * index * index for index in range(count)]
    write_rows(tmp_path, rewards)
    summary = finish_summary(tmp_path, status="completed", exit_code=0)
    assert summary["initial_reward"] == pytest.approx(sum(rewards[:5]) / len(rewards[:5]), abs=1e-6)
    assert summary["final_reward"] == pytest.approx(sum(rewards[-5:]) / len(rewards[-5:]), abs=1e-6)
    assert summary["steps"] == count
    assert summary["seconds"]["sample"] == pytest.approx(0.5 * count)
    assert (summary["status"], summary["exit_code"]) == ("completed", 0)
    assert read_json(tmp_path / "summary.json") == summary


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"reward": 1}', '{"step": "x"}'])
def test_a_whole_line_that_is_not_a_row_is_damage(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 1}}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl: is damaged \(no row: "):
        read_metrics(tmp_path)


def test_a_line_a_kill_cut_short_is_left_out(tmp_path):
    write_rows(tmp_path, [0.0, 1.0], torn='{"step": 3, "rew')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    summary = finish_summary(tmp_path, status="failed")
    assert (summary["steps"], summary["final_reward"]) == (2, 0.5)


def test_a_run_without_a_step_has_no_rewards(tmp_path):
    summary = finish_summary(tmp_path, status="failed")
    assert (summary["steps"], summary["initial_reward"], summary["final_reward"]) == (0, None, None)


def test_rows_without_a_reward_are_left_out_of_the_means(tmp_path):
    write_rows(tmp_path, [None, 1.0, "nan", 3.0])
    summary = finish_summary(tmp_path, status="completed")
    assert summary["initial_reward"] == summary["final_reward"] == 2.0
    assert summary["steps"] == 4


def test_a_summary_keeps_what_earlier_writers_said(tmp_path):
    write_json(tmp_path / "summary.json", {"smoke": True, "restarts": 2, "status": "running"})
    summary = finish_summary(tmp_path, status="completed")
    assert (summary["smoke"], summary["restarts"], summary["status"]) == (True, 2, "completed")


def test_json_is_replaced_whole_whoever_reads_meanwhile(tmp_path):
    path, done, values = tmp_path / "file.json", threading.Event(), []
    write_json(path, {"value": 0, "padding": "x" * 200_000})

    def read_on():
        while not done.is_set():
            values.append(read_json(path)["value"])

    reader = threading.Thread(target=read_on)
    reader.start()
    for value in range(1, 60):
        write_json(path, {"value": value, "padding": "x" * 200_000})
    done.set()
    reader.join()
    assert values and values == sorted(values)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


def test_a_missing_file_reads_as_empty(tmp_path):
    assert read_json(tmp_path / "none.json") == {}
    assert read_metrics(tmp_path) == []


# --- two launches never work in one run directory ------------------------------------------------------------------


def test_a_run_directory_is_claimed_once_and_free_again_afterwards(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lock = lock_run(run)

    with pytest.raises(ConfigError, match="another launch is running"):
        lock_run(run)

    os.close(lock)
    os.close(lock_run(run))


@pytest.mark.parametrize("wait_option", [os.WNOWAIT, 0], ids=["not yet collected by its parent", "gone"])
def test_what_a_killed_launcher_left_is_waited_for_and_a_living_one_is_not(tmp_path: Path, wait_option: int) -> None:
    run, dead = Run(tmp_path), subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | wait_option)
    lock = lock_run(run)
    began = time.monotonic()
    wait_for_end(run)  # the lock belongs to this process, which is alive
    assert time.monotonic() - began < 0.3 and run.is_running()

    (tmp_path / "lock").write_text(f"{socket.gethostname()} {dead.pid}\n")  # its process guards hold the lock
    threading.Timer(0.4, os.close, [lock]).start()
    wait_for_end(run)
    assert 0.3 < time.monotonic() - began < 5 and not run.is_running()


def test_a_launch_that_has_not_named_itself_is_said(tmp_path: Path) -> None:
    for make in (Path.exists, Path.touch):  # no lock file, then an empty lock file
        make(tmp_path / "lock")
        with pytest.raises(ConfigError, match=r"is still starting and has no pid yet\. Fix: try again"):
            read_launcher(tmp_path)
    lock = lock_run(Run(tmp_path))
    assert read_launcher(tmp_path) == (socket.gethostname(), os.getpid())
    os.close(lock)


def test_looking_at_the_lock_keeps_no_launch_out(tmp_path: Path) -> None:
    assert not Run(tmp_path).is_running()
    (tmp_path / "lock").touch()
    looking = (tmp_path / "lock").open()
    fcntl.flock(looking, fcntl.LOCK_SH)  # is_running also locks the file for a moment
    assert not Run(tmp_path).is_running()  # two readers do not mistake each other for a launch
    threading.Timer(0.1, looking.close).start()
    lock = lock_run(Run(tmp_path))
    assert Run(tmp_path).is_running()
    os.close(lock)
    assert not Run(tmp_path).is_running()


def test_without_file_locks_nothing_is_known_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert not Run(tmp_path).is_running()


# --- rows past a checkpoint are moved aside, not lost --------------------------------------------------------------


def write(folder, steps, torn=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + torn)


def steps(folder, name="metrics.jsonl"):
    path = folder / name
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("step", "torn", "remaining", "moved"),
    [
        (3, "", [1, 2, 3], [4, 5]),
        (3, '{"step": 6, "re', [1, 2, 3], [4, 5]),
        (5, "", [1, 2, 3, 4, 5], []),
        (5, '{"step": 6, "re', [1, 2, 3, 4, 5], []),
        (9, "", [1, 2, 3, 4, 5], []),
        (0, "", [], [1, 2, 3, 4, 5]),
    ],
)
def test_rows_past_the_step_are_moved_and_a_torn_line_is_dropped(tmp_path, step, torn, remaining, moved):
    write(tmp_path, range(1, 6), torn)
    assert move_rows_after(tmp_path, step) == len(moved)
    assert steps(tmp_path) == remaining
    assert steps(tmp_path, "metrics.redone.jsonl") == moved
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99}\n')
    assert [row["step"] for row in read_metrics(tmp_path)] == [*remaining, 99]


def test_rows_moved_twice_are_all_kept_aside(tmp_path):
    write(tmp_path, [1, 2, 3])
    move_rows_after(tmp_path, 2)
    write(tmp_path, [1, 2, 3, 4])
    move_rows_after(tmp_path, 2)
    assert steps(tmp_path, "metrics.redone.jsonl") == [3, 3, 4]


def test_rows_of_evaluations_and_samples_are_moved_with_them(tmp_path):
    for name in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        write(tmp_path, [2, 2, 4])
        (tmp_path / "metrics.jsonl").rename(tmp_path / name)
    write(tmp_path, [1, 2, 3, 4])
    assert move_rows_after(tmp_path, 2) == 2  # rows of metrics.jsonl
    for name in ("eval", "samples"):
        assert steps(tmp_path, f"{name}.jsonl") == [2, 2]
        assert steps(tmp_path, f"{name}.redone.jsonl") == [4]


def test_a_run_without_rows_has_nothing_to_move(tmp_path):
    assert move_rows_after(tmp_path, 3) == 0
    assert list(tmp_path.iterdir()) == []


def test_code_without_git_has_the_commit_its_image_was_built_from(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_HOME", str(tmp_path))
    assert code_version.read_code_state()["commit"] is None
    (tmp_path / ".commit").write_text("abc\n")
    state = code_version.read_code_state()
    assert (state["commit"], state["dirty"], state["patch"]) == ("abc", False, "")


def test_a_git_that_hangs_ends_the_launch_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nexec sleep 20\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(code_version, "_GIT_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=r"^code: git took more than 0 seconds .*\. Fix: check the disk"):
        code_version.read_code_state()


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "samples.jsonl", "slow_rewards.jsonl"])
@pytest.mark.parametrize("damage", ["\0" * 99, "\0\0\n", '{"step": 3, "rew\0\0\n', '{"st\n\0\0\n', "no row\n"])
def test_a_damaged_end_of_a_row_file_is_cut(tmp_path, name, damage):
    """R9: a power loss leaves NUL bytes or a cut line behind the last row."""
    (tmp_path / name).write_text('{"step": 1}\n{"step": 2}\n' + damage)
    move_rows_after(tmp_path, 2)
    assert (tmp_path / name).read_text() == '{"step": 1}\n{"step": 2}\n'


def test_nul_bytes_between_two_rows_cost_neither(tmp_path):
    """R9: a row that was added after a power loss follows NUL bytes in its line."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n\0\0\0{"step": 2}\n')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    move_rows_after(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_damaged_row_of_samples_blocks_nothing(tmp_path):
    """R9: samples.jsonl never blocks a resume; a damaged row in the middle of metrics.jsonl still does."""
    text = '{"step": 1}\nno row\n{"step": 2}\n'
    (tmp_path / "samples.jsonl").write_text(text)
    assert move_rows_after(tmp_path, 2) == 0
    assert (tmp_path / "samples.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: is damaged"):
        move_rows_after(tmp_path, 2)


@pytest.fixture
def full(tmp_path):
    """Return ``full(resource)``, which fills a small disk with bytes or with files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small disk")

    def fill(resource: str) -> None:
        with pytest.raises(OSError, match="No space left"):
            for number in range(100):
                (folder / f"filler-{number}").write_bytes(b"x" * (1 << 19 if resource == "bytes" else 0))

    yield folder, fill
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("resource", ["bytes", "files"])
def test_a_full_disk_gets_the_end_of_a_run_and_no_empty_files(full, resource, capsys):
    """R8, R17: summary.json is final, and no temporary files are left."""
    folder, fill = full
    write_json(folder / "summary.json", {"status": "running"})
    fill(resource)
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(OSError, match="No space left"):
        write_json(folder / "summary.json", {"status": "failed"})
    assert {path.name for path in folder.iterdir()} == before
    assert finish_summary(folder, status="failed", exit_code=1, cause="rank 0: No space left on device")
    assert {path.name for path in folder.iterdir()} == before
    summary = read_json(folder / "summary.json")
    assert summary["status"] == "failed" and "No space left" in summary["cause"]
    assert "could not be written" not in capsys.readouterr().out


def test_what_does_not_fit_into_the_blocks_of_a_file_leaves_it_whole(full, capsys):
    """R17: half a summary would block the resume."""
    folder, fill = full
    write_json(folder / "summary.json", {"status": "running"})
    fill("bytes")
    finish_summary(folder, status="failed", cause="x" * 5000)
    assert read_json(folder / "summary.json") == {"status": "running"}
    assert "summary.json could not be written (No space left on device)" in capsys.readouterr().out
