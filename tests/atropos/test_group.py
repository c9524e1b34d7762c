"""Scored groups: JSON to arrays and back without loss, and messages about invalid groups."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos.groups import PROMPT, group
from grpo_recipes.extensions.atropos.group import (
    UNTRAINED,
    Group,
    find_group_problem,
    from_trajectories,
    join_parts,
    to_trajectories,
)

NEGATIVE = st.floats(-100, 0)
ANY = st.floats(-1e6, 1e6)
VOCABULARY = 1000


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Draw a valid group of any size, lengths, turns and optional fields."""
    size = draw(st.integers(1, 4))
    rows: dict[str, list[Any]] = {"tokens": [], "masks": [], "inference_logprobs": []}
    for _ in range(size):
        length = draw(st.integers(2, 9))
        tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length))
        trained = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
        trained[draw(st.integers(1, length - 1))] = True
        elsewhere = draw(st.sampled_from([st.just(1.0), ANY]))  # some environments know log-probs of other tokens too
        rows["tokens"].append(tokens)
        rows["masks"].append(
            [token if is_trained else UNTRAINED for token, is_trained in zip(tokens, trained, strict=True)]
        )
        rows["inference_logprobs"].append([draw(NEGATIVE if is_trained else elsewhere) for is_trained in trained])
    lengths = [len(tokens) for tokens in rows["tokens"]]
    of_tokens = st.tuples(*(st.lists(ANY, min_size=length, max_size=length) for length in lengths)).map(list)
    settings = st.fixed_dictionaries(
        {}, optional={"set_advantage_to_zero": st.booleans(), "temperature": st.floats(0.1, 2)}
    )
    message = st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=5)})
    return Group(
        **rows,
        scores=draw(st.lists(ANY, min_size=size, max_size=size)),
        advantages=draw(st.none() | of_tokens),
        ref_logprobs=draw(st.none() | of_tokens),
        messages=draw(st.none() | st.lists(st.lists(message, min_size=1, max_size=2), min_size=size, max_size=size)),
        generation_params=draw(settings) | draw(st.sampled_from([{}, {"policy_version": 7}])),
        overrides=draw(st.lists(settings, min_size=size, max_size=size)),
        group_overrides=draw(st.sampled_from([{}, {"temperature": 0.5}])),
        images=draw(st.sampled_from([None, "a.png"])),
        env_id=draw(st.none() | st.integers(0, 5)),
        distill_token_ids=draw(st.sampled_from([None, [[[1, 2]] * length for length in lengths]])),
    )


@given(groups())
def test_a_group_goes_to_arrays_and_back_unchanged(original: Group) -> None:
    assert find_group_problem(original, size=len(original.tokens), longest=9, vocabulary=VOCABULARY) is None
    assert from_trajectories(to_trajectories(original)) == original


@given(groups())
def test_the_arrays_hold_what_the_wire_says(original: Group) -> None:
    for index, row in enumerate(to_trajectories(original)):
        tokens, labels = original.tokens[index], original.masks[index]
        at = len(row.prompt_ids)
        assert [*row.prompt_ids, *row.completion_ids] == tokens
        assert labels[:at] == [UNTRAINED] * at and labels[at] != UNTRAINED
        assert row.mask.dtype == bool and row.mask.tolist() == [label != UNTRAINED for label in labels[at:]]
        assert original.inference_logprobs is not None
        expected = np.array(original.inference_logprobs[index][at:], np.float32)
        assert row.logprobs.dtype == np.float32 and np.array_equal(row.logprobs, np.where(row.mask, expected, 0))
        if original.advantages is None:
            assert row.advantages is None
        else:
            assert row.advantages is not None and row.advantages.dtype == np.float32
            assert np.array_equal(row.advantages, np.array(original.advantages[index][at:], np.float32))
        assert (row.score, row.env_id) == (original.scores[index], original.env_id)


@given(groups())
def test_a_group_goes_over_the_wire_and_back_unchanged(original: Group) -> None:
    assert Group.from_json(json.loads(json.dumps(original.to_json()))) == original


def test_a_turn_of_the_environment_stays_in_the_completion_and_is_not_trained_on() -> None:
    row = to_trajectories(
        Group(
            tokens=[[1, 2, 3, 4, 5, 6, 7]],
            masks=[[-100, -100, 3, -100, -100, 6, -100]],
            scores=[1.0],
            inference_logprobs=[[1.0, 1.0, -0.25, 1.0, 1.0, -0.5, 1.0]],
            overrides=[{}],
        )
    )[0]
    assert row.prompt_ids.tolist() == [1, 2] and row.completion_ids.tolist() == [3, 4, 5, 6, 7]
    assert row.mask.tolist() == [True, False, False, True, False]
    assert row.logprobs.tolist() == [-0.25, 0, 0, -0.5, 0]


@pytest.mark.parametrize("nothing", [[], None, "absent"])
def test_an_empty_list_null_and_no_key_are_the_same(nothing: Any) -> None:
    wire = {name: value for name, value in group().to_json().items() if value is not None}
    names = ["advantages", "ref_logprobs", "messages", "overrides", "images", "distill_token_ids", "generation_params"]
    given_them = wire if nothing == "absent" else wire | dict.fromkeys(names, nothing)
    assert Group.from_json(given_them) == group()


def test_a_null_among_the_overrides_is_none_of_its_own() -> None:
    read = Group.from_json({**group().to_json(), "overrides": [None, {"set_advantage_to_zero": True}]})
    assert read.overrides == [{}, {"set_advantage_to_zero": True}]
    assert [read.is_zeroed(row) for row in range(2)] == [False, True]


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [],
        {"tokens": [[1]], "masks": [[1]]},
        {**group().to_json(), "scores": None},
        {**group().to_json(), "advantages": 1.0},
        {**group().to_json(), "generation_params": [1]},
        {**group().to_json(), "overrides": [1, 2]},
    ],
)
def test_what_is_no_group_is_refused(wire: Any) -> None:
    with pytest.raises(ValueError, match="group"):
        Group.from_json(wire)


def test_the_nearest_temperature_counts() -> None:
    scored = group(
        3,
        overrides=[{"temperature": 0.5}, {}, {"set_advantage_to_zero": True}],
        generation_params={"temperature": 0.7, "policy_version": 3},
        group_overrides={"temperature": 0.9},
    )
    assert [row.temperature for row in to_trajectories(scored)] == [0.5, 0.7, 0.7]
    assert to_trajectories(replace(scored, generation_params={}))[1].temperature == 0.9
    assert to_trajectories(group())[0].temperature is None
    own = replace(scored, overrides=[{"temperature": value} for value in (0.5, 1.0, 0.7)])
    varied = replace(own, generation_params={"temperature": [0.5, 1.0, 0.7]})  # of the requests
    assert [row.temperature for row in to_trajectories(varied)] == [0.5, 1.0, 0.7]
    assert [(row.zeroed, row.policy_version) for row in to_trajectories(scored)] == [(False, 3), (False, 3), (True, 3)]


@pytest.mark.parametrize("version", [None, "3", 3.0, True])
def test_a_policy_version_is_a_whole_number_or_unknown(version: Any) -> None:
    assert group(generation_params={"policy_version": version}).policy_version is None


def changed(name: str, row: int, values: list[Any]) -> Group:
    """Replace one row of a field in a valid group."""
    rows = list(getattr(group(3), name))
    rows[row] = values
    return group(3, **{name: rows})


P, T = PROMPT, [UNTRAINED] * len(PROMPT)
PROBLEMS = {
    "no trajectories": (group(0), "0 trajectories, expected 3"),
    "too few": (group(2), "2 trajectories, expected 3"),
    "too many": (group(4), "4 trajectories, expected 3"),
    "no log-probs": (group(3, inference_logprobs=None), "no inference_logprobs"),
    "scores of fewer": (group(3, scores=[1.0, 2.0]), "scores have 2 trajectories, tokens have 3"),
    "overrides of fewer": (group(3, overrides=[{}]), "overrides have 1 trajectories, tokens have 3"),
    "masks of more": (group(3, masks=group(4).masks), "masks have 4 trajectories, tokens have 3"),
    "advantages of fewer": (group(3, advantages=[[0.0] * 4]), "advantages have 1 trajectories, tokens have 3"),
    "ragged masks": (changed("masks", 1, [*T, 21]), "trajectory 1: 5 tokens, but 4 masks"),
    "ragged log-probs": (
        changed("inference_logprobs", 2, [1.0, 1.0, 1.0, -0.5]), "trajectory 2: 6 tokens, but 4 inference_logprobs"
    ),
    "ragged advantages": (
        group(3, advantages=[[0.0] * 4, [0.0] * 5, [0.0] * 5]), "trajectory 2: 6 tokens, but 5 advantages"
    ),
    "a row that is not a list": (changed("masks", 1, None), "trajectory 1: its masks are not a list"),  # type: ignore[arg-type]
    "empty": (
        group(3, tokens=[[*P, 20], [], [*P, 22, 23, 24]], masks=[[*T, 20], [], [*T, 22, 23, 24]],
              inference_logprobs=[[-0.5] * 4, [], [-0.5] * 6]),
        "trajectory 1: no tokens",
    ),
    "token beyond the vocabulary": (
        group(3, first=997), "trajectory 2: token id 1000, but the model knows only 0 to 999",
    ),
    "negative token": (changed("tokens", 0, [4, -11, 16, 20]), "trajectory 0: token id -11"),
    "huge token": (changed("tokens", 1, [*P, 21, 2**70]), "trajectory 1: tokens contain an invalid value"),
    "token of text": (changed("tokens", 1, [*P, 21, "a"]), "trajectory 1: tokens contain an invalid value"),
    "mask of zeros and ones": (changed("masks", 1, [0, 0, 0, 1, 1]), "trajectory 1: mask 0 at token 4, expected"),
    "nothing trained on": (changed("masks", 2, [UNTRAINED] * 6), "trajectory 2: no token is trained on"),
    "first token trained on": (
        changed("masks", 1, [4, -100, -100, 21, 22]), "trajectory 1: its first token is trained on"
    ),
    "log-prob above 0": (
        changed("inference_logprobs", 2, [1.0] * 3 + [-0.5, 1.0, -0.5]),
        "trajectory 2: inference log-prob 1 > 0 of a trained token",
    ),
    "infinite log-prob": (
        changed("inference_logprobs", 0, [1.0] * 3 + [-math.inf]),
        "trajectory 0: inference log-prob -inf of a trained token",
    ),
    "log-prob that is none": (
        changed("inference_logprobs", 0, [1.0] * 3 + [None]),
        "trajectory 0: inference_logprobs contain an invalid value",
    ),
    "score that is not a number": (group(3, scores=[0.0, math.nan, 1.0]), "trajectory 1: score nan"),
    # S8: finite in float64, and not in the float32 of the trainer.
    "score of 1e39": (group(3, scores=[0.0, 1.0, 1e39]), "trajectory 2: score 1e+39 is infinite in float32"),
    "score of an endless integer": (group(3, scores=[0.0, 10**400, 1.0]), "trajectory 1: score inf"),
    "score with an overflowing square": (
        group(3, scores=[-1e20, 0.0, 1.0]), "trajectory 0: score -1e+20 is beyond 1e+15: the variance of a group"
    ),
    "advantage of 1e39": (
        group(3, advantages=[[0.0] * 4, [0.0] * 4 + [1e39], [0.0] * 6]),
        "trajectory 1: 1e+39 is infinite in float32 among its advantages",
    ),
    "log-prob that means minus infinity": (
        changed("inference_logprobs", 1, [1.0] * 3 + [-0.5, -9999.0]),
        "trajectory 1: inference log-prob -9999 of a trained token, below -104: float32 can",
    ),
    "several temperatures": (group(3, generation_params={"temperature": [1.0, 0.5]}),
        "trajectory 0: temperature [1.0, 0.5]"),
    "temperature of 1e39": (group(3, generation_params={"temperature": 1e39}), "trajectory 0: temperature 1e+39"),
    "temperature of 1e-9": (group(3, generation_params={"temperature": 1e-9}), "trajectory 0: temperature 1e-09"),
    "score of text": (group(3, scores=[0.0, 1.0, "1"]), "trajectory 2: score '1'"),
    "infinite advantage": (
        group(3, advantages=[[0.0] * 4, [0.0] * 4 + [math.inf], [0.0] * 6]), "trajectory 1: inf among its advantages"
    ),
    "temperature of text": (
        group(3, overrides=[{}, {}, {"temperature": "hot"}]), "trajectory 2: temperature 'hot'"
    ),
    "negative temperature": (group(3, generation_params={"temperature": -1}), "trajectory 0: temperature -1"),
    "supervised": (group(3, group_overrides={"sft": True}), "a group for supervised fine-tuning"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "problem"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_problem_says_which_trajectory_and_what(wrong: Group, problem: str) -> None:
    message = find_group_problem(wrong, size=3, longest=64, vocabulary=VOCABULARY)
    assert message is not None and message.startswith(problem)


def test_what_is_too_long_is_a_problem_and_what_just_fits_is_none() -> None:
    assert find_group_problem(group(3), size=3, longest=6, vocabulary=25) is None
    message = find_group_problem(group(3), size=3, longest=5, vocabulary=25)
    assert message == "trajectory 2: 6 tokens, at most 5 are allowed"


def test_untrained_tokens_may_have_any_log_prob() -> None:
    logprobs = [[math.nan, math.inf, 7.0, *([-0.5] * (row + 1))] for row in range(2)]
    scored = group(2, inference_logprobs=logprobs)
    assert find_group_problem(scored, size=2, longest=None, vocabulary=None) is None
    assert all(np.isfinite(row.logprobs).all() for row in to_trajectories(scored))


def test_a_group_with_a_problem_has_no_arrays() -> None:
    with pytest.raises(ValueError, match="trajectory 1: 5 tokens, but 4 masks"):
        to_trajectories(changed("masks", 1, [*T, 21]))


def test_a_field_that_was_replaced_wins_on_the_way_back() -> None:
    original = group(2, advantages=[[0.1] * 4, [0.2] * 5], generation_params={"policy_version": 3, "temperature": 0.7})
    rows = to_trajectories(original)
    logprobs, advantages = np.full(2, -2.0, np.float32), np.full(2, 4.0, np.float32)
    rows[1] = replace(rows[1], score=9.0, zeroed=True, temperature=0.25, logprobs=logprobs, advantages=advantages)
    back = from_trajectories([replace(row, policy_version=5) for row in rows])
    assert back.scores == [0.0, 9.0] and back.policy_version == 5
    assert back.overrides == [{}, {"temperature": 0.25, "set_advantage_to_zero": True}]
    assert back.inference_logprobs == [[1.0, 1.0, 1.0, -0.5], [1.0, 1.0, 1.0, -2.0, -2.0]]
    assert back.advantages == [[0.1] * 4, [0, 0, 0, 4.0, 4.0]]
    assert original.overrides == [{}, {}] and original.policy_version == 3


def test_rows_of_several_groups_are_no_group() -> None:
    rows = to_trajectories(group(2))
    with pytest.raises(ValueError, match="different groups"):
        from_trajectories([rows[0], replace(rows[1], env_id=1)])
    with pytest.raises(ValueError, match="no trajectories"):
        from_trajectories([])


def part(size: int, version: int | None = 1, prompt: int = 11, **changes: Any) -> Group:
    """Build part of a group: ``size`` trajectories of a prompt with this token."""
    whole = group(size, first=20, env_id=0, generation_params={} if version is None else {"policy_version": version})
    tokens = [[token if token != 11 else prompt for token in row] for row in whole.tokens]
    return replace(whole, tokens=tokens, **changes)


def test_parts_of_a_group_are_joined_in_order() -> None:
    first, second = part(1, scores=[3.0]), part(2, scores=[4.0, 5.0], overrides=[{}, {"temperature": 2.0}])
    [joined], remaining = join_parts([first, second], 3)
    assert remaining == [] and find_group_problem(joined, size=3, longest=None, vocabulary=None) is None
    assert joined.tokens == first.tokens + second.tokens and joined.scores == [3.0, 4.0, 5.0]
    assert joined.overrides == [{}, {}, {"temperature": 2.0}] and joined.env_id == 0


def test_parts_are_joined_over_others_between_them() -> None:
    """run-api hands out parts by size, so the parts of two groups alternate."""
    parts = [part(3, prompt=11), part(3, prompt=12), part(1, prompt=11), part(1, prompt=12)]
    whole, remaining = join_parts([*parts, group(4)], 4)
    assert remaining == []
    assert sorted(full.tokens[0][1] for full in whole if full.env_id == 0) == [11, 12]
    assert all(len({tuple(row[:3]) for row in full.tokens}) == 1 and len(full.tokens) == 4 for full in whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"env_id": 1},
        {"prompt": 12},
        {"generation_params": {"policy_version": 1, "temperature": 0.5}},
        {"group_overrides": {"temperature": 0.5}},
        {"advantages": [[0.0] * 4]},
    ],
)
def test_what_differs_is_not_joined(changes: dict[str, Any]) -> None:
    parts = [part(1), part(1, **changes)]
    assert join_parts(parts, 2) == ([], parts)


def test_parts_fill_a_group_whichever_of_them_fit() -> None:
    sizes = [3, 2, 2, 1]
    whole, remaining = join_parts([part(size) for size in sizes], 4)
    assert [len(full.tokens) for full in whole] == [4, 4] and remaining == []
    whole, remaining = join_parts([part(3), part(2)], 4)
    assert whole == [] and [len(scored.tokens) for scored in remaining] == [3, 2]


def test_the_policy_of_a_joined_group_is_its_oldest_part_s() -> None:
    assert join_parts([part(1, 4), part(1, 2)], 2)[0][0].policy_version == 2
    assert join_parts([part(1, 4), part(1, None)], 2)[0][0].policy_version is None


def test_a_group_of_the_size_and_one_beyond_it_stay_as_they_are() -> None:
    groups = [part(2), part(3), part(2)]
    whole, remaining = join_parts(groups, 2)
    assert remaining == [] and all(returned is original for returned, original in zip(whole, groups, strict=True))
