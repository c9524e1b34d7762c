"""10,000 groups posted by eight at once while a client takes them: each once, and no memory that grows."""

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
CHUNK = 10  # groups of one request
WRONG_EVERY = 10  # one group in so many has rows of unequal lengths
VALID = GROUPS - GROUPS // WRONG_EVERY
MOST_QUEUED = 256  # groups: an environment pauses while run-api has as many
MOST_GROWTH = 48 << 20  # bytes; all groups together take several times that


def numbered(number: int) -> Group:
    """A group whose first two tokens are its number; its log-probs are as many as its tokens unless it is wrong."""
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
        own = AtroposClient(api.url, say=lambda _: None)
        for start in range(poster, GROUPS, POSTERS * CHUNK):
            while own.status()["queue_size"] > MOST_QUEUED:
                if over.wait(0.2):
                    return
            numbers = range(start, min(start + POSTERS * CHUNK, GROUPS), POSTERS)
            post_groups(api.url, [numbered(number) for number in numbers])

    mine, theirs = psutil.Process(), psutil.Process(api.process.pid)
    taken: list[int] = []
    began, first = time.monotonic(), (0, 0)
    with ThreadPoolExecutor(POSTERS) as posters:
        done = [posters.submit(produce, poster) for poster in range(POSTERS)]
        try:
            while len(taken) < VALID:
                groups = client.take_groups(
                    min(STEP, VALID - len(taken)),
                    size=SIZE,
                    longest=LENGTH,
                    vocabulary=1000,
                    step=0,
                    max_staleness=None,
                )
                rows = [row for group in groups for row in to_trajectories(group)]
                assert len(rows) == len(groups) * SIZE
                taken += [1000 * int(row.prompt_ids[0]) + int(row.prompt_ids[1]) for row in rows[::SIZE]]
                if len(taken) <= VALID // 5:
                    first = (mine.memory_info().rss, theirs.memory_info().rss)
        finally:
            over.set()
        for one in done:
            one.result()
    growth = [process.memory_info().rss - before for process, before in zip((mine, theirs), first, strict=True)]
    seconds, used = time.monotonic() - began, theirs.cpu_times()
    print(f"{GROUPS} groups in {seconds:.0f} s, {used.user + used.system:.0f} s of a core in run-api")
    print(f"memory grew by {growth[0] >> 20} MiB here, by {growth[1] >> 20} MiB in run-api")
    assert sorted(taken) == [number for number in range(GROUPS) if number % WRONG_EVERY]
    assert client.counts["rejected"] == GROUPS // WRONG_EVERY and client.counts["groups"] == GROUPS
    assert client.counts["batches"] == client.status()["current_step"] and client.counts["lost_batches"] == 0
    assert client._ready_groups == [] and client._parts == []
    assert max(growth) < MOST_GROWTH
    # Everything else that a client keeps is of a size that no number of groups changes.
    assert len(client.last_seen) == POSTERS and client._sizes == {SIZE}
