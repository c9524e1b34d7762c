"""Every cache that the guide's script moved into the repository: its folder today, and the user's choice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.commands import base_environment, run_environment
from grpo_recipes.process.scratch import Scratch

# Below CACHE_ROOT, unless the user chose a folder. Caches of a node or a run are not kept.
UNDER_CACHE_ROOT = {
    "HF_HOME": "huggingface", "XDG_CACHE_HOME": "", "WANDB_CACHE_DIR": "wandb", "VLLM_CACHE_ROOT": "vllm",
}  # fmt: skip
ON_THE_NODE = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TMPDIR"}
IN_THE_RUN = {"WANDB_DIR", "TENSORBOARD_LOGGING_DIR"}


def added(tmp_path: Path, **environment: str) -> dict[str, str]:
    scratch = Scratch(tmp_path / "disk", tmp_path / "memory")
    return run_environment({"HOME": str(tmp_path), **environment}, scratch, tmp_path / "run", "mark")


@pytest.mark.parametrize("name", UNDER_CACHE_ROOT)
def test_downloads_go_under_one_folder(tmp_path, name):
    variables = added(tmp_path, CACHE_ROOT=str(tmp_path / "cache"))
    assert Path(variables[name]) == tmp_path / "cache" / UNDER_CACHE_ROOT[name]
    assert Path(added(tmp_path)[name]).is_relative_to(find_code_root() / ".cache")


@pytest.mark.parametrize("name", sorted(ON_THE_NODE | IN_THE_RUN))
def test_what_belongs_to_the_node_or_the_run_is_kept_there(tmp_path, name):
    assert Path(added(tmp_path)[name]).is_relative_to(tmp_path / ("disk" if name in ON_THE_NODE else "run"))


@pytest.mark.parametrize("name", sorted(UNDER_CACHE_ROOT.keys() | ON_THE_NODE - {"TMPDIR"} | IN_THE_RUN))
def test_a_folder_of_ones_own_stands(tmp_path, name):
    assert name not in added(tmp_path, **{name: "/mine"})
    assert base_environment({name: "/mine"})[name] == "/mine"


@pytest.mark.parametrize(
    "name",
    [
        "HF_DATASETS_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "NLTK_DATA",
        "WANDB_ARTIFACT_DIR",
        "WANDB_CONFIG_DIR",
        "PIP_CACHE_DIR",
        "CONDARC",
    ],
)
def test_what_we_do_not_set_is_handed_on(tmp_path, name):
    assert name not in added(tmp_path)
    assert base_environment({name: "/mine"})[name] == "/mine"


@pytest.mark.parametrize("name", ["CONDA_PKGS_DIRS", "CONDA_ENVS_DIRS", "CONDA_PREFIX"])
def test_condas_folders_reach_no_run(tmp_path, name):
    assert name not in {**base_environment({name: "/mine"}), **added(tmp_path, **{name: "/mine"})}


def test_packages_of_the_users_own_site_reach_no_run(tmp_path):
    assert added(tmp_path, PYTHONUSERBASE="/mine", PYTHONNOUSERSITE="")["PYTHONNOUSERSITE"] == "1"


def test_the_hubs_own_caches_follow_hf_home(tmp_path):
    code = (
        "import datasets.config, huggingface_hub.constants\n"
        "print(datasets.config.HF_DATASETS_CACHE, huggingface_hub.constants.HF_HUB_CACHE)"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "hub/datasets"), str(tmp_path / "hub/hub")]


def test_git_keeps_out_what_runs_leave_behind():
    ignored = (find_code_root() / ".gitignore").read_text().splitlines()
    assert {".cache/", ".tmp/", ".hf_cache/", "/runs/", "/logs/*", "!/logs/.gitkeep", "/wandb/"} <= set(ignored)
    assert (find_code_root() / "logs" / ".gitkeep").is_file(), "Slurm opens logs/slurm_%j.out before the script runs"
