"""Two ranks continued past the first epoch, through the real server: each rank takes the prompts it would have."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from exact_record import record
from real_runs import Launch, same_rows, weights_hash
from taken_prompts import FLAGS, forget, taken_by

# The 80 prompts of the smoke task are five steps an epoch.
STEPS, SAVED = 12, (7, 11)
KEYS = ("--num_processes", "2", "--prompts_per_step", "16", "--num_generations", "4", "--max_steps", str(STEPS))
RANKS = (0, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("accelerator", "sampler"),
    [("ddp", "vllm"), ("zero2", "vllm"), ("fsdp2", "vllm"), ("zero2", "transformers"), ("fsdp2", "transformers")],
)
def test_two_ranks_continued_in_the_second_and_third_epoch(
    launch: Callable[..., Launch], accelerator: str, sampler: str
) -> None:
    sampling = ("--use_vllm", str(sampler == "vllm").lower(), "--accelerator", accelerator)
    saving = ("--save_steps", "1", "--save_total_limit", str(STEPS))
    alone = launch(*KEYS, *FLAGS, *sampling, *saving, "--run_name", "alone", folder="alone")
    assert alone.wait() == 0, alone.output
    prompts_by_rank = [taken_by(alone, rank) for rank in RANKS]
    assert all(list(steps) == list(range(STEPS)) for steps in prompts_by_rank)
    assert not any(set(prompts_by_rank[0][step]) & set(prompts_by_rank[1][step]) for step in range(STEPS))

    for step in SAVED:
        folder = copy_until(alone, step, alone.folder.parent / f"from-{step}")
        continued = launch("--resume", str(folder), folder=f"from-{step}", by_exec=True)
        assert continued.wait() == 0, continued.output
        assert f"resuming from checkpoint-{step}" in continued.output
        for rank in RANKS:
            expected = {done: prompts for done, prompts in prompts_by_rank[rank].items() if done >= step}
            assert taken_by(continued, rank) == expected, f"rank {rank} from {step}"
        weights, expected_weights = weights_hash(continued), weights_hash(alone)
        record(sampler, accelerator, 2, "one-iteration", step, False, weights, expected_weights)
        assert same_rows(continued, alone)
        assert weights == expected_weights


def copy_until(run: Launch, step: int, folder: Path) -> Path:
    """Copy the run directory as it was after the checkpoint of ``step``."""
    copy = folder / "runs" / run.run_dir.name
    shutil.copytree(run.run_dir, copy)
    forget(copy)
    shutil.rmtree(copy / "model")
    for checkpoint in (copy / "checkpoints").glob("checkpoint-*"):
        if int(checkpoint.name.rsplit("-", 1)[1]) > step:
            shutil.rmtree(checkpoint)
    return copy
