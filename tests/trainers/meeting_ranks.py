"""One of two ranks that wait for each other. `test_rank` says for how long, and whether rank 1 comes late."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from grpo_recipes.trainers.rank import wait_for_all_ranks

LATE = 1  # the rank that does not come in time


def main(run: Path, seconds: float, late: bool) -> None:
    """Print "met", or why the ranks did not meet."""
    wait_for_all_ranks(run, torch.device("cpu"))  # without other ranks there is nothing to do
    torch.distributed.init_process_group("gloo")
    if late and torch.distributed.get_rank() == LATE:
        time.sleep(seconds + 4)
        return
    try:
        wait_for_all_ranks(run, torch.device("cpu"))
        print("met", flush=True)
    except RuntimeError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "late")
    os._exit(0)
