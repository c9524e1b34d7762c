"""smoke_test.py, run_tests.py and test_gpu_integration.py report errors and exit with 1. The e2e tests run them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.paths import find_code_root

sys.path.insert(0, str(find_code_root()))
import run_tests
import smoke_test
import test_gpu_integration

SCRIPTS = ("smoke_test.py", "run_tests.py", "test_gpu_integration.py", "scripts/find_environment.py")
RIGHT = dict.fromkeys(smoke_test.TRAIN, 0.5)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a folder with the scripts; each test adds its own files."""
    for name in SCRIPTS:
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(find_code_root() / name, tmp_path / "here" / name)
    return tmp_path / "here"


def run(checkout: Path, script: str, python: str = f'exec {sys.executable} "$@"') -> subprocess.CompletedProcess[str]:
    """Run a script in an environment with this shell line as its Python."""
    binaries = checkout.parent / "environment/bin"
    binaries.mkdir(parents=True)
    same_checkout = 'case "$*" in *installed_checkout.py) exit 0;; esac'  # runs this code
    for name in ("python", "grpo"):
        (binaries / name).write_text(f"#!/bin/sh\n{same_checkout}\n{python}\n")
        (binaries / name).chmod(0o755)
    return subprocess.run(
        [sys.executable, str(checkout / script)], env={"PATH": "/usr/bin:/bin", "ENV_DIR": str(binaries.parent)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RIGHT, None),
        (None, "train metrics cannot be read: [Errno 2]"),
        ("{", "train metrics cannot be read: "),
        (RIGHT | {"loss_kl": float("nan")}, "train metrics without a finite loss_kl"),
        (RIGHT | {"grad_norm": "1"}, "train metrics without a finite grad_norm"),
        ({"loss_total": 1.0}, "train metrics without a finite loss_pg, loss_kl, loss_entropy, kl_divergence"),
    ],
)
def test_metrics_that_are_missing_or_not_finite_end_the_smoke_test(tmp_path: Path, content: Any, message: str) -> None:
    (tmp_path / "run/metrics").mkdir(parents=True)
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "run/metrics/train_iter_000.json").write_text(text)
    if message is None:
        assert smoke_test.metrics(tmp_path, "train", smoke_test.TRAIN) == RIGHT
        return
    with pytest.raises(SystemExit, match=r"\S+: ") as ended:
        smoke_test.metrics(tmp_path, "train", smoke_test.TRAIN)
    assert message in str(ended.value) and "\n" not in str(ended.value)


def test_a_training_that_fails_ends_the_smoke_test_with_its_last_line(checkout: Path) -> None:
    (checkout / "run_offline_grpo.py").write_text("import sys\nprint('some words')\nsys.exit('grpo: it broke')\n")
    done = run(checkout, "smoke_test.py", f'[ "$4" = grpo_recipes.smoke ] && exit 0; exec {sys.executable} "$@"')
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "smoke_test.py: grpo: it broke\n")


@pytest.mark.parametrize("broken", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in run_tests.TESTS)])
def test_the_tests_that_pass_are_counted(checkout: Path, broken: str | None) -> None:
    for description, test in run_tests.TESTS.items():
        path, _, name = test.partition("::")
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        with (checkout / path).open("a") as file:
            file.write(f"def {name}():\n    assert {description != broken}\n\n")
    done = run(checkout, "run_tests.py")
    assert done.returncode == (0 if broken is None else 1), done.stdout
    assert done.stdout.splitlines()[-1] == ("7/7 tests passed" if broken is None else "6/7 tests passed")
    assert [line for line in done.stdout.splitlines() if line.startswith("FAILED ")][-1:] == (
        [] if broken is None else [f"FAILED {broken}"]
    )


def test_a_test_that_is_gone_or_skipped_has_not_passed(checkout: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<x><testcase name="a[1]"/><testcase name="a[2]"><failure/></testcase><testcase name="b"><skipped/></testcase>'
        '<testcase name="c[1]"/><testcase name="c[2]"/></x>'
    )
    assert run_tests.results(report) == {"a": False, "b": False, "c": True}
    done = run(checkout, "run_tests.py")
    assert done.returncode == 1 and "7/7" not in done.stdout


def test_without_pytest_the_tests_say_so(checkout: Path) -> None:
    done = run(checkout, "run_tests.py", "echo 'No module named pytest' >&2; exit 1")
    assert done.returncode == 1 and done.stderr.startswith("run_tests.py: pytest is not installed. Fix: ")


def test_the_named_tests_exist_and_have_names_of_their_own() -> None:
    names = [test.rpartition("::")[2] for test in run_tests.TESTS.values()]
    assert len(set(names)) == 7
    for test in run_tests.TESTS.values():
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in (find_code_root() / path).read_text()


@pytest.mark.parametrize(
    ("device", "gpus", "cpu", "message"),
    [
        ("cuda", 1, False, None), ("cpu", 0, True, None), ("cuda", 0, False, "no GPU is visible"),
        ("cpu", 0, False, "CPU build"), ("cuda", 8, True, "needs a CPU environment"),
    ],
)  # fmt: skip
def test_without_a_gpu_the_checks_are_skipped(
    tmp_path: Path, device: str, gpus: int, cpu: bool, message: str | None
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {device} {gpus}\n")
    python.chmod(0o755)
    reason = test_gpu_integration.reason_to_skip(*test_gpu_integration.count_gpus(str(python)), cpu)
    assert reason is None if message is None else message in reason


def written_run(folder: Path) -> Path:
    """Write the files that the checks read in a one-iteration run."""
    run = folder / "run/offline-1"
    for place in ("processes", "checkpoints/checkpoint-2", "model"):
        (run / place).mkdir(parents=True)
    rows = [{"step": 1, "syncs": 1, "problem_seeds": [1]}, {"step": 2, "syncs": 0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "samples.jsonl").write_text(json.dumps({"samples": [{"completion": "x"}]}) + "\n")
    (run / "eval.jsonl").write_text(json.dumps({"problem_seeds": [7]}) + "\n")
    (run / "summary.json").write_text('{"status": "completed"}')
    for name in ("processes/server.json", "model/model.safetensors", "checkpoints/checkpoint-2/COMPLETE"):
        (run / name).write_text("{}")
    for name in ("metrics", "checkpoints"):
        (folder / "run" / name).mkdir()
    (folder / "run/checkpoints/iter_000").symlink_to(run / "checkpoints/checkpoint-2")
    for name, keys in (("train", smoke_test.TRAIN), ("eval", smoke_test.EVAL)):
        (folder / f"run/metrics/{name}_iter_000.json").write_text(json.dumps(dict.fromkeys(keys, 0.5)))
    return run


@pytest.mark.parametrize(
    ("file", "content", "fails"),
    [
        ("offline-1/samples.jsonl", '{"samples": [{"completion": ""}]}', "vLLM server rollout generation"),
        ("offline-1/processes/server.json", None, "vLLM server rollout generation"),
        (
            "metrics/train_iter_000.json",
            json.dumps(RIGHT | {"grad_norm": 0.0}),
            "training epoch with server-backed data",
        ),
        ("metrics/eval_iter_000.json", "{}", "evaluator with vLLM server"),
        ("offline-1/eval.jsonl", '{"problem_seeds": [1]}', "evaluator with vLLM server"),
        ("offline-1/summary.json", '{"status": "failed"}', "end-to-end iteration"),
        ("checkpoints/iter_000", None, "end-to-end iteration"),
        ("offline-1/model/model.safetensors", None, "end-to-end iteration"),
    ],
)
def test_each_check_of_a_run_can_fail(tmp_path: Path, file: str, content: str | None, fails: str) -> None:
    run, checks = str(written_run(tmp_path)), test_gpu_integration.CHECKS
    assert all(test_gpu_integration.passed(check, run, tmp_path) for check in checks.values())
    changed = tmp_path / "run" / file
    changed.unlink() if content is None else changed.write_text(content)
    results = {name: test_gpu_integration.passed(check, run, tmp_path) for name, check in checks.items()}
    assert [name for name, holds in results.items() if not holds] == [fails]


def test_no_script_of_the_root_is_collected_with_the_tests(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("testpaths") == ["tests"]
    assert not [
        name
        for script in (smoke_test, run_tests, test_gpu_integration)
        for name in vars(script)
        if name.startswith("test")
    ]
