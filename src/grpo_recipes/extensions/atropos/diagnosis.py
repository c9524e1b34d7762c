"""Explain why no batch comes, from run-api's queue, its environments and its packing rule.

The trainer's client calls ``diagnose_missing_batch`` when it gives up waiting, and puts the result into its error.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from grpo_recipes.extensions.atropos.connection import AtroposError, Connection
from grpo_recipes.extensions.atropos.packing import predict_deadlock

_MAX_ENVIRONMENTS = 64  # env_ids that are tried
_DEADLOCK = "deadlock"
# A temporary environment that asks for the largest group in the queue. Its weight hardly changes the other shares.
_OBSERVER = {"max_token_length": 1, "desired_name": "diagnosis", "weight": 1e-6, "group_size": 1}
_BUFFERED = (
    "the queue is empty; run-api may hold back smaller groups than their environment registered, invisibly, until they "
    "add up to that size"
)


def diagnose_missing_batch(
    connection: Connection, batch_size: int | None, last_seen: Mapping[int | None, float], sizes: Collection[int]
) -> tuple[str, list[str]]:
    """Request run-api's state; return the likely reason why it hands out no batch, and the lines of a report.

    If groups are queued, this registers an environment of almost no weight at run-api, and disconnects it again.

    Args:
        connection: the connection to run-api.
        batch_size: sequences of a registered batch; None reads the number from run-api.
        last_seen: ``time.monotonic()`` of the last group of each environment, by its id.
        sizes: sizes of the groups that came.
    """
    status, status_failure = connection.try_get("/status")
    if not status:
        return f"run-api {status_failure}", [f"/status of run-api at {connection.url}: {status_failure}"]
    info, info_failure = connection.try_get("/info")
    environments: dict[int, dict[str, Any]] = {}
    for env_id in range(_MAX_ENVIRONMENTS):
        environment, _ = connection.try_get("/status-env", {"env_id": env_id})
        if "self_queue_size" not in environment:
            break
        environments[env_id] = environment
    queued = int(status.get("queue_size", 0))
    all_sizes = {*sizes, *(_read_queued_sizes(connection) if queued else ())}
    # If no known environment sent the latest group, count the queued groups that no environment counts.
    latest, _ = connection.try_get("/latest_example") if queued else ({}, "")
    counted = sum(int(environment.get("self_queue_size", 0)) for environment in environments.values())
    latest_is_uncounted = not environments or latest.get("env_id") not in environments
    without_id = max(0, queued - counted) if latest_is_uncounted and latest.get("tokens") else 0
    packing = _explain_packing(
        queued, batch_size or int(info.get("batch_size", -1)), all_sizes, environments, without_id
    )
    activity = _describe_activity(environments, last_seen, without_id)
    # With an empty queue, the environments without groups explain more than the packing rule.
    reason = packing if queued or packing.startswith(_DEADLOCK) else "; ".join(activity)
    lines = [f"/status of run-api at {connection.url}: {status}", f"/info: {info or info_failure}", *activity]
    return reason, [*lines, f"packing: {packing}"]


def _read_queued_sizes(connection: Connection) -> set[int]:
    """Return the sizes of queued groups that run-api shows: of the latest group and of the largest group.

    run-api shows the largest size only to an environment. So this registers an environment of almost no weight, and
    disconnects it again. A failed request is ignored.
    """
    latest, _ = connection.try_get("/latest_example")
    sizes = {len(latest["tokens"])} if latest.get("tokens") else set()
    with suppress(AtroposError):
        env_id = connection.request("POST", "/register-env", _OBSERVER, repeat=False).get("env_id")
        if env_id is not None:
            status, _ = connection.try_get("/status-env", {"env_id": env_id})
            connection.request("POST", "/disconnect-env", {"env_id": env_id}, repeat=False)
            sizes |= {int(status["max_group_size"])} if "max_group_size" in status else set()
    return sizes


def _describe_activity(
    environments: Mapping[int, Mapping[str, Any]], last_seen: Mapping[int | None, float], without_id: int
) -> list[str]:
    """Return a line for each environment that joined or sent a group: seconds since its last group, and its queue.

    ``last_seen`` has monotonic times by id. A last line counts the ``without_id`` queued groups without an environment.
    """
    now = time.monotonic()
    lines = []
    for env_id in [*environments, *(env_id for env_id in last_seen if env_id not in environments)]:
        age = f"last seen {now - last_seen[env_id]:.0f} s ago" if env_id in last_seen else "it never sent a group"
        queued = environments.get(env_id, {}).get("self_queue_size") if env_id is not None else None
        queue = "" if queued is None else f", {queued} of its groups in the queue"
        lines.append(f"environment {'without an id' if env_id is None else env_id}: {age}{queue}")
    if without_id:
        lines.append(f"groups without an env_id: {without_id} in the queue")
    return lines or ["no environment has joined, and no group ever came"]


def _explain_packing(
    queued: int,
    batch_size: int,
    sizes: Collection[int],
    environments: Mapping[int, Mapping[str, Any]],
    without_id: int,
) -> str:
    """Return a sentence that explains why run-api builds no batch from the queued groups.

    The sentence starts with "deadlock" if run-api would never build one. ``sizes`` are known group sizes, and
    ``without_id`` is the number of queued groups without an environment.
    """
    if batch_size > 0 and (reason := predict_deadlock(batch_size, sorted(sizes))):
        return f"{_DEADLOCK}, since {reason}"
    if not queued:
        return _BUFFERED if environments else "the queue is empty"
    of_sizes = f" of {', '.join(map(str, sorted(sizes)))} sequences" if sizes else ""
    line = f"the groups in the queue ({queued}{of_sizes}) do not fill a batch of {batch_size} sequences"
    has_shares = any(environment.get("unallocated_fraction", 1.0) < 1.0 for environment in environments.values())
    idle = [str(env_id) for env_id, environment in environments.items() if not environment.get("self_queue_size")]
    if has_shares and without_id:
        return f"{line}; while an environment has a min_allocation, run-api hands out no group without an env_id"
    if has_shares and idle:
        line += f"; an environment with a min_allocation and no groups blocks every batch: perhaps {', '.join(idle)}"
    return line
