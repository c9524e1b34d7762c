"""Sweeps: trials that run or are submitted, the output, and running the same command again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.console.report.page import NOTHING
from grpo_recipes.console.sweep.run import SignalForwarder, format_array_indices
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.launch import submission
from grpo_recipes.plan.ports import port_keys
from grpo_recipes.recipe import read_frozen
from grpo_recipes.runs.rundir import Run, lock_run, read_json, write_json
from grpo_recipes.slurm.client import find_queued_tasks

TWO = ("seed=1..2",)
MEASURED = {"seconds/update": 0.25, "seconds/sync": 0.0312, "syncs": 1, "memory/peak_gb": 0.945}


def test_trials_are_frozen_runs_in_one_wandb_group(sweep, read_sweeps, fake_launches):
    assert sweep("learning_rate=1e-4,3e-4", "--max_steps", "3", "--name", "lr") == 0
    (saved_sweep,) = read_sweeps()
    assert saved_sweep.folder.name.startswith("lr-")
    assert fake_launches.started == ["learning_rate=1e-4", "learning_rate=3e-4"]
    recipe = read_frozen(saved_sweep.trial_dir(1) / "recipe.yaml")
    assert recipe["learning_rate"] == 3e-4 and recipe["max_steps"] == 3
    assert recipe["wandb_run_group"] == saved_sweep.folder.name
    identity = read_json(saved_sweep.trial_dir(1) / "run.json")
    assert identity["run_name"] == "lr-learning_rate=3e-4"
    assert (saved_sweep.trial_dir(1) / "code/src/grpo_recipes/console/sweep/run.py").is_file()
    record = json.loads((saved_sweep.folder / "sweep.json").read_text())
    assert record["axes"] == {"learning_rate": ["1e-4", "3e-4"]} and record["code"]["commit"]
    assert (saved_sweep.folder / "sweep.html").is_file()


def test_a_group_that_the_user_names_is_kept(sweep, read_sweeps, fake_launches):
    assert sweep(*TWO, "--wandb_run_group", "mine") == 0
    assert read_frozen(read_sweeps()[0].trial_dir(0) / "recipe.yaml")["wandb_run_group"] == "mine"


@pytest.mark.parametrize("key", ["weight_sync", "weight_bridge_mode"])
def test_weight_sync_methods_end_in_a_table_with_times_memory_and_reward(
    sweep, read_sweeps, fake_launches, capsys, key
):
    fake_launches.measured = MEASURED
    assert sweep(f"{key}=none,shared_vllm,lora_only", "--max_steps", "3") == 0
    (swept,) = read_sweeps()
    recipes = [read_frozen(swept.trial_dir(index) / "recipe.yaml") for index in range(3)]
    methods = [("restart", False), ("shared", False), ("lora", True)]
    assert [(recipe["weight_sync"], recipe["use_peft"]) for recipe in recipes] == methods
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(index for index, line in enumerate(lines) if line.startswith("weight_sync ")) :]
    assert table[0].split()[-8:] == ["update", "s", "sync", "s", "mem", "GB", "save", "MB"]
    measured = [line.split()[-4:] for line in table[1:4]]
    assert measured == [
        ["0.25", "0.0312", "0.945", NOTHING],
        ["0.281", "0", "0.945", NOTHING],
        ["0.25", "0.0312", "0.945", NOTHING],
    ]
    assert all("completed  3      0.2 -> 0.2" in line for line in table[1:4])
    assert max(map(len, table[:5])) <= 88


def test_a_sweep_over_other_keys_has_no_columns_of_speed(sweep, fake_launches, capsys):
    fake_launches.measured = MEASURED
    assert sweep(*TWO) == 0
    assert "update s" not in capsys.readouterr().out


def test_the_server_and_the_colocated_engine_are_swept(sweep, read_sweeps, fake_launches, capsys):
    assert sweep("vllm_mode=server,colocate") == 0
    modes = [read_json(read_sweeps()[0].trial_dir(index) / "plan.json")["mode"] for index in range(2)]
    assert modes == ["server", "colocate"] and "update s" in capsys.readouterr().out


GROUPS = """
model_name_or_path: smoke:sums
dtype: float32
bf16: false
atropos_environment: arithmetic
reward_funcs: [environment]
prompts_per_step: 8
num_generations: 8
max_prompt_length: 32
max_completion_length: 8
max_steps: 9
use_vllm: true
"""


def test_runs_with_atropos_start_a_run_api_each(folder, read_sweeps, fake_launches):
    pytest.importorskip("atroposlib")
    (folder / "groups.yaml").write_text(GROUPS)
    assert cli.main(["sweep", "groups.yaml", "weight_sync=none,shared_vllm,lora_only", "--max_steps", "3"]) == 0
    for index in range(3):
        trial = read_sweeps()[0].trial_dir(index)
        recipe, plan = read_frozen(trial / "recipe.yaml"), read_json(trial / "plan.json")
        assert recipe["max_steps"] == 3 and not any(recipe.is_set(key) for key in port_keys())
        assert {"run-api", "environment-arithmetic"} <= {process["role"] for process in plan["processes"]}


def test_the_runs_of_an_array_cannot_share_a_run_api(folder, fake_sbatch, capsys):
    pytest.importorskip("atroposlib")
    recipe = GROUPS.replace("atropos_environment: arithmetic", "atropos_api_url: http://127.0.0.1:8000")
    (folder / "groups.yaml").write_text(recipe)
    assert cli.main(["sweep", "groups.yaml", "weight_sync=file,shared", "--slurm", "--profile", "cpu"]) == 2
    assert "the runs of an array can't share a run-api. Fix: remove" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_a_trial_that_fails_is_named_and_the_others_run(sweep, read_sweeps, fake_launches, capsys):
    fake_launches.codes = {"seed=1": 3, "seed=2": 2}
    assert sweep("seed=1..3") == 3  # exit code of the first failed trial
    output = capsys.readouterr().out
    assert "trial 1 of 3: seed=1 failed with exit code 3: a fake cause" in output
    assert "trial 2 of 3: seed=2 failed with exit code 2: here it is refused. Fix: mend it" in output
    assert "trial 3 of 3: seed=3 completed" in output
    assert "not completed: seed=1 (failed), seed=2 (failed)" in output
    assert f"grpo sweep --resume runs/sweeps/{read_sweeps()[0].folder.name}" in output


def test_grpo_stop_ends_a_sweep_with_the_trial_that_runs(sweep, read_sweeps, monkeypatch, capsys):
    started, before = [], {signum: signal.getsignal(signum) for signum in signal.valid_signals()}

    def fake_launch(forwarder, argv, environment, log) -> int:
        started.append(Path(argv[-1]).name)
        assert cli.main(["stop", str(read_sweeps()[0].folder)]) == 0
        summary = {**read_json(Path(argv[-1]) / "summary.json"), "status": "stopped", "exit_code": 75}
        write_json(Path(argv[-1]) / "summary.json", summary)
        return 75

    monkeypatch.setattr(SignalForwarder, "run", fake_launch)
    code = sweep("seed=1..3")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, before[signum])
    output = capsys.readouterr().out
    assert (code, started) == (75, ["seed=1"])
    assert "stop requested: the running trial saves and ends" in output and "grpo: sweep stopped by grpo stop" in output


@pytest.mark.parametrize("arguments", [("SAME",), ("--resume", "last"), ("--resume", "DIR")])
def test_again_it_fills_the_gaps_alone(sweep, read_sweeps, fake_launches, capsys, arguments):
    fake_launches.codes = {"seed=2": 1, "seed=3": 75}
    assert sweep("seed=1..3") == 1
    fake_launches.started, fake_launches.codes = [], {}
    folder = read_sweeps()[0].folder
    words = [str(folder) if word == "DIR" else word for word in arguments]
    assert (sweep("seed=1..3") if arguments == ("SAME",) else cli.main(["sweep", *words])) == 0
    assert fake_launches.started == ["seed=2", "seed=3"]
    assert len(read_sweeps()) == 1 and read_sweeps()[0].find_unfinished_trials() == []
    assert "1 of 3 completed, 2 to run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other", [("--name", "b"), ("--name", "a", "--max_steps", "4"), ("--name", "a", "--new")], ids=" ".join
)
def test_another_name_or_recipe_or_new_is_another_sweep(sweep, read_sweeps, fake_launches, monkeypatch, other):
    fake_launches.codes = {"seed=2": 1}
    assert sweep(*TWO, "--name", "a") == 1
    monkeypatch.setattr("grpo_recipes.console.sweep.folder.timestamp", lambda: "later")
    assert sweep(*TWO, *other) == 1
    assert len(read_sweeps()) == 2


def test_a_completed_sweep_is_not_gone_on_with(sweep, read_sweeps, fake_launches, monkeypatch):
    assert sweep(*TWO) == 0
    monkeypatch.setattr("grpo_recipes.console.sweep.folder.timestamp", lambda: "later")
    assert sweep(*TWO) == 0
    assert len(read_sweeps()) == 2


def test_a_run_directory_that_is_gone_is_made_again(sweep, read_sweeps, fake_launches, capsys):
    assert sweep(*TWO) == 0
    shutil.rmtree(read_sweeps()[0].trial_dir(1))
    assert cli.main(["sweep", "--resume", "last"]) == 2
    assert "the run directory of seed=2 is gone" in capsys.readouterr().err
    fake_launches.started = []
    assert sweep(*TWO) == 0
    assert fake_launches.started == ["seed=2"] and read_sweeps()[0].find_unfinished_trials() == []


def test_a_run_directory_is_not_made_again_by_other_code(sweep, read_sweeps, fake_launches, monkeypatch, capsys):
    assert sweep(*TWO) == 0
    shutil.rmtree(read_sweeps()[0].trial_dir(1))
    monkeypatch.setattr("grpo_recipes.console.sweep.run.read_code_state", lambda: {"commit": "another"})
    assert sweep(*TWO) == 2
    assert "the code has changed since the sweep started" in capsys.readouterr().err


def test_a_named_port_that_is_taken_is_refused_before_anything_is_written(sweep, folder, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert sweep(*TWO, "--main_process_port", port) == 2
    message = capsys.readouterr().err
    assert f"--main_process_port: port {port} is in use by another process (pid {os.getpid()}). Fix: free it" in message
    assert not (folder / "runs").exists()


def test_what_does_not_fit_the_machine_is_refused_before_anything_is_written(sweep, folder, capsys):
    assert sweep("num_processes=1,2", "--accelerator", "single") == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("grpo: num_processes=2: ") and "accelerator: single runs one process" in message
    assert list(folder.iterdir()) == []


def test_a_trial_that_runs_elsewhere_is_left_alone(sweep, read_sweeps, fake_launches, capsys):
    fake_launches.codes = {"seed=1": 1, "seed=2": 1}
    assert sweep(*TWO) == 1
    fake_launches.started, fake_launches.codes = [], {}
    lock = lock_run(Run(read_sweeps()[0].trial_dir(0)))
    try:
        assert cli.main(["sweep", "--resume", "last"]) == 0
        assert cli.main(["sweep", "--resume", "last"]) == 0
    finally:
        os.close(lock)
    assert fake_launches.started == ["seed=2"]
    assert "0 of 2 completed, 1 queued or running, 1 to run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("echo 0; echo 3", {0, 3}),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", set()),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", None),
    ],
)
def test_the_queue_is_asked_for_the_jobs_of_the_sweep(folder, monkeypatch, answer, expected):
    fake_squeue = folder / "squeue"
    fake_squeue.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\n{answer}\n')
    fake_squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    if expected is None:
        with pytest.raises(ConfigError, match="Unable to contact"):
            find_queued_tasks([7, 8])
    else:
        assert find_queued_tasks([7, 8]) == expected
    assert "--jobs=7,8" in (folder / "asked").read_text()
    assert find_queued_tasks([]) == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("seed=1..2", "--profile", "cpu"), "--profile: does nothing without --slurm"),
        (("seed=1..2", "--time", "1:00:00"), "--time: does nothing without --slurm"),
        (("seed=1..2", "--max-parallel", "2"), "--max-parallel: does nothing without --slurm"),
        (("seed=1..2", "--slurm"), "--slurm: needs a site profile"),
        (
            ("seed=1..2", "--slurm", "--profile", "cpu", "--max-parallel", "0"),
            "--max-parallel: expected 1 or more, got 0",
        ),
        (("seed=1..2", "--slurm", "--local"), "not allowed with argument"),
        (("--max_steps", "4", "seed=1..2"), "seed=1..2: comes after a flag"),
        (("seed=1..2", "--resume", "last"), "--resume: a sweep continues with its recipe and keys"),
        (("seed=1..2", "--name", "a/b"), "can't be the name of a folder"),
        ((), "sweep: no key is varied"),
    ],
)
def test_options_that_contradict_each_other_are_refused(sweep, folder, capsys, words, message):
    assert sweep(*words) == 2
    assert message in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_what_is_no_sweep_is_refused(folder, capsys):
    for words, message in ((["last"], "no sweeps found in runs/sweeps"), (["x"], "not a sweep directory")):
        assert cli.main(["sweep", "--resume", *words]) == 2
        assert message in capsys.readouterr().err


def test_the_default_recipe_is_varied_where_it_is_asked_for(folder, read_sweeps, fake_launches, monkeypatch):
    assert cli.main(["sweep", "seed=1..2"]) == 2 and not fake_launches.started
    monkeypatch.setenv("GRPO_DEFAULT_RECIPE", "1")
    assert cli.main(["sweep", "seed=1..2"]) == 0
    assert fake_launches.started == ["seed=1", "seed=2"]


@pytest.mark.parametrize(
    ("indices", "most", "text"),
    [
        ([0, 1, 2, 3, 4, 5], 2, "0-5%2"),
        ([5, 0, 1, 2], None, "0-2,5"),
        ([3], 1, "3%1"),
        ([0, 2, 3], None, "0,2-3"),
    ],
)
def test_indices_are_written_as_sbatch_takes_them(indices, most, text):
    assert format_array_indices(indices, most) == text


@pytest.fixture
def fake_sbatch(monkeypatch):
    """Record the submitted scripts. The jobs are 41, 42, ..."""
    scripts = []

    def fake_submit(script, after=None):
        scripts.append(script.read_text())
        return 40 + len(scripts)

    monkeypatch.setattr(submission, "submit", fake_submit)
    monkeypatch.setattr(submission, "_check_deep", lambda *arguments: None)
    return scripts


def test_one_array_job_runs_all_trials(sweep, read_sweeps, fake_sbatch, folder, capsys):
    assert sweep("learning_rate=1e-4,3e-4", "seed=1..3", "--slurm", "--profile", "cpu", "--max-parallel", "2") == 0
    (saved_sweep,) = read_sweeps()
    (script,) = fake_sbatch
    assert "#SBATCH --array=0-5%2\n" in script
    assert "#SBATCH --output=logs/slurm_%A_%a.out\n" in script
    assert script.endswith(f'exec grpo sweep --cell {saved_sweep.folder} "$@"\n')
    assert f"export PYTHONPATH={saved_sweep.trial_dir(0)}/code/src\n" in script
    assert saved_sweep.record["jobs"] == [41] and (folder / "logs").is_dir()
    assert "submitted job 41 with 6 tasks, one per run" in capsys.readouterr().out
    pointers = sorted(path.name.rpartition("-")[2] for path in (folder / "runs/.jobs").iterdir())
    assert pointers == [f"41_{index}" for index in range(6)]


def test_an_option_of_the_command_line_stands_over_the_profile(sweep, fake_sbatch):
    assert sweep("seed=1..2", "--slurm", "--profile", "cpu", "--time", "00:10:00") == 0
    assert "#SBATCH --time=00:10:00\n" in fake_sbatch[0]


def test_again_it_submits_what_is_missing(sweep, read_sweeps, fake_sbatch, fake_launches, monkeypatch, capsys):
    command = ("seed=1..4", "--slurm", "--profile", "cpu")
    assert sweep(*command) == 0
    (saved_sweep,) = read_sweeps()
    for index, code in ((0, "0"), (1, "1")):
        fake_launches.codes[saved_sweep.names[index]] = int(code)
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        assert cli.main(["sweep", "--cell", str(saved_sweep.folder)]) == int(code)
    monkeypatch.setattr("grpo_recipes.console.sweep.run.find_queued_tasks", lambda jobs: {3} if jobs == [41] else set())
    capsys.readouterr()
    assert sweep(*command) == 0
    assert "#SBATCH --array=1-2\n" in fake_sbatch[1]
    assert "1 of 4 completed, 1 queued or running, 2 to run" in capsys.readouterr().out
    assert read_sweeps()[0].record["jobs"] == [41, 42]


def test_without_sbatch_no_trial_is_checked(sweep, monkeypatch, folder, capsys):
    monkeypatch.setenv("PATH", str(folder))
    assert sweep("seed=1..2", "--slurm", "--profile", "cpu") == 2
    assert capsys.readouterr().err.startswith("grpo: sbatch: this machine does not have Slurm's command sbatch. Fix: ")
    assert list(folder.iterdir()) == []


def test_when_sbatch_refuses_nothing_is_left(sweep, read_sweeps, monkeypatch, folder, capsys):
    def fake_refusal(script, after=None):
        raise config_error("sbatch", "invalid partition", "name another")

    monkeypatch.setattr(submission, "submit", fake_refusal)
    monkeypatch.setattr(submission, "_check_deep", lambda *arguments: None)
    assert sweep("seed=1..2", "--slurm", "--profile", "cpu") == 2
    assert read_sweeps() == [] and list((folder / "runs/sweeps").iterdir()) == []


@pytest.mark.parametrize("index", ["", "2", "x"])
def test_a_task_is_one_of_the_sweep(sweep, read_sweeps, fake_sbatch, index, monkeypatch, capsys):
    assert sweep("seed=1..2", "--slurm", "--profile", "cpu") == 0
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", index)
    assert cli.main(["sweep", "--cell", str(read_sweeps()[0].folder)]) == 2
    assert "is not a trial of" in capsys.readouterr().err
