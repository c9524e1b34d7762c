"""Every command of README.md and docs/ is run: here unchanged, by a test that follows its page, or by a test that gets
its words from ``documented``. If such a test has a fake, the page says so above the command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import documented as pages
import pytest
import yaml
from console.report.synthetic_runs import make_run
from doc_pages import PAGES, REPOSITORY, blocks, code_words, prose
from grpo_command import run_grpo

from grpo_recipes import cli
from grpo_recipes.extensions.colocated import keys as colocated
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.recipe.document import BASE_KEY
from grpo_recipes.recipe.keys import READ_VARIABLES, catalogue, environment_keys
from grpo_recipes.slurm import profile

sys.path.insert(0, str(REPOSITORY / "tests/e2e"))
import test_authoring
import test_your_own_run

MATH = "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"
MODEBENCH = "recipes/Qwen2.5-0.5B-Instruct"

# Commands that load torch, transformers or data.
LOADING = r"check --deep|check-rewards|benchmarks"
# Seconds at most; nothing is started or written.
RUN_HERE = {
    "CONFIG=recipes/smoke/grpo.yaml grpo check",
    "RUN_NAME=first VLLM_PORT=8100 TRAIN_SEED=7 grpo plan recipes/smoke/grpo.yaml",
    "grpo check recipes/atropos/smoke.yaml",
    "grpo check recipes/smoke/grpo.yaml",
    "grpo check-rewards recipes/examples/rule.yaml",
    "grpo check-rewards recipes/smoke/grpo.yaml",
    f"grpo check {MATH}",
    "grpo check --deep recipes/examples/atropos_two_sums.yaml",
    "grpo check --deep recipes/examples/two_sums.yaml",
    'grpo check recipes/smoke/grpo.yaml --eval_strategy no --unset eval_steps --reward_funcs "[pure_accuracy_math]"',
    "grpo check recipes/smoke/grpo.yaml --learning_rate 1e-6 --beta=0.04 --no_shuffle_dataset",
    "grpo --help",
    "grpo launch recipes/smoke/grpo.yaml --dry-run",
    "grpo plan recipes/atropos/smoke.yaml",
    "grpo plan recipes/smoke/grpo.yaml",
    "grpo plan recipes/smoke/grpo.yaml --weight_sync file",
    "grpo plan recipes/smoke/grpo.yaml --gpus 1 --vllm_gpu shared",
    "grpo plan recipes/smoke/grpo.yaml --gpus 2 --weight_sync shared",
    f"grpo plan {MATH} --gpus 1 --vllm_mode colocate",
    f"grpo plan {MATH} --gpus 8",
    f"grpo plan {MATH} --gpus 8 --json",
    f"grpo plan {MATH} --gpus 8 --vllm_data_parallel_size 2",
    f"grpo plan {MATH} --gpus 8 --gpu-memory 80 --time 72:00:00",
    "grpo keys temperature",
    "grpo keys objective",
    "python src/atropos_grpo.py --model-name smoke:sums --environment arithmetic --dry-run",
    "grpo keys --env",
    "grpo keys --json",
    "grpo plan recipes/Qwen2.5-7B-Instruct/grpo/config_math.yaml --gpus 8 --nodes 2",
    "grpo plan recipes/Qwen2.5-7B-Instruct/grpo/config_math.yaml --gpus 8 --nodes 2 --vllm_node own",
    "grpo plan recipes/Qwen2.5-7B-Instruct/grpo/config_math.yaml --gpus 8 --nodes 3 --vllm_node own"
    " --vllm_data_parallel_size 16 --vllm_data_parallel_size_local 8",
    "grpo check recipes/Qwen2.5-1.5B-Instruct/maxent/config_math.yaml",
    "grpo check recipes/Qwen2.5-1.5B-Instruct/maxent/config_math_tempered.yaml",
    "grpo plan recipes/Qwen3-4B/maxent/config_math_weighted_mle.yaml --gpus 8",
    "MAXENT=1 grpo plan recipes/smoke/maxent.yaml",
    "MAXENT=1 MAXENT_TAU=inf grpo check recipes/smoke/maxent.yaml",
    "grpo plan recipes/Qwen2.5-1.5B-Instruct/maxent/config_math_tempered.yaml --gpus 8",
    "bash slurm/train.slurm --help",
    f"grpo check {MODEBENCH}/maxent/config_modebench_countdown.yaml",
    f"grpo check-rewards {MODEBENCH}/grpo/config_modebench_graph_coloring.yaml",
    f"grpo plan {MODEBENCH}/maxent/config_modebench_graph_coloring.yaml --gpus 8",
    "python -m grpo_recipes.extensions.problems.modebench.baselines",
    "python run_colocated_grpo.py --gpus 4 --dry-run",
    "python run_offline_grpo.py -m train.lr=5e-6,1e-5 train.kl_coef='[0.02,0.05]' --dry-run",
    "python test_gpu_integration.py",
}

# Seconds at most as well, in a user's folder: two runs, my.yaml with its data, the repository's recipes.
IN_A_FOLDER = {
    "grpo new my.yaml --from theirs.yaml",
    "grpo new my.yaml --from recipes/Qwen3-4B/grpo/config_math.yaml",
    "grpo new my.yaml --from recipes/Qwen3-4B/maxent/config_math_tempered.yaml",
    "grpo logs last --server -n 100",
    "grpo report RUN RUN",
    "grpo watch last",
    "grpo doctor",
    "grpo doctor recipes/smoke/grpo.yaml",
    "grpo doctor --run last",
}
# It loads model, data and rewards, as a submission does.
LOADS = "grpo submit recipes/smoke/grpo.yaml --profile mltheory --dry-run"
# These may find something to do on this machine, or in that run.
MAY_END_WITH_2 = {"grpo doctor", "grpo doctor recipes/smoke/grpo.yaml", "grpo doctor --run last"}
# The part of the followed page whose test has fakes; what the page shows before it is run without.
_BEFORE, _CLUSTER = test_your_own_run.PAGE.read_text().split("## Run on a Slurm cluster")
ON_THE_CLUSTER = {line for line in _CLUSTER.splitlines() if f"\n{line}\n" not in _BEFORE}
_RECIPE = """
model_name_or_path: smoke:sums
dataset_name: data.jsonl
reward_funcs: [pure_accuracy_math]
"""


# Lines of a shell's start file: the shell that reads them.
SOURCED = {"source <(grpo completion bash)": "bash", "source <(grpo completion zsh)": "zsh"}


def followed() -> dict[str, str]:
    """Return the commands of pages that a test follows from their first to their last, with that test."""
    run, author = "tests/e2e/test_your_own_run.py", "tests/e2e/test_authoring.py"
    script = test_your_own_run.script_of_the_page(local=False).splitlines()
    page = {line: run for block in blocks("bash") if block.page == "tutorial.md" for line in block.lines}
    assert page.keys() <= set(script)
    return page | dict.fromkeys(test_authoring.commands_of_the_docs(), author)


def clean_environment(folder: Path) -> dict[str, str]:
    """The tester's environment without the launcher's variables, with the `grpo` of this Python."""
    names = {*READ_VARIABLES, *environment_keys()}
    inherited = {name: text for name, text in os.environ.items() if name not in names and not name.startswith("SLURM_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**inherited, "PATH": path, "RUN_ROOT": str(folder / "runs"), "ENV_DIR": sys.prefix}


def run_as_it_stands(command: str, cwd: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a page with bash, or without if it is only `grpo` with words and variables."""
    environment, argv = clean_environment(folder), ["bash", "-c", command]
    if simple := re.fullmatch(r"((?:\w+=\S+ )*)grpo ([^|&;<>$*()]+)", command):
        environment |= dict(word.split("=", 1) for word in shlex.split(simple[1]))
        return run_grpo(*shlex.split(simple[2]), cwd=cwd, env=environment)
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.parametrize(
    "command",
    [pytest.param(line, marks=pytest.mark.slow if re.search(LOADING, line) else ()) for line in sorted(RUN_HERE)],
)
def test_it_runs_as_it_stands(command: str, tmp_path: Path) -> None:
    if environment_device() != "cpu":
        pytest.skip("the default recipe of a CUDA environment needs GPUs")
    done = run_as_it_stands(command, REPOSITORY, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", [*sorted(IN_A_FOLDER), pytest.param(LOADS, marks=pytest.mark.slow)])
def test_it_runs_in_a_folder_of_a_user(command: str, tmp_path: Path) -> None:
    if environment_device() != "cpu":
        pytest.skip("the default recipe of a CUDA environment needs GPUs")
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    (tmp_path / "theirs.yaml").write_text("model_name_or_path: Qwen/Qwen3-4B\nper_device_train_batch_size: 8\n")
    if "--from" not in command:
        (tmp_path / "my.yaml").write_text(_RECIPE)
        (tmp_path / "data.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    runs = [make_run(tmp_path / "runs", f"math-20261120-10150{number}", steps=3, seed=number) for number in (1, 2)]
    for run in runs:
        plan = json.loads((run / "plan.json").read_text())
        for process in plan["processes"]:
            (tmp_path / process["log"]).parent.mkdir(exist_ok=True)
            (tmp_path / process["log"]).write_text("a line of the log\n")
    line = command
    for run in runs:
        line = line.replace("RUN", str(run), 1) if " RUN" in line else line
    done = run_as_it_stands(line, tmp_path, tmp_path)
    assert done.returncode in ((0, 2) if command in MAY_END_WITH_2 else (0,)), done.stdout + done.stderr
    assert done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("line", sorted(SOURCED))
def test_it_is_read_by_its_shell(line: str, tmp_path: Path) -> None:
    if shutil.which(SOURCED[line]) is None:
        pytest.skip(f"{SOURCED[line]} is not installed")
    start = 'autoload -Uz compinit; compinit -u -d "$PWD/.zcompdump"; ' if SOURCED[line] == "zsh" else ""
    command = [
        SOURCED[line],
        *(["-f"] if SOURCED[line] == "zsh" else ["--norc"]),
        "-c",
        f"{start}{line} && typeset -f _grpo",
    ]
    environment = {**clean_environment(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "_grpo" in done.stdout, done.stderr


def test_every_command_is_run() -> None:
    tests_by_command, page = pages.runners(), followed()
    for command, marked in pages.commands().items():
        tests = tests_by_command.get(command, [])
        runs_here = command in {*RUN_HERE, *IN_A_FOLDER, *SOURCED, LOADS}
        assert runs_here or command in page or tests, (
            f"new command: {command}: add it to RUN_HERE or IN_A_FOLDER, or have a test take it from documented()"
        )
        fakes = [fake for _, fake in tests] or [command in ON_THE_CLUSTER]
        assert marked == (not runs_here and all(fakes)), f"a page says that a test has a fake, and only then: {command}"


def test_no_command_is_classified_that_no_page_has() -> None:
    assert sorted(({*RUN_HERE, *IN_A_FOLDER, *SOURCED} | pages.runners().keys()) - pages.commands().keys()) == []
    assert not RUN_HERE & IN_A_FOLDER


def test_what_runs_a_command_is_noticed_when_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "grpo sweep --resume last"
    assert pages.documented(shown)[1:] == ["sweep", "--resume", "last"]
    assert pages.documented("MAXENT=1 bash training.sh")[:3] == ["env", "MAXENT=1", "bash"]
    with pytest.raises(AssertionError, match="no page shows"):
        pages.documented("grpo sweep --resume first")
    with pytest.raises(AssertionError, match="does not say that Slurm is a fake"):
        pages.documented(shown, fake="Slurm")
    with pytest.raises(AssertionError):
        pages.documented(shown, {"no word of it": "x"})
    head = "from documented import documented\n"
    (tmp_path / "test_unused.py").write_text(f"{head}def test_it():\n    documented({shown!r})\n")
    monkeypatch.setattr(pages, "TESTS", tmp_path)
    with pytest.raises(AssertionError, match="does not use the words"):
        pages.runners()


def test_commands_cannot_hide_in_blocks_of_another_language() -> None:
    assert {block.language for block in blocks()} <= {"bash", "json", "python", "text", "yaml"}
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
    elif words[0] == "grpo" and words[1].startswith("-"):
        assert any(words[1] in action.option_strings for action in cli.make_parser()._actions)
    elif words[0] == "grpo":
        options = command_options(words[1])
        flags = [word.partition("=")[0] for word in words[2:] if word.startswith("--")]
        assert all(flag in options or flag.lstrip("-") in catalogue() for flag in flags)
    else:
        files = [word for word in words if word.endswith(".sh")]
        assert all((REPOSITORY / file).is_file() for file in files)


def test_make_targets_are_there() -> None:
    assert {"setup", "smoke", "test", "e2e", "docs", "docs-serve", "clean"} <= make_targets()


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def command_options(name: str) -> set[str]:
    (commands,) = [action for action in cli.make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return {option for action in commands.choices[name]._actions for option in action.option_strings}


def test_yaml_examples_hold_known_keys() -> None:
    for block in blocks("yaml"):
        known = {*(profile.KEYS if block.file == "mysite.yaml" else catalogue())}
        known |= set(colocated.CONVERTERS[0].sections) if block.page == "migrate.md" else set()
        assert set(yaml.safe_load("\n".join(block.lines))) <= {*known, BASE_KEY}, block


def test_python_examples_compile() -> None:
    examples = blocks("python")
    assert examples
    for block in examples:
        compile("\n".join(block.lines), block.page, "exec")
