"""Checks that a recipe adds: are its assets here, and do they fit?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_recipes.console.doctor import recipes
from grpo_recipes.console.doctor.recipes import Case
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.process.reports import format_bytes

MEGABYTE = 10**6


@pytest.fixture
def local(tmp_path: Path):
    """``local(megabytes)``: create a model folder. Its config has that size in bfloat16, its weight file is small."""

    def make(megabytes: int = 1) -> str:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        shape = {
            "model_type": "qwen2", "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size":
            megabytes * MEGABYTE // 256, "num_attention_heads": 2, "num_key_value_heads": 2, "dtype": "bfloat16",
            "max_position_embeddings": 4096, "tie_word_embeddings": True,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(shape))
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(5 * MEGABYTE)
        return str(folder)

    return make


@pytest.fixture
def case(machine, read, tmp_path: Path):
    """``case(KEY=VALUE)``: a recipe on a CPU machine with an empty cache."""

    def make(variables: dict[str, str] | None = None, **keys) -> Case:
        machine_variables = {"CACHE_ROOT": str(tmp_path / "cache"), "HOME": str(tmp_path), **(variables or {})}
        recipe = read(run_root=str(tmp_path), dtype="bfloat16", **keys)
        return Case(machine(**machine_variables).environment, recipe)

    return make


def test_what_is_not_fetched(case, local):
    finding = recipes.assets(case())
    assert finding.status == "warning" and "Qwen/Qwen2.5-1.5B-Instruct" in finding.value and "grpo fetch" in finding.fix
    assert "openai/gsm8k" in finding.value
    assert "3 checkpoints" in recipes.space(case()).value  # the package has the shapes of the shipped recipes' models
    unknown = case(model_name_or_path="someone/model")
    assert "config.json is not on this machine" in recipes.space(unknown).value


def test_a_model_folder_complete_and_not(case, local, tmp_path: Path):
    data = {"dataset_name": str(tmp_path / "train.jsonl")}
    (tmp_path / "train.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    assert recipes.assets(case(model_name_or_path=local(5), **data)).status == "ok"
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model/pytorch_model-00001-of-00001.bin")
    assert recipes.assets(case(model_name_or_path=str(tmp_path / "model"), **data)).status == "ok"
    (tmp_path / "model/config.json").unlink()
    finding = recipes.assets(case(model_name_or_path=str(tmp_path / "model"), **data))
    assert finding.status == "problem" and "has no config.json" in finding.value


def test_a_local_dataset(case, local, tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"problem": "1+1", "answer": "2"}\n')
    finding = recipes.assets(case(dataset_name=str(path), model_name_or_path=local(1)))
    assert finding.status == "ok" and str(path) in finding.value


def test_a_gated_model_wants_a_token(case):
    gated = {"model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}
    finding = recipes.assets(case(variables={"HF_TOKEN": ""}, **gated))
    assert finding.status == "problem" and "accept its license" in finding.fix
    finding = recipes.assets(case(variables={"HF_TOKEN": "hf_" + "c" * 34}, **gated))
    assert finding.status == "warning" and finding.value.startswith("not fetched")


def test_space_for_the_checkpoints_is_that_of_the_plan(case, local):
    small = case(model_name_or_path=local(1), save_total_limit=2)
    finding, total = recipes.space(small), format_bytes(small.estimates.disk.total)
    assert finding.status == "ok" and finding.value.startswith(f"about {total} for 3 checkpoints and the model, ")
    unlimited = recipes.space(case(model_name_or_path=local(1), save_total_limit=None))
    assert unlimited.status == "warning" and "save_total_limit: 2" in unlimited.fix
    assert "for 2 of an unlimited number of checkpoints and the model" in unlimited.value
    for few in ({"save_strategy": "no"}, {"max_steps": 5, "save_steps": 5}):
        finding = recipes.space(case(model_name_or_path=local(1), save_total_limit=None, **few))
        assert finding.status == "ok" and " for 1 checkpoint and the model" in finding.value
    # a model of 10 TB: no disk holds its checkpoints
    finding = recipes.space(case(model_name_or_path=local(10**7)))
    assert finding.status == "problem" and "run_root" in finding.fix


def test_way_of_the_weights_through_shared_memory(case, local, monkeypatch, small_disk: Path):
    small = case(model_name_or_path=local(1), save_total_limit=2)
    assert recipes.space(small).status == "ok"
    monkeypatch.setattr(recipes, "SHARED_MEMORY", small_disk)
    finding = recipes.space(small)
    assert finding.status == "problem" and "--shm-size" in finding.fix


def test_memory_for_the_training_on_cpu(case, local):
    small = {"max_completion_length": 16, "max_prompt_length": 16, "per_device_train_batch_size": 1}
    finding = recipes.training_memory(case(model_name_or_path=local(1), **small))
    assert finding.value.startswith("about ") and " free" in finding.value
    finding = recipes.training_memory(case(model_name_or_path=local(10**6), **small))
    assert finding.status == "problem" and " TB" in finding.value and "--mem" in finding.fix


def test_memory_of_gpus_is_that_of_the_plan(case, local, planned, monkeypatch):
    monkeypatch.setattr(recipes, "find_gpu_memory", lambda environment: 80.0)

    def memory(megabytes: int):
        model_case = case(model_name_or_path=local(megabytes))
        model_case.__dict__["plan"] = planned(recipe=model_case.recipe)
        return recipes.training_memory(model_case)

    too_much = memory(30_000)
    assert too_much.status == "problem" and "use_peft: true" in too_much.fix and "of 80.0 GiB" in too_much.value
    assert memory(100).status == "ok"
    monkeypatch.setattr(recipes, "find_gpu_memory", lambda environment: None)
    assert memory(30_000).status == "ok" and " of " not in memory(30_000).value


@pytest.mark.skipif(environment_device() != "cpu", reason="the plan in a CUDA environment depends on the GPUs")
def test_what_a_launch_would_start(case):
    finding = recipes.gpu_plan(case())
    assert finding.status == "ok" and finding.value == "vllm server, training processes: 1"
    assert recipes.gpu_plan(case(vllm_mode="colocate")).value == "vllm colocate, training processes: 1"
    with pytest.raises(ConfigError, match="nccl needs GPUs"):
        recipes.gpu_plan(case(weight_sync="nccl"))


def test_gpus_that_nothing_uses(case, cuda_machine, planned):
    idle_case = case()
    idle_case.__dict__["plan"] = planned(gpus=[str(index) for index in range(8)], prompts_per_step=5, num_generations=2)
    finding = recipes.gpu_plan(idle_case)
    assert finding.status == "warning" and "unused GPUs: 6, 7" in finding.value


class FakeGpulessCase(Case):
    """A recipe in a CUDA environment without a GPU."""

    @property
    def plan(self):
        raise config_error(
            "devices", "no GPU is visible, but this is a CUDA environment", "submit with sbatch --gres=gpu:8"
        )


def test_no_gpu_is_usual_on_a_login_node_and_a_problem_in_a_job(case, fake_program):
    fake_program("sinfo", "echo slurm 22.05.8")
    login = case()
    assert recipes.gpu_plan(FakeGpulessCase(login.environment, login.recipe)).status == "warning"
    job = case(variables={"SLURM_JOB_ID": "7"})
    with pytest.raises(ConfigError, match="no GPU is visible"):
        recipes.gpu_plan(FakeGpulessCase(job.environment, job.recipe))


def test_a_gpu_that_server_and_trainers_share_counts_once(planned):
    shared = type("SharedCase", (), {"plan": planned(weight_sync="shared", dtype="float32")})()
    assert "GPUs: 4" in recipes.gpu_plan(shared).value
