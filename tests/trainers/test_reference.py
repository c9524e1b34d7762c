"""The reference is the initial model on every process. A resumed run restores a moving reference."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from rank_processes import run_ranks

from grpo_recipes import smoke
from grpo_recipes.recipe.configs import GRPOConfig, ModelConfig
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer
from grpo_recipes.trainers.model import loaded_by_every_rank, model_init_kwargs

from .fixed_completions import make_trainer
from .test_controllers import train
from .tiny_training import ON_CPU, SUMS, as_dataset

SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
TARGET = {"maxent_objective": "listwise", "maxent_beta": 1.0}


def test_no_part_of_a_model_stays_in_the_machines_memory_if_it_trains_on_a_gpu() -> None:
    """For a single process, TRL passes device_map: auto, which uses the memory of the machine if a GPU is full."""
    model_args = ModelConfig(model_name_or_path="m", dtype="bfloat16")
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda:0"), model_init_kwargs={"use_cache": False})
    expected = {"revision": "main", "dtype": "bfloat16", "device_map": {"": "cuda:0"}, "use_cache": False}
    assert model_init_kwargs(model_args, on_gpu) == expected
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), model_init_kwargs=None)
    assert "device_map" not in model_init_kwargs(model_args, on_cpu)


@pytest.mark.parametrize(
    ("kind", "keys"), [(GRPOTrainer, {"beta": 0.5}), (MaxEntGRPOTrainer, TARGET)], ids=["loss", "target"]
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, model: str, kind: type[GRPOTrainer], keys: dict[str, Any]
) -> None:
    keys = {**keys, **SYNCED}
    expected_rows, whole = train(tmp_path / "whole", model, kind, keys, steps=4)
    train(tmp_path / "run", model, kind, keys, stop_at=3, steps=4)
    rows, resumed = train(tmp_path / "run", model, kind, keys, steps=4)
    assert rows == expected_rows
    for network, other in ((resumed.model, whole.model), (resumed.ref_model, whole.ref_model)):
        for mine, expected in zip(network.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, expected)
    initial = make_trainer(tmp_path / "new", model, GRPOTrainer).model
    assert not torch.equal(whole.ref_model.lm_head.weight, initial.lm_head.weight)  # it has moved


def test_a_checkpoint_without_the_reference_is_named(tmp_path: Path, model: str) -> None:
    train(tmp_path / "run", model, GRPOTrainer, {"beta": 0.5}, stop_at=2)
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2/reference_0\.pt is missing"):
        train(tmp_path / "run", model, GRPOTrainer, {"beta": 0.5, **SYNCED})


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["zero3", "fsdp2"])
def test_every_process_holds_its_part_of_the_initial_model(model: str, accelerator: str) -> None:
    outputs = run_ranks("trainers.sharded_reference", model, accelerator=accelerator, seconds=540)
    assert all("the reference is the initial model" in output for output in outputs)


@pytest.mark.parametrize(
    ("keys", "read_by_all"), [({"beta": 0.1}, True), (TARGET, True), ({"maxent_objective": "listwise"}, False)]
)
def test_every_process_reads_the_weights_where_there_is_a_reference(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], read_by_all: bool
) -> None:
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    monkeypatch.setenv(name, "true")
    paths, stock = set(), trl.trainer.grpo_trainer.create_model_from_path

    def watched(*args: Any, **kwargs: Any) -> Any:
        paths.add(os.environ[name])
        return stock(*args, **kwargs)

    monkeypatch.setattr(trl.trainer.grpo_trainer, "create_model_from_path", watched)
    make_trainer(tmp_path, model, **keys)
    assert paths == {"false" if read_by_all else "true"} and os.environ[name] == "true"


def test_a_model_that_cannot_be_built_leaves_the_settings_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    monkeypatch.setenv(name, "true")
    args = GRPOConfig(output_dir=str(tmp_path), **ON_CPU, **TARGET)
    with pytest.raises(OSError):
        MaxEntGRPOTrainer(
            model=str(tmp_path / "absent"),
            reward_funcs=[],
            args=args,
            train_dataset=as_dataset(SUMS),
            processing_class=smoke.build_tokenizer(),
            run_dir=tmp_path,
        )
    assert os.environ[name] == "true" and args.beta == 0.0


@pytest.mark.parametrize("loading", ["true", None])
def test_variables_that_trl_sets_meanwhile_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loading: str | None
) -> None:
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    monkeypatch.delenv(name, raising=False)
    if loading:
        monkeypatch.setenv(name, loading)
    monkeypatch.setenv("MASTER_PORT", "1")  # put back after the test
    with loaded_by_every_rank(GRPOConfig(output_dir=str(tmp_path), **ON_CPU, beta=0.1)):
        os.environ["MASTER_PORT"] = "2"
    assert (os.environ["MASTER_PORT"], os.environ.get(name)) == ("2", loading)
