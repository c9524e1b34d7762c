"""`run_offline_grpo.py -m`: Hydra keys become a sweep, here or as an array job, with the options of `grpo sweep`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from grpo_recipes.console.sweep.folder import Sweep
from grpo_recipes.extensions.offline import main as offline
from grpo_recipes.launch import submission
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe import read_frozen

SMOKE = ("model.train_id=smoke:sums", "data.problems=arithmetic", "generation.max_new_tokens=8", "train.iterations=1")
EIGHTEEN = ("train.lr=5e-6,1e-5,2e-5", "train.kl_coef=0.02,0.05,0.1", "train.batch_size=4,8")
LISTS = tuple(f"{key}=[{values}]" for key, _, values in (word.partition("=") for word in EIGHTEEN))
ON_SLURM = ("--slurm", "--profile", "cpu", "--max-parallel", "2")
FREE = "generation.base_url=http://127.0.0.1:29876"


def multirun(*words: str) -> int:
    return offline.main(["-m", *SMOKE, *words])


def read_sweeps(folder: Path) -> list:
    return [Sweep.read(path.parent) for path in sorted(folder.glob("multirun/*/*/sweeps/*/sweep.json"))]


@pytest.mark.slow
@pytest.mark.parametrize("words", [EIGHTEEN, LISTS], ids=["commas", "lists"])
def test_eighteen_runs_differ_in_folder_and_configuration_and_end_in_one_table(folder, fake_launches, capsys, words):
    assert multirun(FREE, *words) == 0
    (saved_sweep,) = read_sweeps(folder)
    recipes = [read_frozen(saved_sweep.trial_dir(index) / "recipe.yaml") for index in range(18)]
    keys = ("learning_rate", "beta", "per_device_train_batch_size", "steps_per_generation", "max_steps", "save_steps")
    expected = {
        (rate, kl, size, 16 // size, 16 // size, 16 // size)
        for rate in (5e-6, 1e-5, 2e-5) for kl in (0.02, 0.05, 0.1) for size in (4, 8)
    }  # fmt: skip
    assert {tuple(recipe[key] for key in keys) for recipe in recipes} == expected
    assert len(set(fake_launches.started)) == 18 and sorted(fake_launches.started) == sorted(saved_sweep.names)
    output = capsys.readouterr().out
    assert output.count("learning_rate  beta") == 1 and output.count("grpo: comparison in") == 1
    assert (
        output.count(" completed  ") == 18 and "18 of 18 completed" in (saved_sweep.folder / "sweep.html").read_text()
    )


def test_the_same_command_goes_on_in_the_folder_of_another_second(folder, fake_launches, capsys):
    fake_launches.codes = {"learning_rate=5e-06": 3}
    assert multirun(FREE, "train.lr=5e-6,1e-5") == 3
    began = fake_launches.started
    fake_launches.started, fake_launches.codes = [], {}
    time.sleep(1.1)  # Hydra names the folder by the second
    assert multirun(FREE, "train.lr=5e-6,1e-5", "--new", "--dry-run") == 0
    assert "2 runs would start in multirun/" in capsys.readouterr().out
    assert multirun(FREE, "train.lr=5e-6,1e-5") == 0
    assert began == ["learning_rate=5e-06", "learning_rate=1e-05"] and fake_launches.started == began[:1]
    assert len(read_sweeps(folder)) == 1 and "continuing multirun/" in capsys.readouterr().out
    assert multirun(FREE, "train.lr=5e-6,1e-5", "hydra.sweep.dir=mine") == 0
    assert len(list(folder.glob("mine/sweeps/*/sweep.json"))) == 1


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the submitted scripts."""
    texts: list[str] = []
    monkeypatch.setattr(submission, "submit", lambda script, after: texts.append(script.read_text()) or 41)
    monkeypatch.setattr(submission, "_check_deep", lambda *arguments: None)
    return texts


@pytest.mark.slow
def test_it_is_submitted_as_one_array_job_whose_servers_have_ports_of_their_own(folder, scripts, capsys):
    words = ("train.lr=5e-6,1e-5", "train.kl_coef=[0.02,0.05,0.1]", *ON_SLURM)
    assert multirun(*words, "--time", "00:10:00", "--name", "mine") == 0
    (saved_sweep,) = read_sweeps(folder)
    (script,) = scripts
    assert "#SBATCH --array=0-5%2\n" in script and "#SBATCH --time=00:10:00\n" in script
    assert script.endswith(f'exec grpo sweep --cell {saved_sweep.folder} "$@"\n')
    assert saved_sweep.folder.name.startswith("mine-")
    recipes = [read_frozen(saved_sweep.trial_dir(index) / "recipe.yaml") for index in range(6)]
    assert len({(recipe["learning_rate"], recipe["beta"]) for recipe in recipes}) == 6
    assert not any(recipe.is_set("vllm_server_port") for recipe in recipes)
    assert multirun(*words[:2], "train.iterations=2", FREE, *words[2:]) == 0
    assert (
        read_frozen(read_sweeps(folder)[1].trial_dir(0) / "recipe.yaml")["vllm_server_port"] == 29876
    )  # the port in the command


@pytest.mark.slow
def test_optuna_chooses_values_of_hydra_keys(folder, fake_launches, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run_offline_grpo.py", "-m", "train.lr=log:1e-6..1e-4"])
    pytest.importorskip("optuna", reason="EXTRAS=search bash scripts/setup.sh")
    words = ("train.lr=log:1e-6..1e-4", "train.batch_size=1..5", "--search", "optuna", "--trials", "3")
    refused = "per_device_train_batch_size=5 and 1 more: train.batch_size: steps of 5 x 1 completions"
    assert multirun(FREE, *words) == 2 and refused in capsys.readouterr().err  # an end of a range cannot run
    words = ("train.lr=log:1e-6..1e-4", "train.batch_size=1..8", "--search", "optuna", "--trials", "3")
    assert multirun(FREE, *words, "--metric", "reward") == 0
    (saved_sweep,) = read_sweeps(folder)
    script = find_code_root() / "run_offline_grpo.py"
    assert saved_sweep.resume_command() == f"python {script} -m train.lr=log:1e-6..1e-4"
    recipes = [read_frozen(saved_sweep.trial_dir(index) / "recipe.yaml") for index in range(3)]
    assert len({recipe["learning_rate"] for recipe in recipes}) == 3
    assert all(1e-6 <= recipe["learning_rate"] <= 1e-4 for recipe in recipes)
    for recipe in recipes:  # derived keys are computed per run
        assert recipe["max_steps"] == 16 // recipe["per_device_train_batch_size"]
    output = capsys.readouterr().out
    assert (
        "can't run, so Optuna chooses other values: train.batch_size" in output
        and "highest reward of 3 trials" in output
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.lr=5e-6,fast",), "learning_rate=fast: train.lr: expected a number, got 'fast'"),
        (("train.batch_size=4,5",), "per_device_train_batch_size=5: train.batch_size: steps of 5 x 1 completions"),
        (("train.lr=5e-6,0.000005",), "are the same learning_rate"),
        (("train.lr=interval(1e-6,1e-4)",), "does not list its values. Fix: write values between commas, or LOW..HIGH"),
        (("train.lr=1e-6..1e-4",), "-m: no key has several values"),
        (("train.lr=1e-6..1e-4", "--search", "optuna"), "--search: needs the number of runs"),
        (("train.lr=1e-4..1e-6", "--search", "optuna", "--trials", "2"), "1e-4 is not below 1e-6"),
        (("seed=1..4", "--search", "optuna", "--trials", "2"), "finds only the luckiest seed"),
        (("train.lr=5e-6,1e-5", "--slurm"), "--slurm: needs a site profile"),
        (("train.lr=5e-6,1e-5", "--profile", "cpu"), "--profile: does nothing without --slurm"),
        (("train.lr=5e-6,1e-5", "--slurm", "--profile", "nowhere"), "--profile: profile 'nowhere' not found"),
        (("train.lr=5e-6,1e-5", "--resume", "last"), "--resume: has no effect with -m"),
        (("train.lr=5e-6,1e-5", "--cfg", "job"), "--cfg: has no effect with -m"),
        (("train.lr=5e-6,1e-5", "--benchmark"), "--benchmark: has no effect with -m"),
        (("train.lr=5e-6,1e-5", "model.device=cuda:3"), "model.device: 'cuda:3' is not available"),
        (("train.lr=5e-6,1e-5", "--trails", "3"), "is not an option of run_offline_grpo.py. Fix: use --trials"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_made(folder, capsys, words, message):
    assert multirun(*words) == 2
    assert message in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("words", [("--slurm", "--profile", "cpu"), ("--trials", "3"), ("--new",), ("--name", "x")])
def test_options_of_a_sweep_need_m(folder, capsys, words):
    assert offline.main([*SMOKE, *words]) == 2
    assert f"grpo: {words[0]}: has no effect without -m. Fix: add -m, or remove it" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_a_refused_submission_leaves_nothing(folder, scripts, monkeypatch, capsys):
    def refused(script: Path, after: int | None = None) -> int:
        from grpo_recipes.errors import config_error

        raise config_error("sbatch", "is refused", "ask")

    monkeypatch.setattr(submission, "submit", refused)
    assert multirun("train.lr=5e-6,1e-5", "--slurm", "--profile", "cpu", "hydra.sweep.dir=a/b") == 2
    assert not (folder / "a").exists() and folder.is_dir()
