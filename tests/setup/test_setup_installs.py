"""`scripts/setup.sh` with the real pip and a small index on disk: the installed packages can be imported."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from setup_checkout import Checkout

PINS = {
    "torch": "9.9",
    "planted-one": "1.0",
    "planted-two": "2.0",
    "iniconfig": "3.0",
    "planted-games": "4.0",
    "planted-search": "5.0",
}
EXTRAS = ("planted-games", "planted-search")  # named by the locks of the extras


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> None:
    """Write a wheel and put it into the index ``folder``."""
    module, place = name.replace("-", "_"), folder / name
    place.mkdir(parents=True)
    about = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(place / f"{module}-{version}-py3-none-any.whl", "w") as file:
        for path, content in files.items():
            file.writestr(path, content)
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
    (place / "index.html").write_text(f'<a href="{module}-{version}-py3-none-any.whl">{module}</a>')


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    for name, version in PINS.items():
        wheel(folder, name, version, {f"{name.replace('-', '_')}.py": f"VERSION = '{version}'\n".encode()})
    backend = distribution("setuptools")  # builds the project; a lock names it as any other package
    parts = {str(path): Path(path.locate()) for path in backend.files or () if path.suffix != ".pyc"}
    commands = f"setuptools-{backend.version}.dist-info/entry_points.txt"
    variables = {
        name: file.read_bytes()
        for name, file in parts.items()
        if file.is_file() and (".dist-info/" not in name or name == commands)
    }
    wheel(folder, "setuptools", backend.version, variables)
    return folder


@pytest.mark.slow
def test_what_the_lock_names_and_the_project_itself_are_installed(checkout: Checkout, index: Path) -> None:
    lock = checkout.root / "requirements" / "cpu.txt"
    lock.write_text("".join(f"{name}=={version}\n" for name, version in PINS.items() if name not in EXTRAS))
    for extra, pin in {"environments": "planted-games==4.0", "search": "planted-search==5.0"}.items():
        (checkout.root / "requirements" / f"{extra}.txt").write_text(f"{pin}\n")
    with lock.open("a") as file:
        file.write(f"setuptools=={distribution('setuptools').version}\n")
    (checkout.root / "src/grpo_recipes/cli.py").write_text("main = None\n")
    first = checkout.setup(PIP_INDEX_URL=index.as_uri(), PIP_NO_CACHE_DIR="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    assert first.returncode == 0, first.stdout + first.stderr

    python = checkout.root / ".venv/bin/python"
    modules = "grpo_recipes, planted_one, planted_two, planted_games, planted_search, torch"
    code = f"import {modules}; print(torch.VERSION, grpo_recipes.__file__)"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.stdout.split() == ["9.9", str(checkout.root / "src/grpo_recipes/__init__.py")], done.stderr
    assert (checkout.root / ".venv/bin/grpo").is_file()
    stamp = json.loads((checkout.root / ".venv/grpo-environment.json").read_text())
    assert stamp["flavour"] == "cpu" and stamp["python"] == sys.version.split()[0]
    second = checkout.setup(PIP_INDEX_URL="file:///nowhere")
    assert (second.returncode, second.stderr) == (0, "") and "complete" in second.stdout
