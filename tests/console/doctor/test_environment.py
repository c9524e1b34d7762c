"""The environment's packages, variables and code, in deliberately broken environments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_recipes.console.doctor import environment
from grpo_recipes.console.doctor.examine import Machine, NoAnswer
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe.keys import catalogue_trl


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch):
    """``recorded(KEY=VALUE)``: write the record of this environment with these entries changed."""
    real = json.loads((Path(sys.prefix) / environment.RECORD).read_text())
    monkeypatch.setattr(sys, "prefix", str(tmp_path))

    def make(**changes: str) -> None:
        (tmp_path / environment.RECORD).write_text(json.dumps({**real, "root": str(find_code_root()), **changes}))

    return make


def test_the_record_of_the_set_up(machine, recorded):
    recorded()
    right = environment.environment(machine())
    assert "Python 3." in right.value
    recorded(lock="0" * 64)
    changed = environment.environment(machine())
    assert changed.status == "problem" and "changed since" in changed.value and "make setup" in changed.fix
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_HOME", sys.prefix)
        lost = environment.environment(machine())
    assert "git checkout -- requirements" in lost.fix and "changed since" not in lost.value
    recorded(python="3.10.1")
    assert "made for Python 3.10.1" in environment.environment(machine()).value
    other = {"cpu": "cuda", "cuda": "cpu"}[machine().device]
    recorded(flavour=other)
    finding = environment.environment(machine())
    assert finding.status == "problem" and "--rebuild" in finding.fix


def test_an_environment_of_another_checkout_and_one_without_a_record(machine, recorded):
    recorded(root="/elsewhere")
    assert "/elsewhere" in environment.environment(machine()).value
    (Path(sys.prefix) / environment.RECORD).unlink()
    assert environment.environment(machine()).status == "warning"


def fake_package(folder: Path, name: str, version: str) -> None:
    """Write the files that importlib.metadata and import need to find a package."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()


def test_versions_of_this_environment(machine):
    finding = environment.versions(machine())
    assert finding.status == "ok" and f"trl {catalogue_trl()}" in finding.value


def test_another_trl_is_a_problem_and_another_peft_a_warning(machine, tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    fake_package(tmp_path, "peft", "0.1.0")
    finding = environment.versions(machine())
    assert finding.status == "warning" and "peft 0.1.0 (locked: 0." in finding.value
    fake_package(tmp_path, "trl", "0.18.0")
    finding = environment.versions(machine())
    assert finding.status == "problem" and "trl 0.18.0" in finding.value
    assert "peft 0.1.0 (locked: 0." in finding.value, "a problem hides no warning"


@pytest.mark.parametrize(("locked", "same"), [("2.13.0", True), ("2.13.0+cu130", True), ("2.13.0+cpu", False)])
def test_a_local_part_of_a_version_that_the_lock_does_not_name_is_the_same(
    cuda_machine, tmp_path: Path, monkeypatch, locked, same
):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/gpu.txt").write_text(f"torch=={locked}\n")
    monkeypatch.setenv("GRPO_HOME", str(tmp_path))
    real = environment.find_installed_version
    monkeypatch.setattr(
        environment, "find_installed_version", lambda name: {"torch": "2.13.0+cu130"}.get(name, real(name))
    )
    assert (environment.versions(cuda_machine()).status == "ok") == same


def test_what_a_run_imports_must_be_there(machine, tmp_path: Path, monkeypatch):
    if machine().device == "cpu":
        monkeypatch.syspath_prepend(tmp_path)
        fake_package(tmp_path, "torchvision", "0.28.0")
        finding = environment.versions(machine())
        assert finding.status == "problem" and finding.fix == "pip uninstall torchvision"
        fake_package(tmp_path, "peft", "0.1.0")
        assert "torchvision for CUDA" in environment.versions(machine()).value
    real = environment.importlib.util.find_spec
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None if name == "peft" else real(name))
    finding = environment.versions(machine())
    assert finding.status == "problem" and finding.value.startswith("missing: peft")


def test_a_missing_module_is_a_problem_without_a_lock_too(machine, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GRPO_HOME", str(tmp_path))
    versions = {"trl": "0.18.0"}
    monkeypatch.setattr(environment, "find_installed_version", versions.get)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None if name in ("torch", "vllm") else 1)
    missing = environment.versions(machine())
    assert missing.status == "problem" and missing.value.startswith("missing: torch, vllm; trl 0.18.0")
    assert missing.fix.startswith("run make setup")


def test_packages_of_pythonpath_and_of_the_user(machine, tmp_path: Path):
    assert environment.user_packages(machine(PYTHONPATH="")).value == "none"
    fake_package(tmp_path, "transformers", "4.0.0")
    finding = environment.user_packages(machine(PYTHONPATH=str(tmp_path)))
    assert finding.status == "warning" and "transformers in" in finding.value and "PYTHONNOUSERSITE" in finding.fix
    fake_package(tmp_path, "yaml", "1.0")
    fake_package(tmp_path, "math_verify", "1.0")
    (tmp_path / "peft-0.1.0.dist-info").mkdir()
    (tmp_path / "peft-0.1.0.dist-info/METADATA").write_text("Name: peft\nVersion: 0.1.0\n")
    finding = environment.user_packages(machine(PYTHONPATH=str(tmp_path)))
    assert "math_verify, peft, transformers, yaml in" in finding.value


def test_packages_of_the_documentation(machine, monkeypatch):
    assert environment.versions(machine()).status == "ok"
    real = environment.find_installed_version
    monkeypatch.setattr(
        environment, "find_installed_version", lambda name: None if name == "mkdocs-material" else real(name)
    )
    finding = environment.versions(machine())
    assert finding.status == "warning" and "mkdocs-material missing" in finding.value and "make docs" in finding.fix


def test_no_heavy_import():
    heavy = {"torch", "trl", "transformers", "datasets", "vllm", "accelerate"}
    code = f"import sys, grpo_recipes.console.doctor.command; print(*{heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_variables_that_nothing_reads_any_more(machine):
    assert environment.unread_variables(machine()).value == "none"
    finding = environment.unread_variables(machine(TRANSFORMERS_CACHE="/x"))
    assert finding.status == "warning" and "CACHE_ROOT" in finding.fix
    of_guide = environment.unread_variables(machine(GPUS_PER_NODE="8", MAX_PROMPT_CHARS="2048"))
    assert "GPUS_PER_NODE: unset it" in of_guide.fix and "MAX_PROMPT_CHARS: write max_prompt_length" in of_guide.fix
    assert environment.unread_variables(machine(SERVER_LOG="a", TRAINING_LOG="b", ACC_TEE="3")).value == "none"


def test_libraries_do_not_read_what_we_call_unread():
    import importlib.util

    for module in ("transformers/utils/hub.py", "transformers/__init__.py", "datasets/config.py"):
        name, _, path = module.partition("/")
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        text = (Path(spec.origin).parent / path).read_text()
        assert not [variable for variable in environment.UNREAD_VARIABLES if variable in text], module


def test_vllm_variables_are_compared_with_its_own_list_and_ours(machine):
    assert environment.unread_variables(machine()).value == "none"
    right = environment.unread_variables(machine(VLLM_PORT="8100", VLLM_LOGGING_LEVEL="DEBUG", VLLM_API_KEY="x"))
    assert right.status == "ok" and right.value == "none"
    wrong = environment.unread_variables(machine(VLLM_MEM_UTILL="0.5", VLLM_ATTENTION_BACKEND="XFORMERS"))
    assert wrong.status == "warning" and "VLLM_ATTENTION_BACKEND, VLLM_MEM_UTILL" in wrong.value
    assert "did you mean VLLM_MEM_UTIL?" in wrong.fix


def test_libraries_that_come_before_the_packages_own(machine, cuda_machine, tmp_path: Path):
    assert environment.libraries(cuda_machine()).status == "ok"
    (tmp_path / "libcudnn.so.8").touch()
    assert environment.libraries(cuda_machine(LD_LIBRARY_PATH=f":{tmp_path}")).status == "warning"
    assert environment.libraries(cuda_machine(LD_LIBRARY_PATH=str(tmp_path / "other"))).status == "ok"
    assert environment.libraries(machine(LD_PRELOAD="/x.so")).status == "warning"


def test_an_encoding_other_than_utf8_is_a_problem(doctor):
    ascii_shell = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, results = doctor(**ascii_shell)
    assert code == 2 and results["encoding"]["status"] == "problem" and "UTF-8" in results["encoding"]["fix"]
    assert doctor(LC_ALL="C.UTF-8")[1]["encoding"] == {"name": "encoding", "status": "ok", "value": "UTF-8", "fix": ""}


def test_the_commit_of_the_code(machine, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GRPO_HOME", str(tmp_path))
    assert environment.code(machine()).status == "warning"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "training.sh").write_text("#!/bin/bash\n")
    for command in (["init", "-q"], ["add", "training.sh"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    finding = environment.code(machine())
    assert finding.status == "ok" and len(finding.value) == 12
    (tmp_path / "training.sh").write_text("#!/bin/sh\n")
    assert "with uncommitted changes" in environment.code(machine()).value


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("TRANSFORMERS_CACHE", "HF_HOME"),
        ("HF_HUB_ENABLE_HF_TRANSFER", "HF_XET_HIGH_PERFORMANCE"),
        ("HF_HUB_REQUEST_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"),
        ("TORCH_LOAD_WEIGHTS_ONLY", "unset it"),
        ("TORCH_FORCE_FULL_STATE_DICT", "unset it"),
        ("FLASH_ATTENTION_FORCE_DISABLED", "attn_implementation"),
        ("TRANSFORMERS_NO_FLASH_ATTN", "attn_implementation"),
    ],
)
def test_an_old_variable_is_told_with_what_to_do(machine, name, fix):
    finding = environment.unread_variables(machine(**{name: "1"}))
    assert finding.status == "warning" and name in finding.value and fix in finding.fix


@pytest.mark.parametrize("name", ["VLLM_ATTENTION_BACKEND", "VLLM_USAGE_STATS_PATH", "VLLM_URL"])
def test_a_variable_that_vllm_no_longer_knows_is_told(machine, name):
    finding = environment.unread_variables(machine(**{name: "x"}))
    assert finding.status == "warning" and name in finding.value and name in finding.fix


@pytest.fixture
def broken_torch(tmp_path, monkeypatch):
    """Make the import of torch fail, as if a library were missing."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    monkeypatch.setattr(
        environment, "base_environment", lambda environment: {**environment, "PYTHONPATH": str(tmp_path)}
    )


def test_a_torch_that_does_not_import_is_a_problem(machine, broken_torch):
    finding = environment.imports(machine())
    assert (
        finding.status == "problem" and finding.value.startswith("the import of torch: ") and "--rebuild" in finding.fix
    )
    assert "import of torch halted" in finding.value


def test_an_import_that_hangs_is_told(machine, monkeypatch):
    fake_hang = "print('the import of trl\\nthe import of vllm', flush=True); import time; time.sleep(60)"
    monkeypatch.setattr(environment, "_IMPORTS", fake_hang)
    with pytest.raises(NoAnswer, match=r"^the import of vllm did not end within 3 s"):
        environment.imports(Machine(machine().environment, timeout=3))


def test_a_child_that_a_signal_ends_is_a_problem(machine, monkeypatch):
    monkeypatch.setattr(environment, "_IMPORTS", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    finding = environment.imports(machine())
    assert finding.status == "problem" and "signal 4" in finding.value


def test_what_torch_finds(machine, cuda_machine, monkeypatch):
    monkeypatch.setattr(environment, "_IMPORTS", """print('{"torch": "2", "GPUs": 0, "bfloat16": true}')""")
    assert environment.imports(machine()).value == "torch 2, GPUs 0, bfloat16 True"
    assert environment.imports(cuda_machine()).fix == "see the check gpus"
    monkeypatch.setattr(environment, "_IMPORTS", """print('{"torch": "2", "GPUs": 1, "bfloat16": false}')""")
    assert environment.imports(cuda_machine()).status == "warning"
