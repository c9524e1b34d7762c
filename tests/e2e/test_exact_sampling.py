"""A real server: a generation has the same bits after other traffic and on another server."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from one_by_one import Bench

from grpo_recipes.launch.readiness import Activity, read_activity
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.weights.file import FileClient

NOISE = random.Random(3)
PROMPTS = [[NOISE.randrange(5, 20) for _ in range(NOISE.randrange(4, 40))] for _ in range(16)]
COMPLETIONS = 4
LONG = {"max_tokens": 24, "generation_kwargs": {"ignore_eos": True}}


def generate(client: FileClient) -> dict[str, Any]:
    client.generation_name = "train/3"
    return client.generate(PROMPTS, n=COMPLETIONS, **LONG)


def other_traffic(bench: Bench, url: str, turn: int) -> None:
    """Prompts that share beginnings with ours, unseeded and not held, then a seeded generation of another size."""
    bench.client(url, seed=None).generate([[*PROMPTS[turn], 7], PROMPTS[2]], n=3, max_tokens=7)
    client = bench.client(url)
    client.generation_name = f"other/{turn}"
    client.generate(PROMPTS[::-1][: 3 + turn], n=2, max_tokens=9)


def end_in_flight(client: FileClient, run_dir: Path) -> float:
    """Stop the run during a generation and return the seconds until the generation ended."""
    stop = StopRequest(run_dir)
    client.stop = stop
    stop_times: list[float] = []

    def request_stop() -> None:
        stop_times.append(time.monotonic())
        stop_file(run_dir).touch()

    threading.Timer(0.2, request_stop).start()
    with stop.cutting_short():
        assert client.generate(PROMPTS, n=16, **LONG)["completion_ids"] == [[0]] * 16 * len(PROMPTS)
    return time.monotonic() - stop_times[0]


def stacks_of_every_process(bench: Bench) -> dict[str, str]:
    files = list((bench.run_dir / "stacks").glob("server_*.txt"))
    for file in files:
        os.kill(int(file.stem.removeprefix("server_")), signal.SIGUSR2)
    deadline = time.monotonic() + 10
    while not all(file.stat().st_size for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {file.name: file.read_text() for file in files}


@pytest.mark.slow
def test_a_generation_has_the_same_bits_again_after_other_traffic_and_on_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path).joined(monkeypatch)
    with bench.server() as url:
        client = bench.client(url)
        first = generate(client)
        assert len({tuple(ids) for ids in first["completion_ids"]}) > len(PROMPTS)
        for turn in range(5):
            other_traffic(bench, url, turn)
            assert generate(client) == first  # log-probs too, as floats: to the last bit

        activity = read_activity("127.0.0.1", int(url.rsplit(":", 1)[1]), client.session.headers["Authorization"][7:])
        assert isinstance(activity, Activity) and activity.requests == 0
        assert activity.tokens >= 6 * len(PROMPTS) * COMPLETIONS * LONG["max_tokens"]
        assert len(stacks_of_every_process(bench)) == 3  # the API server, the engine, its worker
        assert all("most recent call first" in text for text in stacks_of_every_process(bench).values())

        assert end_in_flight(bench.client(url), tmp_path) < 3
        assert generate(client) == first
    with bench.server() as url:
        assert generate(bench.client(url)) == first
