"""Two launches never work in one run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_recipes.errors import Refused
from grpo_recipes.launch.rundir import Run, claim


def test_a_run_directory_is_claimed_once_and_free_again_afterwards(tmp_path: Path) -> None:
    run = Run(tmp_path, {"run_name": "run"})
    held = claim(run)

    with pytest.raises(Refused, match="another launch is running"):
        claim(run)

    os.close(held)
    os.close(claim(run))
