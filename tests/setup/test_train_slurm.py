"""slurm/train.slurm: the guide's flags become options of training.sh."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented import documented

REPOSITORY = Path(__file__).resolve().parents[2]
MATH = "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"


@pytest.fixture
def train(tmp_path: Path):
    """``train(*arguments, VARIABLE=...)`` in a copy with a training.sh that prints its arguments."""
    root = tmp_path / "repository"
    (root / "src/grpo_recipes").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "recipes", root / "recipes")
    shutil.copytree(REPOSITORY / "slurm", root / "slurm")
    (root / "training.sh").write_text('printf "%s\\n" "$@"\ngrep SigIgn "/proc/$$/status"\n')

    def run(*arguments: str, script: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script or root / "slurm/train.slurm"), *arguments],
            env={"PATH": "/usr/bin:/bin", **variables}, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    return run


def handed_on(done: subprocess.CompletedProcess[str], tmp_path: Path) -> list[str]:
    assert done.returncode == 0, done.stderr
    *words, ignored = done.stdout.splitlines()
    assert int(ignored.split()[1], 16) & (1 << 9)  # USR1 is for the launcher
    return [word.removeprefix(f"{tmp_path}/repository/") for word in words]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [MATH, "--task", "grpo"]),
        (["--model", "Qwen/Qwen3-4B"], ["recipes/Qwen3-4B/grpo/config_math.yaml", "--task", "grpo"]),
        (
            ["--model=Qwen3-4B", "--task=maxent", "--config=math_tempered"],
            ["recipes/Qwen3-4B/maxent/config_math_tempered.yaml", "--task", "maxent"],
        ),
        (["--accelerator", "zero3"], [MATH, "--task", "grpo", "--accelerator", "zero3"]),
        (["--tp", "2"], [MATH, "--task", "grpo", "--vllm_tensor_parallel_size", "2"]),
        (["--dp", "2"], [MATH, "--task", "grpo", "--vllm_data_parallel_size", "2"]),
        (["--vllm-port", "9000"], [MATH, "--task", "grpo", "--vllm_server_port", "9000"]),
        (["--vllm-group-port", "9001"], [MATH, "--task", "grpo", "--vllm_group_port", "9001"]),
        (["--args", "--a 8 --b 'x y'"], [MATH, "--task", "grpo", "--a", "8", "--b", "x y"]),
        (["--args=--seed 8", "--tp", "2"], [MATH, "--task", "grpo", "--vllm_tensor_parallel_size", "2", "--seed", "8"]),
    ],
)
def test_every_flag_reaches_training_sh(train, tmp_path: Path, flags: list[str], expected: list[str]) -> None:
    assert handed_on(train(*flags), tmp_path) == expected


def test_the_line_of_the_docs_reaches_training_sh(train, tmp_path: Path) -> None:
    shown = (
        "sbatch --gres=gpu:8 --cpus-per-task=64 --mem=256G slurm/train.slurm --model Qwen2.5-7B-Instruct "
        "--task maxent --config math"
    )
    words = documented(shown, fake="sbatch and training.sh")
    assert words[0] == "sbatch" and words[4] == "slurm/train.slurm"
    recipe = "recipes/Qwen2.5-7B-Instruct/maxent/config_math.yaml"
    assert handed_on(train(*words[5:]), tmp_path) == [recipe, "--task", "maxent"]


def test_variables_stand_for_flags_and_flags_win(train, tmp_path: Path) -> None:
    variables = {"MODEL": "Qwen3-4B", "TASK": "maxent", "CONFIG_SUFFIX": "math_tempered", "TP": "2", "DP": "3"}
    words = handed_on(train(**variables, OPTIONAL_ARGS="--seed 8"), tmp_path)
    recipe = "recipes/Qwen3-4B/maxent/config_math_tempered.yaml"
    sizes = ["--vllm_tensor_parallel_size", "2", "--vllm_data_parallel_size", "3"]
    assert words == [recipe, "--task", "maxent", *sizes, "--seed", "8"]
    words = handed_on(train("--config", "math", "--tp", "4", "--args", "--seed 9", **variables), tmp_path)
    assert words[-6:] == ["--vllm_tensor_parallel_size", "4", "--vllm_data_parallel_size", "3", "--seed", "9"]
    assert words[0] == "recipes/Qwen3-4B/maxent/config_math.yaml"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--modle", "x"], "--modle: is no option"),
        (["--max_steps", "3"], "give options of grpo launch with --args"),
        (["extra"], "extra: is no option"),
        (["--model"], "--model: needs a value"),
        (["--model", "--task", "grpo"], "--model: needs a value"),
        (["--args"], "--args: needs a value"),
        (["--task", "sft"], "--task: 'sft' is no trainer. Fix: write grpo or maxent"),
        (["--config", "none"], "Qwen3-4B/grpo/config_math.yaml"),
        (["--args", "--a 'b"], "has a quote that is not closed"),
    ],
)
def test_bad_input_is_exit_code_2_before_any_work(train, flags: list[str], message: str) -> None:
    done = train(*flags)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr


def test_help_needs_neither_repository_nor_environment(train, tmp_path: Path) -> None:
    alone = Path(shutil.copy(REPOSITORY / "slurm/train.slurm", tmp_path / "spooled"))
    done = train("--tp", "2", "--help", script=alone)
    assert done.returncode == 0
    for flag in ("--model", "--task", "--config", "--accelerator", "--dp", "--tp", "--vllm-port", "--vllm-group-port"):
        assert flag in done.stdout


def test_a_job_finds_the_repository_it_was_submitted_from(train, tmp_path: Path) -> None:
    spooled = Path(shutil.copy(REPOSITORY / "slurm/train.slurm", tmp_path / "spooled"))
    for name in ("SLURM_SUBMIT_DIR", "GRPO_HOME"):
        assert handed_on(train(script=spooled, **{name: str(tmp_path / "repository")}), tmp_path)[0] == MATH
    done = train(script=spooled, SLURM_SUBMIT_DIR="/elsewhere")
    assert done.returncode == 2 and "submitted from /elsewhere, which is not the repository" in done.stderr


def test_its_header_is_that_of_training_sh() -> None:
    headers = [
        re.findall("^#SBATCH .*$", (REPOSITORY / name).read_text(), re.MULTILINE)
        for name in ("slurm/train.slurm", "training.sh")
    ]
    assert headers[0] == headers[1]


def test_the_shell_accepts_it() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([str(shellcheck), "slurm/train.slurm"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
