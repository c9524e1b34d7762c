"""M9: output that can't be written ends every command in one line and a nonzero exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from grpo_command import run_grpo

from grpo_recipes.cli import run_reporting_errors
from grpo_recipes.paths import find_code_root

FULL = Path("/dev/full")
SMOKE = str(find_code_root() / "recipes/smoke/grpo.yaml")
MESSAGE = (
    "grpo: stdout: cannot be written (No space left on device). Fix: redirect it to a file on a disk with free space\n"
)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["--version"], ["check", "--help"], ["keys"], ["keys", "--json"], ["completion", "bash"],
        ["check", SMOKE], ["check", SMOKE, "--json"], ["plan", SMOKE],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_full_disk_behind_stdout_is_one_line(words: list[str]) -> None:
    """M9: no command prints a traceback."""
    with FULL.open("w") as full:
        done = run_grpo(*words, stdout=full)
    assert (done.returncode, done.stderr) == (2, MESSAGE)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["check", SMOKE]], ids=" ".join)
def test_a_new_process_is_also_one_line(words: list[str]) -> None:
    """M9: Python flushes stdout again when it ends."""
    with FULL.open("w") as full:
        argv = [sys.executable, "-m", "grpo_recipes", *words]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (2, MESSAGE)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stderr_keeps_the_exit_code() -> None:
    """M9: if the problems can't be printed, the exit code still reports them."""
    with FULL.open("w") as full:
        argv = [sys.executable, "-m", "grpo_recipes", "check", "none.yaml"]
        assert subprocess.run(argv, stderr=full, timeout=120, check=False).returncode == 2


def test_ctrl_c_before_a_launch_handles_signals_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer's Ctrl-C in the first second printed a traceback."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background test run ignores it
    try:
        assert run_reporting_errors(lambda: signal.raise_signal(signal.SIGINT) or 0) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "grpo: interrupted\n"
