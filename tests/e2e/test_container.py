"""The container: its Dockerfile carried out in a Debian root, and a run in it, as docs/installation.md shows them.

Without a Docker daemon and Apptainer: `tests/container_image.py` stands in for both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from container_image import Image, needs_of_the_test, new_root
from documented import documented

USER = "34567:34567"  # without a name in the image
COMMIT = "0123456789abcdef" * 2 + "01234567"
FAKE = "Docker and Apptainer"


@pytest.fixture
def image() -> Iterator[Image]:
    if reason := needs_of_the_test():
        pytest.skip(reason)
    built = Image(new_root())
    yield built
    built.remove()
    assert str(built.root) not in Path("/proc/self/mounts").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the user, at a path that is in the image, too."""
    os.chown(tmp_path, *map(int, USER.split(":")))
    return tmp_path


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.timeout(2400)  # 17 minutes were seen on two cores with a load of ten
def test_the_image_is_built_and_trains_for_any_user_read_only_and_without_a_network(image: Image, folder: Path) -> None:
    shown = (
        "docker build -f docker/Dockerfile --build-arg DEVICE=cpu "
        '--build-arg COMMIT="$(git rev-parse HEAD)" -t grpo:cpu .'
    )
    image.build(documented(shown, {"COMMIT=$(git rev-parse HEAD)": f"COMMIT={COMMIT}"}, fake=FAKE))
    assert image.labels["org.opencontainers.image.revision"] == COMMIT
    assert_nobody_but_root_can_write(image)

    run = (
        'docker run --rm --read-only --tmpfs /tmp:exec --shm-size 16g --user "$(id -u):$(id -g)" -v "$PWD":/work '
        "grpo:cpu launch recipes/smoke/grpo.yaml"
    )
    places = {"$(id -u):$(id -g)": USER, "$PWD:/work": f"{folder}:/work"}
    words = [*documented(run, places, fake=FAKE), "--max_steps", "4", "--save_steps", "4"]
    done = image.docker(words, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_the_run_is_the_users(folder)

    cuda = 'docker run --rm --gpus all --shm-size 16g --user "$(id -u):$(id -g)" -v "$PWD":/work grpo launch my.yaml'
    checked = {"launch": "check", "my.yaml": "recipes/smoke/grpo.yaml"}
    done = image.docker(documented(cuda, places | checked, fake=FAKE))
    assert done.returncode == 0 and done.stdout.endswith("recipes/smoke/grpo.yaml is valid\n"), done.stderr

    caller = environment_of_a_caller(folder)
    done = image.apptainer(documented("apptainer exec grpo.sif grpo doctor", fake=FAKE), USER, folder, caller)
    assert re.search(r"^ok +environment +cpu, in /opt/grpo/env", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert re.search(rf"^ok +code +{COMMIT[:12]}$", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 0, done.stdout
    words = documented("apptainer run --nv grpo.sif launch my.yaml", checked, fake=FAKE)
    done = image.apptainer(words, USER, folder, caller)
    assert done.returncode == 0 and done.stdout.endswith("recipes/smoke/grpo.yaml is valid\n"), done.stderr


def environment_of_a_caller(home: Path) -> dict[str, str]:
    """What Apptainer hands over: packages in the home folder, and a repository, that must not be used."""
    packages = home / ".local/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "yaml.py").write_text("raise SystemExit('a package of the home folder was imported')\n")
    return {"PYTHONPATH": str(packages), "GRPO_HOME": str(home), "LC_ALL": "en_US.UTF-8"}


def assert_nobody_but_root_can_write(image: Image) -> None:
    """Docker's user without a folder can read the installed files and change no file of the image."""
    done = image.docker(["docker", "run", "--rm", "grpo:cpu", "--version"])
    assert done.returncode == 0 and done.stdout.startswith("grpo-recipes "), done.stderr
    find = ["find", "/opt/grpo", "-xdev", "(", "-writable", "-o", "!", "-readable", ")", "-not", "-type", "l"]
    listing = image.enter(find, {}, user=USER)
    assert (listing.returncode, listing.stdout) == (0, ""), listing.stdout[:2000] + listing.stderr[:2000]


def assert_the_run_is_the_users(folder: Path) -> None:
    """The run completed in the mounted folder, names the commit of the image, and belongs to the user."""
    (run,) = (folder / "runs").glob("smoke-*")
    summary, identity = (json.loads((run / name).read_text()) for name in ("summary.json", "run.json"))
    assert (summary["status"], summary["steps"], summary["exit_code"]) == ("completed", 4, 0)
    assert identity["code"]["commit"] == COMMIT
    assert (run / "model/model.safetensors").is_file() and (run / "report.html").is_file()
    assert {path.lstat().st_uid for path in folder.rglob("*")} == {int(USER.split(":")[0])}
    assert {path.name for path in folder.iterdir()} <= {"runs", "logs", ".cache", ".config", ".triton"}
