"""Test the transfer format of completions: token ids and log-probs have the same bits on both sides."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from grpo_recipes.server.wire import (
    Completions,
    flatten_completions,
    join_completions,
    pack_completions,
    unpack_completions,
)  # fmt: skip

logprobs = st.floats(max_value=0.0, width=32, allow_nan=False)
tokens = st.tuples(st.integers(0, 2**31 - 1), logprobs)


@given(st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=5))
def test_the_same_bits_arrive(completions) -> None:
    ids = [[token for token, _ in row] for row in completions]
    scored = [[logprob for _, logprob in row] for row in completions]
    arrived, of_each = unpack_completions(pack_completions(flatten_completions(ids, scored))).rows()
    assert arrived == ids
    lowest = [[[max(logprob, -9999.0)] for logprob in row] for row in scored]  # as JSON from vLLM had it
    assert of_each == lowest
    assert [[[row[index][0]] for index in range(len(row))] for row in of_each] == lowest
    assert pickle.loads(pickle.dumps(of_each)) == of_each != [*of_each, [[0.0]]]
    assert [math.copysign(1, logprob) for row in of_each for (logprob,) in row] == [
        math.copysign(1, logprob) for row in scored for logprob in row
    ]


def test_all_rows_are_sent_as_arrays_and_each_rank_unpacks_its_slice() -> None:
    lengths, ids, logprobs = lengths_and_tokens([2000, 2, 0, 1])
    rows = pickle.loads(body := pickle.dumps(Completions(lengths, ids, logprobs).rows()))
    assert len(body) < 8 * len(ids) + 1000  # 4 bytes for an id, 4 for a log-prob
    assert [[*row] for row in rows[0][1:]] == [[2000, 2001], [], [2002]] == rows[0][-3:] and len(rows[0]) == 4
    assert rows[1][1:] == [[[-2000.0], [-2001.0]], [], [[-2002.0]]] and type(rows[1][1:]) is list
    assert rows[0][-1] == rows[0][3] == [2002] and type(rows[0][3][0]) is int
    with pytest.raises(IndexError):
        rows[0][4]


def test_answers_are_joined_in_order() -> None:
    first, second = flatten_completions([[1, 2], [3]], [[-0.1, -0.2], [-0.3]]), flatten_completions([[4]], [[-0.4]])
    ids, logprobs = join_completions([first, second]).rows()
    assert ids == [[1, 2], [3], [4]] != [[1, 2], [3]]
    assert [[np.float32(logprob) for (logprob,) in row] for row in logprobs[2:]] == [[np.float32(-0.4)]]
    assert join_completions([second, flatten_completions([[5]], None)]).rows() == ([[4], [5]], None)


def test_a_row_has_only_its_own_log_probs_when_it_is_pickled() -> None:
    bytes_of_row = [len(pickle.dumps(row)) for row in Completions(*lengths_and_tokens([3, 10_000])).rows()[1]]
    assert bytes_of_row[0] < 1000 and 40_000 < bytes_of_row[1] < 41_000


def lengths_and_tokens(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = np.arange(sum(lengths))
    return np.array(lengths, np.int32), tokens.astype(np.int32), -tokens.astype(np.float32)


def test_without_log_probs_none_travel() -> None:
    body = pack_completions(flatten_completions([[1, 2], [3]], None))
    assert set(load(body)) == {"ids", "lengths"}
    assert unpack_completions(body).rows() == ([[1, 2], [3]], None)


def test_a_log_prob_that_is_not_a_number_stays_one_for_the_trainer_to_refuse() -> None:
    assert np.isnan(unpack_completions(pack_completions(flatten_completions([[1]], [[math.nan]]))).logprobs).all()


def test_a_token_without_log_prob_is_not_sent() -> None:
    with pytest.raises(ValueError, match="not one log-prob for each token"):
        flatten_completions([[1, 2]], [[-0.5]])
