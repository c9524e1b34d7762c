"""`grpo completion` in real shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.recipe.keys import catalogue

ASK = {
    # Like readline: the words of the line so far, also split at "=", and the index of the last word.
    "bash": (
        'source "$SCRIPT"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _grpo; printf "%s\\n" "${COMPREPLY[@]}"; '
        "complete -p grpo >&2"
    ),
    # Like bashcompinit: run the function in sh emulation, then keep only the words that match.
    "zsh": (
        'autoload -Uz compinit; compinit -u -d "$PWD/.zcompdump"; source "$SCRIPT"; '
        "() { emulate -L sh; setopt kshglob noshglob braceexpand; "
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _grpo; printf "%s\\n" "${COMPREPLY[@]}"; } "$@"'
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("work")
    for name in ("mine.yaml", "my two.yaml", "notes.txt"):
        (work / name).touch()
    (work / "more").mkdir()
    for name in ("smoke-20260101-120000", "smoke-20260102-120000", "no_run"):
        (work / "runs" / name).mkdir(parents=True)
    for path in (work / "runs").glob("smoke-*"):
        (path / "run.json").touch()
    return work


@pytest.fixture(params=list(ASK))
def offered(request: pytest.FixtureRequest, folder: Path, capsys: pytest.CaptureFixture[str]):
    """``offered("grpo", "check", "--deep", "m")``: the words that the shell offers for the last word."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert cli.main(["completion", shell]) == 0
    (folder / shell).write_text(capsys.readouterr().out)

    def ask(*words: str) -> set[str]:
        command = [shell, *(["-f"] if shell == "zsh" else ["--norc"]), "-c", ASK[shell], shell, *words]
        environment = {"PATH": "/usr/bin:/bin", "SCRIPT": f"./{shell}", "HOME": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        fitting = {line for line in done.stdout.splitlines() if line.startswith(words[-1].lstrip("="))}
        return (fitting if shell == "zsh" else set(done.stdout.splitlines())) - {""}

    return ask


def test_commands_options_keys_values_and_files(offered):
    assert offered("grpo", "ch") == {"chat", "check", "check-rewards"}
    assert {*cli.commands(), "--help", "--version"} == offered("grpo", "")
    assert offered("grpo", "launch", "--re") == {
        "--resume", *(f"--{key}" for key in catalogue() if key.startswith("re")),
    }  # fmt: skip
    assert offered("grpo", "logs", "--") == {
        "--environments",
        "--follow",
        "--launch",
        "--lines",
        "--run-api",
        "--slurm",
        "--server",
        "--trainer",
        "--help",
    }
    assert offered("grpo", "check", "--learning") == {"--learning_rate"}
    assert offered("grpo", "check", "m") == {"mine.yaml", "my two.yaml", "more"}
    assert offered("grpo", "check", "--deep", "mi") == {"mine.yaml"}
    assert offered("grpo", "new", "x.yaml", "--from", "mi") == {"mine.yaml"}
    assert offered("grpo", "check", "mine.yaml", "--task", "") == {"grpo", "maxent"}
    assert offered("grpo", "plan", "mine.yaml", "--use_peft", "t") == {"true"}
    assert offered("grpo", "plan", "mine.yaml", "--weight_sync", "=", "f") == {"file"}
    assert offered("grpo", "check", "--report_to", "t") == {"tensorboard", "trackio"}
    assert {"none", "wandb"} < offered("grpo", "sweep", "mine.yaml", "report_to", "=", "")
    assert offered("grpo", "plan", "--max_steps", "") == set()  # the value is any number
    assert offered("grpo", "keys", "lora_t") == {key for key in catalogue() if key.startswith("lora_t")}
    assert offered("grpo", "stop", "--now", "la") == {"last"}
    assert offered("grpo", "generate", "my") == {"my two.yaml"}
    assert offered("grpo", "generate", "--backend", "") == {"vllm_server", "sglang_server"}
    assert offered("grpo", "completion", "") == {"bash", "zsh"}


def test_runs_profiles_and_the_keys_of_a_sweep(offered):
    runs = {"smoke-20260101-120000", "smoke-20260102-120000"}
    for words in (["status"], ["logs"], ["stop", "--now"], ["chat"], ["launch", "--resume"]):
        assert offered("grpo", *words, "") == {"last", *runs}, words
        assert offered("grpo", *words, "smoke-20260102") == {"smoke-20260102-120000"}, words
    assert offered("grpo", "submit", "mine.yaml", "--profile", "ml") == {"mltheory"}
    assert offered("grpo", "sweep", "mi") == {"mine.yaml"}
    assert offered("grpo", "sweep", "mine.yaml", "weight_s") == {"weight_sync=", "weight_sync_timeout="}
    assert offered("grpo", "sweep", "mine.yaml", "weight_sync", "=", "f") == {"file"}
    assert offered("grpo", "sweep", "mine.yaml", "load_in") == set()


def test_keys_that_every_recipe_is_rejected_for_are_not_offered(offered):
    """M5: completion offered keys that grpo check rejects for every useful value."""
    for begin in ("load_in", "save_only", "bnb_", "use_bnb"):
        assert any(key.startswith(begin) for key in catalogue()), begin
        assert offered("grpo", "launch", f"--{begin}") == offered("grpo", "keys", begin) == set()
    assert offered("grpo", "check", "--") >= {"--use_peft", "--save_steps", "--unset"}
    for key in ("deepspeed", "resume_from_checkpoint", "output_dir"):
        assert offered("grpo", "check", f"--{key}") == set()


def test_another_shell_is_refused(capsys):
    assert cli.main(["completion", "fish"]) == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
