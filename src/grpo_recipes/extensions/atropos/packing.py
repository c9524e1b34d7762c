"""Which groups Atropos' run-api can put into batches: its packing rule of version 0.4.0, before anything runs.

run-api hands out batches of exactly ``batch_size`` sequences and never cuts a group. It collects groups of one size
until they have as many sequences as the largest group in its queue, and fills a batch with such packs, the oldest
first. A group that fits no pack, or a pack that overshoots, stops the queue without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def foreseen_deadlock(
    batch_size: int, group_sizes: Sequence[int], min_allocations: Sequence[float | None] = ()
) -> str | None:
    """Return why run-api would stop, or hand out an environment's groups only by chance; None where it does neither.

    Args:
        batch_size: sequences of a batch, as registered.
        group_sizes: sequences of a group of each environment, or sizes that were seen.
        min_allocations: least share of each batch of each environment, 0 to 1 or None, in the same order; none of them
            has one where this is empty.
    """
    sizes = sorted(set(group_sizes))
    if not sizes:
        return None
    if sizes[0] < 1 or batch_size < 1:
        return f"groups of {sizes[0]} and batches of {batch_size} sequences: run-api never hands out a batch of none"
    largest = sizes[-1]
    if largest > batch_size:
        return (
            f"a group of {largest} sequences does not fit into a batch of {batch_size}: run-api never cuts a group, "
            "and hands out nothing while one is in its queue"
        )
    if uneven := next(((small, large) for small, large in pairwise(sizes) if large % small), None):
        return (
            f"groups of {uneven[0]} and of {uneven[1]} sequences do not pack: beside a group of {uneven[1]} run-api "
            f"hands out those of {uneven[0]} in multiples of {uneven[1]} alone, which they never make"
        )
    if batch_size % largest:
        return (
            f"batches of {batch_size} sequences are not a multiple of groups of {largest}: run-api hands out only "
            "batches that whole groups fill exactly"
        )
    return _starved(batch_size, group_sizes, min_allocations)


def _starved(batch_size: int, group_sizes: Sequence[int], min_allocations: Sequence[float | None]) -> str | None:
    """Return which environment's groups the least shares leave no room for, as run-api serves them in order."""
    if all(share is None for share in min_allocations):
        return None
    wanted = {
        index: int(batch_size * share)
        for index, share in enumerate(min_allocations)
        if share is not None and int(batch_size * share) > 0
    }
    if (total := sum(wanted.values())) > batch_size:
        wanted = {
            index: max(group_sizes[index], int(number * (batch_size / total))) for index, number in wanted.items()
        }
    left = batch_size
    for index, number in wanted.items():
        size = group_sizes[index]
        if size > left:
            return _left_out(index, size, left, batch_size)
        left -= size * min(-(-number // size), left // size)
    for index, size in enumerate(group_sizes):
        if index not in wanted and size > left:
            return _left_out(index, size, left, batch_size)
    return None


def _left_out(index: int, size: int, left: int, batch_size: int) -> str:
    return (
        f"the least shares of other environments leave {left} of the {batch_size} sequences of a batch, and the groups "
        f"of environment {index + 1} have {size}: run-api takes them only while the others lack groups"
    )
