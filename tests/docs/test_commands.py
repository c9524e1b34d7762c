"""Every command of README.md and docs/ is run here, or by a test that is named here."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from doc_pages import PAGES, REPOSITORY, blocks, code_words, prose

from grpo_recipes import cli
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.recipe.document import BASE_KEY
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, READ_VARIABLES, catalogue

MATH = "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"
MODEBENCH = "recipes/Qwen2.5-0.5B-Instruct"

# Seconds at most; nothing is started or written.
RUN_HERE = {
    "CONFIG=recipes/smoke/grpo.yaml grpo check",
    "RUN_NAME=first VLLM_PORT=8100 TRAIN_SEED=7 grpo plan",
    "grpo check",
    "grpo check-rewards recipes/smoke/grpo.yaml",
    f"grpo check {MATH}",
    "grpo check recipes/smoke/grpo.yaml --learning_rate 1e-6 --beta=0.04 --no_shuffle_dataset",
    "grpo launch recipes/smoke/grpo.yaml --dry-run",
    "grpo plan",
    "grpo plan --weight_sync file",
    f"grpo plan {MATH} --gpus 1 --vllm_mode colocate",
    f"grpo plan {MATH} --gpus 8",
    f"grpo plan {MATH} --gpus 8 --json",
    f"grpo plan {MATH} --gpus 8 --gpu-memory 80 --time 72:00:00",
    "grpo keys temperature",
    "grpo keys --env",
    "grpo keys --json",
    "grpo plan recipes/Qwen2.5-7B-Instruct/grpo/config_math.yaml --gpus 8 --nodes 2",
    "grpo plan recipes/Qwen2.5-7B-Instruct/grpo/config_math.yaml --gpus 8 --nodes 2 --vllm_node own",
    "grpo check recipes/Qwen2.5-1.5B-Instruct/maxent/config_math.yaml",
    "grpo check recipes/Qwen2.5-1.5B-Instruct/maxent/config_math_listwise.yaml",
    "grpo plan recipes/Qwen3-4B/maxent/config_math_weighted_mle.yaml --gpus 8",
    "MAXENT=1 grpo plan",
    "MAXENT=1 MAXENT_TAU=inf grpo check",
    "grpo plan recipes/Qwen2.5-1.5B-Instruct/maxent/config_math_listwise.yaml --gpus 8",
    "make help",
    "bash slurm/train.slurm --help",
    f"grpo check {MODEBENCH}/maxent/config_modebench_countdown.yaml",
    f"grpo check-rewards {MODEBENCH}/grpo/config_modebench_graph_coloring.yaml",
    f"grpo plan {MODEBENCH}/maxent/config_modebench_graph_coloring.yaml --gpus 8",
    "python -m grpo_recipes.evaluate.benchmarks",
}

_SBATCH = "tests/e2e/test_slurm_run.py::test_sbatch_training_sh_starts_at_once_and_completes"
_AUTHOR = "tests/e2e/test_authoring.py::test_from_an_empty_file_to_a_trained_model"
_SUBMIT = "tests/e2e/test_submit.py::test_a_submitted_run_uses_its_frozen_code_and_is_followed_and_stopped"
COVERED = {
    "grpo submit my.yaml --profile slurm/profiles/mysite.yaml": _SUBMIT,
    "grpo submit recipes/smoke/grpo.yaml --profile mltheory --dry-run": (
        "tests/launch/test_submission.py::test_a_dry_run_says_that_the_environment_is_another"
    ),
    "grpo status": "tests/cli/test_runs.py::test_the_table_has_a_line_a_run_the_newest_first",
    "grpo status last": "tests/cli/test_runs.py::test_a_run_is_named_by_folder_name_job_or_last",
    "grpo logs -f last": _SUBMIT,
    "grpo logs last --server -n 100": "tests/cli/test_runs.py::test_logs_shows_the_last_lines_and_masks_secrets",
    "grpo stop last": _SUBMIT,
    "sbatch --gres=gpu:8 slurm/train.slurm --model Qwen2.5-7B-Instruct --task maxent --config math": (
        "tests/setup/test_train_slurm.py::test_every_flag_reaches_training_sh"
    ),
    "grpo new my.yaml": _AUTHOR,
    "grpo check my.yaml": _AUTHOR,
    "grpo check my.yaml --deep": _AUTHOR,
    "grpo check-rewards my.yaml": _AUTHOR,
    "grpo plan my.yaml --gpus 8": _AUTHOR,
    "grpo launch my.yaml": _AUTHOR,
    "grpo new my.yaml --from recipes/Qwen3-4B/grpo/config_math.yaml": (
        "tests/cli/test_new.py::test_it_copies_a_recipe_with_a_schema_that_is_found"
    ),
    "grpo new my.yaml --from recipes/Qwen3-4B/maxent/config_math_listwise.yaml": (
        "tests/cli/test_new.py::test_it_copies_a_recipe_with_a_schema_that_is_found"
    ),
    "bash training.sh": "tests/e2e/test_smoke_run.py::test_training_sh_trains_the_smoke_recipe",
    "MAXENT=1 bash training.sh": "tests/e2e/test_maxent.py::test_one_variable_trains_the_smoke_task_by_maxent",
    "sbatch --gres=gpu:8 training.sh": _SBATCH,
    "scancel --signal=USR1 --batch JOBID": (
        "tests/e2e/test_slurm_run.py::test_usr1_to_the_batch_script_saves_and_requeues"
    ),
    "sbatch --gres=gpu:8 --cpus-per-task=64 --mem=256G training.sh --learning_rate 2e-6": _SBATCH,
    "grpo launch recipes/smoke/grpo.yaml": "tests/e2e/test_resume.py::test_resume_last_continues_a_killed_run",
    "grpo launch --resume last": "tests/e2e/test_resume.py::test_resume_last_continues_a_killed_run",
    "grpo fetch my.yaml": "tests/fetch/test_download.py::test_what_was_fetched_loads_with_the_network_cut_off",
    "grpo fetch my.yaml --update": (
        "tests/fetch/test_download.py::test_again_it_downloads_nothing_and_tells_of_newer_commits"
    ),
    "grpo fetch --resume runs/qwen2.5-1.5b-math-20260101-120000": (
        "tests/fetch/test_assets_at_launch.py::test_a_resumed_run_gets_its_own_commits_back"
    ),
    "grpo doctor": "tests/doctor/test_command.py::test_every_check_is_a_line_and_what_to_do_stands_below",
    "grpo doctor recipes/smoke/grpo.yaml": "tests/doctor/test_command.py::test_a_recipe_adds_its_checks",
    "grpo doctor --run last": "tests/doctor/test_command.py::test_a_run_is_explained",
    "grpo report last": "tests/cli/test_report.py::test_last_is_the_newest_run",
    "grpo sweep recipes/smoke/grpo.yaml learning_rate=1e-4,3e-4 seed=1..3": (
        "tests/sweep/test_run.py::test_trials_are_frozen_runs_in_one_wandb_group"
    ),
    "grpo sweep my.yaml learning_rate=1e-6,3e-6 seed=1..3 --slurm --profile slurm/profiles/mltheory.yaml "
    "--max-parallel 2": "tests/sweep/test_run.py::test_one_array_job_runs_all_trials",
    "grpo sweep --resume last": "tests/sweep/test_run.py::test_again_it_fills_the_gaps_alone",
    "grpo report RUN RUN": "tests/cli/test_report.py::test_several_runs_get_one_page_here",
    "sbatch --nodes=2 --gres=gpu:8 training.sh": (
        "tests/e2e/test_two_nodes.py::test_the_update_of_two_nodes_is_that_of_the_joined_batch"
    ),
    "make setup": "tests/setup/test_setup.py::test_second_run_changes_nothing",
    "DEVICE=cpu ENV_DIR=.venv.cpu make setup": "tests/setup/test_setup.py::test_automatic_flavour",
    "make docs": "tests/docs/test_site.py::test_the_site_builds_without_a_warning",
    "make test": "tests/docs/test_commands.py::test_make_targets_are_there",
    "source .venv/bin/activate": "tests/setup/test_setup.py::test_environment_of_these_tests_is_complete",
}


def commands() -> list[str]:
    return sorted({line for block in blocks("bash") for line in block.lines if line and not line.startswith("#")})


def clean_environment(folder: Path) -> dict[str, str]:
    """The tester's environment without what the launcher reads; `grpo` is that of this environment."""
    ours = {*READ_VARIABLES, *ENVIRONMENT_KEYS}
    kept = {name: text for name, text in os.environ.items() if name not in ours and not name.startswith("SLURM_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "RUN_ROOT": str(folder / "runs"), "ENV_DIR": sys.prefix}


@pytest.mark.parametrize("command", commands())
def test_every_command_is_run(command: str, tmp_path: Path) -> None:
    if command in COVERED:
        file, _, name = COVERED[command].partition("::")
        assert f"def {name}(" in (REPOSITORY / file).read_text(), COVERED[command]
        return
    assert command in RUN_HERE, "new command: add it to RUN_HERE, or name the test that runs it in COVERED"
    if environment_device() != "cpu":
        pytest.skip("what runs by default in a CUDA environment needs GPUs")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=REPOSITORY,
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not (tmp_path / "runs").exists()


def test_no_command_is_classified_that_no_page_has() -> None:
    assert (RUN_HERE | COVERED.keys()) - set(commands()) <= {"make help"}
    assert not RUN_HERE & COVERED.keys()


def test_commands_cannot_hide_in_blocks_of_another_language() -> None:
    assert {block.language for block in blocks()} <= {"bash", "python", "text", "yaml"}
    for block in blocks("text"):
        assert not re.match(r"\$ |(grpo|make|bash|sbatch) \w", block.lines[0]), block


def inline_commands() -> list[str]:
    spans = {span for page in PAGES for span in code_words(prose(page))}
    return sorted(span for span in spans if re.match(r"(grpo|make|bash|sbatch) \S", span))


@pytest.mark.parametrize("command", inline_commands())
def test_commands_in_sentences_exist(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        assert words[1] in make_targets()
    elif words[0] == "grpo":
        options = command_options(words[1])
        flags = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
        assert all(flag in options or flag.lstrip("-") in catalogue() for flag in flags)
    else:
        files = [word for word in words if word.endswith(".sh")]
        assert all((REPOSITORY / file).is_file() for file in files)


def test_make_targets_are_there() -> None:
    assert {"setup", "smoke", "test", "e2e", "docs", "clean"} <= make_targets()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def command_options(name: str) -> set[str]:
    (commands,) = [action for action in cli.make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return {option for action in commands.choices[name]._actions for option in action.option_strings}


def test_yaml_examples_hold_known_keys() -> None:
    for block in blocks("yaml"):
        assert set(yaml.safe_load("\n".join(block.lines))) <= {*catalogue(), BASE_KEY}, block


def test_python_examples_compile() -> None:
    examples = blocks("python")
    assert examples
    for block in examples:
        compile("\n".join(block.lines), block.page, "exec")
