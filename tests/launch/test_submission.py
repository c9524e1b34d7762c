"""`grpo submit` with a fake sbatch: checked, frozen and submitted, or rejected without written files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.cli.runs import OVERRIDES
from grpo_recipes.launch import submission
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.runs import rundir
from grpo_recipes.runs.rundir import describe_code_change, find_run, read_json
from tests.plan.model_folders import SMALL, model_folder

SMOKE = str(find_code_root() / "recipes/smoke/grpo.yaml")
MATH = str(find_code_root() / "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml")
pytestmark = pytest.mark.skipif(environment_device() != "cpu", reason="the profile for nodes without GPUs is used")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty working folder, and replace check --deep by a check without problems."""
    for name in {*environment_keys(), *READ_VARIABLES, "WANDB_MODE"} - {"GRPO_HOME"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(submission, "_check_deep", lambda *arguments: None)
    put_sbatch(tmp_path_factory.mktemp("bin"), monkeypatch)
    return tmp_path


def put_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str) -> None:
    """Put fake commands of Slurm, written in bash, first on the PATH; sbatch fails by default."""
    for name, body in {"sbatch": "exit 1", **bodies}.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.fixture
def fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a fake sbatch, written in bash, first on the PATH."""

    def put(body: str) -> None:
        (tmp_path / "bin").mkdir()
        put_sbatch(tmp_path / "bin", monkeypatch, sbatch=body, scontrol="echo 'ClusterName = fake'")

    return put


def submit(*arguments: str, profile: str = "cpu", recipe: str = SMOKE, then: tuple[str, ...] = ()) -> int:
    return cli.main(["submit", recipe, *then, "--profile", profile, *arguments])


def test_a_run_in_another_folder_of_runs_is_named_by_its_directory(folder, fake_sbatch, capsys) -> None:
    """`grpo status 77` only finds a run in RUN_ROOT."""
    fake_sbatch('echo "77;fake"')
    assert submit("--run_root", str(folder / "elsewhere")) == 0
    (run_dir,) = (path.parent for path in (folder / "elsewhere").glob("*/run.json"))
    name = f"elsewhere/{run_dir.name}"
    assert f"follow it with grpo status {name}, or grpo logs -f {name}; stop it with" in capsys.readouterr().out


def profile_of(folder: Path, text: str) -> str:
    (folder / "site.yaml").write_text(text)
    return str(folder / "site.yaml")


def any_disk_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of free space, so that a large recipe passes on a small disk."""
    monkeypatch.setattr(submission, "require_disk_space", lambda *arguments: None)


def only_run(folder: Path) -> Path:
    (path,) = (folder / "runs").glob("*/run.json")
    return path.parent


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, **named: Any) -> str:
    assert submit(*arguments, **named) == 2
    assert not Path("runs").exists() or not [path for path in Path("runs").iterdir() if path.name != ".jobs"]
    return capsys.readouterr().err


def test_a_run_is_frozen_and_its_script_submitted(folder, fake_sbatch, capsys) -> None:
    fake_sbatch('cp "${@: -1}" "$PWD/seen.sh"; echo "77;fake"')
    assert submit("--seed", "7", "--time", "0:30:00") == 0
    run_dir = only_run(folder)
    output = capsys.readouterr().out
    assert f"submitted job 77, run directory runs/{run_dir.name}" in output
    assert "grpo status 77" in output and "grpo logs -f 77" in output and "grpo stop 77" in output
    script = (run_dir / "job.sh").read_text()
    assert (folder / "seen.sh").read_text() == script
    assert f"#SBATCH --chdir={folder}\n" in script and "#SBATCH --time=0:30:00\n" in script
    assert script.endswith(f'exec grpo launch --resume {run_dir} "$@"\n')
    assert (folder / "logs").is_dir()
    assert read_json(run_dir / "summary.json") == {"status": "submitted", "smoke": True, "restarts": 0}
    assert "seed: 7" in (run_dir / "recipe.yaml").read_text()
    assert read_json(run_dir / "plan.json")["flavour"] == "cpu"
    assert (folder / "runs/.jobs/fake-77").read_text() == str(run_dir)
    assert read_json(run_dir / "job.json") == {"job": "fake-77", "working_folder": str(folder)}


def test_the_frozen_code_is_a_copy_that_the_run_holds_itself_to(folder, fake_sbatch, monkeypatch) -> None:
    fake_sbatch("echo 1")
    assert submit() == 0
    run = find_run(Path("runs"), "last")
    code = run.folder / "code"
    copied = {str(path.relative_to(code)) for path in code.rglob("*.py")}
    assert copied == {str(path.relative_to(find_code_root())) for path in (find_code_root() / "src").rglob("*.py")}
    assert (code / "training.sh").is_file() and (code / "requirements/cpu.txt").is_file()
    assert describe_code_change(run) is None  # against the repository
    monkeypatch.setenv("GRPO_CODE", str(code))
    assert describe_code_change(run) is None  # against itself
    (code / "src/grpo.py").write_text("raise SystemExit\n")
    assert "were changed after the run was submitted" in describe_code_change(run)


def test_a_dry_run_prints_the_script_and_writes_nothing(folder, capsys) -> None:
    before = sorted(folder.iterdir())
    assert submit("--dry-run", "--seed", "7") == 0
    told = capsys.readouterr()
    assert told.out.startswith("#!/bin/bash\n#SBATCH --job-name=smoke\n") and "launch --resume" in told.out
    assert "batch 16 prompts x 16 completions" in told.err
    assert sorted(folder.iterdir()) == before


def test_a_dry_run_says_that_the_environment_is_another(capsys) -> None:
    assert submit("--dry-run", profile="mltheory") == 0
    assert "submitting would fail: --profile: the nodes have GPUs" in capsys.readouterr().err
    assert "run DEVICE=cuda make setup" in refusal(capsys, profile="mltheory")


def test_each_of_several_recipes_is_a_job_that_starts_from_the_model_before(folder, fake_sbatch, capsys) -> None:
    fake_sbatch('echo "$@" >> "$PWD/seen"; wc -l < "$PWD/seen"')
    pair = [str(find_code_root() / f"recipes/smoke/{name}.yaml") for name in ("sft", "sft_grpo")]
    assert submit("--seed", "7", recipe=pair[0], then=(pair[1],)) == 0
    first, second = (folder / "runs" / (folder / f"runs/.jobs/fake-{job}").read_text() for job in (1, 2))
    assert (folder / "seen").read_text().splitlines() == [
        f"--parsable {first}/job.sh",
        f"--parsable --dependency=afterok:1 --kill-on-invalid-dep=yes {second}/job.sh",
    ]
    assert f"submitted job 2, run directory runs/{second.name}, starts after the success of job 1" in (
        capsys.readouterr().out
    )
    recipes = [yaml.safe_load((run / "recipe.yaml").read_text()) for run in (first, second)]
    assert [recipe["seed"] for recipe in recipes] == [7, 7]
    assert recipes[0]["task"] == "sft" and recipes[0]["model_name_or_path"] == "smoke:untrained"
    assert recipes[1]["model_name_or_path"] == str(first / "model")
    assert not any("model" in asset["kind"] for asset in read_json(second / "run.json").get("sources", []))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model_name_or_path", "a/b"], "--model_name_or_path: would apply to every recipe. Fix: set model_name_or"),
        (["--run_name", "one"], "would be the directory of two runs. Fix: set another run_name in"),
        (["--learning_rate", "x"], "learning_rate: expected a number, got 'x'"),
    ],
)
def test_several_recipes_are_checked_before_the_first_is_submitted(
    fake_sbatch, monkeypatch, capsys, flags, message
) -> None:
    fake_sbatch("echo 1")
    monkeypatch.setattr(rundir, "timestamp", lambda: "20260101-000000")
    assert message in refusal(capsys, *flags, then=(SMOKE,))


def test_a_mistake_in_the_last_recipe_is_found_before_the_slow_check_of_the_first(monkeypatch, capsys) -> None:
    deep_checks: list[Any] = []
    monkeypatch.setattr(submission, "_check_deep", lambda *arguments: deep_checks.append(arguments))
    assert "recipe 'missing.yaml' not found" in refusal(capsys, then=(SMOKE, "missing.yaml"))
    assert deep_checks == []


def test_another_environment_is_not_looked_into(folder, fake_sbatch) -> None:
    fake_sbatch("echo 1")
    assert submit(profile=profile_of(folder, "gpus: 2\nenv_dir: /of/the/cluster\n")) == 0


def test_what_sbatch_says_is_told_and_no_run_directory_is_left(fake_sbatch, capsys) -> None:
    fake_sbatch(
        "echo 'sbatch: error: invalid partition specified: x' >&2; echo 'sbatch: error: Batch job failed' >&2; exit 1"
    )
    assert "sbatch: invalid partition specified: x; Batch job failed. Fix: " in refusal(capsys, "--partition", "x")


def test_an_sbatch_that_tells_no_job_is_told_with_its_words(folder, fake_sbatch, capsys) -> None:
    fake_sbatch("echo Welcome; echo 'your job is on its way'")
    assert submit() == 2
    assert "sbatch: prints no job id ('Welcome your job is on its way')" in capsys.readouterr().err
    assert only_run(folder)  # the job may be in the queue, and needs it


def test_without_sbatch_nothing_else_is_checked(monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setattr(submission, "_check_deep", lambda *arguments: pytest.fail("the deep check takes minutes"))
    expected = (
        "grpo: sbatch: this machine does not have Slurm's command sbatch. "
        "Fix: submit on the cluster's login node, or load the site's Slurm module\n"
    )
    assert refusal(capsys) == expected
    monkeypatch.setattr(submission, "_check_deep", lambda *arguments: None)
    assert submit("--dry-run") == 0, "a dry run submits nothing"


def test_a_script_that_cannot_be_written_leaves_no_run_directory(fake_sbatch, monkeypatch, capsys) -> None:
    fake_sbatch("echo 1")
    write_text = Path.write_text

    def full(path: Path, *arguments, **named) -> int:
        if path.name == "job.sh":
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **named)

    monkeypatch.setattr(Path, "write_text", full)
    assert "job.sh: cannot write this file (No space left on device). Fix: set run_root to a folder" in refusal(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--time", "soon"], "--time: 'soon' is not a time limit in Slurm's format"),
        (["--nodes", "0"], "expected at least 1, got 0"),
        (["--gpus", "x"], "expected an integer, got 'x'"),
        (["--learning_rat", "1"], "unknown key 'learning_rat'"),
        (["--report_to", "wandb"], "--report_to: the run reports to W&B, but the nodes of cpu have no internet"),
        (
            ["--push_to_hub", "true", "--hub_model_id", "a/b"],
            "the run uploads its model, but the nodes of cpu have no internet",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(arguments, message, capsys) -> None:
    assert message in refusal(capsys, *arguments)


def test_a_profile_that_is_not_there(capsys) -> None:
    assert "profile 'nowhere' not found. Fix: use the path of a file, or one of cpu, " in refusal(
        capsys, profile="nowhere"
    )


def test_nodes_with_internet_may_report_to_wandb(folder, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "*")
    site = profile_of(folder, "internet: true\n")
    assert "W&B does not answer" in refusal(capsys, "--report_to", "wandb", profile=site)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert submit("--dry-run", "--report_to", "wandb") == 0


def test_every_override_reaches_the_script(capsys) -> None:
    values = {"time": "0:06:00", "nodes": "2", "gpus": "8", "cpus": "16"}
    overrides = {key: values.get(key, f"my-{key}") for key in OVERRIDES}
    assert submit("--dry-run", *[f"--{key}={text}" for key, text in overrides.items()], profile="mltheory") == 0
    header = capsys.readouterr().out
    named = {"cpus": "cpus-per-task=16", "gpus": "gres=gpu:a100:8"}
    for key, text in overrides.items():
        assert f"#SBATCH --{named.get(key, f'{key}={text}')}\n" in header


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("gpus: 8\ncpus: 8\nmem: 256G\n", "8 cores for 8 GPUs, at least 16 are needed. Fix: set cpus: 64"),
        ("gpus: 4\ncpus: 16\nmem: 4G\n", "at least 32.0 GB are needed. Fix: set mem: 128G"),
        (
            "gpus: 8\nexclusive: true\ntime: '00:05:00'\n",
            "time 00:05:00 is not longer than signal_lead (300 s): the run stops at once. Fix: set a longer time, or "
            "signal_lead: 30",
        ),
    ],
)
def test_a_profile_that_asks_for_too_little_is_refused(folder, capsys, site, message) -> None:
    assert message in refusal(capsys, "--dry-run", profile=profile_of(folder, site), recipe=MATH)


def test_a_profile_that_leaves_cores_and_memory_to_the_site_is_noted(folder, monkeypatch, capsys) -> None:
    any_disk_has_room(monkeypatch)
    assert submit("--dry-run", profile=profile_of(folder, "gpus: 8\n"), recipe=MATH) == 0
    assert "note: site.yaml does not set cpus and mem" in capsys.readouterr().err
    assert submit("--dry-run", profile=profile_of(folder, "gpus: 8\nexclusive: true\n"), recipe=MATH) == 0
    assert "does not set" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a%j", "two\nlines", "back\\slash"])
def test_a_working_folder_that_slurm_reads_otherwise_is_refused(folder, monkeypatch, capsys, name) -> None:
    (folder / name).mkdir()
    monkeypatch.chdir(folder / name)
    line = refusal(capsys, "--dry-run")
    assert line.startswith("grpo: working folder: ") and len(line.splitlines()) == 1


@pytest.mark.parametrize("key", ["sbatch_options: ['--x=1\\n#SBATCH --y']", 'partition: "a\\n#SBATCH --y"'])
def test_no_value_of_a_profile_adds_a_line_to_the_header(folder, capsys, key) -> None:
    key = key.replace("['", '["').replace("']", '"]')
    assert "must be a single line. Fix: remove the line breaks" in refusal(
        capsys, profile=profile_of(folder, key + "\n")
    )


def test_a_variable_says_how_gpus_are_asked_for(monkeypatch, capsys) -> None:
    monkeypatch.setenv("SLURM_GPU_FLAG_STYLE", "gpus")
    assert submit("--dry-run", profile="mltheory") == 0
    assert "#SBATCH --gpus-per-node=a100:7\n" in capsys.readouterr().out
    monkeypatch.setenv("SLURM_GPU_FLAG_STYLE", "some")
    assert "SLURM_GPU_FLAG_STYLE: gpu_flag_style: 'some' is not supported" in refusal(capsys, profile="mltheory")


def test_the_site_says_where_runs_and_downloads_are_unless_the_user_does(folder, monkeypatch, capsys) -> None:
    site = profile_of(folder, f"run_root: {folder}/scratch\ncache_root: /site/cache\njob_name: mine\n")
    monkeypatch.delenv("CACHE_ROOT")
    assert submit("--dry-run", profile=site) == 0
    script = capsys.readouterr().out
    assert f"--resume {folder}/scratch/smoke-" in script and "CACHE_ROOT=/site/cache\n" in script
    assert "--job-name=mine\n" in script
    monkeypatch.setenv("CACHE_ROOT", "/my/cache")
    assert submit("--dry-run", "--run_root", f"{folder}/own", profile=site) == 0
    script = capsys.readouterr().out
    assert f"--resume {folder}/own/smoke-" in script and "CACHE_ROOT=/my/cache\n" in script


def test_a_model_too_large_for_the_sites_gpu_is_refused_with_the_key_to_change(folder, capsys) -> None:
    flags = ["--model_name_or_path", model_folder(folder / "model", SMALL)]
    error = refusal(capsys, *flags, profile=profile_of(folder, "gpus: 2\ngpu_memory_gib: 1\nenv_dir: /x\n"))
    assert "the run does not fit: " in error and "remove gpu_memory_gib from site.yaml" in error
    assert [error.count(f"the {role} needs ") for role in ("trainer", "server")] == [1, 1]
    assert submit("--dry-run", *flags, profile=profile_of(folder, "gpus: 2\nenv_dir: /x\n")) == 0


def test_an_accelerate_file_is_frozen(folder, fake_sbatch, monkeypatch) -> None:
    (folder / "mine.yaml").write_text("distributed_type: 'NO'\n")
    monkeypatch.setenv("CONFIG_FILE", "mine.yaml")
    fake_sbatch("echo 1")
    assert submit() == 0
    run_dir = only_run(folder)
    assert f"export CONFIG_FILE={run_dir}/accelerate.yaml\n" in (run_dir / "job.sh").read_text()
    assert (run_dir / "accelerate.yaml").read_text() == "distributed_type: 'NO'\n"


def test_how_a_check_that_gives_no_answer_ended_is_said(folder, monkeypatch, capsys) -> None:
    monkeypatch.undo()  # the real check --deep
    (folder / "killed").write_text("#!/bin/sh\nkill -9 $$\n")
    (folder / "killed").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "killed"))
    assert submit("--dry-run") == 2
    assert "grpo check --deep ended with code -9 and without a result" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_not_here_is_refused_with_the_command_that_brings_it(monkeypatch, capsys) -> None:
    monkeypatch.undo()  # the real check --deep
    any_disk_has_room(monkeypatch)
    monkeypatch.setenv("CACHE_ROOT", "/nowhere")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert submit("--dry-run", recipe=MATH, profile="mltheory") == 2
    assert "grpo fetch recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml" in capsys.readouterr().err
