"""The figures of bench/weights.py, from rounds and memory that are written down."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bench.scripts import HOME, script
from grpo_recipes.runs.rundir import read_json

RECORD = HOME / "bench/results/weights.json"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with script("weights", alias="bench_weights") as module:
        yield module


def case(weights: int, moved: int, pss: tuple[int, int], *rounds: tuple[float, float, float]) -> dict:
    memory = dict(zip(("trainer", "server"), pss, strict=True))
    return {
        "weight_bytes": weights,
        "moved_bytes": moved,
        "pss_bytes": memory,
        "peak_bytes": {name: 2 * value for name, value in memory.items()},
        "rounds": [dict(zip(("copy", "sync", "sync without guard"), row, strict=True)) for row in rounds],
    }


def test_a_ratio_is_that_of_one_round_and_memory_is_beyond_the_idle_pair(bench):
    idle = case(10, 10, (100, 200), (1, 1, 1))
    large = case(110, 55, (160, 250), (1, 2, 1.5), (10, 40, 30), (2, 6, 4))
    figures = bench.figures({"1B": {"file": large}, "1M": {"file": idle}})
    assert list(figures) == ["1M", "1B"]
    assert figures["1B"]["file"] == {
        "sync to copy": 3,
        "sync without guard to copy": 2,
        "moved to weights": 0.5,
        "pss to weights": 1.1,
        "peak to weights": 2.2,
    }
    assert "pss to weights" not in figures["1M"]["file"]


def test_a_ratio_is_to_the_mean_of_the_copies_before_and_after(bench):
    single_case = case(10, 10, (100, 200), (1, 6, 3))
    single_case["rounds"][0]["copy after"] = 3
    figures = bench.figures({"1M": {"file": single_case}})["1M"]["file"]
    assert (figures["sync to copy"], figures["sync without guard to copy"]) == (3, 1.5)


def test_the_sync_of_a_round_is_between_two_copies(bench, tmp_path, monkeypatch):
    did: list[str] = []
    monkeypatch.setattr(bench, "plain_copy", lambda _, file: (did.append("copy"), file.touch()))
    args, client = SimpleNamespace(weight_guard=True), SimpleNamespace(checksum_error=None)
    for turn in (0, 1):
        did.clear()
        sync = lambda: did.append(f"sync {args.weight_guard}")  # noqa: E731
        row = bench.timed_round(args, client, sync, None, tmp_path / "copy", turn)
        order = ["copy", "sync True", "copy", "sync False"]
        assert did == (order if turn == 0 else order[::-1])
        assert sorted(row) == ["copy", "copy after", "sync", "sync without guard"]


def test_memory_is_that_of_living_processes(bench):
    pids, before, size = [os.getpid()], bench.pss([os.getpid()]), 64 << 20
    with mmap.mmap(-1, size) as memory:  # not from the heap, which may have as much left of earlier tests
        memory.write(b"1" * size)
        assert bench.pss(pids) - before > 0.9 * size and bench.peak(pids) >= bench.pss(pids)


def test_the_plain_copy_has_every_byte(bench, tmp_path):
    model = torch.nn.Linear(3, 5).to(torch.bfloat16)
    (tmp_path / "copy").write_bytes(b"an older one")
    bench.plain_copy(model, tmp_path / "copy")
    parts = [parameter.detach().view(-1).view(torch.uint8).numpy().tobytes() for parameter in model.parameters()]
    assert (tmp_path / "copy").read_bytes() == b"".join(parts)


def test_the_record_has_the_figures_of_its_rounds(bench):
    record = read_json(RECORD)
    assert record["cases"] and record["figures"] == bench.figures(record["cases"])
