"""A sweep as one array job."""

from __future__ import annotations

import pytest

from grpo_recipes import cli
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.launch import submission
from grpo_recipes.sweep import run
from grpo_recipes.sweep.run import array_text, task_index


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
    assert array_text(indices, most) == text


@pytest.fixture
def fake_sbatch(monkeypatch):
    """Scripts that were submitted; the jobs are 41, 42, ..."""
    scripts = []

    def fake_submit(script, cwd):
        scripts.append(script.read_text())
        return 40 + len(scripts)

    monkeypatch.setattr(run, "submit", fake_submit)
    monkeypatch.setattr(submission, "_look_deep", lambda *arguments: None)
    return scripts


def test_one_array_job_runs_all_trials(sweep, made, fake_sbatch, folder, capsys):
    assert sweep("learning_rate=1e-4,3e-4", "seed=1..3", "--slurm", "--profile", "cpu", "--max-parallel", "2") == 0
    (one,) = made()
    (script,) = fake_sbatch
    assert "#SBATCH --array=0-5%2\n" in script
    assert "#SBATCH --output=logs/slurm_%A_%a.out\n" in script
    assert script.endswith(f"exec grpo sweep --cell {one.folder}\n")
    assert f"export PYTHONPATH={one.trial_dir(0)}/code/src\n" in script
    assert one.record["jobs"] == [41] and (folder / "logs").is_dir()
    assert "job 41 is submitted, a task for each of 6 runs" in capsys.readouterr().out
    pointers = sorted(path.name.rpartition("-")[2] for path in (folder / "runs/.jobs").iterdir())
    assert pointers == [f"41_{index}" for index in range(6)]


def test_an_option_of_the_command_line_stands_over_the_profile(sweep, fake_sbatch):
    assert sweep("seed=1..2", "--slurm", "--profile", "cpu", "--time", "00:10:00") == 0
    assert "#SBATCH --time=00:10:00\n" in fake_sbatch[0]


def test_again_it_submits_what_is_missing(sweep, made, fake_sbatch, fake_launches, monkeypatch, capsys):
    again = ("seed=1..4", "--slurm", "--profile", "cpu")
    assert sweep(*again) == 0
    (one,) = made()
    for index, code in ((0, "0"), (1, "1")):
        fake_launches.codes[one.names[index]] = int(code)
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        assert cli.main(["sweep", "--cell", str(one.folder)]) == int(code)
    monkeypatch.setattr("grpo_recipes.sweep.run.queued", lambda sweep: {3})  # a fake queue
    capsys.readouterr()
    assert sweep(*again) == 0
    assert "#SBATCH --array=1-2\n" in fake_sbatch[1]
    assert "1 of 4 completed, 1 queued or running, 2 to run" in capsys.readouterr().out
    assert made()[0].record["jobs"] == [41, 42]


def test_when_sbatch_refuses_nothing_is_left(sweep, made, monkeypatch, folder, capsys):
    def fake_refusal(script, cwd):
        raise config_error("sbatch", "invalid partition", "name another")

    monkeypatch.setattr(run, "submit", fake_refusal)
    monkeypatch.setattr(submission, "_look_deep", lambda *arguments: None)
    assert sweep("seed=1..2", "--slurm", "--profile", "cpu") == 2
    assert made() == [] and list((folder / "runs/sweeps").iterdir()) == []


@pytest.mark.parametrize("index", ["", "2", "x"])
def test_a_task_is_one_of_the_sweep(sweep, made, fake_sbatch, index):
    assert sweep("seed=1..2", "--slurm", "--profile", "cpu") == 0
    with pytest.raises(ConfigError, match="is not a trial of"):
        task_index(made()[0], {"SLURM_ARRAY_TASK_ID": index})
