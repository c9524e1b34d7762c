"""The environment of child processes, and the folders of an attempt."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_recipes.plan.commands import base_environment, run_environment, with_processes
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.secrets import mask_environment

REMOVED = [
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PMI_SIZE", "PMIX_RANK",
    "OMPI_COMM_WORLD_SIZE", "VLLM_MODEL", "VLLM_PORT", "VLLM_TP_SIZE", "VLLM_MAX_LEN", "VLLM_MEM_UTIL", "VLLM_MODE",
    "VLLM_GROUP_PORT", "MASTER_PORT", "RUN_NAME", "CONFIG", "CONFIG_FILE", "TRAIN_ENTRYPOINT", "MAXENT", "TRAIN_SEED",
    "ACCELERATOR", "GRPO_HIDDEN_PACKAGES",
]  # fmt: skip


@pytest.mark.parametrize("name", REMOVED)
def test_what_would_reach_into_the_children_is_removed(name):
    assert name not in base_environment({name: "x", "PATH": "/bin"})


@pytest.mark.parametrize("name", ["HOME", "HF_TOKEN", "WANDB_PROJECT", "VLLM_LOGGING_LEVEL", "SLURM_JOB_ID"])
def test_the_rest_of_the_users_environment_is_kept(name):
    assert base_environment({name: "x"})[name] == "x"


@pytest.mark.parametrize(
    ("exported", "expected"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a.org"}, "a.org,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "127.0.0.1,,b"}, "127.0.0.1,b,localhost,::1"),
    ],
)
def test_a_proxy_is_never_asked_for_this_machine(exported, expected):
    environment = base_environment({**exported, "http_proxy": "http://proxy:1"})
    assert environment["NO_PROXY"] == expected
    assert "127.0.0.1" in environment["no_proxy"].split(",")
    assert environment["http_proxy"] == "http://proxy:1"


def test_the_list_of_variables_we_read_has_no_double():
    assert not set(READ_VARIABLES) & set(environment_keys())
    assert all(READ_VARIABLES.values())


def test_every_process_knows_its_run_and_its_node_local_folders(tmp_path):
    scratch = Scratch(tmp_path / "disk", tmp_path / "memory")
    added = run_environment({"CACHE_ROOT": "/cache", "HOME": str(tmp_path)}, scratch, tmp_path / "run", "run-abcd")
    assert added["GRPO_RUN"] == "run-abcd"
    assert added["GRPO_RUN_DIR"] == str(tmp_path / "run")
    assert added["GRPO_SYNC_DIR"] == str(scratch.memory)
    assert added["GRPO_TOKEN_FILE"] == str(scratch.token_file)
    assert added["TMPDIR"] == str(scratch.disk)
    assert added["PYTHONNOUSERSITE"] == "1"
    assert added["HF_HOME"] == "/cache/huggingface"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"):
        assert added[name].startswith(str(scratch.disk))
    assert mask_environment(added) == added, "nothing secret is added"


@pytest.mark.parametrize("name", ["HF_HOME", "WANDB_DIR", "TRITON_CACHE_DIR", "TENSORBOARD_LOGGING_DIR"])
def test_a_folder_the_user_chose_is_left_alone(tmp_path, name):
    added = run_environment({name: "/mine"}, Scratch(tmp_path, tmp_path), tmp_path, "x")
    assert name not in added


def test_trackers_that_compare_runs_have_a_folder_for_all_of_them(tmp_path):
    runs = [run_environment({}, Scratch(tmp_path, tmp_path), tmp_path / name, "x") for name in ("first", "second")]
    for name in ("TRACKIO_DIR", "MLFLOW_TRACKING_URI"):
        assert runs[0][name] == runs[1][name]
    assert runs[0]["TRACKIO_DIR"] == str(tmp_path / "trackio")
    assert runs[0]["MLFLOW_TRACKING_URI"] == f"file://{tmp_path}/mlruns"


def test_a_login_to_the_hub_outlives_our_choice_of_cache(tmp_path):
    scratch = Scratch(tmp_path, tmp_path)
    login = tmp_path / ".cache/huggingface/token"
    assert "HF_TOKEN_PATH" not in run_environment({"HOME": str(tmp_path)}, scratch, tmp_path, "x")
    login.parent.mkdir(parents=True)
    login.write_text("hf_x")
    assert run_environment({"HOME": str(tmp_path)}, scratch, tmp_path, "x")["HF_TOKEN_PATH"] == str(login)
    assert "HF_TOKEN_PATH" not in run_environment({"HOME": str(tmp_path), "HF_HOME": "/h"}, scratch, tmp_path, "x")


def test_the_environments_own_tools_come_first_on_the_path():
    folders = base_environment({"PATH": "/usr/bin:/bin"})["PATH"].split(":")
    assert folders == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]


LOGIN = {
    "HF_TOKEN": "a", "WANDB_API_KEY": "b", "JUDGE_KEY": "c", "AWS_SECRET_ACCESS_KEY": "d", "HOME": "/home/ada",
    "MLFLOW_TRACKING_PASSWORD": "e", "SWANLAB_API_KEY": "f", "COMET_API_KEY": "g", "TRACKIO_WRITE_TOKEN": "h",
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "offline", "trainer"),
    [
        ({"report_to": ["none"]}, True, set()),
        ({"report_to": ["none"]}, False, {"HF_TOKEN"}),
        ({"report_to": ["wandb"]}, True, {"WANDB_API_KEY"}),
        ({"report_to": ["tensorboard", "mlflow"]}, True, {"MLFLOW_TRACKING_PASSWORD"}),
        ({"report_to": ["swanlab", "comet_ml"]}, True, {"SWANLAB_API_KEY", "COMET_API_KEY"}),
        ({"report_to": ["trackio"]}, True, {"TRACKIO_WRITE_TOKEN"}),
        ({"reward_environment": ["JUDGE_KEY"], "report_to": ["none"]}, True, {"JUDGE_KEY"}),
        ({"callbacks": ["mine.py:Mine"], "report_to": ["none"]}, True, {*LOGIN} - {"HOME"}),
    ],
)
def test_each_process_gets_the_secrets_of_its_role_alone(read, tmp_path, keys, offline, trainer):
    recipe, resources = read(**keys), Resources("cuda", ("0", "1"), 8)
    assets = SimpleNamespace(offline_variables=lambda _: {"HF_HUB_OFFLINE": "1"}) if offline else None
    plan = make_plan(recipe, resources, LOGIN)
    got = {
        process.role: {name for name in process.full_environment(LOGIN) if name in LOGIN}
        for process in with_processes(
            plan, recipe, resources, LOGIN, Names(tmp_path, "a", "a-1", "now"), assets
        ).processes
    }
    assert got == {"server": {"HOME", *(() if offline else ("HF_TOKEN",))}, "trainer": {"HOME", *trainer}}


def test_cuda_counts_gpus_as_nvidia_smi_does_unless_the_user_says_otherwise(tmp_path):
    """With GPUs of two kinds, CUDA counts the fastest first: index 0 of the plan would be another GPU."""
    scratch = Scratch(tmp_path / "disk", tmp_path / "memory")
    assert run_environment({}, scratch, tmp_path, "mark")["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    exported = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert "CUDA_DEVICE_ORDER" not in run_environment(exported, scratch, tmp_path, "mark")
