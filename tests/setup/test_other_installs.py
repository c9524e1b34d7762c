"""`pip install -e .` and `uv sync` in a clean environment, from a real package index: the result trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setup_checkout import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OFFLINE = ("run_offline_grpo.py", "train.iterations=1", "model.train_id=smoke:sums", "data.problems=sums")
TORCH_CPU = "https://download.pytorch.org/whl/cpu"
UV_CACHE = os.environ.get("UV_CACHE_DIR") or str(Path.home() / ".cache/uv")
BESIDE = ("torchvision", "torchaudio", "torchcodec")


def setting(name: str) -> str:
    """Return one of pip's own settings here: a variable, or of its files."""
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    of_files = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    return os.environ.get(f"PIP_{name.replace('-', '_').upper()}", of_files)


class Clone:
    """The files of this repository in another folder, and a clean environment: HOME, PATH and pip's own settings.

    Packages that uv has unpacked before come from its cache. ``bytecode`` may be the folder of an earlier clone at the
    same place, with the same packages: importing all of them for the first time takes a minute.
    """

    def __init__(self, root: Path, bytecode: Path):
        self.root, self.bytecode = root, bytecode
        names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
        for name in filter(None, names.stdout.split("\0")):
            if (REPOSITORY / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, root / name)

    def run(self, *words: str, status: int = 0, **variables: str) -> str:
        """Run a command at the root and return its output."""
        names = ("index-url", "find-links", "cert")
        settings = {f"PIP_{name.replace('-', '_').upper()}": setting(name) for name in names}
        clean = {"HOME": str(self.root.parent), "PATH": "/usr/bin:/bin", **{k: v for k, v in settings.items() if v}}
        clean |= {"UV_CACHE_DIR": UV_CACHE, "PYTHONPYCACHEPREFIX": str(self.bytecode)}
        done = subprocess.run(
            words, cwd=self.root, env=clean | variables, capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    def trains_with_server(self, python: str) -> None:
        """See that an iteration with vLLM ends. The model is the repository's, which takes a minute to make."""
        flags = (*OFFLINE, "generation.max_new_tokens=8")
        output = self.run(python, *flags, CACHE_ROOT=os.environ.get("CACHE_ROOT", str(REPOSITORY / ".cache")))
        assert "grpo: status  completed; smoke test on CPU" in output

    def trains(self, python: str) -> None:
        """See that the scripts of the offline trainer plan and train in this environment, without PYTHONPATH."""
        assert "device     cpu" in self.run(python, *OFFLINE, "--dry-run")
        assert "Train metrics:" in self.run(python, "smoke_test.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("installs")


@pytest.fixture
def clone(folder: Path) -> Clone:
    shutil.rmtree(folder / "clone", ignore_errors=True)
    return Clone(folder / "clone", folder / "bytecode")


@pytest.fixture(scope="module")
def torch_index(folder: Path) -> Path:
    """A package index on disk with only torch's CPU build, instead of PyTorch's index."""
    build = folder / "index" / "torch"
    fetch = ("-m", "pip", "download", "--retries", "0", "--extra-index-url", TORCH_CPU, "--no-deps", "--dest")
    subprocess.run(
        [sys.executable, *fetch, str(build), "torch==2.13.0+cpu"], check=True, capture_output=True, timeout=300
    )
    (file,) = build.iterdir()
    (build / "index.html").write_text(f'<a href="{file.name}">{file.name}</a>')
    return build.parent


def test_pip_installs_what_trains_and_the_extra_brings_the_server(clone: Clone, torch_index: Path) -> None:
    # uv resolves like pip in a fraction of the time. Pip does not read the settings for uv in pyproject.toml.
    install = """source scripts/pip_settings.sh; export_uv_settings "$1"; export UV_INDEX="$UV_INDEX $2"
        "$0" -m uv pip install --no-config --no-sources --python "$1" --editable "$3" """
    clone.run(sys.executable, "-m", "venv", "v")
    python = str(clone.root / "v/bin/python")
    command = ("bash", "-c", install, sys.executable, python, torch_index.as_uri())
    clone.run(*command, ".")
    clone.trains(python)
    refused = clone.run(python, *OFFLINE, status=2)
    assert "this run needs vLLM, but it is not installed. Fix: run make setup, or pip install -e '.[cpu]'" in refused
    assert not (clone.root / "logs").is_dir() or not list((clone.root / "logs").glob("liv_*"))

    clone.run(*command, ".[cpu]")
    output = clone.run(python, "-c", "from importlib.metadata import version as v; print(v('torch'), v('torchvision'))")
    if not output.split()[-1].endswith("+cpu"):  # no index here has that build
        fix = f"pip uninstall {' '.join(BESIDE)}"
        assert fix in clone.run(python, *OFFLINE, status=2) and fix in clone.run(python, "smoke_test.py", status=1)
        clone.run(python, "-m", "pip", "uninstall", "--yes", *BESIDE)
    clone.trains(python)
    clone.trains_with_server(python)


def test_uv_installs_what_trains(clone: Clone, torch_index: Path, tmp_path: Path) -> None:
    clone.run(sys.executable, "-m", "venv", str(tmp_path / "uv"))
    clone.run(str(tmp_path / "uv/bin/python"), "-m", "pip", "install", "uv")
    project, version = clone.root / "pyproject.toml", f"{sys.version_info.major}.{sys.version_info.minor}"
    text = project.read_text()
    assert TORCH_CPU in text and "'x86_64'\"]" in text
    # Only this Python's build is in the index on disk, and uv resolves for every Python that the project allows.
    marker = f"'x86_64' and python_version == '{version}'\"]"
    project.write_text(text.replace(TORCH_CPU, torch_index.as_uri()).replace("'x86_64'\"]", marker))
    variables = {
        "UV_PROJECT_ENVIRONMENT": "v",  # where the bytecode of the other test is
        "UV_PYTHON": sys.executable,
        "SSL_CERT_FILE": setting("cert"),
        "UV_DEFAULT_INDEX": setting("index-url"),
    }
    variables = {name: value for name, value in variables.items() if value}
    clone.run(str(tmp_path / "uv/bin/uv"), "sync", "--extra", "cpu", **variables)
    python = str(clone.root / "v/bin/python")
    clone.trains(python)
    clone.trains_with_server(python)
    for name in BESIDE:
        clone.run(python, "-c", f"import {name}", status=1)

    lock = (
        clone.root / "uv.lock"
    ).read_text()  # of the project alone there is torch for CUDA, and nothing else of vLLM
    assert 'name = "torch"\nversion = "2.13.0"\n' in lock and 'name = "torch"\nversion = "2.13.0+cpu"\n' in lock
