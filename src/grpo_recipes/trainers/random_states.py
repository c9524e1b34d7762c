"""The states of this process's random number generators."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_states() -> dict[str, Any]:
    """Those of Python, numpy, torch and its current device, to be put back with ``set_random_states``."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what ``random_states`` returned."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["device"] is not None:
        torch.cuda.set_rng_state(states["device"])
