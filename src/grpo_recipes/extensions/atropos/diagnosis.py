"""Why no batch comes: what run-api shows of its queue and environments, and what its packing rule makes of them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from grpo_recipes.extensions.atropos.connection import AtroposError, Connection
from grpo_recipes.extensions.atropos.packing import foreseen_deadlock

_MOST_ENVIRONMENTS = 64  # that are asked for
_DEADLOCK = "deadlock"
# Asks for the largest group in the queue; its weight leaves the shares of the others as they are.
_OBSERVER = {"max_token_length": 1, "desired_name": "diagnosis", "weight": 1e-6, "group_size": 1}
_BUFFER = (
    "the queue is empty; a group of another size than its environment registered waits, out of sight, until others "
    "complete that size"
)


def diagnosis(
    connection: Connection, batch_size: int | None, last_seen: Mapping[int | None, float], sizes: Collection[int]
) -> tuple[str, list[str]]:
    """Return the likely reason, and a line for each thing that run-api shows: state, environments, packing.

    Args:
        connection: to run-api.
        batch_size: sequences that were registered; run-api's own where None.
        last_seen: when a group of each environment came last, as ``time.monotonic`` says.
        sizes: of the groups that came.
    """
    status, no_status = connection.look("/status")
    if not status:
        return f"run-api {no_status}", [f"/status of run-api at {connection.url}: {no_status}"]
    info, no_info = connection.look("/info")
    environments = _environments(connection)
    queued = int(status.get("queue_size", 0))
    found = {*sizes, *(_queued_sizes(connection) if queued else ())}
    nameless = _without_id(connection, queued, environments)
    packing = _packing(queued, batch_size or int(info.get("batch_size", -1)), found, environments, nameless)
    seen = _seen(environments, last_seen, nameless)
    # Where nothing is queued, who has sent nothing says more than the queue.
    reason = packing if queued or packing.startswith(_DEADLOCK) else "; ".join(seen)
    lines = [f"/status of run-api at {connection.url}: {status}", f"/info: {info or no_info}", *seen]
    return reason, [*lines, f"packing: {packing}"]


def _environments(connection: Connection) -> dict[int, dict[str, Any]]:
    """Return what run-api says of each environment that has joined, by its id."""
    found: dict[int, dict[str, Any]] = {}
    for index in range(_MOST_ENVIRONMENTS):
        answer, _ = connection.look("/status-env", {"env_id": index})
        if "self_queue_size" not in answer:
            break
        found[index] = answer
    return found


def _queued_sizes(connection: Connection) -> set[int]:
    """Return the sizes of queued groups that run-api shows: the size of the latest group, and the largest size.

    run-api shows the largest size only to an environment. So an environment of no weight joins for the question.
    """
    latest, _ = connection.look("/latest_example")
    sizes = {len(latest["tokens"])} if latest.get("tokens") else set()
    with suppress(AtroposError):
        env_id = connection.ask("POST", "/register-env", _OBSERVER, repeat=False).get("env_id")
        if env_id is not None:
            shown, _ = connection.look("/status-env", {"env_id": env_id})
            connection.ask("POST", "/disconnect-env", {"env_id": env_id}, repeat=False)
            sizes |= {int(shown["max_group_size"])} if "max_group_size" in shown else set()
    return sizes


def _without_id(connection: Connection, queued: int, environments: Mapping[int, Mapping[str, Any]]) -> int:
    """Return how many queued groups belong to no environment: those that the environments do not count as theirs."""
    latest, _ = connection.look("/latest_example") if queued else ({}, "")
    theirs = sum(int(environment.get("self_queue_size", 0)) for environment in environments.values())
    known = not environments or latest.get("env_id") not in environments
    return max(0, queued - theirs) if known and latest.get("tokens") else 0


def _seen(
    environments: Mapping[int, Mapping[str, Any]], last_seen: Mapping[int | None, float], nameless: int
) -> list[str]:
    """Return when each environment was last seen, and how many groups it has in the queue."""
    now = time.monotonic()
    lines = []
    for env_id in [*environments, *(one for one in last_seen if one not in environments)]:
        seen = f"last seen {now - last_seen[env_id]:.0f} s ago" if env_id in last_seen else "no group of it ever came"
        queued = environments.get(env_id, {}).get("self_queue_size") if env_id is not None else None
        beside = "" if queued is None else f", {queued} of its groups in the queue"
        lines.append(f"environment {'without an id' if env_id is None else env_id}: {seen}{beside}")
    if nameless:
        lines.append(f"groups without an env_id: {nameless} in the queue")
    return lines or ["no environment has joined, and no group ever came"]


def _packing(
    queued: int, batch_size: int, sizes: Collection[int], environments: Mapping[int, Mapping[str, Any]], nameless: int
) -> str:
    """Return what run-api's packing rule makes of the queue."""
    if batch_size > 0 and (why := foreseen_deadlock(batch_size, sorted(sizes))):
        return f"{_DEADLOCK}, since {why}"
    if not queued:
        return _BUFFER if environments else "the queue is empty"
    of_sizes = f" of {', '.join(map(str, sorted(sizes)))} sequences" if sizes else ""
    line = f"the groups in the queue ({queued}{of_sizes}) do not fill a batch of {batch_size} sequences"
    shares = any(one.get("unallocated_fraction", 1.0) < 1.0 for one in environments.values())
    lacking = [str(index) for index, one in environments.items() if not one.get("self_queue_size")]
    if shares and nameless:
        return f"{line}; while an environment has a min_allocation, run-api hands out no group without an env_id"
    if shares and lacking:
        line += f"; an environment with a least share and no groups stops every batch: perhaps {', '.join(lacking)}"
    return line
