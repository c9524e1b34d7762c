"""What travels from the run's server to the trainer for a completion: token ids, and one log-prob for each.

An answer is a safetensors file: 8 bytes a token, exact to the bit, and read at the speed of a copy. As the JSON of an
OpenAI-compatible server it would be text, tokens as strings and every log-prob twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from grpo_recipes.errors import translate

COMPLETIONS_PATH = "/grpo/completions"
BYTES_PER_TOKEN = 8  # of an answer: an id, and a log-prob
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, as in vLLM's own answers


class Completions(NamedTuple):
    """Some completions, those of a prompt side by side; their tokens stand one after the other."""

    lengths: np.ndarray  # (B,) int32: tokens of each
    ids: np.ndarray  # (sum of lengths,) int32
    logprobs: np.ndarray | None  # as ids, float32; None where none were asked for

    def rows(self) -> tuple[list[list[int]], list[list[list[float]]] | None]:
        """Return ids, and log-probs in the shape of TRL's, which has room for other tokens' beside each: (B, T, 1)."""
        ends = np.cumsum(self.lengths)[:-1]
        ids = [row.tolist() for row in np.split(self.ids, ends)]
        if self.logprobs is None:
            return ids, None
        return ids, [row.tolist() for row in np.split(self.logprobs[:, None], ends)]


def completions_of(ids_BT: Sequence[Sequence[int]], logprobs_BT: Sequence[Sequence[float]] | None) -> Completions:
    """Return completions that are lists of ids, and of log-probs or None."""
    lengths = np.fromiter(map(len, ids_BT), np.int32)
    ids = np.fromiter(chain.from_iterable(ids_BT), np.int32)
    if logprobs_BT is None:
        return Completions(lengths, ids, None)
    if [len(row) for row in logprobs_BT] != lengths.tolist():
        raise ValueError("not one log-prob for each token")
    logprobs = np.fromiter(chain.from_iterable(logprobs_BT), np.float32)
    return Completions(lengths, ids, np.maximum(logprobs, np.float32(LOWEST_LOGPROB)))


def packed(completions: Completions) -> bytes:
    """Return what travels."""
    return save({name: array for name, array in completions._asdict().items() if array is not None})


def unpacked(body: bytes) -> Completions:
    """Return the completions of an answer; ValueError where it is none."""
    with translate(SafetensorError, lambda error: ValueError(f"{len(body)} bytes that are no completions ({error})")):
        arrays = load(body)
    found = Completions(arrays["lengths"], arrays["ids"], arrays.get("logprobs"))
    kinds = [None if array is None else (array.dtype.name, array.ndim) for array in found]
    if kinds not in ([("int32", 1), ("int32", 1), scored] for scored in (None, ("float32", 1))):
        raise ValueError(f"arrays of other kinds: {kinds}")
    if int(found.lengths.sum(dtype=np.int64)) != len(found.ids):
        raise ValueError(f"{len(found.ids)} tokens where the lengths say {found.lengths.sum(dtype=np.int64)}")
    return found
