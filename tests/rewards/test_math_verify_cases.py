"""The labelled pairs of math-verify's own regression tests, and each score of ours that differs, with its reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes.rewards.answers import LONGEST_ANSWER
from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.rewards.math_verify import math_verify

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "math_verify_cases.yaml").read_text())["cases"]


def completion(case: dict[str, Any]) -> str:
    """Return the answer in a completion's format."""
    return case["text"] if "text" in case else f"<answer>{case['answer']}</answer>"


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['gold']} | {case.get('answer', case.get('text'))}"[:80]
)
def test_the_score_is_the_label_or_ours_on_purpose(case):
    assert math_verify([completion(case)], [case["gold"]]) == [case.get("ours", case["label"])]


def test_the_exact_reward_takes_nothing_that_math_verify_refuses():
    accepted = [case for case in CASES if pure_accuracy_math([completion(case)], [case["gold"]]) == [1.0]]

    assert len(accepted) > 90
    assert [case["gold"] for case in accepted if case.get("ours", case["label"]) != 1] == []


def test_the_cases_are_short_different_and_explained():
    assert len(CASES) > 250
    assert Counter((case["gold"], completion(case)) for case in CASES).most_common(1)[0][1] == 1
    for case in CASES:
        assert max(len(case["gold"]), len(completion(case))) <= LONGEST_ANSWER
        assert ("answer" in case) != ("text" in case) and case["label"] in (0, 1)
        assert ("ours" in case) == ("why" in case) and case.get("ours", 2) != case["label"]
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    assert f"agrees with {sum('ours' not in case for case in CASES)} of math-verify's own {len(CASES)} tests" in page
