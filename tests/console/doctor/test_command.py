"""`grpo doctor` from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from grpo_command import run_grpo

from grpo_recipes.cli import main
from grpo_recipes.console.doctor import MACHINE, RECIPE, RUN
from grpo_recipes.console.doctor.examine import get_check_name
from grpo_recipes.plan.devices import environment_device

SMOKE = str(Path(__file__).resolve().parents[3] / "recipes/smoke/grpo.yaml")
on_cpu = pytest.mark.skipif(environment_device() != "cpu", reason="the smoke recipe needs a CPU environment")


def run_doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_grpo("doctor", *arguments, env={**os.environ, "HF_HUB_OFFLINE": "1", **variables})


def test_every_check_is_a_line_and_what_to_do_stands_below(tmp_path: Path):
    done = run_doctor("-v", TRANSFORMERS_CACHE="/x")
    lines = done.stdout.splitlines()
    marks = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert len(marks) == len(MACHINE) + 1 and set(marks[:-1]) <= {"ok", "warn", "PROBLEM"}
    index = next(number for number, line in enumerate(lines) if line.startswith("warn     unread variables"))
    assert lines[index + 1].strip().startswith("-> TRANSFORMERS_CACHE: set CACHE_ROOT")
    assert lines[-1].startswith(f"grpo: {len(MACHINE)} checks, ")


def test_a_problem_is_exit_code_2_and_none_is_0(doctor, tmp_path: Path):
    code, results = doctor(SLURM_TMPDIR=str(tmp_path))
    problems = [name for name, result in results.items() if result["status"] == "problem"]
    assert (code == 2) == bool(problems)
    long = tmp_path / ("y" * 80)
    long.mkdir()
    code, results = doctor(SLURM_TMPDIR=str(long))
    assert code == 2 and results["socket paths"]["status"] == "problem"


@on_cpu
def test_a_recipe_adds_its_checks(doctor):
    _, results = doctor(SMOKE)
    assert set(results) == {get_check_name(check) for check in (*MACHINE, *RECIPE)}
    assert results["gpu plan"]["status"] == "ok" and "smoke:sums" in results["assets"]["value"]
    _, results = doctor(SMOKE, "--vllm_node", "own")  # valid in a recipe, but a plan on one node rejects it
    assert results["gpu plan"]["status"] == "problem" and "vllm_node: shared" in results["gpu plan"]["fix"]


@on_cpu
def test_a_wrong_recipe_is_told_and_the_machine_looked_at_all_the_same(doctor):
    code, results = doctor(SMOKE, "--lerning_rate", "1", "--top_p", "0.9")
    assert code == 2 and len(results) == len(MACHINE) + 1
    assert "lerning_rate" in results["recipe"]["value"] and "1 more: grpo check" in results["recipe"]["value"]


def test_what_it_refuses(tmp_path: Path):
    for arguments, message in (
        (["--learning_rate", "1"], "grpo: --learning_rate: not an option of grpo doctor"),
        ([SMOKE, "--run", "last"], "grpo: --run: a run has its own recipe"),
        (["--run", str(tmp_path)], "is not a run directory"),
    ):
        done = run_doctor(*arguments)
        assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_a_run_is_explained(doctor, make_run, row, monkeypatch):
    run = make_run(rows=[row(step, kl=5.0) for step in range(1, 7)], status="completed", beta=0.01)
    code, results = doctor("--run", str(run.folder))
    assert code == 2 and set(results) == {get_check_name(check) for check in RUN}
    assert [name for name, result in results.items() if result["status"] == "problem"] == ["kl"]
    code, results = doctor("--run", "last", RUN_ROOT=str(run.folder.parent))
    assert code == 2 and results["ending"]["value"] == "completed, 6 steps"


@pytest.mark.slow
@pytest.mark.alone  # it measures that the checks wait at the same time
def test_programs_that_hang_do_not_hold_it_up(fake_program):
    for name in ("sinfo", "nvidia-smi"):
        fake_program(name, "exec sleep 60")
    began = time.monotonic()
    results = {check["name"]: check for check in json.loads(run_doctor("--json").stdout)["checks"]}
    assert time.monotonic() - began < 8
    assert "sinfo did not answer within 3 s" in results["slurm"]["value"]
    assert results["gpus"]["status"] == "problem"


def test_nothing_secret_is_printed(tmp_path: Path):
    token, key, password = "hf_" + "q" * 34, "0123456789abcdef" * 2 + "01234567", "pa55w0rd"
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai\n  login user\n  password {key}\n")
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text(token)
    variables = {
        "HOME": str(tmp_path),
        "https_proxy": f"http://alice:{password}@proxy.invalid:3128",
        "http_proxy": f"http://{password}@proxy.invalid:3128",
        "HF_ENDPOINT": f"http://{password}@hub.invalid",
        "HF_HUB_OFFLINE": "0",
        "LD_PRELOAD": "",
        "VLLM_API_KEYS": key,
    }
    for tokens in ({}, {"HF_TOKEN": token, "WANDB_API_KEY": key}):
        for form in ([], ["--json"]):
            done = run_doctor(*form, **variables, **tokens)
            assert done.stdout
            for secret in (token, key, password):
                assert secret not in done.stdout + done.stderr


def test_it_writes_nothing(tmp_path: Path):
    run_doctor(RUN_ROOT=str(tmp_path / "runs"), CACHE_ROOT=str(tmp_path / "cache"))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_run_is_not_the_machine(capsys):
    assert main(["doctor", "--run", ""]) == 2
    assert capsys.readouterr().err.startswith("grpo: --run: '' is not a run directory")
