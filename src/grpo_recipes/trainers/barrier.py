"""The ranks' first meeting: a network that does not carry their collectives is found, and who is missing."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import torch
import torch.distributed

from grpo_recipes.runs.rundir import read_json

MEETING_SECONDS = 300.0


def meet(run_dir: Path, device: torch.device, seconds: float = MEETING_SECONDS) -> None:
    """Sum one element over all ranks.

    Args:
        run_dir: the run directory; the ranks' records in it say on which node each is.
        device: of this rank, where its collectives work.
        seconds: longest wait.

    Raises:
        RuntimeError: not every rank came; over gloo the message names those that are missing.
    """
    if not torch.distributed.is_initialized():
        return
    limit = datetime.timedelta(seconds=seconds)
    backend = torch.distributed.get_backend()
    try:
        if backend == "gloo":
            torch.distributed.monitored_barrier(timeout=limit, wait_all_ranks=True)
        present = torch.ones(1, device=device)
        torch.distributed.all_reduce(present, async_op=True).wait(limit)
    except RuntimeError as error:
        who = _missing(run_dir, str(error)) or "a rank that does not answer"
        advice = "see its log; if it waits too, name the network interface with NETWORK_INTERFACE"
        raise RuntimeError(f"the ranks do not meet over {backend} within {seconds:.0f} s: {who}; {advice}") from error
    if int(present) != torch.distributed.get_world_size():
        raise RuntimeError(f"{int(present)} of {torch.distributed.get_world_size()} ranks took part in an all-reduce")


def _missing(run_dir: Path, error: str) -> str:
    """The ranks that torch's monitored barrier names, with their nodes."""
    named = re.search(r"Ranks ([\d, ]+) failed to pass monitoredBarrier", error)
    if named is None:
        return ""
    said = []
    for rank in named[1].split(","):
        record = read_json(run_dir / "processes" / f"rank_{int(rank)}.json") or {}
        said.append(f"rank {int(rank)} on node {record.get('node', '?')}")
    return ", ".join(said)
