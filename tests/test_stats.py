"""pass@k against its definition, and intervals against published numbers and a simulation."""

from __future__ import annotations

import math
import random
import statistics
from itertools import combinations

import pytest

from grpo_recipes.stats import (
    best_at_k,
    evaluated_ks,
    format_result,
    majority_at_k,
    mean_with_interval,
    pass_at_k,
    pass_at_k_table,
    reported_ks,
    scores_at_k,
    t_interval_half_width,
    wilson_interval,
)


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_it_is_the_share_of_subsets_with_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        verdicts = [number < right for number in range(samples)]
        for k in range(1, samples + 1):
            subsets = list(combinations(verdicts, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(samples, right, k) == pytest.approx(expected)


def test_large_numbers_do_not_overflow() -> None:
    expected = 1 - math.comb(9990, 100) / math.comb(10000, 100)
    assert pass_at_k(10000, 10, 100) == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "right", "k"), [(3, 4, 1), (3, 1, 4), (3, -1, 1), (3, 1, 0)])
def test_what_is_not_defined_raises(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(samples, right, k)


def test_the_best_of_k_is_the_mean_over_all_subsets() -> None:
    draw = random.Random(5)
    results = set()
    for _ in range(60):
        rewards = [draw.choice((-1.0, 0.0, 0.25, 1.0, draw.random())) for _ in range(draw.randint(1, 7))]
        for k in range(1, len(rewards) + 1):
            subsets = list(combinations(rewards, k))
            assert best_at_k(rewards, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-12)
            results.add(round(best_at_k(rewards, k), 3))
    assert len(results) > 50
    verdicts = [1.0, 0.0, 0.0, 1.0, 0.0]
    assert [best_at_k(verdicts, k) for k in range(1, 6)] == pytest.approx([pass_at_k(5, 2, k) for k in range(1, 6)])
    assert best_at_k([0.0] * 9990 + [1.0] * 10, 100) == pytest.approx(pass_at_k(10000, 10, 100))
    for k in (0, 3):
        with pytest.raises(ValueError, match="not defined"):
            best_at_k([1.0, 2.0], k)


@pytest.mark.parametrize(
    ("answers", "right", "by_k"),
    [
        ("aabb", "a", [1, 1, 1, 1]),  # two of each: the first to appear
        ("baab", "a", [0, 0, 1, 0]),
        ("abbb", "a", [1, 1, 0, 0]),
        ("abcb", "b", [0, 0, 0, 1]),
        ("..ba", "b", [0, 0, 1, 1]),  # no answer, no vote
        ("....", "b", [0, 0, 0, 0]),
    ],
)
def test_the_majority_of_the_first_k(answers: str, right: str, by_k: list[int]) -> None:
    votes = [None if answer == "." else answer for answer in answers]
    verdicts = [answer == right for answer in answers]
    assert [majority_at_k(votes, verdicts, k) for k in (1, 2, 3, 4)] == by_k
    with pytest.raises(ValueError, match="not defined"):
        majority_at_k(votes, verdicts, 5)


def test_scores_of_an_evaluation_equal_their_definitions() -> None:
    draw = random.Random(2)
    rewards = [[draw.choice((0.0, 0.5, 1.0)) for _ in range(6)] for _ in range(9)]
    right = [[reward == 1.0 for reward in row] for row in rewards]
    answers = [[f"{reward}" for reward in row] for row in rewards]
    scores = scores_at_k(rewards, right, answers)
    names = ("pass", "mean", "best", "majority")
    assert set(scores) == {f"{name}@{k}" for name in names for k in (1, 2, 4, 5, 6)}
    for k in (1, 2, 4, 5, 6):
        subsets = [list(combinations(row, k)) for row in rewards]
        best = [statistics.fmean(map(max, of_one)) for of_one in subsets]
        passed = [statistics.fmean(1.0 in subset for subset in of_one) for of_one in subsets]
        most = [statistics.multimode(row[:k])[0] == 1.0 for row in rewards]
        firsts = [statistics.fmean(row[:k]) for row in rewards]
        for name, estimates in zip(names, (passed, firsts, best, most), strict=True):
            value, interval = scores[f"{name}@{k}"]
            assert value == pytest.approx(statistics.fmean(estimates)), (name, k)
            assert interval is not None and interval[0] <= value <= interval[1]
        half = t_interval_half_width(best)
        assert scores[f"best@{k}"][1] == pytest.approx((statistics.fmean(best) - half, statistics.fmean(best) + half))
    assert len({round(value, 6) for value, _ in scores.values()}) > 12


def test_an_evaluation_leaves_out_what_is_unscored() -> None:
    rewards = [[None, 1.0, 0.0], [0.5, None, None]]
    right = [[None, True, False], [False, None, None]]
    scores = scores_at_k(rewards, right, [["x", "1", "2"], ["3", "1", "1"]])
    assert {name: value for name, (value, _) in scores.items() if not name.endswith("@3")} == {
        "pass@1": 0.25, "mean@1": 0.75, "best@1": 0.5, "majority@1": 0.5,
        "pass@2": 1.0, "mean@2": 0.5, "best@2": 1.0, "majority@2": 1.0,
    }  # fmt: skip
    assert scores["mean@2"][1] is None  # one problem says nothing about others
    for name in ("pass@3", "mean@3", "best@3", "majority@3"):  # no problem has three scored completions
        value, interval = scores[name]
        assert math.isnan(value) and interval is None
    silent = scores_at_k(rewards, right, [[None] * 3] * 2)
    assert not any("majority" in name for name in silent) and "pass@2" in silent


def test_no_k_is_above_the_number_of_completions() -> None:
    assert [evaluated_ks(samples) for samples in (1, 2, 4, 5, 6, 8)] == [
        [1], [1, 2], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 5, 6], [1, 2, 4, 5, 8],
    ]  # fmt: skip
    assert "pass@5" not in scores_at_k([[1.0] * 4], [[True] * 4], [["1"] * 4])


def test_wilson_gives_the_textbook_numbers() -> None:
    # Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


@pytest.mark.parametrize("samples", [1, 8])
def test_intervals_hold_the_truth_as_often_as_they_say(samples: int) -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(4000):
        chances = [rng.choice((0.1, 0.5, 0.9)) for _ in range(60)]  # problems differ, their completions are alike
        scores = [sum(rng.random() < chance for _ in range(samples)) / samples for chance in chances]
        _, (low, high) = mean_with_interval(scores)
        hits += low <= 0.5 <= high
    assert 0.935 <= hits / 4000 <= 0.965


def test_one_problem_says_nothing_about_others() -> None:
    assert mean_with_interval([0.25]) == (0.25, (0.0, 1.0))


def test_the_interval_is_students() -> None:
    # Mean 2 and standard deviation 1 of three values: 4.303 / sqrt(3).
    assert t_interval_half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert t_interval_half_width([0.0, 1.0]) == pytest.approx(12.706 / 2)
    assert t_interval_half_width([float(row % 2) for row in range(100)]) == pytest.approx(
        1.984 * 0.50252 / 10, rel=1e-3
    )
    assert t_interval_half_width([1.0]) is None


def test_problems_that_all_agree_leave_an_interval() -> None:
    # 30 problems of 3 distinct answers among 8: a share of 3.84 / 33.84 of others may have 0 or 8.
    mean, (low, high) = mean_with_interval([3.0] * 30, 8.0)
    assert (mean, low, high) == (
        3.0,
        pytest.approx(3 - 3 * 0.11352, abs=1e-4),
        pytest.approx(3 + 5 * 0.11352, abs=1e-4),
    )
    for value, most in ((0.5, 1.0), (0.0, 8.0), (8.0, 8.0), (0.1 + 0.2, 1.0)):
        _, (low, high) = mean_with_interval([value] * 30, most)
        assert 0 <= low <= value <= high <= most and high - low > 0.1 * most, value
    # Of scores that are 0 it is Wilson's, on any scale.
    assert mean_with_interval([0.0] * 30, 8.0)[1][1] == pytest.approx(8 * wilson_interval(0, 30)[1])


def test_the_interval_of_few_problems_is_students() -> None:
    scores = [0.25, 0.75] * 15
    _, (low, high) = mean_with_interval(scores)
    assert (high - low) / 2 == pytest.approx(2.045 * statistics.stdev(scores) / math.sqrt(30))


def test_reported_ks() -> None:
    assert [reported_ks(samples) for samples in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_table_leaves_out_what_has_no_verdict() -> None:
    table = pass_at_k_table([[1.0, 0.0], [None, 1.0], [None, None], [0.0, 0.0]])

    assert table["pass@1"] == pytest.approx((0.5 + 1 + 0) / 3, abs=1e-6)
    assert table["pass@2"] == 0.5  # the second problem has one verdict only
    low, high = table["pass@2_ci"]
    assert low < 0.5 < high
    assert pass_at_k_table([[None]]) == {"pass@1": None, "pass@1_ci": None}


def test_a_line_for_a_person() -> None:
    result = {**pass_at_k_table([[1.0, 0.0]] * 3 + [[0.0, 0.0]]), "problems": 4, "samples": 2}
    assert format_result(result) == "pass@1 0.375 (0.000 to 0.773), pass@2 0.750 (0.301 to 0.954); 4 problems"
    assert format_result({**pass_at_k_table([[None]]), "problems": 1}) == "pass@1 none; 1 problems"
