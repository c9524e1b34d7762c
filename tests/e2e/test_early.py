"""Rewards judge a group while the real server samples others, and the run is the one in which they wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from real_runs import Launch, same_rows, weights_hash

from grpo_recipes import smoke
from grpo_recipes.runs.rundir import read_rows

JUDGED = "rewards/judged_early"
PROMPTS, GROUP, STEPS = 4, 4, 4
REWARD = """
import json
import time


def own(completions, prompts, completion_ids):
    for prompt, ids in zip(prompts, completion_ids):
        began = time.time()
        time.sleep(0.05)
        with open("CALLS", "a") as file:
            file.write(json.dumps([began, time.time(), prompt[-1]["content"], len(ids)]) + "\\n")
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""
# A random model draws each of 263 tokens about as often: 5 of them end a completion, after any number of tokens. Not by
# strings to stop at: when the engine hears that one was found, and its batch shrinks, would decide last bits.
STOPS = smoke.build_tokenizer().convert_tokens_to_ids([*"0123"])
FLAGS = {
    "reward_workers": 1, "generation_kwargs": json.dumps({"stop_token_ids": STOPS}), "max_completion_length": 200,
    "prompts_per_step": PROMPTS, "num_generations": GROUP, "max_steps": STEPS, "save_strategy": "no",
}  # fmt: skip


def random_model(folder: Path) -> str:
    torch.manual_seed(0)
    tokenizer = smoke.build_tokenizer()
    smoke.build_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_of(launch: Callable[..., Launch], folder: Path, *flags: str) -> Launch:
    """Run with the reward, whose calls stand in ``calls.jsonl`` of the folder."""
    folder.mkdir()
    own = folder / "own.py"
    own.write_text(REWARD.replace("CALLS", str(folder / "calls.jsonl")))
    given = [word for key, value in FLAGS.items() for word in (f"--{key}", str(value))]
    run = launch(*given, "--reward_funcs", f"{own}:own", *flags, folder=folder.name)
    assert run.wait(600) == 0, run.output
    return run


def calls_of(folder: Path) -> list[list[tuple[float, float, str, int]]]:
    """Begin, end, prompt and length of each call, by generation: each has prompts of its own."""
    found = sorted(tuple(json.loads(line)) for line in (folder / "calls.jsonl").read_text().splitlines())
    prompts = list(dict.fromkeys(prompt for _, _, prompt, _ in found))
    shares = [prompts[first : first + PROMPTS] for first in range(0, len(prompts), PROMPTS)]
    return [[call for call in found if call[2] in share] for share in shares]


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_is_judged_while_others_are_sampled_and_nothing_else_changes(
    launch: Callable[..., Launch], tmp_path: Path, ranks: int
) -> None:
    model = random_model(tmp_path / "model")
    shared = (
        "--model_name_or_path",
        model,
        "--num_processes",
        str(ranks),
        "--per_device_train_batch_size",
        str(PROMPTS * GROUP // ranks),
    )
    early = run_of(launch, tmp_path / "early", *shared)
    waiting = run_of(launch, tmp_path / "waiting", *shared, "--reward_isolation", "none")

    rows, generations = early.rows(), calls_of(tmp_path / "early")
    assert sum(0 < row[JUDGED] <= 1 for row in rows) >= STEPS / 2
    for row, calls in zip(rows, generations, strict=True):
        lengths = [length for *_, length in calls]
        assert max(lengths) > 4 * min(lengths)
        # The scoring that followed the sampling ended after the last call, and took so long.
        sampled = max(end for _, end, _, _ in calls) - row["seconds/score"]
        assert len({prompt for began, _, prompt, _ in calls if began < sampled}) >= row[JUDGED] * PROMPTS
    assert not any(JUDGED in row for row in waiting.rows())

    assert same_rows(early, waiting, JUDGED)
    samples = [read_rows(run.run_dir / "samples.jsonl") for run in (early, waiting)]
    assert samples[0] == samples[1] and len(samples[0]) == STEPS
    assert weights_hash(early) == weights_hash(waiting)
