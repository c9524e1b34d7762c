"""Every training command of the offline trainer's original guide can be planned with only the model folder changed."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from grpo_command import run_python

from grpo_recipes import smoke
from grpo_recipes.paths import find_code_root

pytest.importorskip("hydra")

QUICK_START = """python run_offline_grpo.py
  model.train_id=Qwen/Qwen2.5-1.5B model.ref_id=Qwen/Qwen2.5-1.5B model.device=cuda:2
  generation.backend=vllm_server generation.base_url=http://127.0.0.1:30000
  eval.backend=vllm_server eval.base_url=http://127.0.0.1:30000 train.iterations=10"""
SWEEP = """python run_offline_grpo.py -m
  train.lr='[5e-6,1e-5,2e-5]' train.kl_coef='[0.02,0.05,0.1]' train.batch_size='[4,8]'"""
LARGER = "python run_offline_grpo.py model.train_id=Qwen/Qwen2.5-7B model.ref_id=Qwen/Qwen2.5-7B model.device=cuda:2"
LOCAL = "python run_offline_grpo.py model.train_id=/path/to/checkpoint model.ref_id=Qwen/Qwen2.5-1.5B"
CONSERVATIVE_SAMPLING = """python run_offline_grpo.py
  generation.temperature=0.5 generation.top_p=0.9 generation.max_new_tokens=512"""
LARGER_BATCHES = "python run_offline_grpo.py generation.batch_size=16 eval.batch_size=16"
AGGRESSIVE = """python run_offline_grpo.py
  train.iterations=50 train.lr=5e-5 train.batch_size=16 data.problems_per_iteration=8"""
CONSERVATIVE = "python run_offline_grpo.py train.lr=5e-6 train.kl_coef=0.02 train.batch_size=4"
QUICK_ITERATION = """python run_offline_grpo.py
  model.train_id=Qwen/Qwen2.5-0.5B model.ref_id=Qwen/Qwen2.5-0.5B train.iterations=3 data.problems_per_iteration=2"""
SEARCH = """python run_offline_grpo.py -m model.train_id=Qwen/Qwen2.5-1.5B
  train.lr='[5e-6,1e-5,2e-5]' train.kl_coef='[0.02,0.05,0.1]' train.iterations=20"""
OVERNIGHT = """python run_offline_grpo.py model.train_id=Qwen/Qwen2.5-7B model.ref_id=Qwen/Qwen2.5-7B
  train.iterations=100 train.lr=1e-5 data.problems_per_iteration=8 eval.interval=5"""
NO_GPU = "model.device=cuda:2"
# Command of the guide -> words of its launch, or the number of its runs.
GUIDE = {
    QUICK_START: ("--max_steps 20", "--vllm_server_port 30000"),
    SWEEP: 18,
    LARGER: ("--max_steps 20",),
    LOCAL: ("/checkpoint ", "--ref_model_name_or_path Qwen/Qwen2.5-1.5B"),
    CONSERVATIVE_SAMPLING: ("--temperature 0.5", "--top_p 0.9", "--max_completion_length 512"),
    LARGER_BATCHES: ("--per_device_eval_batch_size 16", "--max_concurrent_requests 16"),
    AGGRESSIVE: ("--max_steps 100", "--learning_rate 5e-05", "--per_device_train_batch_size 16"),
    CONSERVATIVE: ("--learning_rate 5e-06", "--beta 0.02", "--max_steps 40"),
    QUICK_ITERATION: ("--max_steps 3", "--steps_per_generation 1"),
    SEARCH: 9,
    OVERNIGHT: ("--max_steps 400", "--eval_steps 20"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Create a folder with a model."""
    folder = tmp_path_factory.mktemp("local") / "checkpoint"
    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    smoke.build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def dry_run(command: str, folder: Path, checkpoint: str) -> subprocess.CompletedProcess[str]:
    """Plan a command like a shell would run it, with an existing model folder."""
    words = shlex.split(command.replace("/path/to/checkpoint", checkpoint))
    assert words[:2] == ["python", "run_offline_grpo.py"]
    return run_python("-m", "grpo_recipes.extensions.offline.main", *words[2:], "--dry-run", cwd=folder)


@pytest.mark.parametrize("command", GUIDE)
def test_a_command_of_the_guide_is_planned(command: str, tmp_path: Path, checkpoint: str) -> None:
    done = dry_run(command.replace(NO_GPU, ""), tmp_path, checkpoint)
    assert done.returncode == 0, done.stderr
    expected = GUIDE[command]
    if isinstance(expected, int):
        runs = [line for line in done.stdout.splitlines() if line.startswith("  ")]
        assert len(set(runs)) == expected and f"{expected} runs would start in " in done.stdout
    else:
        assert all(flag in done.stdout for flag in expected), done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [command for command in GUIDE if NO_GPU in command])
def test_a_gpu_that_is_not_there_is_refused_and_never_replaced(command: str, tmp_path: Path, checkpoint: str) -> None:
    done = dry_run(command, tmp_path, checkpoint)
    assert done.returncode == 2
    assert "model.device: 'cuda:2' is not available: this environment has the CPU build" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_script_of_the_guide_is_the_module_of_these_tests() -> None:
    for script in ("run_offline_grpo.py", "src/offline_grpo.py"):
        assert (
            'continue_in_environment("grpo_recipes.extensions.offline.main")' in (find_code_root() / script).read_text()
        )
