"""run_offline_grpo.py: Hydra's overrides become one launch or a sweep; errors are printed and create no files."""

from __future__ import annotations

import datetime
import os
import runpy
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hydra")
from grpo_recipes.cli.entry_points import with_flags_of
from grpo_recipes.console.sweep.spec import make_trials
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.extensions.offline import main as offline
from grpo_recipes.launch.resolve import POINTERS
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources
from grpo_recipes.runs.rundir import create_recorded_folder
from grpo_recipes.slurm.client import SlurmJob

SMOKE = ("model.train_id=smoke:sums", "data.problems=arithmetic", "generation.max_new_tokens=8")
with socket.socket() as free:  # another launch on this machine may use the configured port
    free.bind(("127.0.0.1", 0))
    FREE = f"generation.base_url=http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> int:
    return offline.main(list(words))


def test_a_dry_run_prints_the_launch_and_makes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*SMOKE, "train.iterations=3", "--dry-run") == 0
    output = capfd.readouterr().out
    assert "grpo launch" in output and "--max_steps 6" in output and "--dataset_name seeded:arithmetic" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("--max_prompt_length", "512", *SMOKE, "--use_vllm", "false"),
        (*SMOKE, "--use_vllm=false", "--max_prompt_length", "512"),
    ],
)
def test_a_recipe_key_is_a_flag_wherever_its_value_stands(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, "--dry-run") == 0
    output = capfd.readouterr().out
    assert "(no server: use_vllm is false)" in output and "--max_completion_length 8" in output
    assert "--max_prompt_length 512" in output or "--max_prompt_length=512" in output


def test_evaluations_can_be_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(*SMOKE, "eval.enabled=false", "generation.base_url=http://127.0.0.1:29877", "--dry-run") == 0
    output = capfd.readouterr().out
    assert (
        "--eval_strategy no" in output and "num_generations_eval" not in output and "eval_problem_seeds" not in output
    )


def test_a_folder_of_a_sweep_is_the_value_of_its_flag(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--resume", "cells/train.lr=1e-5,seed=2") == 2
    assert "grpo: --resume: " in capfd.readouterr().err


def test_a_run_records_the_command_of_the_script_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["src/grpo_recipes/extensions/offline/main.py", "--cfg", "job"])
    monkeypatch.delitem(sys.modules, offline.__name__)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module(offline.__name__, run_name="__main__")
    folder = create_recorded_folder(tmp_path / "run", "")
    assert folder and folder["command"] == f"python {find_code_root() / 'run_offline_grpo.py'} --cfg job"


def test_the_configuration_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--cfg", "job", "train.lr=3e-4") == 0
    assert "lr: 0.0003" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.lrr=1e-5",), "train.lrr=1e-5: unknown key 'train.lrr'. Fix: write train.lr=1e-5"),
        (("train.lr=1e-5,2e-5",), "train.lr=1e-5,2e-5: has several values. Fix: add -m"),
        ((*SMOKE, "train.lr=fast"), "train.lr: learning_rate: expected a number, got 'fast'"),
        ((*SMOKE, "train.batch_size=5"), "train.batch_size: steps of 5 x"),
        ((*SMOKE, "model.device=cuda:2"), "model.device: 'cuda:2' is not available: this environment has"),
        ((*SMOKE, "eval.id_seed_start=1010"), "1010"),
        (("model.train_id=./nowhere", FREE), "model.train_id: model folder './nowhere' not found"),
        ((*SMOKE, "-m", "seed=1"), "-m: no key has several values"),
        ((*SMOKE, "-m", "model.device=cpu,auto"), "model.device: can't be swept"),
        ((*SMOKE, "-m", "seed=1,2", "model.device=cuda:2"), "model.device: 'cuda:2' is not available"),
        (("train.lr",), "train.lr: "),
        ((*SMOKE, "eval.enabled=no"), "eval.enabled: must be true or false, got 'no'. Fix: write"),
        ((*SMOKE, "eval.do_sample='false'"), "eval.do_sample: must be true or false, got 'false'"),
        ((*SMOKE, "logging.wandb.enabled=off"), "logging.wandb.enabled: must be true or false, got 'off'"),
        ((*SMOKE, "eval.ids=5000"), "eval.ids: expected a list of integers, got 5000"),
        ((*SMOKE, "eval.ids=[1,1001]"), "eval.ids: 1001 is also a training seed"),
        ((*SMOKE, "generation.base_url=http://a:99999999"), "generation.base_url: 'http://a:99999999' is"),
        (("--resume", "somewhere", "train.lr=1e-3"), "train.lr=1e-3: has no effect with --resume"),
        (("~train.lr",), "~train.lr: unknown key '~train.lr'. Fix: write train.lr=VALUE"),
        (("hydra.job.chdir=true",), "hydra.job.chdir=true: has no effect here. Fix: remove it; hydra.run.dir sets"),
        (("hydra.sweep.dir=x",), "hydra.sweep.dir=x: has no effect here. Fix: remove it; hydra.run.dir sets"),
        (("-m", "seed=1,2", "hydra.run.dir=x"), "hydra.run.dir=x: has no effect here. Fix: remove it; hydra.sweep.dir"),
        ((*SMOKE, "-m", "seed=1,2", "generation.base_url=8000"), "generation.base_url: '8000' is not an address"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_nothing_is_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert run(*words) == 2
    assert message in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("device", "gpus"),
    [("auto", ("0", "1", "2")), ("cuda", ("0", "1", "2")), ("cuda:2", ("0", "2")), ("cuda:0", ("1", "0"))],
)  # fmt: skip
def test_the_named_gpu_trains_and_another_one_serves(device: str, gpus: tuple[str, ...]) -> None:
    resources, variables = offline.select_device(device, Resources(device="cuda", gpus=("0", "1", "2"), cores=2))
    assert resources.gpus == gpus
    assert variables == ({} if len(gpus) == 3 else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})


def test_a_gpu_that_is_not_there_is_never_replaced() -> None:
    with pytest.raises(ConfigError, match="'cpu' is not available: this environment is for GPUs"):
        offline.select_device("cpu", Resources(device="cuda", gpus=("0", "1", "2"), cores=2))
    with pytest.raises(ConfigError, match="'cuda:3' is not available: 3 GPUs are visible"):
        offline.select_device("cuda:3", Resources(device="cuda", gpus=("0", "1", "2"), cores=2))
    with pytest.raises(ConfigError, match="'cuda:' is unknown"):
        offline.select_device("cuda:", Resources(device="cuda", gpus=("0", "1", "2"), cores=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("train.lr=5e-6,1e-5,2e-5", "train.kl_coef=0.02,0.05,0.1", "train.batch_size=4,8"),
        ("train.lr=[5e-6,1e-5,2e-5]", "train.kl_coef=[0.02,0.05,0.1]", "train.batch_size=[4,8]"),
    ],
)
def test_either_spelling_of_a_sweep_is_all_combinations(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    specs: list[Any] = []
    monkeypatch.setattr("grpo_recipes.console.sweep.command.start_sweep", lambda spec, *_: specs.append(spec) or 0)
    assert run("-m", *SMOKE, *words) == 0
    (spec,) = specs
    trials = make_trials(spec, os.environ, "cpu")
    combinations = {
        (trial.recipe["learning_rate"], trial.recipe["beta"], trial.recipe["max_steps"]) for trial in trials
    }
    assert len(trials) == 18 and len({trial.name for trial in trials}) == 18
    assert combinations == {
        (lr, kl, steps) for lr in (5e-6, 1e-5, 2e-5) for kl in (0.02, 0.05, 0.1) for steps in (40, 20)
    }


def test_a_server_is_asked_where_its_address_is_named_and_it_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        words = (*SMOKE, f"generation.base_url={address}", "--dry-run")
        assert run(*words) == 0
        assert f"--vllm_server_base_url {address}" in capfd.readouterr().out
    assert run(*words) == 0
    output = capfd.readouterr().out
    assert "vllm_server_base_url" not in output and f"--vllm_server_port {address.rpartition(':')[2]}" in output


def test_ids_to_evaluate_on_reach_the_recipe_in_a_sweep_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(*SMOKE, "eval.ids=[5000,5003]", "--dry-run") == 0
    assert "--eval_problem_ids 5000 5003" in capfd.readouterr().out
    specs: list[Any] = []
    monkeypatch.setattr("grpo_recipes.console.sweep.command.start_sweep", lambda spec, *_: specs.append(spec) or 0)
    assert run("-m", *SMOKE, "train.lr=1e-5,2e-5", "eval.ids=[5000,5003]") == 0
    trials = make_trials(specs[0], os.environ, "cpu")
    assert [trial.recipe["eval_problem_ids"] for trial in trials] == [[5000, 5003]] * 2


@pytest.mark.parametrize("place", ["mine", "."])
def test_a_refused_launch_leaves_what_was_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(offline, "launch", refuse)
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)
    (folder / "thesis.txt").write_text("years of work")
    assert run(*SMOKE, FREE, f"hydra.run.dir={place}") == 2
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    assert run(*SMOKE, FREE, f"hydra.run.dir={tmp_path}-new") == 2
    assert not Path(f"{tmp_path}-new").exists()


def refuse(*_: Any) -> int:
    raise config_error("somewhere", "something is wrong", "mend it")


def test_a_folder_of_another_configuration_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    launched: list[Any] = []
    moved: list[dict[str, Any]] = []

    def launch(options: Any, _: Any) -> int:
        launched.append(options.resume)
        ports = {key: value.value for key, value in options.keys.items() if "server_port" in key}
        moved.append(ports if options.resume else {})
        (tmp_path / "one/offline-1").mkdir(exist_ok=True)
        (tmp_path / "one/offline-1/run.json").write_text("{}")
        return 0

    monkeypatch.setattr(offline, "launch", launch)
    words = (*SMOKE, FREE, "hydra.run.dir=one")
    assert run(*words, "train.lr=1e-3") == 0
    hydra_files = {path.name: path.read_text() for path in (tmp_path / "one/.hydra").iterdir()}
    assert run(*words, "train.lr=7e-3") == 2
    assert "train.lr: is 0.007, but the run in one started with 0.001. Fix: go back to" in capfd.readouterr().err
    assert run(*words, "train.lr=1e-3") == 0
    assert launched == [None, str(tmp_path / "one/offline-1")]
    assert run(*words, "train.lr=1e-3", "generation.base_url=http://127.0.0.1:29878", "model.device=cpu") == 0
    assert moved[-1] == {"vllm_server_port": 29878}
    assert {path.name: path.read_text() for path in (tmp_path / "one/.hydra").iterdir()} == hydra_files


def test_a_requeued_job_resumes_its_run_in_the_folder_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []

    def launch(options: Any, resources: Resources) -> int:
        assert resources.job
        launched.append(options.resume)
        if options.resume is None:
            run_dir = Path(options.keys["run_root"].value, f"offline-{len(launched)}")
            run_dir.mkdir()
            (run_dir / "run.json").write_text("{}")
            pointer = run_dir.parent / POINTERS / resources.job.name
            pointer.parent.mkdir()
            pointer.write_text(str(run_dir))
        return 0

    monkeypatch.setattr(offline, "launch", launch)
    words = (*SMOKE, FREE, "--use_vllm=false")
    starts = [(0, 7, 1e-3), (0, 8, 1e-3), (0, 7, 2e-3), (1, 7, 1e-3), (1, 7, 3e-3), (1, 9, 1e-3)]
    for hour, (restarts, number, lr) in enumerate(starts):
        job = SlurmJob(number, "cluster", 1, None, restarts)
        monkeypatch.setattr(offline, "find_resources", lambda _, job=job: Resources("cpu", (), 2, job))
        clock = SimpleNamespace(now=lambda hour=hour: datetime.datetime(2026, 1, 1, hour))
        monkeypatch.setattr("hydra.core.utils.datetime", clock)
        assert run(*words, f"train.lr={lr}") == 0
    first = next(tmp_path.glob("outputs/*/*/offline-1"))
    assert launched == [None, None, None, str(first), None, None]


def test_a_command_in_a_fix_is_one_that_can_be_run(capfd: pytest.CaptureFixture[str]) -> None:
    told = config_error("--model_name_or_path", "is not here", "run grpo fetch my.yaml --model_name_or_path=a/b")
    (problem,) = with_flags_of(told, {}, {"--model_name_or_path": "model.train_id"}).problems
    assert (problem.where, problem.fix) == ("model.train_id", "run grpo fetch my.yaml --model_name_or_path=a/b")
    told = config_error("--learning_rate", "is 0", "write learning_rate: 1e-5")
    assert with_flags_of(told, {}, {"--learning_rate": "train.lr"}).problems[0].fix == "write train.lr: 1e-5"


def test_a_sweep_asks_the_server_that_its_command_names(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Any] = []
    monkeypatch.setattr("grpo_recipes.console.sweep.command.start_sweep", lambda spec, *_: specs.append(spec) or 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert run("-m", *SMOKE, "train.lr=1e-5,2e-5", f"generation.base_url={address}") == 0
    trials = make_trials(specs[0], os.environ, "cpu")
    assert [trial.recipe["vllm_server_base_url"] for trial in trials] == [address] * 2
