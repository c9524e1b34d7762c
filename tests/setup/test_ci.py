"""`.ci/run` checks a newcomer's steps: README's commands, a new clone, an empty home, no other variables (R0)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from setup_checkout import REPOSITORY

# A step records its words, its folder, its environment and the files of its home.
RECORD = f"""#!{sys.executable}
import json, os, sys
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
step = {{"words": words, "folder": os.getcwd(), "env": dict(os.environ), "home": os.listdir(os.environ["HOME"])}}
step["files"] = sorted(os.listdir())
print("step", json.dumps(step))
"""
OF_PROGRAMS = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}  # set by every shell, and by Python in a C locale
DOWNLOADS = re.compile(r"PIP_\w+|\w+_(proxy|PROXY)|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE")


def readme_commands() -> list[str]:
    """Return the commands that README shows first, after the clone."""
    text = (REPOSITORY / "README.md").read_text().split("## Quickstart")[1]
    lines = re.search(r"```bash\n(.*?)```", text, re.DOTALL)[1].splitlines()  # type: ignore[index]
    assert lines[:2] == ["git clone REPOSITORY grpo-recipes", "cd grpo-recipes"]
    return lines[2:]


@pytest.fixture
def steps(tmp_path: Path) -> list[dict]:
    """The steps of `.ci/run` in a repository with commands that only record their calls."""
    source, programs, home = tmp_path / "source", tmp_path / "bin", tmp_path / "home"
    (source / ".ci").mkdir(parents=True)
    shutil.copy(REPOSITORY / ".ci/run", source / ".ci/run")
    (source / "training.sh").touch()
    programs.mkdir()
    for name in ("bash", "make", "slurmctld", "munged", "chromium", "zsh"):
        (programs / name).write_text(RECORD)
        (programs / name).chmod(0o755)
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text("[global]\n")
    git = ["git", "-C", str(source), "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    (source / ".venv").mkdir()
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "EXTRAS": "none",
        "DEVICE": "cuda", "HF_TOKEN": "x", "TMPDIR": str(tmp_path), "PIP_FIND_LINKS": "/a b", "https_proxy": "http://p",
    }  # fmt: skip
    done = subprocess.run(
        ["/bin/bash", str(source / ".ci/run")], env=variables, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("step ")]


def test_the_steps_are_the_commands_of_readme_and_then_those_of_contributing(steps: list[dict]) -> None:
    """R0: CI runs README's commands unchanged."""
    typed = [" ".join(step["words"]) for step in steps]
    assert typed[0] == readme_commands()[0] == "bash training.sh"
    assert set(readme_commands()) <= set(typed)
    assert "make test" in readme_commands()
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    commands = [line.partition(" LAST_START=")[0] for line in typed[1:]]
    assert commands != typed[1:] and all(command in contributing for command in commands)


def test_whole_runs_start_in_the_first_50_minutes(steps: list[dict]) -> None:
    (last_start,) = [word for step in steps for word in step["words"] if word.startswith("LAST_START=")]
    assert 0 < time.time() + 50 * 60 - int(last_start.partition("=")[2]) < 100


def test_a_step_sees_an_empty_home_and_no_variable_that_readme_does_not_show(steps: list[dict]) -> None:
    """R0: CI sets no variable, and passes on only the machine's settings for downloads."""
    for step in steps:
        unexpected = {name for name in step["env"] if not DOWNLOADS.fullmatch(name)}
        assert unexpected <= {"HOME", "PATH", *OF_PROGRAMS}, step["words"]
        assert step["env"]["PIP_FIND_LINKS"] == "/a b" and step["env"]["https_proxy"] == "http://p"
        assert step["env"]["PIP_CONFIG_FILE"].endswith("home/.config/pip/pip.conf")
    assert steps[0]["home"] == []


def test_the_first_step_makes_a_new_environment_in_a_clone_that_is_removed_afterwards(steps: list[dict]) -> None:
    """R0: an environment of the caller is not used."""
    assert steps[0]["files"] == [".ci", ".git", "training.sh"]
    assert len({step["folder"] for step in steps}) == 1 and not Path(steps[0]["folder"]).exists()
