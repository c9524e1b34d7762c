"""Two launches never work in one run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.runs.rundir import Run, claim, is_claimed


def test_a_run_directory_is_claimed_once_and_free_again_afterwards(tmp_path: Path) -> None:
    run = Run(tmp_path, {"run_name": "run"})
    held = claim(run)

    with pytest.raises(ConfigError, match="another launch is running"):
        claim(run)

    os.close(held)
    os.close(claim(run))


def test_looking_at_the_lock_keeps_no_launch_out(tmp_path: Path) -> None:
    assert not is_claimed(tmp_path)
    (tmp_path / "lock").touch()
    looking = (tmp_path / "lock").open()
    fcntl.flock(looking, fcntl.LOCK_SH)  # as is_claimed does, for the blink of an eye
    assert not is_claimed(tmp_path)  # two that look do not take one another for a launch
    threading.Timer(0.1, looking.close).start()
    held = claim(Run(tmp_path, {}))
    assert is_claimed(tmp_path)
    os.close(held)
    assert not is_claimed(tmp_path)


def test_without_file_locks_nothing_is_known_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert not is_claimed(tmp_path)
