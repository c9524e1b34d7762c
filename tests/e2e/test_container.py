"""The container: build the CPU image, then train in it, with the commands of docs/installation.md.

Podman runs the `docker` commands. Apptainer's commands run in the same image, with Apptainer's user, environment and
mounts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import documented
from podman import REPOSITORY, Podman, missing_for_containers

from grpo_recipes.cli import commands

USER = "34567:34567"  # the image has no name for this user
COMMIT = "0123456789abcdef" * 2 + "01234567"
SECRETS = (".env", "my.yaml", "hf.token", "src/.env", "recipes/hf.token", "runs/a/run.json", ".venv/bin/python")


@pytest.fixture
def podman() -> Iterator[Podman]:
    if reason := missing_for_containers():
        pytest.skip(reason)
    with Podman.create() as podman:
        yield podman


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout made with umask 077, with files that must not get into the image."""
    folder = tmp_path / "checkout"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in [*files.split("\0")[:-1], *SECRETS]:
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if name in SECRETS:
            copy.write_text("secret\n")
        else:
            shutil.copyfile(REPOSITORY / name, copy)
            copy.chmod(0o700 if os.access(REPOSITORY / name, os.X_OK) else 0o600)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a folder of the user."""
    folder = tmp_path / "home"
    folder.mkdir()
    os.chown(folder, *map(int, USER.split(":")))
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_image_is_built_and_trains_for_any_user_read_only_and_without_a_network(
    podman: Podman, checkout: Path, home: Path
) -> None:
    shown = (
        "docker build -f docker/Dockerfile --build-arg DEVICE=cpu "
        '--build-arg COMMIT="$(git rev-parse HEAD)" -t grpo:cpu .'
    )
    done = podman.docker(documented(shown, {"COMMIT=$(git rev-parse HEAD)": f"COMMIT={COMMIT}"}), checkout, 1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert podman.read_label("grpo:cpu", "org.opencontainers.image.revision") == COMMIT
    assert_secrets_stay_out_and_only_root_can_write(podman)
    assert_programs_start_and_no_command_of_grpo_is_a_program(podman)

    run = (
        'docker run --rm --read-only --tmpfs /tmp:exec --shm-size 16g --user "$(id -u):$(id -g)" -v "$PWD":/work '
        "grpo:cpu launch recipes/smoke/grpo.yaml"
    )
    places = {"$(id -u):$(id -g)": USER, "$PWD:/work": f"{home}:/work"}
    done = podman.docker([*documented(run, places), "--max_steps", "4", "--save_steps", "4"], timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_the_run_is_the_users(home)

    cuda = 'docker run --rm --gpus all --shm-size 16g --user "$(id -u):$(id -g)" -v "$PWD":/work grpo launch my.yaml'
    words = documented(cuda, {**places, "launch": "check", "my.yaml": "recipes/smoke/grpo.yaml"}, fake="the CUDA image")
    image = words.index(f"{home}:/work") + 1
    done = podman.docker([*words[:image], "grpo:cpu", *words[image + 1 :]])
    assert done.returncode == 0 and "recipes/smoke/grpo.yaml is valid" in done.stdout, done.stdout + done.stderr

    add_package_to_home(home)
    words = [*documented("apptainer exec grpo.sif grpo doctor", fake="Apptainer"), "-v"]
    done = run_like_apptainer(podman, words, home)
    assert re.search(r"^ok +environment +cpu, in /opt/grpo/env", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert re.search(rf"^ok +code +{COMMIT[:12]}$", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 0, done.stdout
    replaced = {"launch": "check", "my.yaml": "recipes/smoke/grpo.yaml"}
    words = documented("apptainer run --nv grpo.sif launch my.yaml", replaced, fake="Apptainer")
    done = run_like_apptainer(podman, words, home)
    assert done.returncode == 0 and "recipes/smoke/grpo.yaml is valid" in done.stdout, done.stdout + done.stderr


def assert_secrets_stay_out_and_only_root_can_write(podman: Podman) -> None:
    """Docker's default user can read the installed files and change no file of the image."""
    names = ["(", *" -o ".join(f"-path */repository/{name}" for name in SECRETS).split(), ")"]
    for condition in (names, ["(", "-writable", "-o", "!", "-readable", ")", "-not", "-type", "l"]):
        done = podman.docker(["docker", "run", "--rm", "grpo:cpu", "find", "/opt/grpo", "-xdev", *condition])
        assert (done.returncode, done.stdout) == (0, ""), done.stdout[:2000] + done.stderr[:2000]


def assert_programs_start_and_no_command_of_grpo_is_a_program(podman: Podman) -> None:
    """The entry point runs programs of the image. Every other word is a command of grpo."""
    done = podman.docker(["docker", "run", "--rm", "grpo:cpu", "--version"])
    assert done.returncode == 0 and done.stdout.startswith("grpo-recipes "), done.stderr
    script = f"for name in {' '.join(commands())}; do ! type -P $name || exit 1; done; exit 7"
    done = podman.docker(["docker", "run", "--rm", "grpo:cpu", "/bin/bash", "-c", script])
    assert (done.returncode, done.stdout) == (7, ""), done.stdout + done.stderr


def assert_the_run_is_the_users(home: Path) -> None:
    """The run completed in the mounted folder, names the commit of the image, and belongs to the user."""
    (run,) = (home / "runs").glob("smoke-*")
    summary, identity = (json.loads((run / name).read_text()) for name in ("summary.json", "run.json"))
    assert (summary["status"], summary["steps"], summary["exit_code"]) == ("completed", 4, 0)
    assert identity["code"]["commit"] == COMMIT
    assert (run / "model/model.safetensors").is_file() and (run / "report.html").is_file()
    assert {path.lstat().st_uid for path in home.rglob("*")} == {int(USER.split(":")[0])}
    assert {path.name for path in home.iterdir()} <= {"runs", "logs", ".cache", ".config", ".triton"}


def add_package_to_home(home: Path) -> None:
    """Add a package that must not be imported."""
    packages = home / ".local/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "yaml.py").write_text("raise SystemExit('a package of the home folder was imported')\n")


def run_like_apptainer(podman: Podman, words: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    """Run an `apptainer exec` or `run` command with Apptainer's user, mounts and variables of the caller."""
    assert words[0] == "apptainer" and words[1] in ("exec", "run")
    command = ["grpo" if word.endswith("/bin/grpo") else word for word in words if word != "--nv"][3:]
    packages = home / ".local/lib/python3.11/site-packages"
    variables = {"HOME": home, "PYTHONPATH": packages, "GRPO_HOME": home, "LC_ALL": "en_US.UTF-8"}
    environment = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
    mounts = ["--read-only", "--tmpfs", "/tmp:exec", "-v", f"{home}:{home}", "-w", str(home), "--user", USER]
    start = ["--entrypoint", "/usr/bin/env"] if words[1] == "exec" else []
    return podman.docker(["docker", "run", "--rm", *mounts, *environment, *start, "grpo:cpu", *command])
