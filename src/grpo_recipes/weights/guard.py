"""Check that the server uses the trainer's weights, by a checksum and by its log-probs; otherwise the run stops.

Some servers answer 200 to a weight update and still use other weights. At RL learning rates, about 99 % of bf16 weights
do not change in a step, so log-probs cannot detect bf16 weights that are one step old; the checksum can. The checksum
cannot detect a server that stores the right weights and computes with others; the log-probs can.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_recipes.server.plugin import choose_unit, find_server_name, fingerprint

_WRAP = 1 << 64

# Largest mean |log p_trainer - log p_server| over the tokens of a batch. Healthy runs of a small model on CPU
# (bench/results/guard_tolerance.json) give 3e-7 in float32 and 2e-3 in bfloat16. Another model's weights give 0.1 and
# more. Larger models, GPUs and float16 are not measured: there the first healthy syncs of a run set the tolerance.
TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
CALIBRATING_SYNCS = 3  # first syncs of a run that lower the tolerance of its dtype
_MARGIN, _LOWEST = 10.0, 0.1  # multiple of the largest calibrating difference; lowest fraction of the dtype's tolerance


class WeightsDiffer(RuntimeError):
    """Raised if vLLM does not use the trainer's weights; no update was computed from its samples."""


def compute_sent_fingerprint(name: str, tensor: torch.Tensor, report: Mapping[str, Any]) -> torch.Tensor:
    """Return the fingerprint of a sent tensor, on its device, for comparison with a worker's report (``grpo_weights``).

    If the report has a parameter of this name, the tensor is first converted to its dtype, and the fingerprint uses its
    unit (``choose_unit``).
    """
    server_name = find_server_name(name, report["parameters"], report["packed"])
    if server_name is None:
        return fingerprint(tensor, choose_unit(tensor))
    _, dtype, *unit = report["parameters"][server_name]
    return fingerprint(tensor.to(getattr(torch, dtype)), *unit)


def find_differences(streamed: Mapping[str, int], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the server's parameters that differ from the trainer's; an empty list if all are equal.

    ``streamed`` has the trainer's fingerprints in the server's dtype, ``reports`` the ``grpo_weights()`` of all workers
    of a replica.
    """
    parameters, packed = reports[0]["parameters"], reports[0]["packed"]
    expected: dict[str, int] = {}
    unmatched_sum = 0
    for name, value in streamed.items():
        server_name = find_server_name(name, parameters, packed)
        if server_name is None:
            unmatched_sum += value
        else:
            expected[server_name] = expected.get(server_name, 0) + value

    def holds(value: int, names: Sequence[str]) -> bool:
        """Return whether the workers' shards add up to ``value``, or every worker has a copy of it."""
        values = [sum(report["parameters"][name][0] for name in names) % _WRAP for report in reports]
        return sum(values) % _WRAP == value % _WRAP or set(values) == {value % _WRAP}

    wrong = [name for name, value in expected.items() if not holds(value, [name])]
    # vLLM renames parameters of some models in other ways. The unmatched parameters of both sides must have equal sums.
    unmatched = [name for name in parameters if name not in expected]
    if not holds(unmatched_sum, unmatched):
        wrong += unmatched or ["(no parameter of the server matches)"]
    return wrong


def describe_checksum_error(
    bridge: str, wrong: Sequence[Sequence[str]], sync: int = 0, replicas: Sequence[Sequence[Mapping[str, Any]]] = ()
) -> str | None:
    """Return an error message if a replica has wrong parameters or another sync than ``sync``, else None.

    ``wrong`` has the names of each replica's wrong parameters, and ``replicas`` the reports of each replica's workers.
    ``sync`` is the number of the last sync. With 0, the workers' numbers are not compared.
    """
    problems = []
    for index, names in enumerate(wrong):
        replica = f"replica {index}: " if len(wrong) > 1 else ""
        if names:
            listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            problems.append(f"{replica}after the sync it holds other values than the trainer in {listed}")
        other_syncs = sorted({report["sync"] for report in replicas[index]} - {sync}) if sync else []
        if other_syncs:
            numbers = ", ".join(map(str, other_syncs))
            problems.append(f"{replica}it has the weights of sync {numbers}, and the trainer sent sync {sync}")
    if not problems:
        return None
    return f"weights did not reach the server through the '{bridge}' bridge: {'; '.join(problems)}"


def calibrate_tolerance(tolerance: float, healthy: Sequence[float]) -> float:
    """Return a dtype's tolerance, lowered to ten times the largest difference of a run's first healthy syncs.

    ``healthy`` has the mean |log p_trainer - log p_server| of each such sync. With fewer than ``CALIBRATING_SYNCS``
    values, return ``tolerance`` unchanged. The result is between a tenth of ``tolerance`` and ``tolerance``. It never
    exceeds ``tolerance``, so that an unnoticed wrong first sync does not let later wrong syncs pass.
    """
    if len(healthy) < CALIBRATING_SYNCS:
        return tolerance
    return min(tolerance, max(_MARGIN * max(healthy), _LOWEST * tolerance))


def describe_logprob_error(bridge: str, difference: float, tolerance: float) -> str | None:
    """Return an error message if the mean log-prob ``difference`` exceeds ``tolerance``, else None."""
    if difference <= tolerance:
        return None
    return (
        f"the server computes with other weights than the trainer's after a sync through the '{bridge}' bridge: mean "
        f"|log-prob difference| {difference:.3g} on the first batch exceeds {tolerance:.3g} (weight_guard_tolerance)"
    )
