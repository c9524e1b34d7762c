"""A checkpoint fits the number of training processes that made it."""

from __future__ import annotations

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.resolve import require_same_world_size
from grpo_recipes.runs.checkpoints import publish_checkpoint
from grpo_recipes.runs.rundir import Run


def test_a_checkpoint_of_another_number_of_processes_is_refused(planned, tmp_path):
    staged = tmp_path / "checkpoints" / "partial" / "checkpoint-5"
    staged.mkdir(parents=True)
    publish_checkpoint(staged, tmp_path / "checkpoints", 5, 2)
    run = Run(tmp_path)

    require_same_world_size(run, planned(gpus=("0", "1", "2")))
    with pytest.raises(ConfigError, match=r"checkpoint-5 has 2 training processes, the plan has 3.*--num_processes 2"):
        require_same_world_size(run, planned(gpus=("0", "1", "2", "3")))
