"""A run resumed from a checkpoint equals an uninterrupted run, bit for bit on CPU, for any rank and epoch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_record import record
from rank_processes import run_ranks

from grpo_recipes.runs.checkpoints import publish_checkpoint

from .resumed_ranks import GROUP, SHAPES, points, restarts
from .tiny_training import different_characters, train

# Contents of a rank's checkpoint file under the names of the first release. Older checkpoints must resume.
WINDOW = {
    "step", "split", "buffered", "metrics", "logs", "step_time", "tr_loss", "total_loss", "last_logged", "flos",
    "total_flos", "tokens_seen", "evaluation_owed", "ahead",
}  # fmt: skip
Found = list[dict[str, dict[str, Any]]]  # by rank, shape and case: what `resumed_ranks.train` returns


OFTEN = {1: ["uneven"], 2: ["two-iterations"]}  # shapes by number of ranks
SELDOM = {1: ["one-iteration", "two-iterations"], 2: ["one-iteration", "uneven"], 3: ["two-iterations"]}  # for minutes


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=lambda count: f"{count}-ranks")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return trained(tmp_path_factory.mktemp("ranks"), request.param, OFTEN[request.param])


def trained(folder: Path, count: int, shapes: list[str]) -> Found:
    """Run these shapes with this many ranks, one process per rank, and return their results."""
    run_ranks("trainers.resumed_ranks", str(folder), *shapes, count=count, seconds=500)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(count)]


def test_every_epoch_has_an_order_of_its_own_and_every_rank_its_share(ranks: Found) -> None:
    """Otherwise, equal runs would prove little."""
    for shape in ranks[0]:
        windows = SHAPES[shape]["windows"]
        by_rank = _taken(ranks, shape, "whole")
        joined = [[prompt for _, prompts in parts for prompt in prompts] for parts in zip(*by_rank, strict=True)]
        assert all(prompts == [prompt for prompt in prompts[::GROUP] for _ in range(GROUP)] for prompts in joined)
        epochs = [
            [prompt for generation in joined[start : start + windows] for prompt in generation[::GROUP]]
            for start in range(0, 3 * windows, windows)
        ]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert len({row["grad_norm"] for row in ranks[0][shape]["whole"]["rows"]}) > 5
        assert len({rank[shape]["whole"]["weights"] for rank in ranks}) == 1


def test_a_run_continued_from_any_checkpoint_equals_the_one_left_alone(ranks: Found) -> None:
    for shape in ranks[0]:
        for step in points(shape):
            _assert_equal_from(ranks, shape, f"from-{step}", step)


def test_a_run_stopped_again_and_again_equals_the_one_left_alone(ranks: Found) -> None:
    for shape in ranks[0]:
        _assert_equal_from(ranks, shape, "stopped", 0)


def test_with_ignore_data_skip_the_epoch_begins_again(ranks: Found) -> None:
    """The current window is finished. Then each rank repeats the prompts from the start of the epoch."""
    for shape in ranks[0]:
        epoch = SHAPES[shape]["epoch"]
        first, *later = restarts(shape)
        _assert_equal_from(ranks, shape, f"restarted-{first}", first)  # the epoch starts here anyway
        for step in later:
            case = f"restarted-{step}"
            for whole, restarted in zip(_taken(ranks, shape, "whole"), _taken(ranks, shape, case), strict=True):
                from_start = [prompts for done, prompts in whole if done >= step // epoch * epoch]
                prompts_taken = [prompts for _, prompts in restarted]
                assert prompts_taken and prompts_taken == from_start[: len(prompts_taken)], case
            assert len({rank[shape][case]["weights"] for rank in ranks}) == 1
            record("transformers", "ddp", len(ranks), shape, step, True, *_weights(ranks, shape, case))


@pytest.mark.slow
@pytest.mark.parametrize("count", SELDOM)
def test_runs_of_the_other_shapes(tmp_path: Path, count: int) -> None:
    ranks = trained(tmp_path, count, SELDOM[count])
    test_every_epoch_has_an_order_of_its_own_and_every_rank_its_share(ranks)
    test_a_run_continued_from_any_checkpoint_equals_the_one_left_alone(ranks)
    test_a_run_stopped_again_and_again_equals_the_one_left_alone(ranks)
    test_with_ignore_data_skip_the_epoch_begins_again(ranks)


def _assert_equal_from(ranks: Found, shape: str, case: str, step: int) -> None:
    """Check that a case has the prompts, rows and weights of the uninterrupted run from ``step`` on."""
    for whole, continued in zip(_taken(ranks, shape, "whole"), _taken(ranks, shape, case), strict=True):
        assert continued == [[done, prompts] for done, prompts in whole if done >= step], case
    rows = ranks[0][shape]["whole"]["rows"]
    assert ranks[0][shape][case]["rows"] == rows[step:], case
    weights, alone = _weights(ranks, shape, case)
    record("transformers", "ddp", len(ranks), shape, step or "stops", case.startswith("restarted"), weights, alone)
    assert [rank[shape][case]["weights"] for rank in ranks] == [alone] * len(ranks), case


def _taken(ranks: Found, shape: str, case: str) -> list[list[Any]]:
    return [rank[shape][case]["prompts"] for rank in ranks]


def _weights(ranks: Found, shape: str, case: str) -> tuple[str, str]:
    return ranks[0][shape][case]["weights"], ranks[0][shape]["whole"]["weights"]


def test_a_batch_that_is_split_otherwise_goes_on_with_whole_generations(tmp_path: Path) -> None:
    whole, continued = _split_otherwise(tmp_path, num_iterations=1)
    assert len(whole) == 6
    assert continued == whole[3:]


def test_a_generation_under_way_is_not_split_otherwise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"inside a generation window of .*per_device_train_batch_size 4.*Fix: "):
        _split_otherwise(tmp_path, num_iterations=2)


def test_a_checkpoint_is_not_resumed_at_another_place_in_the_data(tmp_path: Path) -> None:
    keys = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9, "steps_per_generation": 1}
    train(tmp_path, **keys, max_steps=2)
    for changed, message in (
        ({"seed": 7}, "saved with seed 42, this run has seed 7"),
        ({"num_iterations": 2}, "saved with num_iterations 1, this run has num_iterations 2"),
        ({"per_device_train_batch_size": 8}, "saved with prompts of a generation 1, completions of a step 4, this run"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint-2 was {message}.*Fix: .*--ignore_data_skip true"):
            train(tmp_path, **keys | changed, max_steps=3)
    train(tmp_path, **keys, seed=7, max_steps=3, ignore_data_skip=True)
    with pytest.raises(ValueError, match=r"checkpoint-3 comes from a run that restarted an epoch.*Fix: add "):
        train(tmp_path, **keys, seed=7, max_steps=4)


def test_a_checkpoint_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    """It contains neither the data order nor the batch split. The other names are unchanged."""
    keys = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 9, "max_steps": 3}
    alone, _ = train(tmp_path / "alone", **keys)
    staged = tmp_path / "old" / "checkpoints" / "partial" / "checkpoint-2"
    shutil.copytree(tmp_path / "alone" / "checkpoints" / "checkpoint-2", staged)
    (staged / "order_of_data.json").unlink()
    window = torch.load(staged / "grpo_window_0.pt", weights_only=False)
    assert window.keys() == WINDOW
    assert type(window["logs"]["prompt"]) is list and type(window["logs"]["rewards"]) is dict
    del window["split"], window["ahead"]
    torch.save(window, staged / "grpo_window_0.pt")
    (staged / "COMPLETE").unlink()
    publish_checkpoint(staged, tmp_path / "old" / "checkpoints", 2, 1)

    resumed, _ = train(tmp_path / "old", **keys)

    for weight, other in zip(alone.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(weight, other)


def _split_otherwise(folder: Path, num_iterations: int) -> tuple[list[Any], list[Any]]:
    """Return the prompts by generation for a run of six steps, and for a run resumed after three with half the rows."""
    batches: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        batches.append([prompt[0]["content"] for prompt in prompts])
        return different_characters(completions)

    keys = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 9, "num_iterations": num_iterations}
    train(folder / "whole", reward, **keys, per_device_train_batch_size=4, **_accumulated(3))
    whole, batches = batches, []
    saved = "checkpoints/checkpoint-3"
    shutil.copytree(folder / "whole" / saved, folder / "continued" / saved)
    train(folder / "continued", reward, **keys, per_device_train_batch_size=2, **_accumulated(6))
    return whole, batches


def _accumulated(count: int) -> dict[str, int]:
    return {"steps_per_generation": count, "gradient_accumulation_steps": count}
