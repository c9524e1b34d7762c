"""Compare the prediction of run-api's packing with run-api's code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_recipes.extensions.atropos.packing import predict_deadlock

packing: Any = pytest.importorskip("atroposlib.api.utils")
Shares = Sequence[float | None]


def handed_out(
    batch_size: int, sizes: Sequence[int], shares: Shares, first: Sequence[int], alive: Sequence[int], rounds: int
) -> list[int]:
    """Count the groups that run-api hands out for each living environment.

    Environments of ``first`` post first, then the living environments in turns.
    """
    envs = [
        {"connected": True, "registered_id": index, "min_batch_allocation": share, "group_size": size}
        for index, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]
    shared = any(share is not None for share in shares)
    queue: list[dict[str, Any]] = []
    got = [0] * len(sizes)
    for number, index in enumerate([*first, *(env for _ in range(rounds) for env in alive)], 1):
        queue.append({"tokens": [[1]] * sizes[index], "env_id": index})
        if number > len(first) and (number - len(first)) % (2 * len(alive)):
            continue  # a trainer asks less often than environments post
        while True:
            if shared:
                batch, queue = packing.grab_batch_with_minimum_allocations(queue, batch_size, envs)
            else:
                batch, queue = packing.grab_exact_from_heterogeneous_queue(queue, batch_size)
            if batch is None:
                break
            assert sum(len(group["tokens"]) for group in batch) == batch_size
            for group in batch:
                got[group["env_id"]] += number > len(first)
    return [got[index] for index in alive]


def stops(batch_size: int, sizes: Sequence[int], shares: Shares) -> Any:
    """Find first groups and living environments that let run-api hand out no group of a living environment."""
    every = range(len(sizes))
    needed = {index for index in every if int(batch_size * (shares[index] or 0)) > 0}
    for count in range(1, len(sizes) + 1):
        for alive in itertools.combinations(every, count):
            if not needed <= set(alive):
                continue  # a dead environment with a least share stops run-api for any sizes
            for first in itertools.chain.from_iterable(itertools.product(every, repeat=length) for length in range(3)):
                if not min(handed_out(batch_size, sizes, shares, first, alive, 4 * batch_size)):
                    return first, alive
    return None


def of_plenty(batch_size: int, sizes: Sequence[int], shares: Shares) -> list[int]:
    """Count the groups of each environment in the first batches, if every environment posted more than enough."""
    envs = [
        {"connected": True, "registered_id": index, "min_batch_allocation": share} for index, share in enumerate(shares)
    ]
    queue = [{"tokens": [[1]] * size, "env_id": index} for _ in range(20) for index, size in enumerate(sizes)]
    got = [0] * len(sizes)
    for _ in range(3):
        batch, queue = packing.grab_batch_with_minimum_allocations(queue, batch_size, envs)
        for group in batch:
            got[group["env_id"]] += 1
    return got


@pytest.mark.parametrize(("waiting", "in_batch"), [(0, None), (1, 1), (2, 2), (5, 2)])
def test_a_least_share_is_served_first_as_far_as_its_groups_wait(waiting: int, in_batch: int | None) -> None:
    """run-api makes no batch without a group of that environment, and does not wait for as many as the share has."""
    envs = [
        {"connected": True, "registered_id": 0, "min_batch_allocation": None},
        {"connected": True, "registered_id": 1, "min_batch_allocation": 0.5},
    ]
    queue = [{"tokens": [[1]] * 4, "env_id": index} for index in [0] * 8 + [1] * waiting]
    batch, _ = packing.grab_batch_with_minimum_allocations(queue, 16, envs)
    assert (batch and [group["env_id"] for group in batch].count(1)) == in_batch


@pytest.mark.parametrize(
    ("batch_size", "sizes", "why"),
    [
        (4, [3], "batches of 4 sequences are not a multiple of groups of 3"),
        (12, [4, 3], "groups of 3 and of 4 sequences do not pack"),
        (8, [2, 3], "groups of 2 and of 3 sequences do not pack"),
        (8, [8, 16], "a group of 16 sequences does not fit into a batch of 8"),
        (8, [8, 4], None),
        (8, [2, 4, 8, 2], None),
        (8, [], None),
        (8, [0, 8], "groups of 0"),
        (0, [1], "batches of 0"),
    ],
)
def test_the_five_ways_in_which_sizes_pack_or_do_not(batch_size: int, sizes: list[int], why: str | None) -> None:
    deadlock = predict_deadlock(batch_size, sizes)
    assert deadlock is None if why is None else deadlock is not None and why in deadlock


@pytest.mark.parametrize("batch_size", [1, 4, 6, 8])
def test_sizes_are_said_to_stop_run_api_exactly_where_they_do(batch_size: int) -> None:
    cases = [pair for count in (1, 2) for pair in itertools.combinations_with_replacement(range(1, 7), count)]
    for sizes in [*cases, (1, 2, 4), (2, 3, 6), (1, 1, 3)]:
        foreseen = predict_deadlock(batch_size, sizes) is not None
        assert foreseen == (stops(batch_size, sizes, [None] * len(sizes)) is not None), sizes


@pytest.mark.parametrize("batch_size", [4, 8])
def test_nothing_stops_that_is_not_foreseen_with_least_shares(batch_size: int) -> None:
    choices = (None, 0.0, 0.25, 0.5, 0.7, 1.0)
    cases = [(sizes, shares) for sizes in itertools.product((1, 2, 4, 8), repeat=2)
             for shares in itertools.product(choices, repeat=2)]  # fmt: skip
    cases += [((2, 2, 4), shares) for shares in itertools.product((None, 0.25, 0.5), repeat=3)]
    for sizes, shares in cases:
        if predict_deadlock(batch_size, sizes, shares) is None:
            assert stops(batch_size, sizes, shares) is None, (sizes, shares)


@pytest.mark.parametrize(
    ("sizes", "shares", "left_out"),
    [
        ((4, 4), (0.5, 0.5), None),
        ((4, 4), (0.9, 0.9), None),  # more than a batch: run-api scales them down, to a group each
        ((4, 4), (0.5, None), None),
        ((4, 4), (0.0, None), None),
        ((8, 8), (0.5, 0.5), "environment 2 have 8"),
        ((4, 4), (0.7, 0.3), "environment 2 have 4"),
        ((4, 4), (1.0, None), "environment 2 have 4"),
        ((4, 4), (None, 1.0), "environment 1 have 4"),
        ((4, 4, 4), (0.5, 0.5, 0.5), "environment 3 have 4"),
        ((8, 4), (None, 0.5), "environment 1 have 8"),
    ],
)
def test_an_environment_that_least_shares_leave_no_room_for_gets_none(
    sizes: tuple[int, ...], shares: Shares, left_out: str | None
) -> None:
    deadlock = predict_deadlock(8, sizes, shares)
    counts = of_plenty(8, sizes, shares)
    if left_out is None:
        assert deadlock is None and all(counts)
    else:
        assert deadlock is not None and f"groups of {left_out}" in deadlock
        assert counts[int(left_out.split()[1]) - 1] == 0
