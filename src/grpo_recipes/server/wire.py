"""Encode completions for the way from the run's server to the trainer: token ids, and a log-prob for each.

An answer is a safetensors file: 8 bytes per token, bit-exact, and as fast to read as a copy. The JSON of an
OpenAI-compatible server would contain text, tokens as strings, and every log-prob twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from grpo_recipes.errors import translate_errors

COMPLETIONS_PATH = "/grpo/completions"
WORKERS_PATH = "/grpo/workers"  # calls a method of every worker of every replica
REPLICA_HEADER = "X-data-parallel-rank"  # vLLM's header with the replica that must answer a request
BYTES_PER_TOKEN = 8  # an id and a log-prob
LOWEST_LOGPROB = -9999.0  # represents minus infinity, as in vLLM's own answers


@dataclass(eq=False)
class TokenLogprobs:
    """The log-probs of a completion, (T, 1), read like lists of a number: ``row[5][0]``, ``[x for (x,) in row]``.

    It contains an array, because millions of lists take seconds to make. The last axis is TRL's, which allows the
    log-probs of several tokens at a position.
    """

    logprobs: NDArray[np.float32]
    """(T,)"""

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, index: int) -> tuple[float]:
        return (float(self.logprobs[index]),)

    def __iter__(self) -> Iterator[tuple[float]]:
        return zip(self.logprobs.tolist())

    def __eq__(self, other: object) -> bool:
        """Compare the numbers, also with a list of such lists."""
        return isinstance(other, TokenLogprobs | list) and [*map(list, self)] == [*map(list, other)]


@dataclass(eq=False)
class PackedRows(Sequence[Any]):
    """Token ids or log-probs of completions in a flat array, read like a list of rows. A slice is a list.

    TRL sends the completions of all ranks to every rank, which slices its own rows. So only the rank that needs a row
    unpacks it, and rank 0 pickles two arrays instead of millions of numbers.
    """

    bounds: NDArray[np.int64]
    """The start of each row, and the end of the last row, (B + 1,)."""
    values: NDArray[np.int32] | NDArray[np.float32]
    """Ids or log-probs of all rows, (sum of lengths,)."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: Any) -> Any:
        """Return the row of an index, a list of ids or a TokenLogprobs, or the list of a slice's rows."""
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        row = range(len(self))[index]
        values: NDArray[Any] = self.values[self.bounds[row] : self.bounds[row + 1]]
        return TokenLogprobs(values) if values.dtype == np.float32 else values.tolist()

    def __eq__(self, other: object) -> bool:
        """Compare the rows, also with a list of rows."""
        return isinstance(other, PackedRows | list) and [*self] == [*other]


class Completions(NamedTuple):
    """Completions as flat arrays: the tokens of all completions, one after the other."""

    lengths: NDArray[np.int32]  # number of tokens of each completion, (B,)
    ids: NDArray[np.int32]  # (sum of lengths,)
    logprobs: NDArray[np.float32] | None  # (sum of lengths,); None if none were requested

    def rows(self) -> tuple[PackedRows, PackedRows | None]:
        """Return rows of token ids, (B, T), and of log-probs, (B, T, 1), or None without log-probs."""
        bounds = np.append(0, np.cumsum(self.lengths, dtype=np.int64))
        return PackedRows(bounds, self.ids), None if self.logprobs is None else PackedRows(bounds, self.logprobs)


def flatten_completions(ids_BT: Sequence[Sequence[int]], logprobs_BT: Sequence[Sequence[float]] | None) -> Completions:
    """Join (B, T) lists of token ids, and of log-probs unless they are None, to flat arrays.

    Log-probs below ``LOWEST_LOGPROB`` are raised to it. Raise ValueError if a token has no log-prob.
    """
    lengths = np.fromiter(map(len, ids_BT), np.int32)
    ids = np.fromiter(chain.from_iterable(ids_BT), np.int32)
    if logprobs_BT is None:
        return Completions(lengths, ids, None)
    if [len(row) for row in logprobs_BT] != lengths.tolist():
        raise ValueError("not one log-prob for each token")
    logprobs = np.fromiter(chain.from_iterable(logprobs_BT), np.float32)
    return Completions(lengths, ids, np.maximum(logprobs, np.float32(LOWEST_LOGPROB)))


def join_completions(answers: Sequence[Completions]) -> Completions:
    """Join the completions of several answers. Without log-probs in an answer, return none."""
    lengths, ids, logprobs = zip(*answers, strict=True)
    joined_logprobs = None if any(array is None for array in logprobs) else np.concatenate(logprobs)
    return Completions(np.concatenate(lengths), np.concatenate(ids), joined_logprobs)


def pack_completions(completions: Completions) -> bytes:
    """Encode completions as the bytes of an answer, a safetensors file."""
    return save({name: array for name, array in completions._asdict().items() if array is not None})


def unpack_completions(body: bytes) -> Completions:
    """Decode the body of an answer to completions.

    Raise ValueError if it is not a safetensors file or is inconsistent, and KeyError if it lacks an array.
    """
    with translate_errors(
        SafetensorError, lambda error: ValueError(f"{len(body)} bytes that are not completions ({error})")
    ):
        arrays: dict[str, Any] = load(body)
    completions = Completions(arrays["lengths"], arrays["ids"], arrays.get("logprobs"))
    kinds = [None if array is None else (array.dtype.name, array.ndim) for array in completions]
    if kinds not in ([("int32", 1), ("int32", 1), logprobs] for logprobs in (None, ("float32", 1))):
        raise ValueError(f"arrays of other kinds: {kinds}")
    token_count = int(completions.lengths.sum(dtype=np.int64))
    if token_count != len(completions.ids):
        raise ValueError(f"expected {token_count} tokens by the lengths, got {len(completions.ids)}")
    return completions
