"""Compare the bytes of checkpoints with the free space of a real file system."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.plan.disk_space import require_disk_space
from grpo_recipes.plan.estimates import UnknownShape, estimate_disk, format_gib
from grpo_recipes.plan.models import compute_model_sizes

from .model_folders import SMALL, model_folder

BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 50, "save_steps": 100}
P = compute_model_sizes(SMALL)["parameters"]


@pytest.fixture
def disk(read, planned, tmp_path):
    """``disk(KEY=VALUE, ...)``: the disk estimate of a small model."""
    model = model_folder(tmp_path / "model", SMALL)

    def estimate(**keys):
        low = {"dtype": "bfloat16", "accelerator": "ddp", "learning_rate": 1e-3}
        recipe = read(**{"model_name_or_path": model, "max_prompt_length": 8, **low, **keys})
        return estimate_disk(recipe, planned(recipe=recipe), tmp_path / "runs/one")

    return estimate


@pytest.mark.parametrize(
    ("keys", "checkpoint"),
    [
        ({}, 2 * P + 4 * P),
        ({"optim": "sgd"}, 2 * P),
        ({"accelerator": "zero2"}, 2 * P + 12 * P + 2 * P),
        ({"sync_ref_model": True, "beta": 0.1}, 2 * P + 4 * P + 2 * P),
    ],
)
def test_what_a_checkpoint_holds(keys, checkpoint, disk):
    need = disk(**keys)
    assert need.parts == {"checkpoints": 3 * checkpoint, "model": 2 * P}  # a limit of two, and the one being written


def test_an_adapter_is_small_and_its_model_is_merged(disk):
    need = disk(use_peft=True, lora_r=1)
    assert need.parts["checkpoints"] < 3 * P
    assert need.parts["model"] > 2 * P


@pytest.mark.parametrize(
    ("keys", "checkpoints"),
    [
        ({}, 3),
        ({"save_total_limit": 5}, 6),
        ({"save_total_limit": 5, "max_steps": 250, "save_steps": 100}, 3),
        ({"save_total_limit": None, "max_steps": 250, "save_steps": 100}, 3),
        ({"save_total_limit": None}, None),
        ({"save_total_limit": None, "save_strategy": "epoch"}, None),
        ({"save_strategy": "no"}, 1),
        ({**BEST, "save_total_limit": 1}, 3),
        ({**BEST, "save_total_limit": 5, "max_steps": 150}, 3),
    ],
)
def test_how_many_checkpoints_there_are_at_a_time(keys, checkpoints, disk):
    need = disk(**keys)
    assert need.checkpoints == checkpoints
    assert need.parts["checkpoints"] == (checkpoints or 2) * 6 * P


def test_the_number_of_checkpoints_is_named(disk):
    assert ": 3 checkpoints 0.0" in str(disk(save_total_limit=2))
    assert ": 1 checkpoint 0.0" in str(disk(save_strategy="no"))
    assert ": 2 of an unlimited number of checkpoints 0.0" in str(disk(save_total_limit=None))


def test_a_model_without_a_single_weight_has_a_disk_estimate(disk, tmp_path):
    nothing = model_folder(tmp_path / "model", {**dict.fromkeys(SMALL, 0), "model_type": "qwen2", "head_dim": 8})
    assert disk(model_name_or_path=nothing).total == 0


def test_free_bytes_are_those_the_user_may_write(disk, tmp_path):
    usage = os.statvfs(tmp_path)
    assert disk().available == pytest.approx(usage.f_bavail * usage.f_frsize, rel=0.1)


def test_what_a_resumed_run_has_written_is_room(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=100, f_files=0))
    checkpoint = tmp_path / "runs/one/checkpoints/checkpoint-2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(b"x" * 500)
    assert disk().available == 1500


def test_the_limit_that_is_named_fits(disk, monkeypatch):
    free = 10 * 6 * P
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1, f_files=0))
    need = disk(save_total_limit=20)
    assert not need.fits
    named = yaml.safe_load(need.fix)
    assert disk(**named).fits
    assert not disk(save_total_limit=named["save_total_limit"] + 1).fits


def test_where_not_even_one_fits_another_folder_is_named(disk, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=9 * P, f_frsize=1, f_files=0))
    least = format_gib(2 * 6 * P + 2 * P)
    assert disk().fix == f"run_root: a folder with {least} GiB free, and save_total_limit: 1"


def test_a_run_that_cannot_fit_is_refused(read, planned, tmp_path, monkeypatch):
    recipe = read(model_name_or_path=model_folder(tmp_path / "model", SMALL), max_prompt_length=8)
    plan = planned(recipe=recipe)
    require_disk_space(recipe, plan, tmp_path / "runs/one")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=1, f_files=0))
    with pytest.raises(ConfigError) as refused:
        require_disk_space(recipe, plan, tmp_path / "runs/one")
    assert "GiB are free in" in str(refused.value)
    assert "save_total_limit" in refused.value.problems[0].fix


def test_what_cannot_be_estimated_is_not_refused(read, planned):
    recipe = read(model_name_or_path="some/model")
    require_disk_space(recipe, planned(recipe=recipe), Path("runs/one"))
    with pytest.raises(UnknownShape, match="grpo fetch"):
        estimate_disk(recipe, planned(recipe=recipe), Path("runs/one"))


@pytest.mark.skipif(environment_device() != "cpu", reason="a CUDA environment asks for GPUs first")
def test_launch_refuses_before_it_makes_anything(tmp_path, monkeypatch, capsys):
    recipe = {
        "model_name_or_path": model_folder(tmp_path / "model", SMALL), "dataset_name": "rows.jsonl",
        "prompts_per_step": 1, "num_generations": 2, "max_prompt_length": 8, "max_completion_length": 8,
        "bf16": False, "run_root": "runs", "use_vllm": False,
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    full, statvfs = SimpleNamespace(f_bavail=0, f_frsize=1, f_files=0), os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: statvfs(path) if str(path).startswith("/dev/") else full)
    assert cli.main(["launch", "recipe.yaml"]) == EXIT_CONFIG_ERROR
    output = capsys.readouterr().err
    assert output.startswith("grpo: run_root: the run writes ")
    assert "Fix: set run_root: a folder with" in output
    assert not (tmp_path / "runs").exists()
