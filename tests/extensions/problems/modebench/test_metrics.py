"""mean@k, distinct@k, coverage@k on hand-made completions, and baselines compared with a count of every guess."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import permutations, product

import pytest

from grpo_recipes.extensions.problems.modebench import baselines as module
from grpo_recipes.extensions.problems.modebench.baselines import baselines, score_constant_answer, score_random_guesser
from grpo_recipes.extensions.problems.modebench.dataset import Settings, compute_mode_scores, find_mode, make_rows
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.stats import format_result, score_names

DEFAULTS = Settings.read(lambda key: catalogue()[key]["default"])
COUNTDOWN = json.dumps({"task": "countdown", "numbers": [2, 4, 8], "target": 6, "modes": 3})
TRIANGLE = json.dumps({"task": "graph_coloring", "edges": [[1, 2], [1, 3], [2, 3]], "partial": "1??", "modes": 2})
PAIR = json.dumps({"task": "graph_coloring", "edges": [[1, 2]], "partial": "??3", "modes": 6})


def test_hand_made_completions() -> None:
    modes = [["a", "a", None, "b"], [None] * 4, ["c"] * 4, ["d", "e", "f", "g"]]
    scores = compute_mode_scores(modes, [2, 3, 4, 8])
    assert {key: scores[key] for key in score_names(scores)} == {
        "mean@4": (0.75 + 0 + 1 + 1) / 4,
        "distinct@4": (2 + 0 + 1 + 4) / 4,
        "coverage@4": (1 + 0 + 0.25 + 0.5) / 4,
    }
    for key in score_names(scores):
        low, high = scores[f"{key}_ci"]
        assert 0 <= low < scores[key] < high
    assert scores["distinct@4_ci"][1] > 1


def test_coverage_is_never_above_1() -> None:
    scores = compute_mode_scores([["a", "b"]], [1])
    assert (scores["coverage@2"], scores["distinct@2"], scores["distinct@2_ci"]) == (1.0, 2.0, [0.0, 2.0])


def test_a_guesser_is_right_as_often_as_guesses_are() -> None:
    """List every guess of both tasks and let the verifier judge it."""
    guesses = [
        text
        for a, b, c in permutations(("2", "4", "8"))
        for first, other in product("+-*/", repeat=2)
        for text in (f"({a}{first}{b}){other}{c}", f"{a}{first}({b}{other}{c})")
    ]
    colours = ["".join(colours) for colours in product("123", repeat=2)]
    for problem, every in ((COUNTDOWN, guesses), (TRIANGLE, colours), (PAIR, colours)):
        modes = [find_mode(text, problem) for text in every]
        chances = {mode: modes.count(mode) / len(modes) for mode in modes if mode is not None}
        right = sum(chances.values())
        distinct = sum(1 - (1 - chance) ** 4 for chance in chances.values())
        scores = score_random_guesser([problem], 4)
        assert scores["pass@1"] == scores["mean@4"] == pytest.approx(right, abs=1e-6)
        assert scores["pass@4"] == pytest.approx(1 - (1 - right) ** 4, abs=1e-6)
        assert scores["distinct@4"] == pytest.approx(distinct, abs=1e-6)
        assert scores["coverage@4"] == pytest.approx(distinct / len(chances), abs=1e-6)


def test_a_guesser_who_is_played_scores_that() -> None:
    rng = random.Random(0)
    answers = [row["answer"] for row in make_rows("modebench:graph_coloring", "test", DEFAULTS)]
    drawn = [
        [find_mode("".join(rng.choices("123", k=5)), answer) for _ in range(8)] for answer in answers for _ in range(20)
    ]
    played = compute_mode_scores(drawn, [json.loads(answer)["modes"] for answer in answers for _ in range(20)])
    exact = score_random_guesser(answers, 8)
    for key in ("mean@8", "distinct@8", "coverage@8"):
        assert played[key] == pytest.approx(exact[key], rel=0.15)


def test_the_best_constant() -> None:
    scores = score_constant_answer([TRIANGLE, PAIR, PAIR], 4)
    assert scores["answer"] == "23"  # right everywhere, and before 32
    assert [scores[key] for key in ("pass@1", "pass@4", "mean@4", "distinct@4")] == [1.0] * 4
    assert scores["coverage@4"] == pytest.approx((1 / 2 + 1 / 6 + 1 / 6) / 3, abs=1e-6)
    assert score_constant_answer([COUNTDOWN, TRIANGLE], 1)["pass@1"] == 0.5


@pytest.mark.parametrize(
    ("task", "name", "expected"),
    [
        ("countdown", "random", {"pass@8": 0.283, "mean@8": 0.042, "distinct@8": 0.304, "coverage@8": 0.132}),
        ("countdown", "constant", {"pass@8": 0.008, "mean@8": 0.008, "distinct@8": 0.008, "coverage@8": 0.001}),
        ("graph_coloring", "random", {"pass@8": 0.191, "mean@8": 0.028, "distinct@8": 0.218, "coverage@8": 0.032}),
        ("graph_coloring", "constant", {"pass@8": 0.086, "mean@8": 0.086, "distinct@8": 0.086, "coverage@8": 0.014}),
    ],
)
def test_what_knows_nothing_scores_on_the_default_test_splits(task: str, name: str, expected: dict[str, float]) -> None:
    scores = baselines([row["answer"] for row in make_rows(f"modebench:{task}", "test", DEFAULTS)], 8)[name]
    assert {key: scores[key] for key in expected} == pytest.approx(expected, abs=0.0006)


def test_more_hidden_vertices_are_harder_to_guess() -> None:
    chances = []
    for hidden in (3, 4, 5, 6):
        test_rows = make_rows("modebench:graph_coloring", "test", replace(DEFAULTS, hidden=hidden))
        chances.append(score_random_guesser([row["answer"] for row in test_rows], 8)["mean@8"])
    assert chances == sorted(chances, reverse=True) and chances[0] > 5 * chances[-1]


def test_the_command_prints_both_for_both(capsys: pytest.CaptureFixture[str]) -> None:
    module.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [f"modebench:{task}", name] for task in ("countdown", "graph_coloring") for name in ("random", "constant")
    ]
    assert lines[0].endswith("coverage@8 0.132")


def test_a_line_for_a_person_has_the_baselines() -> None:
    result = {"pass@1": 0.5, "pass@1_ci": [0.4, 0.6], "distinct@1": 0.5, "distinct@1_ci": [0.4, 0.6], "problems": 2}
    result["baselines"] = {"random": {"pass@1": 0.25, "pass@1_ci": [0.2, 0.3]}}
    assert format_result(result) == (
        "pass@1 0.500 (0.400 to 0.600), distinct@1 0.500 (0.400 to 0.600); 2 problems; random pass@1 0.250"
    )
