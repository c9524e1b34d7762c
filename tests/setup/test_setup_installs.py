"""`scripts/setup.sh` with the real uv and pip, and a small index on disk: the packages can be imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
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
        module = name.replace("-", "_")
        path = f"{module}/__init__.py" if name == "planted-one" else f"{module}.py"
        wheel(folder, name, version, {path: f"VERSION = '{version}'\n".encode()})
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


@pytest.fixture
def locked(checkout: Checkout) -> Checkout:
    """Return a checkout whose locks have only the packages of the small index."""
    pins = [f"{name}=={version}" for name, version in PINS.items() if name not in EXTRAS]
    pins.append(f"setuptools=={distribution('setuptools').version}")
    (checkout.root / "requirements/cpu.txt").write_text("".join(f"{pin}\n" for pin in pins))
    for extra, pin in {"environments": "planted-games==4.0", "search": "planted-search==5.0"}.items():
        (checkout.root / "requirements" / f"{extra}.txt").write_text(f"{pin}\n")
    (checkout.root / "src/grpo_recipes/cli.py").write_text("main = None\n")
    return checkout


def add_uv(checkout: Checkout) -> None:
    """Put the uv of this environment on PATH."""
    uv = Path(sys.prefix, "bin/uv")
    if not uv.is_file():
        pytest.skip("this environment has no uv")
    checkout.add_command("uv", f'exec {uv} "$@"')


def assert_packages_work(checkout: Checkout) -> None:
    """Import the packages of the small index in the new environment."""
    python = checkout.root / ".venv/bin/python"
    modules = "grpo_recipes, planted_one, planted_two, planted_games, planted_search, torch"
    code = f"import {modules}; print(torch.VERSION, grpo_recipes.__file__)"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.stdout.split() == ["9.9", str(checkout.root / "src/grpo_recipes/__init__.py")], done.stderr
    assert (checkout.root / ".venv/bin/grpo").is_file()


@pytest.mark.slow
def test_uv_installs_the_packages_of_the_locks_and_the_project(locked: Checkout, index: Path) -> None:
    """It leaves its cache in no home that is on another file system than the environment."""
    add_uv(locked)
    (locked.root / "scripts/imported_folders.txt").write_text("not_installed\nplanted_one\n")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        first = locked.setup(HOME=home, PIP_INDEX_URL=index.as_uri())
        assert first.returncode == 0 and "installing 7 packages with uv" in first.stdout, first.stdout + first.stderr
        if Path(home).stat().st_dev != locked.root.stat().st_dev:
            assert not list(Path(home).rglob("uv*"))
    assert not (locked.root / ".venv.uv-cache").exists()
    writable = [
        path for path in locked.root.glob(".venv/**/*") if path.lstat().st_mode & 0o002 and not path.is_symlink()
    ]
    assert writable == []  # by every user

    (packages,) = locked.root.glob(".venv/lib/python3*/site-packages")
    compiled = [path for path in packages.rglob("*.pyc") if "planted" in str(path)]
    assert [path.parents[1].name for path in compiled] == ["planted_one"]  # the listed folder
    assert list(locked.root.glob("src/grpo_recipes/__pycache__/__init__.*.pyc"))
    assert_packages_work(locked)
    stamp = json.loads((locked.root / ".venv/grpo-environment.json").read_text())
    assert stamp["flavour"] == "cpu" and stamp["python"] == sys.version.split()[0]
    second = locked.setup(PIP_INDEX_URL="file:///nowhere")
    assert (second.returncode, second.stderr) == (0, "") and "complete" in second.stdout


@pytest.mark.slow
def test_pip_installs_the_packages_if_uv_fails(locked: Checkout, index: Path) -> None:
    locked.add_command("uv", 'echo "uv: no such option" >&2; exit 2')
    result = locked.setup(PIP_INDEX_URL=index.as_uri(), PIP_NO_CACHE_DIR="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "uv: no such option" in result.stderr and "uv failed (its message is above); trying pip" in result.stdout
    assert_packages_work(locked)


def uv_settings(checkout: Checkout, config: str, **variables: str) -> dict[str, str]:
    """Return the variables and options for uv with a pip configuration file."""
    file = checkout.root / "pip.conf"
    file.write_text(config)
    script = 'source scripts/pip_settings.sh; export_uv_settings "$0"; env -0; echo "OPTIONS=${uv_options[*]}"'
    done = checkout.run("-c", script, sys.executable, PIP_CONFIG_FILE=str(file), **variables)
    assert done.returncode == 0, done.stderr
    settings = dict(entry.split("=", 1) for entry in done.stdout.rstrip("\n").split("\0"))
    return {name: value for name, value in settings.items() if name.startswith(("UV_", "SSL_", "HTTP", "OPTIONS"))}


CONFIG = """
[global]
index-url = https://user:word@index.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
find-links = /wheels
timeout = 7
cert = /global.pem
[install]
cert = /install.pem
constraint = /constraints.txt
trusted-host = index.example
[freeze]
no-index = true
"""


def test_uv_gets_the_configuration_of_pip(checkout: Checkout) -> None:
    settings = uv_settings(checkout, CONFIG, PIP_FIND_LINKS="/first /second", UV_HTTP_TIMEOUT="9")
    assert settings == {
        "UV_DEFAULT_INDEX": "https://user:word@index.example/simple",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/first,/second",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_CONSTRAINT": "/constraints.txt",
        "UV_INSECURE_HOST": "index.example",
        "UV_HTTP_TIMEOUT": "9",
        "SSL_CERT_FILE": "/install.pem",
        "OPTIONS": "",
    }


def test_uv_gets_no_index_and_the_proxy_of_pip(checkout: Checkout) -> None:
    settings = uv_settings(checkout, "[global]\nno-index = true\nproxy = http://proxy:3128\n")
    assert settings["OPTIONS"] == "--no-index"
    assert settings["HTTP_PROXY"] == settings["HTTPS_PROXY"] == "http://proxy:3128"
