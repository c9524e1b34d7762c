"""Predict which groups Atropos' run-api can put into batches, by the packing rule of its version 0.4.0.

run-api hands out batches of exactly ``batch_size`` sequences and never cuts a group. It collects groups of one size
until they have as many sequences as the largest group in its queue, and fills a batch with such packs, the oldest
first. A group that fits no pack, or a pack that is too large, blocks the queue without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def predict_deadlock(
    batch_size: int, group_sizes: Sequence[int], min_allocations: Sequence[float | None] = ()
) -> str | None:
    """Return why run-api would hand out no batch, or an environment's groups only by chance; None if all is well.

    Args:
        batch_size: sequences of a batch, as registered.
        group_sizes: sequences of a group of each environment, or of the groups that came.
        min_allocations: the min_allocation of each environment, 0 to 1 or None, in the same order; empty if no
            environment has one.
    """
    sizes = sorted(set(group_sizes))
    if not sizes:
        return None
    if sizes[0] < 1 or batch_size < 1:
        return f"groups of {sizes[0]} and batches of {batch_size} sequences: run-api never hands out an empty batch"
    largest = sizes[-1]
    if largest > batch_size:
        return (
            f"a group of {largest} sequences does not fit into a batch of {batch_size}: run-api never cuts a group, "
            "and hands out nothing while such a group is in its queue"
        )
    if uneven := next(((small, large) for small, large in pairwise(sizes) if large % small), None):
        return (
            f"groups of {uneven[0]} and of {uneven[1]} sequences do not pack: once run-api has a group of {uneven[1]}, "
            f"it hands out groups of {uneven[0]} only in packs of {uneven[1]}, which they never fill"
        )
    if batch_size % largest:
        return (
            f"batches of {batch_size} sequences are not a multiple of groups of {largest}: run-api hands out only "
            "batches that whole groups fill exactly"
        )
    return _find_starved_environment(batch_size, group_sizes, min_allocations)


def _find_starved_environment(
    batch_size: int, group_sizes: Sequence[int], min_allocations: Sequence[float | None]
) -> str | None:
    """Return a message about the first environment with groups that do not fit next to the min_allocations of others.

    Return None if all groups fit, or no environment has a min_allocation.
    """
    if all(allocation is None for allocation in min_allocations):
        return None
    reserved = {
        index: int(batch_size * allocation)
        for index, allocation in enumerate(min_allocations)
        if allocation is not None and int(batch_size * allocation) > 0
    }
    if (total := sum(reserved.values())) > batch_size:
        reserved = {
            index: max(group_sizes[index], int(sequences * (batch_size / total)))
            for index, sequences in reserved.items()
        }
    room = batch_size
    for index, sequences in reserved.items():
        size = group_sizes[index]
        if size > room:
            return _describe_starvation(index, size, room, batch_size)
        room -= size * min(-(-sequences // size), room // size)
    for index, size in enumerate(group_sizes):
        if index not in reserved and size > room:
            return _describe_starvation(index, size, room, batch_size)
    return None


def _describe_starvation(index: int, size: int, room: int, batch_size: int) -> str:
    """Return the message that groups of environment ``index`` (from 0) are only used while other groups are missing.

    A group has ``size`` sequences. The min_allocation of other environments leaves ``room`` of a batch's sequences.
    """
    return (
        f"the min_allocation of other environments leaves {room} of the {batch_size} sequences of a batch, and the "
        f"groups of environment {index + 1} have {size}: run-api hands them out only while the others lack groups"
    )
