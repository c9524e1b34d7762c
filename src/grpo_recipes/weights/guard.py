"""The proof that the server serves the trainer's weights (a checksum, and its log-probs), or the run stops.

Servers that answer 200 and serve other weights exist. At RL learning rates about 99 % of bf16 weights do not change in
a step, so log-probs cannot see weights one step old in bf16; the checksum can. The checksum cannot see a server that
holds the right weights and computes with others; the log-probs can.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_recipes.server.plugin import fingerprint, held_name, unit_of

_WRAP = 1 << 64

# Largest mean |log p_trainer - log p_server| over the tokens of a batch. Healthy runs of a small model on CPU
# (bench/results/guard_tolerance.json) give 3e-7 in float32 and 2e-3 in bfloat16; another model's weights give 0.1 and
# more. Nobody has measured larger models, GPUs, or float16: there the first healthy syncs of a run say what is usual.
TOLERANCES = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
CALIBRATING_SYNCS = 3  # of a run, by which the tolerance of its dtype is lowered
_MARGIN, _LOWEST = 10.0, 0.1  # times the largest difference of those; share of the dtype's tolerance


class WeightsDiffer(RuntimeError):
    """The server does not serve the trainer's weights; no update was computed from what it sampled."""


def sent_fingerprint(name: str, tensor: torch.Tensor, report: Mapping[str, Any]) -> torch.Tensor:
    """Return the fingerprint of a tensor, on its device, in dtype and units of a worker's ``grpo_weights()``."""
    place = held_name(name, report["parameters"], report["packed"])
    if place is None:
        return fingerprint(tensor, unit_of(tensor))
    _, dtype, *unit = report["parameters"][place]
    return fingerprint(tensor.to(getattr(torch, dtype)), *unit)


def differing(streamed: Mapping[str, int], reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the server's parameters that hold something else than was streamed.

    ``streamed`` has the trainer's fingerprints in the server's dtype, ``reports`` every worker's ``grpo_weights()``.
    """
    held, packed = reports[0]["parameters"], reports[0]["packed"]
    expected: dict[str, int] = {}
    unplaced = 0
    for name, value in streamed.items():
        place = held_name(name, held, packed)
        if place is None:
            unplaced += value
        else:
            expected[place] = expected.get(place, 0) + value

    def holds(value: int, names: Sequence[str]) -> bool:
        """Return whether the workers' shards add up to ``value``, or every worker has a copy of it."""
        values = [sum(report["parameters"][name][0] for name in names) % _WRAP for report in reports]
        return sum(values) % _WRAP == value % _WRAP or set(values) == {value % _WRAP}

    wrong = [name for name, value in expected.items() if not holds(value, [name])]
    # Models whose names vLLM changes otherwise: what found no place must add up to what was not accounted for.
    rest = [name for name in held if name not in expected]
    if not holds(unplaced, rest):
        wrong += rest or ["(no parameter of the server matches)"]
    return wrong


def checksum_error(
    bridge: str, wrong: Sequence[str], sync: int = 0, reports: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    """Return the message for a failed checksum, or for workers with another sync than ``sync``, or None.

    ``sync`` is the number of the one that was sent last; 0: none was, and the workers' own are not looked at.
    """
    some = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    found = [f"after the sync it holds other values than the trainer in {some}"] if wrong else []
    held = sorted({report["sync"] for report in reports} - {sync}) if sync else []
    if held:
        numbers = ", ".join(map(str, held))
        found.append(f"it has the weights of sync {numbers}, and the trainer sent sync {sync}")
    return f"weights did not reach the server through the '{bridge}' bridge: {'; '.join(found)}" if found else None


def calibrated(tolerance: float, healthy: Sequence[float]) -> float:
    """Return the tolerance of a dtype, lowered to ten times the largest difference of a run's first healthy syncs.

    Never below a tenth of it, and never above it: a first sync that is wrong must not allow the rest.
    """
    if len(healthy) < CALIBRATING_SYNCS:
        return tolerance
    return min(tolerance, max(_MARGIN * max(healthy), _LOWEST * tolerance))


def logprob_error(bridge: str, difference: float, tolerance: float) -> str | None:
    """Return the message for log-probs that disagree, or None."""
    if difference <= tolerance:
        return None
    return (
        f"the server computes with other weights than the trainer's after a sync through the '{bridge}' bridge: mean "
        f"|log-prob difference| {difference:.3g} on the first batch exceeds {tolerance:.3g} (weight_guard_tolerance)"
    )
