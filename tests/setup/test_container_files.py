"""The files of the container agree with each other and with docs/installation.md; tests/e2e builds the container."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import documented
from podman import REPOSITORY

REVISION = "COMMIT=$(git rev-parse HEAD)"
PAGE = REPOSITORY / "docs/installation.md"


def instructions(path: Path = REPOSITORY / "docker/Dockerfile") -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with the text that follows each."""
    dockerfile = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, text.strip()) for word, _, text in (line.partition(" ") for line in dockerfile.splitlines() if line)]


def sections(path: Path = REPOSITORY / "docker/grpo.def") -> dict[str, list[str]]:
    """Return the lines of each section of an Apptainer definition, its header as ``header``."""
    sections_by_name: dict[str, list[str]] = {"header": []}
    name = "header"
    for line in (line.strip() for line in path.read_text().splitlines()):
        if line.startswith("%"):
            name = line[1:]
            sections_by_name[name] = []
        elif line and not line.startswith("#"):
            sections_by_name[name].append(line)
    return sections_by_name


def copies_before_the_first_run() -> set[str]:
    """Return the files that the Dockerfile copies before it installs the environment."""
    steps = instructions()
    first_run = next(index for index, (name, _) in enumerate(steps) if name == "RUN")
    return {word for name, text in steps[:first_run] if name == "COPY" for word in text.split()[:-1]}


def apptainer_post(words: list[str]) -> list[str]:
    """Return the lines of %post with the values of the build arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--build-arg", action="append")
    parser.add_argument("image")
    parser.add_argument("definition")
    assert words[:2] == ["apptainer", "build"]
    options = parser.parse_args(words[2:])
    parts = sections(REPOSITORY / options.definition)
    values = dict(line.split("=", 1) for line in [*parts["arguments"], *options.build_arg])
    return [re.sub(r"\{\{ (\w+) \}\}", lambda name: values[name[1]], line) for line in parts["post"]]


def docker_runs(words: list[str]) -> tuple[str, list[str]]:
    """Return the folder and the RUN lines with the values of the build arguments."""
    assert words[:4] == ["docker", "build", "-f", "docker/Dockerfile"] and words[-1] == "."
    arguments = [words[at + 1] for at, word in enumerate(words) if word == "--build-arg"]
    steps = instructions(REPOSITORY / words[3])
    values = dict(line.split("=", 1) for line in [*(text for name, text in steps if name == "ARG"), *arguments])
    lines = [text.rpartition("pip.conf ")[2] for name, text in steps if name == "RUN"]
    folder = next(text for name, text in steps if name == "WORKDIR")
    return folder, [re.sub(r"\$(\w+)", lambda name: values[name[1]], line) for line in lines]


def test_both_definitions_are_the_same_steps_on_the_same_files() -> None:
    shown = 'docker build -f docker/Dockerfile --build-arg COMMIT="$(git rev-parse HEAD)" -t grpo .'
    folder, lines = docker_runs(documented(shown, {REVISION: "COMMIT=abc"}, fake="the CUDA image"))
    assert lines == [
        'DEVICE="cuda" bash docker/install.sh environment',
        'COMMIT="abc" bash docker/install.sh repository',
    ]
    other = 'apptainer build --build-arg COMMIT="$(git rev-parse HEAD)" grpo.sif docker/grpo.def'
    post = apptainer_post(documented(other, {REVISION: "COMMIT=abc"}, fake="Apptainer"))
    assert post == ["set -e", f"cd {folder}", *lines]

    assert f"From: {dict(instructions())['FROM']}" in sections()["header"]
    included = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sections()["files"] == [f"{name} {folder}/{name}" for name in sorted(included)]
    assert all((REPOSITORY / name).exists() for name in included)


def test_the_dockerfile_copies_every_file_that_setup_reads() -> None:
    setup = (REPOSITORY / "scripts/setup.sh").read_text()
    read_first = {*re.findall(r"\$root/(scripts/[\w.]+)", setup), "scripts/imported_folders.txt"}
    copied = {name for name in copies_before_the_first_run() if name.startswith("scripts/")}
    assert read_first == copied


def test_the_dockerfile_has_the_linters_approval() -> None:
    command = [Path(sys.executable).with_name("hadolint"), REPOSITORY / "docker/Dockerfile"]
    if not command[0].is_file():
        pytest.skip("hadolint is not in this environment")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_steps_without_a_name_change_nothing_and_say_what_there_is() -> None:
    done = subprocess.run(["bash", REPOSITORY / "docker/install.sh"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "environment" in done.stderr and "repository" in done.stderr


def test_the_job_of_the_page_hands_on_arguments_and_the_exit_code(tmp_path: Path) -> None:
    (script,) = re.findall(r'^```bash title="container.sbatch"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "container.sbatch").write_text(script)
    for name, body in (("apptainer", 'echo "$@"; exit 75'), ("sbatch", 'exec bash "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    words = documented("sbatch container.sbatch my.yaml", fake="Slurm and Apptainer")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (75, "run --nv grpo.sif launch my.yaml\n")
    words = [*words[:2], "--resume", "last"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "run --nv grpo.sif launch --resume last\n"
