"""Eight posters send 10,000 groups while a client takes them: each group arrives once, and memory does not grow."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from atropos.run_api import RunApi, post_groups
from grpo_recipes.extensions.atropos.client import AtroposClient
from grpo_recipes.extensions.atropos.group import UNTRAINED, Group, to_trajectories

GROUPS, POSTERS, SIZE, LENGTH, STEP = 10_000, 8, 4, 32, 16
CHUNK = 10  # groups per request
WRONG_EVERY = 10  # every tenth group has rows of unequal lengths
VALID = GROUPS - GROUPS // WRONG_EVERY
MOST_QUEUED = 256  # groups; a poster pauses while the queue is longer
MOST_GROWTH = 48 << 20  # bytes; all groups together need several times as much


def numbered(number: int) -> Group:
    """Build a group with its number in the first two tokens. Every tenth group is invalid: one log-prob is missing."""
    prompt = [number // 1000, number % 1000]
    rows = [prompt + [(7 * number + 13 * row + at) % 1000 for at in range(LENGTH - 2)] for row in range(SIZE)]
    logprobs = [[1.0] * 2 + [-0.125] * (LENGTH - 2) for _ in range(SIZE)]
    if number % WRONG_EVERY == 0:
        logprobs[2].pop()
    return Group(
        tokens=rows,
        masks=[[UNTRAINED] * 2 + row[2:] for row in rows],
        scores=[0.0] * SIZE,
        inference_logprobs=logprobs,
        overrides=[{} for _ in rows],
        env_id=number % POSTERS,
    )


@pytest.mark.slow
def test_each_group_is_taken_once_and_memory_stays(api: RunApi) -> None:
    client = AtroposClient(api.url, delay=0.01, max_wait=60, say=lambda _: None)
    api.register(batch_size=STEP * SIZE, max_token_len=LENGTH + 1)
    for _ in range(POSTERS):
        api.register_env(group_size=SIZE)
    over = threading.Event()

    def produce(poster: int) -> None:
        poster_client = AtroposClient(api.url, say=lambda _: None)
        for start in range(poster, GROUPS, POSTERS * CHUNK):
            while poster_client.status()["queue_size"] > MOST_QUEUED:
                if over.wait(0.2):
                    return
            numbers = range(start, min(start + POSTERS * CHUNK, GROUPS), POSTERS)
            post_groups(api.url, [numbered(number) for number in numbers])

    mine, server = psutil.Process(), psutil.Process(api.process.pid)
    numbers_taken: list[int] = []
    began, first = time.monotonic(), (0, 0)
    with ThreadPoolExecutor(POSTERS) as posters:
        done = [posters.submit(produce, poster) for poster in range(POSTERS)]
        try:
            while len(numbers_taken) < VALID:
                groups = client.take_groups(
                    min(STEP, VALID - len(numbers_taken)),
                    size=SIZE,
                    longest=LENGTH,
                    vocabulary=1000,
                    step=0,
                    max_staleness=None,
                )
                rows = [row for group in groups for row in to_trajectories(group)]
                assert len(rows) == len(groups) * SIZE
                numbers_taken += [1000 * int(row.prompt_ids[0]) + int(row.prompt_ids[1]) for row in rows[::SIZE]]
                if len(numbers_taken) <= VALID // 5:
                    first = (mine.memory_info().rss, server.memory_info().rss)
        finally:
            over.set()
        for future in done:
            future.result()
    growth = [process.memory_info().rss - before for process, before in zip((mine, server), first, strict=True)]
    seconds, used = time.monotonic() - began, server.cpu_times()
    print(f"{GROUPS} groups in {seconds:.0f} s, {used.user + used.system:.0f} s of a core in run-api")
    print(f"memory grew by {growth[0] >> 20} MiB here, by {growth[1] >> 20} MiB in run-api")
    assert sorted(numbers_taken) == [number for number in range(GROUPS) if number % WRONG_EVERY]
    assert client.counts["rejected"] == GROUPS // WRONG_EVERY and client.counts["groups"] == GROUPS
    assert client.counts["batches"] == client.status()["current_step"] and client.counts["lost_batches"] == 0
    assert client._ready_groups == [] and client._parts == []
    assert max(growth) < MOST_GROWTH
    # The size of the other client state does not depend on the number of groups.
    assert len(client.last_seen) == POSTERS and client._sizes == {SIZE}
