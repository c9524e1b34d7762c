"""Two processes meet, or the one that is missing is named."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

RANK = """
import os, pathlib, sys, time, torch, torch.distributed
from grpo_recipes.trainers.rank import first_barrier
rank, port, folder, seconds = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), float(sys.argv[4])
first_barrier(folder, torch.device("cpu"))  # alone: nothing to do
torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
if sys.argv[5] == "late" and rank == 1:
    time.sleep(seconds + 4)
    os._exit(0)
try:
    first_barrier(folder, torch.device("cpu"), seconds)
    print("met", flush=True)
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "seconds", "said"),
    [
        ("in time", "60", "met"),
        ("late", "1", "the ranks do not meet over gloo within 1 s: rank 1 on node 7; see its log"),
    ],
)
def test_ranks_meet_or_the_missing_one_is_named(tmp_path, how, seconds, said):
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes/rank_1.json").write_text(json.dumps({"rank": 1, "node": 7, "pid": 1}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), port, str(tmp_path), seconds, how],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert told[0].startswith(said), told
