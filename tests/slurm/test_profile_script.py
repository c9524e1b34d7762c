"""Batch scripts: every option of a profile and of a request changes the script, and the shell accepts it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.paths import find_code_root
from grpo_recipes.slurm.profile import KEYS, Profile, read_profile, render_script

# The header of the training guide, unchanged.
GUIDE = """\
#SBATCH --job-name=OpenR1_GRPO
#SBATCH --account=mltheory
#SBATCH --partition=mltheory
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:a100:7
#SBATCH --cpus-per-task=64
#SBATCH --mem=256G
#SBATCH --time=72:00:00
#SBATCH --output=logs/slurm_%j.out
#SBATCH --exclusive
"""
SITE = Profile("site", gpus=2)
# A value of every key of a profile that the script shows, and the text that the script has for it.
SHOWN = {
    "account": ("me", "--account=me"),
    "partition": ("long", "--partition=long"),
    "nodes": (2, "--nodes=2\n#SBATCH --ntasks=2\n#SBATCH --ntasks-per-node=1\n"),
    "gpu_flag_style": ("gpus", "--gpus-per-node=2"),
    "gpu_kind": ("h100", "--gres=gpu:h100:2"),
    "gpus": (4, "--gres=gpu:4"),
    "cpus": (3, "--cpus-per-task=3"),
    "mem": ("9G", "--mem=9G"),
    "time": ("1-0", "--time=1-0"),
    "exclusive": (True, "#SBATCH --exclusive"),
    "qos": ("high", "--qos=high"),
    "constraint": ("a&b", "--constraint=a&b"),
    "exclude": ("n[1-2]", "--exclude=n[1-2]"),
    "signal_lead": (77, "--signal=B:USR1@77"),
    "sbatch_options": (["--container-image=a b.sqsh"], '#SBATCH --container-image="a b.sqsh"'),
    "srun_options": (["--container-image=x"], "export GRPO_SRUN_OPTIONS=--container-image=x"),
    "network_interface": ("ib0", "export NETWORK_INTERFACE=ib0"),
    "modules": (["cuda/12.6"], "module load cuda/12.6 || fail"),
    "env_dir": ("/my env", "export PATH='/my env/bin':\"$PATH\""),
    "env_activate": ("/act.sh", "source /act.sh || fail"),
    "conda_env": ("mine", "conda activate mine || fail"),
    "conda_sh": ("/conda.sh", "source /conda.sh || fail"),
    "environment": ({"NCCL_DEBUG": "a'b"}, "export NCCL_DEBUG="),
}
# The plan, the submission and the checks read these fields; see tests/launch/test_submission.py.
ELSEWHERE = {"job_name", "gpu_memory_gib", "run_root", "cache_root", "internet"}


def rendered(profile: Profile = SITE, **options: Any) -> str:
    return render_script(profile, "job", ["grpo", "launch", "--resume", "/r un"], {"GRPO_CODE": "/c"}, **options)


def accepted(script: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(script)
    for argv in (["bash", "-n"], [str(Path(sys.executable).parent / "shellcheck")]):
        done = subprocess.run([*argv, str(path)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + script


def test_mltheory_gives_the_header_of_the_guide_line_by_line() -> None:
    profile = read_profile(find_code_root() / "slurm/profiles/mltheory.yaml")
    script = render_script(profile, str(profile.job_name), ["true"], {})
    assert script.removeprefix("#!/bin/bash\n").startswith(GUIDE)
    added_lines = [line for line in script.splitlines() if line.startswith("#SBATCH")][len(GUIDE.splitlines()) :]
    assert added_lines == [
        "#SBATCH --error=logs/slurm_%j.err",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --requeue",
    ]


@pytest.mark.parametrize(
    "path", sorted((find_code_root() / "slurm/profiles").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_shell_accepts_the_scripts_of_shipped_profiles(path: Path, tmp_path: Path) -> None:
    accepted(rendered(read_profile(path)), tmp_path)


def test_every_key_is_shown_here_or_elsewhere() -> None:
    assert SHOWN.keys() | ELSEWHERE == KEYS.keys()


@pytest.mark.parametrize("key", sorted(SHOWN))
def test_every_key_changes_the_script(key: str, tmp_path: Path) -> None:
    value, expected = SHOWN[key]
    script = rendered(replace(SITE, **{key: value}))
    assert expected in script
    assert expected not in rendered()
    accepted(script, tmp_path)


def test_a_job_knows_how_early_its_signal_comes() -> None:
    assert "\nexport GRPO_SIGNAL_LEAD=300\n" in rendered()
    assert "\nexport GRPO_SIGNAL_LEAD=77\n" in rendered(replace(SITE, signal_lead=77))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("array", "0-5%2", "--array=0-5%2\n"),
        ("log", "%A_%a", "--output=logs/slurm_%A_%a.out\n"),
        ("log", "%A_%a", "--error=logs/slurm_%A_%a.err\n"),
        ("chdir", Path("/a b"), '--chdir="/a b"\n'),
    ],
)
def test_every_part_of_a_request_changes_the_script(name: str, value: object, expected: str) -> None:
    assert expected not in rendered()
    assert expected in rendered(**{name: value})


@pytest.mark.parametrize(
    ("style", "lines"), [("none", []), ("gpus", ["--gpus-per-node=a100:7"]), ("gres", ["--gres=gpu:a100:7"])]
)
def test_sites_are_asked_for_gpus_in_their_own_way(style: str, lines: list[str]) -> None:
    script = rendered(Profile("site", gpus=7, gpu_kind="a100", gpu_flag_style=style))
    assert [line for line in re.findall("^#SBATCH (.*)$", script, re.MULTILINE) if "gpu" in line] == lines


def test_nodes_without_internet_do_not_ask_the_hub() -> None:
    assert "export HF_HUB_OFFLINE=1\nexport HF_DATASETS_OFFLINE=1\n" in rendered()
    assert "OFFLINE" not in rendered(replace(SITE, internet=True))


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("/a b", '#SBATCH --chdir="/a b"'),
        ('/a "b"', '#SBATCH --chdir="/a \\"b\\""'),
        ("/it's", '#SBATCH --chdir="/it\'s"'),
        ("/run#1", '#SBATCH --chdir="/run#1"'),
        ("/a\\b", '#SBATCH --chdir="/a\\\\b"'),
    ],
)
def test_a_folder_of_any_name_stands_as_sbatch_reads_it(folder: str, line: str, tmp_path: Path) -> None:
    script = rendered(chdir=Path(folder))
    assert f"{line}\n" in script
    accepted(script, tmp_path)


def test_sbatch_reads_a_folder_of_any_name_as_it_is(tmp_path: Path) -> None:
    if shutil.which("sbatch") is None:
        pytest.skip("there is no sbatch here")
    folder = "/a \"b\" 'c' #d \\e"
    (tmp_path / "job.sh").write_text(rendered(chdir=Path(folder)))
    nobody = "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=2\nNodeName=n1\n"
    (tmp_path / "slurm.conf").write_text(f"{nobody}PartitionName=main Nodes=n1 Default=YES\n")
    environment = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    with subprocess.Popen(
        ["sbatch", "-v", "--test-only", str(tmp_path / "job.sh")], env=environment, text=True, stderr=subprocess.PIPE
    ) as process:
        told = next((line for line in process.stderr if "chdir" in line or "fatal" in line), "")
        process.kill()  # it would try to reach the controller that is not there
    assert told.partition(" : ")[2] == f"{folder}\n"


def test_an_option_that_is_quoted_already_stays_as_it_is() -> None:
    script = rendered(replace(SITE, sbatch_options=['--comment="a b"', "-p long"]))
    assert '#SBATCH --comment="a b"\n#SBATCH -p long\n' in script


def run_script(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "job.sh"
    path.write_text(script)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/of/the/login/shell"}
    return subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_takes_the_place_of_the_shell_with_usr1_ignored(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "grpo"
    fake.write_text('#!/bin/bash\necho "$*|$GRPO_CODE|$PYTHONPATH"\ngrep SigIgn "/proc/$$/status"\n')
    fake.chmod(0o755)
    done = run_script(rendered(replace(SITE, env_dir=str(tmp_path))), tmp_path)
    first, ignored = done.stdout.splitlines()
    assert first == "launch --resume /r un|/c|"
    assert int(ignored.split()[1], 16) & (1 << 9)  # USR1 is signal 10


@pytest.mark.parametrize(
    "broken",
    [
        {"modules": ["nothing/1"]},
        {"env_activate": "/nowhere/activate"},
        {"conda_sh": "/nowhere/conda.sh", "conda_env": "x"},
        {"conda_env": "x"},
    ],
    ids=lambda broken: "+".join(broken),
)
def test_an_environment_that_is_not_there_ends_the_job(broken: dict, tmp_path: Path) -> None:
    done = run_script(rendered(replace(SITE, **broken)), tmp_path)
    assert done.returncode == 2
    assert ("grpo: " in done.stderr and "failed" in done.stderr) or "could not be sourced" in done.stderr
