"""Limits for numbers from user code and other processes: rewards, scores, advantages and log-probs.

Python computes in float64, but training uses float32, which has no finite 1e39. Smaller numbers also break a step,
because a group's variance squares its rewards.
"""

import math

LARGEST_REWARD = (
    1e15  # limit for a reward, score or advantage, so that the variance of a large group stays finite in float32
)
LOWEST_LOGPROB = (
    -104.0
)  # limit for a sampled token: float32 cannot represent a smaller probability, so -9999 is not a log-prob
_LARGEST_FLOAT32 = 3.4028234e38


def find_reward_problem(value: float) -> str | None:
    """Return why a reward, score or advantage is unusable: NaN, infinite, or beyond +-1e15. None if it is fine."""
    if isinstance(value, int) and abs(value) > LARGEST_REWARD:  # may be too large for a float
        return f"an integer is beyond {LARGEST_REWARD:.0e}: the variance of a group would overflow float32"
    if not math.isfinite(value):
        return f"{value}"
    if abs(value) > _LARGEST_FLOAT32:
        return f"{value:.0e} is infinite in float32"
    if abs(value) > LARGEST_REWARD:
        return f"{value:.0e} is beyond {LARGEST_REWARD:.0e}: the variance of a group would overflow float32"
    return None


def is_logprob(value: float) -> bool:
    """Return whether a number can be the log-prob of a sampled token; a positive rounding error is allowed."""
    return LOWEST_LOGPROB <= value <= 1e-3
