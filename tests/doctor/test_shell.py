"""The login shell, its variables, and the code."""

from __future__ import annotations

import subprocess
from pathlib import Path

from grpo_recipes.doctor import environment


def test_variables_that_would_reach_in_are_told_to_be_removed(machine):
    found = environment.login_shell(machine(PMI_SIZE="4", CONDA_PREFIX="/c", PYTHONPATH="/p", RUN_NAME="x"))
    assert found.status == "ok"
    assert "CONDA_PREFIX, PMI_SIZE, PYTHONPATH" in found.value and "RUN_NAME" not in found.value


def test_variables_that_nothing_reads_any_more(machine):
    assert environment.old_variables(machine()).value == "none"
    found = environment.old_variables(machine(TRANSFORMERS_CACHE="/x"))
    assert found.status == "warning" and "CACHE_ROOT" in found.fix


def test_libraries_do_not_read_what_we_call_unread():
    import importlib.util

    for module in ("transformers/utils/hub.py", "transformers/__init__.py", "datasets/config.py"):
        name, _, rest = module.partition("/")
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        text = (Path(spec.origin).parent / rest).read_text()
        assert not [variable for variable in environment.UNREAD_VARIABLES if variable in text], module


def test_vllm_variables_are_compared_with_its_own_list_and_ours(machine):
    assert environment.vllm_variables(machine()).value == "none set"
    right = environment.vllm_variables(machine(VLLM_PORT="8100", VLLM_LOGGING_LEVEL="DEBUG", VLLM_API_KEY="x"))
    assert right.status == "ok" and right.value == "VLLM_API_KEY, VLLM_LOGGING_LEVEL, VLLM_PORT"
    wrong = environment.vllm_variables(machine(VLLM_MEM_UTILL="0.5", VLLM_ATTENTION_BACKEND="XFORMERS"))
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
    code, found = doctor(**ascii_shell)
    assert code == 2 and found["encoding"]["status"] == "problem" and "UTF-8" in found["encoding"]["fix"]
    assert doctor(LC_ALL="C.UTF-8")[1]["encoding"] == {"name": "encoding", "status": "ok", "value": "UTF-8", "fix": ""}


def test_the_commit_of_the_code(machine, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("GRPO_HOME", str(tmp_path))
    assert environment.code(machine()).status == "warning"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "training.sh").write_text("#!/bin/bash\n")
    for command in (["init", "-q"], ["add", "training.sh"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    found = environment.code(machine())
    assert found.status == "ok" and len(found.value) == 12
    (tmp_path / "training.sh").write_text("#!/bin/sh\n")
    assert "changed since" in environment.code(machine()).value
