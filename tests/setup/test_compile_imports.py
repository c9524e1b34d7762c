"""scripts/compile_imports.py: the folders that the set-up compiles are those whose modules a run imports."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from grpo_recipes.process.tree import is_alive
from grpo_recipes.process.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "scripts/compile_imports.py"
IMPORTED = {
    "server": ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
    "trainer": ("grpo_recipes.trainers.entry", "transformers.models.qwen2.modeling_qwen2"),
}
WRITES = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
LISTED = SCRIPT.with_name("imported_folders.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_imports", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_folders_of_the_list_exist() -> None:
    """The list follows the locks."""
    packages = Path(sysconfig.get_path("purelib"))
    missing = [name for name in LISTED if not (packages / name).is_dir()]
    assert len(missing) < len(LISTED) / 50, missing
    assert sorted(LISTED) == LISTED and len(set(LISTED)) == len(LISTED)


def test_a_folder_of_which_little_is_imported_is_left_out(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PACKAGES", tmp_path)
    sizes = {"used/a.py": 30, "used/b.py": 70, "large/a.py": 20, "large/b.py": 80, "used/deep/a.py": 1, "top.py": 1}
    for name, size in sizes.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#" * size)
    imports = {tmp_path / name for name in ("used/a.py", "large/a.py", "used/deep/a.py", "top.py")}
    assert script.choose_folders(imports) == [".", "used", "used/deep"]


def test_modules_are_compiled_and_a_syntax_error_stops_nothing(script: ModuleType, tmp_path: Path) -> None:
    """Only the listed folders are compiled, not the folders in them."""
    copy = tmp_path / "scripts/compile_imports.py"
    packages = tmp_path / "packages"
    for path in (copy, packages / "one/deep/no.py", tmp_path / "src/ours.py"):
        path.parent.mkdir(parents=True)
        path.write_text("")
    copy.with_name("imported_folders.txt").write_text(".\none\nabsent\n")
    source = SCRIPT.read_text().replace('Path(sysconfig.get_path("purelib"))', f"Path({str(packages)!r})")
    copy.write_text(source)
    for name in ("one/yes.py", "one/wrong.py", "top.py"):
        (packages / name).write_text("x = )" if "wrong" in name else "")
    subprocess.run([sys.executable, "-I", copy], env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, check=True)
    compiled = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert compiled == {"yes", "top", "ours"}


def test_a_time_limit_ends_the_workers_too(script: ModuleType, tmp_path: Path) -> None:
    """`timeout --foreground` signals the first process only."""
    code = f"""
import importlib.util, time
spec = importlib.util.spec_from_file_location("compile_imports", {str(SCRIPT)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def compile_slowly(file):
    with open({str(tmp_path / "workers")!r}, "a") as pids:
        print(module.os.getpid(), file=pids)
    time.sleep(600)
module._compile = compile_slowly
module.compile_folders()
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    workers = tmp_path / "workers"
    assert wait_until(lambda: workers.exists() and workers.read_text().endswith("\n"), seconds=30)
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
    pids = {int(line) for line in workers.read_text().split()}
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids), seconds=30)


def test_the_bytecode_of_a_run_names_its_modules(script: ModuleType, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-X", f"pycache_prefix={tmp_path}", "-c", "import yaml"], env=WRITES, check=True)
    files = script.find_imports(tmp_path)
    assert script.PACKAGES / "yaml/loader.py" in files and all(file.is_file() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("process", IMPORTED)
def test_the_list_has_the_modules_of_a_process(script: ModuleType, process: str) -> None:
    """After a change of the locks, record the list again (see the script)."""
    names = ", ".join(IMPORTED[process])
    code = f"import sys, {names}; print('FILES', *(vars(m).get('__file__') for m in list(sys.modules.values())))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FILES "))
    files = [file for file in map(Path, line.split()) if file.suffix == ".py" and script.PACKAGES in file.parents]
    sizes = {file: file.stat().st_size for file in files}
    listed = {script.PACKAGES / name for name in LISTED}
    assert len(files) > 2000
    assert sum(size for file, size in sizes.items() if file.parent in listed) > 0.95 * sum(sizes.values())
